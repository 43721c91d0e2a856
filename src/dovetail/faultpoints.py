"""Places where a test may kill the process.

Code that must survive a crash calls `fault_point` between the steps that a crash could separate. In
production the call compares one module variable with ``None``. When the environment variable
``DOVETAIL_FAULT_POINT`` named the point *before Python started*, the process sends itself SIGKILL there: no
``finally``, no ``atexit``, no flush, which is what a power cut looks like to the files.

``DOVETAIL_FAULT_POINT=name`` kills at the first passage of ``name``, ``DOVETAIL_FAULT_POINT=name:3`` at the
third. ``DOVETAIL_FAULT_TRACE=file`` kills nothing and appends the name of every point passed to the file, so
that a test can find the points that a piece of work passes and then kill it at each.
`dovetail.testing.faults` drives both.
"""

import os
import signal

FAULT_POINT_VARIABLE = "DOVETAIL_FAULT_POINT"
FAULT_TRACE_VARIABLE = "DOVETAIL_FAULT_TRACE"


class _Armed:
    """Counts passages of one point and kills the process at the n-th; records passages when asked to."""

    def __init__(self, point: str, trace_path: str) -> None:
        self.name, _, nth = point.partition(":")
        if nth and not (nth.isdigit() and int(nth) > 0):
            raise ValueError(f"{FAULT_POINT_VARIABLE}={point!r}: after the colon stands which passage kills, from 1.")
        self.passages_left = int(nth or "1")
        self.trace_path = trace_path

    def passed(self, name: str) -> None:
        if self.trace_path:
            # Appending one short line is atomic, so several processes may trace into one file.
            with open(self.trace_path, "a", encoding="utf-8") as trace:
                trace.write(name + "\n")
        if name == self.name:
            self.passages_left -= 1
            if self.passages_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _armed_by_environment() -> _Armed | None:
    point = os.environ.get(FAULT_POINT_VARIABLE, "")
    trace_path = os.environ.get(FAULT_TRACE_VARIABLE, "")
    return _Armed(point, trace_path) if point or trace_path else None


_ARMED = _armed_by_environment()


def fault_point(name: str) -> None:
    """Die here if the environment says so.

    Parameters
    ----------
    name
        Unique in the package: module and moment, such as ``"relation.manifest.written"``. No colon.

    Examples
    --------
    >>> fault_point("example.nothing.armed")
    """
    if _ARMED is not None:
        _ARMED.passed(name)
