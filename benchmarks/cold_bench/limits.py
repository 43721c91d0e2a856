"""A memory cgroup, which limits the page cache too, and files whose pages are not in memory."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MOST_WAIT_S = 60


class NoMemoryLimitError(Exception):
    """No memory cgroup can be made here."""


@dataclass(frozen=True)
class MemoryLimit:
    """A memory cgroup with a limit."""

    group: Path

    def run(self, command: Sequence[str]) -> str:
        """Run a command within the limit and return what it prints; its memory is counted from the start."""
        script = 'echo $$ > "$0" && exec "$@"'
        done = subprocess.run(
            ["sh", "-c", script, str(self.group / "cgroup.procs"), *command],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode} within the memory limit.")
        return done.stdout


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[MemoryLimit]:
    """A cgroup of version 1 or 2, removed at the end."""
    is_second = (_ROOT / "cgroup.controllers").exists()
    parent, setting = (_ROOT, "memory.max") if is_second else (_ROOT / "memory", "memory.limit_in_bytes")
    group = parent / f"dovetail-cold-{os.getpid()}"
    try:
        if is_second and "memory" not in (_ROOT / "cgroup.subtree_control").read_text().split():
            (_ROOT / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
    except OSError as error:
        raise NoMemoryLimitError(f"No memory cgroup can be made in {parent}: {error.strerror}.") from None
    try:
        (group / setting).write_text(str(limit_bytes))
        yield MemoryLimit(group)
    except OSError as error:
        raise NoMemoryLimitError(f"{group / setting} cannot be set: {error.strerror}.") from None
    finally:
        _wait_until_empty(group)
        group.rmdir()


def _wait_until_empty(group: Path) -> None:
    """Wait for processes that their parent has left behind, such as Spark's driver: they end by themselves."""
    until_s = time.monotonic() + _MOST_WAIT_S
    while (group / "cgroup.procs").read_text().strip() and time.monotonic() < until_s:
        time.sleep(0.1)


def drop_pages(directory: Path) -> None:
    """Remove the pages of all files of a directory from memory: pages that others have read do not count as ours."""
    for file in directory.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
