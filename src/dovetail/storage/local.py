"""Local disks: exclusive by ``link``, durable by ``fsync``."""

import errno
import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from dovetail.core.faultpoints import fault_point
from dovetail.storage.interface import LockHeldError

__all__ = [
    "LOCAL",
    "LocalStorage",
    "make_private_directory",
    "sync_directory",
    "write_durably",
]


class LocalStorage:
    """A mounted file system; see `dovetail.storage.interface.Storage`.

    Examples
    --------
    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> LOCAL.create(root / "a", b"1")
    >>> LOCAL.create(root / "a", b"2")
    Traceback (most recent call last):
    FileExistsError: [Errno 17] File exists: 'a'
    >>> LOCAL.read(root / "a"), LOCAL.names(root), LOCAL.names(root / "b")
    (b'1', ['a'], [])
    """

    def read(self, path: Path) -> bytes:
        """See `Storage.read`."""
        return path.read_bytes()

    def map(self, path: Path) -> pa.Buffer:
        """See `Storage.map`."""
        with pa.memory_map(str(path)) as mapped:
            return mapped.read_buffer()

    def size(self, path: Path) -> int | None:
        """See `Storage.size`."""
        try:
            info = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if stat.S_ISDIR(info.st_mode) else info.st_size

    def age_s(self, path: Path) -> float:
        """See `Storage.age_s`."""
        modified_s = path.stat().st_mtime
        # A file written at this moment has the time of the file system, whatever this host's clock says.
        probe = path.with_name(f".now-{uuid.uuid4().hex}")
        try:
            probe.touch()
            return probe.stat().st_mtime - modified_s
        finally:
            probe.unlink(missing_ok=True)

    def exists(self, path: Path) -> bool:
        """See `Storage.exists`."""
        return path.exists()

    def names(self, directory: Path) -> list[str]:
        """See `Storage.names`."""
        try:
            return sorted(os.listdir(directory))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def create(self, path: Path, data: bytes, moment: str | None = None) -> None:
        """See `Storage.create`."""
        draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
        try:
            write_durably(draft, data)
            try:
                os.link(draft, path)
            except FileExistsError:
                # A network file system may retry a request whose reply was lost: two names mean that the link is ours.
                if os.stat(draft).st_nlink != 2:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path.name) from None
            if moment is not None:
                fault_point(moment)
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(path.parent)

    def put(self, path: Path, data: bytes) -> None:
        """See `Storage.put`."""
        draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
        try:
            write_durably(draft, data)
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(path.parent)

    def open_new(self, path: Path) -> IO[bytes]:
        """See `Storage.open_new`."""
        return open(path, "xb")

    def copy(self, source: Path, target: Path) -> None:
        """See `Storage.copy`: a second name for the same bytes, where the file system can do that."""
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:
            draft = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
            try:
                with open(source, "rb") as original, open(draft, "xb") as copy:
                    shutil.copyfileobj(original, copy, 1 << 20)
                    copy.flush()
                    os.fsync(copy.fileno())
                os.rename(draft, target)
            finally:
                draft.unlink(missing_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        """See `Storage.rename`."""
        os.rename(old, new)

    def delete(self, path: Path) -> None:
        """See `Storage.delete`."""
        try:
            path.unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):
            while path.exists():
                # Another process may remove or rename parts of it at the same time.
                with suppress(FileNotFoundError):
                    shutil.rmtree(path)

    def remove_directory(self, path: Path) -> bool:
        """See `Storage.remove_directory`."""
        try:
            path.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    def make_directory(self, path: Path) -> None:
        """See `Storage.make_directory`."""
        path.mkdir(parents=True, exist_ok=True)
        # Also of those that exist: who made them may have been killed before they were durable.
        for place in path.parents:
            try:
                sync_directory(place)
            except OSError as error:
                # One that this user may not list, or that is of no disk, such as /proc, was not made by this user.
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL):
                    raise

    def sync(self, paths: Iterable[Path]) -> None:
        """See `Storage.sync`."""
        for path in paths:
            # A directory and a file are flushed by the same call.
            sync_directory(path)

    @contextmanager
    def lock(self, path: Path, mode: int = 0o644) -> Iterator[None]:
        """See `Storage.lock`."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, mode)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LockHeldError(path, os.pread(descriptor, 32, 0).decode(errors="replace") or "unknown") from None
            # The PID is only for the message above. Ignore errors: a vacuum must be able to start on a full disk.
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(descriptor)


LOCAL = LocalStorage()


def make_private_directory(path: Path, mode: int = 0o700) -> None:
    """Create a directory that only this user can enter, durably; its parents are created as usual.

    One that exists keeps its permissions: whoever made it has chosen them.

    Examples
    --------
    >>> import tempfile
    >>> private = Path(tempfile.mkdtemp()) / "a" / "b"
    >>> make_private_directory(private)
    >>> oct(private.stat().st_mode & 0o777)
    '0o700'
    """
    if path.is_dir():
        return
    LOCAL.make_directory(path.parent)
    try:
        path.mkdir(mode=0o700)
        if mode != 0o700:
            path.chmod(mode)  # not by mkdir, which the umask narrows
    except FileExistsError:
        return
    sync_directory(path.parent)


def write_durably(path: Path, data: Any) -> None:
    """Write a new file that survives a crash once its directory is synced."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, or the content of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
