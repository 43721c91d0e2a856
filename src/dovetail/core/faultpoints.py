"""Named points at which a test can kill the process.

Code that must survive a crash calls `fault_point` between steps that a crash could separate. In production the call
compares one module variable with ``None``. If the environment variable ``DOVETAIL_FAULT_POINT`` named the point
*before Python started*, the process sends itself SIGKILL there: no ``finally``, no ``atexit``, no flush. To the files
this looks like a power cut.

``DOVETAIL_FAULT_POINT=name`` kills when ``name`` is first reached, ``DOVETAIL_FAULT_POINT=name:3`` the third time.
``DOVETAIL_FAULT_TRACE=file`` kills nothing and appends the name of every point reached to the file, so a test can
list the points first and then kill the process at each. `dovetail.testing.faults` drives both.

``DOVETAIL_FAULT_ORDERS=directory`` is for a program of many processes that goes on when one dies: a file there with the
name of a point is an order for one kill. Whoever reaches the point first renames the file to ``name:pid`` and dies. The
file ``passed`` there gets a line ``name pid`` when a process reaches a point for the first time.
"""

import os
import signal

FAULT_POINT_VARIABLE = "DOVETAIL_FAULT_POINT"
FAULT_TRACE_VARIABLE = "DOVETAIL_FAULT_TRACE"
FAULT_ORDERS_VARIABLE = "DOVETAIL_FAULT_ORDERS"


class _Armed:
    """Kills the process at a point's n-th passage, or where an order asks for it; optionally traces all points."""

    def __init__(self, point: str, trace_path: str, orders: str) -> None:
        self.name, _, nth = point.partition(":")
        if nth and not (nth.isdigit() and int(nth) > 0):
            raise ValueError(f"{FAULT_POINT_VARIABLE}={point!r}: the part after the colon must be an integer from 1.")
        self.passages_left = int(nth or "1")
        self.trace_path = trace_path
        self.orders = orders
        self.passed_before: set[str] = set()

    def passed(self, name: str) -> None:
        if self.trace_path:
            # Appending one short line is atomic, so several processes may trace into one file.
            with open(self.trace_path, "a", encoding="utf-8") as trace:
                trace.write(name + "\n")
        if self.orders:
            if name not in self.passed_before:
                self.passed_before.add(name)
                with open(os.path.join(self.orders, "passed"), "a", encoding="utf-8") as passed:
                    passed.write(f"{name} {os.getpid()}\n")
            if self._takes_order(name):
                os.kill(os.getpid(), signal.SIGKILL)
        if name == self.name:
            self.passages_left -= 1
            if self.passages_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def _takes_order(self, name: str) -> bool:
        order = os.path.join(self.orders, name)
        try:
            os.rename(order, f"{order}:{os.getpid()}")
        except FileNotFoundError:
            return False
        return True


def _armed_by_environment() -> _Armed | None:
    point = os.environ.get(FAULT_POINT_VARIABLE, "")
    trace_path = os.environ.get(FAULT_TRACE_VARIABLE, "")
    orders = os.environ.get(FAULT_ORDERS_VARIABLE, "")
    return _Armed(point, trace_path, orders) if point or trace_path or orders else None


_ARMED = _armed_by_environment()


def fault_point(name: str) -> None:
    """Kill the process here if the environment asks for it.

    Names are unique in the package: module and event, such as ``"relation.manifest.written"``. No colon.
    """
    if _ARMED is not None:
        _ARMED.passed(name)
