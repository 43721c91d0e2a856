"""Kill a process at a named point, or at any moment, with SIGKILL.

The program under test runs in a process of its own; the test then looks at what it left on disk. Two ways to choose the
moment, which find different defects: every fault point that the program passes (exact, repeatable, between the steps
that the author thought of) and random moments (anywhere, inside a write included).

Examples
--------
>>> program = python_program('''
... from dovetail.faultpoints import fault_point
... for number in range(2):
...     fault_point("example.step")
...     print("did", number, flush=True)
... ''')
>>> passages_of(program)
[Passage(point='example.step', nth=1), Passage(point='example.step', nth=2)]
>>> run_killed_at(program, Passage("example.step", 2)).stdout
'did 0\\n'
"""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO

from dovetail.faultpoints import FAULT_POINT_VARIABLE, FAULT_TRACE_VARIABLE

__all__ = [
    "Ended",
    "Passage",
    "load_program",
    "passages_of",
    "python_program",
    "random_moments",
    "run_driver",
    "run_killed_after",
    "run_killed_at",
    "run_unharmed",
]

DEFAULT_TIMEOUT_S = 300.0
_DRIVER_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Passage:
    """The n-th time, counted from 1, that a program passes a fault point.

    Examples
    --------
    >>> str(Passage("relation.manifest.before", 2))
    'relation.manifest.before:2'
    """

    point: str
    nth: int

    def __str__(self) -> str:
        return f"{self.point}:{self.nth}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, and what it had printed by then."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.returncode == -signal.SIGKILL


def python_program(source: str, *arguments: str) -> list[str]:
    """The command line that runs this source in a fresh interpreter, ``arguments`` in its ``sys.argv[1:]``.

    Examples
    --------
    >>> python_program("print(1)", "x")[1:]
    ['-c', 'print(1)', 'x']
    """
    return [sys.executable, "-c", source, *arguments]


def run_unharmed(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Ended:
    """Run a program to its end with no fault point armed; an `AssertionError` with its output if it fails.

    Examples
    --------
    >>> run_unharmed(python_program("print('done')")).stdout
    'done\\n'
    """
    return _succeeded(command, _run(command, _environment(env, {}), timeout_s))


def passages_of(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Passage]:
    """Every passage of a fault point while the program runs to its end, in order; at each it can be killed.

    Parameters
    ----------
    command
        The program and its arguments. Run it again from the same start: it must pass the same points.
    env
        Environment variables on top of this process's own.
    timeout_s
        After so long the program is stopped and `subprocess.TimeoutExpired` raised.
    """
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace")
        trace.touch()
        _succeeded(command, _run(command, _environment(env, {FAULT_TRACE_VARIABLE: str(trace)}), timeout_s))
        names = trace.read_text(encoding="utf-8").split()
    seen: Counter[str] = Counter()
    passages = []
    for name in names:
        seen[name] += 1
        passages.append(Passage(name, seen[name]))
    return passages


def run_killed_at(
    command: Sequence[str],
    passage: Passage,
    env: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Ended:
    """Run a program that kills itself at this passage; an `AssertionError` if it ends in any other way.

    A test that believes it has tested a crash, when nothing crashed, would be worse than none.

    Examples
    --------
    >>> run_killed_at(python_program("print('done')"), Passage("example.never_passed", 1))
    Traceback (most recent call last):
    AssertionError: The program was to die at example.never_passed:1, but ended with 0.
    stdout: done
    stderr:
    """
    ended = _run(command, _environment(env, {FAULT_POINT_VARIABLE: str(passage)}), timeout_s)
    if not ended.was_killed:
        raise AssertionError(f"The program was to die at {passage}, but ended with {ended.returncode}.{_said(ended)}")
    return ended


def run_killed_after(command: Sequence[str], delay_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run a program and kill it, with all its children, after a time; it may be done before, see `Ended.was_killed`.

    A program that fails by itself before that is an `AssertionError` with its output.

    Examples
    --------
    >>> run_killed_after(python_program("import time; time.sleep(60)"), delay_s=0.01).was_killed
    True
    """
    try:
        return _succeeded(command, _run(command, _environment(env, {}), delay_s))
    except subprocess.TimeoutExpired as expired:
        return Ended(
            -signal.SIGKILL,
            (expired.stdout or b"").decode(errors="replace"),
            (expired.stderr or b"").decode(errors="replace"),
        )


def load_program(path: Path) -> ModuleType:
    """A program as a module, for what it knows of its own input; its ``main`` is not called."""
    spec = importlib.util.spec_from_file_location(f"dovetail_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_driver(
    command: Sequence[str],
    log: Path,
    point: str | None = None,
    kill_after_s: float | None = None,
    while_running: Callable[[], None] | None = None,
) -> int:
    """Run a driver of Spark's, kill what is left of it, and give its exit code, or minus the signal that ended it.

    Parameters
    ----------
    command
        The program and its arguments.
    log
        The file that what it prints is appended to.
    point
        A fault point, or ``point:n``, at which the driver or one of its workers dies; None: nowhere.
    kill_after_s
        After so long it is killed; None: it may take a quarter of an hour.
    while_running
        Called once it runs; the time until it is killed counts from its return.

    Examples
    --------
    >>> run_driver(python_program("raise SystemExit(3)"), Path(os.devnull))
    3
    """
    spark = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    # What is tested is the protocol: a worker that need not load compiled code starts sooner.
    spark["NUMBA_DISABLE_JIT"] = "1"
    armed = {} if point is None else {FAULT_POINT_VARIABLE: point}
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(spark, armed),
            start_new_session=True,
        )
    try:
        if while_running is not None:
            while_running()
        return process.wait(_DRIVER_TIMEOUT_S if kill_after_s is None else kill_after_s)
    except subprocess.TimeoutExpired:
        if kill_after_s is None:
            raise
        return -signal.SIGKILL
    finally:
        # The group that was started here: the driver, if it lives, and its JVM. The workers end with that.
        _kill_session(process.pid)
        process.wait()


def random_moments(seed: int, rounds: int, up_to_s: float) -> list[float]:
    """Delays for `run_killed_after`, spread evenly over the time that an unharmed run takes.

    One in each equal part of the time, at a random place there: so no part of the run is spared.

    Examples
    --------
    >>> [int(moment) for moment in random_moments(seed=1, rounds=4, up_to_s=4.0)]
    [0, 1, 2, 3]
    """
    chance = random.Random(seed)
    return [(part + chance.random()) * up_to_s / rounds for part in range(rounds)]


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Ended:
    # Files, not pipes: a child that outlives the program would keep a pipe open, and us waiting for its end.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        # A session of its own, so that the program's children can be ended with it and none outlives the test.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired as expired:
            _kill_session(process.pid)
            process.wait()
            expired.stdout, expired.stderr = _content(stdout), _content(stderr)
            raise
        finally:
            _kill_session(process.pid)
        return Ended(returncode, _content(stdout).decode(errors="replace"), _content(stderr).decode(errors="replace"))


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _kill_session(leader_pid: int) -> None:
    try:
        os.killpg(leader_pid, signal.SIGKILL)
    except ProcessLookupError:
        # Nobody is left, which is what was wanted.
        return


def _environment(extra: Mapping[str, str] | None, armed: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in (FAULT_POINT_VARIABLE, FAULT_TRACE_VARIABLE)
    }
    return inherited | dict(extra or {}) | dict(armed)


def _succeeded(command: Sequence[str], ended: Ended) -> Ended:
    if ended.returncode != 0:
        raise AssertionError(f"{command[0]} failed by itself with {ended.returncode}.{_said(ended)}")
    return ended


def _said(ended: Ended) -> str:
    return f"\nstdout: {ended.stdout}stderr: {ended.stderr}".rstrip()
