"""CPU time of a process with all its descendants, and their end. Imports nothing but the standard library."""

import os
import signal
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def tree_of(pid: int) -> list[int]:
    """The process and its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields:
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of the process and its descendants, those that have ended included."""
    ticks = 0
    for each in tree_of(pid):
        fields = _stat(Path(f"/proc/{each}/stat"))
        if fields:
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / _TICKS


def kill_tree(pid: int) -> None:
    """SIGKILL to the process and its descendants."""
    for each in tree_of(pid):
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _stat(path: Path) -> list[str]:
    """The fields behind the command's name, which may contain spaces; none if the process has ended."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
