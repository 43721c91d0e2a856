"""Storage on a simulated disk, as one process sees it: every step of every call can be its last.

The calls do what `dovetail.storage.local` does, step by step, on a `SimulatedDisk`. Before each step the process's
``before_step`` is called with the step's name; what it raises is a crash at that moment, and what it does is what other
processes do in between. Several processes share a disk.
"""

import errno
import io
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pyarrow as pa

from dovetail.storage.interface import LockHeldError
from dovetail.storage.simulated_disk import Choose, SimulatedDisk

__all__ = ["SimulatedStorage", "at_random", "every_choice"]


class SimulatedStorage:
    """A simulated disk, used by one process; see `dovetail.storage.interface.Storage`.

    Examples
    --------
    >>> disk = SimulatedDisk()
    >>> storage = SimulatedStorage(disk)
    >>> storage.make_directory(Path("/flow"))
    >>> storage.create(Path("/flow/a"), b"1")
    >>> storage.write(Path("/flow/b"), b"2")
    >>> disk.power_cut(min)
    >>> storage.names(Path("/flow"))
    ['a']
    """

    def __init__(
        self, disk: SimulatedDisk, before_step: Callable[[str], None] = lambda step: None, host: str = "host"
    ) -> None:
        self.disk = disk
        self._step = before_step
        self._host = host  # locks reach no other one

    def read(self, path: Path) -> bytes:
        """See `Storage.read`."""
        self._step("read")
        return self.disk.read(path)

    def map(self, path: Path) -> pa.Buffer:
        """See `Storage.map`."""
        return pa.py_buffer(self.read(path))

    def size(self, path: Path) -> int | None:
        """See `Storage.size`."""
        self._step("size")
        is_file = self.disk.exists(path) and not self.disk.is_directory(path)
        return len(self.disk.read(path)) if is_file else None

    def age_s(self, path: Path) -> float:
        """See `Storage.age_s`."""
        self._step("age_s")
        return self.disk.age_s(path)

    def exists(self, path: Path) -> bool:
        """See `Storage.exists`."""
        self._step("exists")
        return self.disk.exists(path)

    def names(self, directory: Path) -> list[str]:
        """See `Storage.names`."""
        self._step("names")
        is_file = self.disk.exists(directory) and not self.disk.is_directory(directory)
        return [] if is_file else self.disk.names(directory)

    def create(self, path: Path, data: bytes, moment: str | None = None) -> None:
        """See `Storage.create`."""
        self._step("create.draft")
        draft = self._draft(path)
        self._write_new(draft, data)
        self._step("create.flush")
        self.disk.flush(draft)
        self._step("create.link")
        try:
            self.disk.link(draft, path)
        except FileExistsError:
            self._step("create.refused")
            self.disk.unlink(draft)
            raise
        self._step("create.linked")
        self.disk.unlink(draft)
        self._step("create.sync")
        self._flush_names(path.parent, "create")

    def put(self, path: Path, data: bytes) -> None:
        """See `Storage.put`."""
        self._step("put.draft")
        draft = self._draft(path)
        self._write_new(draft, data)
        self._step("put.flush")
        self._flush_content(draft, "put")
        self._step("put.rename")
        self.disk.rename(draft, path)
        self._step("put.sync")
        self._flush_names(path.parent, "put")

    def open_new(self, path: Path) -> IO[bytes]:
        """See `Storage.open_new`."""
        self._step("open_new")
        if self.disk.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._write_new(path, b"")
        return _Stream(self.disk, path, self._step)

    def copy(self, source: Path, target: Path) -> None:
        """See `Storage.copy`."""
        self._step("copy")
        self.disk.link(source, target)

    def rename(self, old: Path, new: Path) -> None:
        """See `Storage.rename`."""
        self._step("rename")
        self.disk.rename(old, new)

    def delete(self, path: Path) -> None:
        """See `Storage.delete`."""
        self._step("delete")
        for name in self.disk.names(path) if self.disk.is_directory(path) else ():
            self.delete(path / name)
        with suppress(FileNotFoundError):
            self.disk.unlink(path)

    def remove_directory(self, path: Path) -> bool:
        """See `Storage.remove_directory`."""
        self._step("remove_directory")
        if self.disk.exists(path) and not self.disk.is_directory(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if self.disk.names(path):
            return False
        with suppress(FileNotFoundError):
            self.disk.unlink(path)
        return True

    def make_directory(self, path: Path) -> None:
        """See `Storage.make_directory`."""
        self._step("make_directory")
        self.disk.make_directories(path)
        self._step("make_directory.sync")
        for place in path.parents:
            self._flush_names(place, "make_directory")

    def sync(self, paths: Iterable[Path]) -> None:
        """See `Storage.sync`."""
        for path in paths:
            self._step("sync")
            if self.disk.is_directory(path):
                self._flush_names(path, "sync")
            else:
                self._flush_content(path, "sync")

    @contextmanager
    def lock(self, path: Path, mode: int = 0o644) -> Iterator[None]:
        """See `Storage.lock`."""
        self._step("lock")
        if not self.disk.exists(path):
            self._write_new(path, b"")
        key = (self._host, path)
        if key in self.disk.locks:
            raise LockHeldError(path, self.disk.locks[key])
        self.disk.locks[key] = str(id(self))
        try:
            yield
        finally:
            self.disk.locks.pop(key, None)

    def write(self, path: Path, data: bytes, *, exclusively: bool = False) -> None:
        """Write a file as Spark does: with the directories above it, and nothing flushed.

        With ``exclusively``, ``FileExistsError`` if the name is taken.
        """
        self._step("write")
        if exclusively and self.disk.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self.disk.write(path, data)

    def _flush_names(self, directory: Path, verb: str) -> None:
        """Apart from other flushes, so that a test can leave it out for one of the verbs."""
        self.disk.flush(directory)

    def _flush_content(self, path: Path, verb: str) -> None:
        self.disk.flush(path)

    def _write_new(self, path: Path, data: bytes) -> None:
        if not self.disk.is_directory(path.parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self.disk.write(path, data)

    def _draft(self, path: Path) -> Path:
        number = 0
        while self.disk.exists(path.with_name(f".{path.name}-{number:032x}")):
            number += 1
        return path.with_name(f".{path.name}-{number:032x}")


class _Stream(io.BytesIO):
    """A new file while it is written: what was written reaches the disk when it is flushed or closed."""

    def __init__(self, disk: SimulatedDisk, path: Path, before_step: Callable[[str], None]) -> None:
        super().__init__()
        self._disk, self._path, self._step = disk, path, before_step

    def flush(self) -> None:
        """Hand over what was written so far, unless somebody has deleted the file."""
        if not self.closed and self.tell():
            self._step("stream")
            if self._disk.exists(self._path):
                self._disk.write(self._path, self.getvalue())

    def close(self) -> None:
        """Hand over everything."""
        try:
            self.flush()
        finally:
            super().close()


def at_random(generator: random.Random) -> Choose:
    """What is left after a power cut, by a seeded generator; every state can be met."""
    return lambda options: options[generator.randrange(len(options))]


def every_choice(most: int) -> Iterator[Choose]:
    """One `Choose` for each state that a power cut can leave, until there are no more, or ``most`` were given.

    Of the lengths of a torn file it takes the shortest, one in the middle, and the longest ones.

    Examples
    --------
    >>> for choose in every_choice(10):
    ...     print(choose((0, 1)), choose((0, 1)))
    0 0
    0 1
    1 0
    1 1
    """
    path: list[tuple[int, int]] = []  # which option was taken at each decision, and of how many
    for _ in range(most):
        place = 0

        def choose(options: Sequence[int]) -> int:
            nonlocal place
            few = options if len(options) <= 4 else (options[0], options[len(options) // 2], *options[-2:])
            if place == len(path):
                path.append((0, len(few)))
            place += 1
            return few[path[place - 1][0]]

        yield choose
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        path[-1] = (path[-1][0] + 1, path[-1][1])
