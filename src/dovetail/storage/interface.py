"""What the commit protocols need of a storage: a few verbs, each with a promise that holds across a power cut.

Behind it are local disks (`dovetail.storage.local`) and, for tests, a disk that may forget, tear and reorder whatever
was not made durable (`dovetail.storage.simulated`).
"""

import errno
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Protocol

import pyarrow as pa

__all__ = ["LockHeldError", "Storage"]


class LockHeldError(BlockingIOError):
    """Another process of this host has the lock. ``holder`` is what it has noted there."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(errno.EWOULDBLOCK, f"locked by process {holder}", str(path))
        self.holder = holder


class Storage(Protocol):
    """Files below directories, by path. Errors are those of Python's own file functions."""

    def read(self, path: Path) -> bytes:
        """Read a whole file. ``FileNotFoundError`` if there is none."""

    def map(self, path: Path) -> pa.Buffer:
        """The content of a file that nobody changes, mapped where possible; readable also if it is deleted."""

    def size(self, path: Path) -> int | None:
        """The bytes of a file; None if there is no file of this name."""

    def age_s(self, path: Path) -> float:
        """Seconds since a file was written, by the clock of the storage, which is one for all hosts.

        May write beside the file. ``FileNotFoundError`` if there is none.
        """

    def exists(self, path: Path) -> bool:
        """Whether a file or directory of this name exists."""

    def names(self, directory: Path) -> list[str]:
        """The names in a directory, sorted; empty if there is no directory of this name."""

    def create(self, path: Path, data: bytes, moment: str | None = None) -> None:
        """Create a file with this content, whole or not at all. Content and name are durable on return.

        ``FileExistsError`` if the name is taken: of several callers exactly one succeeds. ``moment`` names the fault
        point between the creation of the name and its becoming durable.
        """

    def put(self, path: Path, data: bytes) -> None:
        """Write a file in place of the one that has the name, if any: readers and power cuts find one or the other.

        Content and name are durable on return. A draft that a killed process leaves beside it begins with a dot.
        """

    def open_new(self, path: Path) -> IO[bytes]:
        """Open a new file to write it piece by piece. ``FileExistsError`` if the name is taken.

        Nothing is durable before it was closed, and a `sync` of the file and of its directory.
        """

    def copy(self, source: Path, target: Path) -> None:
        """Create a file with the content of another, both of which nobody changes. ``FileExistsError`` if it exists.

        The content is durable if that of the source is; the name is not before a `sync`.
        """

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or directory another name, atomically. ``FileNotFoundError`` if it is not there.

        Not durable before a `sync` of both parent directories.
        """

    def delete(self, path: Path) -> None:
        """Remove a file, or a directory with its content, if it is there. Not durable before a `sync`."""

    def remove_directory(self, path: Path) -> bool:
        """Remove a directory if it is empty, in one step; whether it is gone. Not durable before a `sync`."""

    def make_directory(self, path: Path) -> None:
        """Create a directory and its parents where missing. Durable on return."""

    def sync(self, paths: Iterable[Path]) -> None:
        """Make durable what was done so far: of a file its content, of a directory its names."""

    def lock(self, path: Path, mode: int = 0o644) -> AbstractContextManager[None]:
        """Hold the lock of this name until the block, or the process, ends. `LockHeldError` if another one has it.

        It excludes processes of the same host; on others it may not. ``mode``: permissions of the lock's file.
        """
