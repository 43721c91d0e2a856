r"""Kill a process at a named point, or at a random time, with SIGKILL.

The program under test runs in its own process; the test then inspects the files it left. There are two ways to choose
the time, which find different defects: every fault point that the program reaches (exact, repeatable, between steps
that the author thought of), and random times (anywhere, even inside a write).

>>> program = python_program('''
... from dovetail.core.faultpoints import fault_point
... for number in range(2):
...     fault_point("example.step")
...     print("did", number, flush=True)
... ''')
>>> passages_of(program)
[Passage(point='example.step', nth=1), Passage(point='example.step', nth=2)]
>>> run_killed_at(program, Passage("example.step", 2)).stdout
'did 0\n'
"""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO

from dovetail.core.faultpoints import FAULT_ORDERS_VARIABLE, FAULT_POINT_VARIABLE, FAULT_TRACE_VARIABLE

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
    "running_driver",
]

DEFAULT_TIMEOUT_S = 300.0
_DRIVER_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Passage:
    """The n-th time, from 1, that a program reaches a fault point."""

    point: str
    nth: int

    def __str__(self) -> str:
        return f"{self.point}:{self.nth}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, and its output until then."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def was_killed(self) -> bool:
        return self.returncode == -signal.SIGKILL


def python_program(source: str, *arguments: str) -> list[str]:
    """The command line that runs this source in a new interpreter, with ``arguments`` in ``sys.argv[1:]``."""
    return [sys.executable, "-c", source, *arguments]


def run_unharmed(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Ended:
    """Run a program to its end with no fault point armed; an `AssertionError` with its output if it fails."""
    return _succeeded(command, _run(command, _environment(env, {}), timeout_s))


def passages_of(
    command: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Passage]:
    """Every fault point that the program reaches while it runs to its end, in order.

    It must reach the same points when run again from the same start.
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
    """Run a program that kills itself at this passage; raise `AssertionError` if it ends in any other way.

    Otherwise a test could pass without any crash.
    """
    ended = _run(command, _environment(env, {FAULT_POINT_VARIABLE: str(passage)}), timeout_s)
    if not ended.was_killed:
        raise AssertionError(
            f"The program should have died at {passage}, but ended with {ended.returncode}.{_said(ended)}"
        )
    return ended


def run_killed_after(command: Sequence[str], delay_s: float, env: Mapping[str, str] | None = None) -> Ended:
    """Run a program and kill it, with all its children, after a delay; it may end earlier, see `Ended.was_killed`.

    If the program fails by itself before, `AssertionError` is raised with its output.
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
    """Load a program as a module, without calling its ``main``."""
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
    """Run a Spark driver, kill its remaining processes, and return its exit code, or minus the signal that ended it.

    Its output is appended to ``log``. The driver or one of its workers dies at ``point``, a fault point or ``point:n``.
    It is killed ``kill_after_s`` seconds after ``while_running`` has returned; None: after a quarter of an hour.
    """
    armed = {} if point is None else {FAULT_POINT_VARIABLE: point}
    with running_driver(command, log, armed) as process:
        try:
            if while_running is not None:
                while_running()
            return process.wait(_DRIVER_TIMEOUT_S if kill_after_s is None else kill_after_s)
        except subprocess.TimeoutExpired:
            if kill_after_s is None:
                raise
            return -signal.SIGKILL


@contextmanager
def running_driver(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a Spark driver whose output goes to a log; at the end of the block its remaining processes are killed."""
    spark = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    # The test is about the protocol: without compiled code workers start faster.
    spark["NUMBA_DISABLE_JIT"] = "1"
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(spark, env or {}),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        # The process group started here: the driver, if it lives, and its JVM. The workers end with the JVM.
        _kill_session(process.pid)
        process.wait()


def random_moments(seed: int, rounds: int, up_to_s: float) -> list[float]:
    """Delays for `run_killed_after`: one at a random time in each equal part of the duration."""
    chance = random.Random(seed)
    return [(part + chance.random()) * up_to_s / rounds for part in range(rounds)]


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Ended:
    # Files, not pipes: a child that outlives the program would keep a pipe open and block us.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        # A separate session, so that the program's children can be killed with it.
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
        # No process is left.
        return


def _environment(extra: Mapping[str, str] | None, armed: Mapping[str, str]) -> dict[str, str]:
    disarmed = (FAULT_ORDERS_VARIABLE, FAULT_POINT_VARIABLE, FAULT_TRACE_VARIABLE)
    inherited = {name: value for name, value in os.environ.items() if name not in disarmed}
    return inherited | dict(extra or {}) | dict(armed)


def _succeeded(command: Sequence[str], ended: Ended) -> Ended:
    if ended.returncode != 0:
        raise AssertionError(f"{command[0]} failed by itself with {ended.returncode}.{_said(ended)}")
    return ended


def _said(ended: Ended) -> str:
    return f"\nstdout: {ended.stdout}stderr: {ended.stderr}".rstrip()
