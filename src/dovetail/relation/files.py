"""Files of a relation: durable and exclusive writing on a local disk, reading anywhere that ``pyarrow.fs`` reaches.

Writing needs two things of a file system: a file that was flushed survives a crash, and a name can be created by
exactly one of several writers. Local disks give both (``fsync``, ``link``). ``pyarrow.fs`` offers neither, so
elsewhere a relation is read-only, and says so.
"""

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from dovetail.errors import DovetailError, RelationConflict, RelationError, RelationNotFound, RelationReadOnly
from dovetail.faultpoints import fault_point

_FULL_OR_BROKEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})


class RelationFiles:
    """The directory of one relation.

    Parameters
    ----------
    path
        A local path, or a URI of any file system that ``pyarrow.fs`` knows.
    filesystem
        A ``pyarrow.fs.FileSystem`` to use instead of the one ``path`` implies.
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: fs.FileSystem | None = None) -> None:
        text = os.fspath(path)
        if filesystem is None and "://" in text:
            filesystem, text = _file_system_of(text)
        if filesystem is None or isinstance(filesystem, fs.LocalFileSystem):
            self.local: Path | None = Path(text).expanduser().absolute()
            self.filesystem: fs.FileSystem = fs.LocalFileSystem()
            self.root = str(self.local)
        else:
            self.local = None
            self.filesystem = filesystem
            self.root = text.rstrip("/")

    def path(self, name: str) -> str:
        """The whole path of a file of this relation."""
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes:
        """All of a small file."""
        try:
            with self.filesystem.open_input_stream(self.path(name)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            raise RelationNotFound(f"{self.path(name)} does not exist.") from None

    def size(self, name: str) -> int | None:
        """The size of a file, 0 for a directory, or None if it does not exist."""
        info = self.filesystem.get_file_info(self.path(name))
        return None if info.type == fs.FileType.NotFound else int(info.size or 0)

    def names(self, directory: str) -> list[str]:
        """The names of the files in a directory, none if it does not exist."""
        selector = fs.FileSelector(self.path(directory), allow_not_found=True)
        return [info.base_name for info in self.filesystem.get_file_info(selector) if info.is_file]

    def map(self, name: str) -> pa.Buffer:
        """A local file as a memory-mapped buffer."""
        try:
            with pa.memory_map(self.path(name)) as mapped:
                return mapped.read_buffer()
        except FileNotFoundError:
            raise RelationNotFound(f"{self.path(name)} does not exist.") from None

    def writable(self) -> Path:
        """The local directory, or the error that says why there is none."""
        if self.local is None:
            raise RelationReadOnly(
                f"{self.root} is on a {self.filesystem.type_name} file system, where a file cannot be created by "
                "exactly one of two writers, so the relation can only be read there. Build and change it on a local "
                "disk, then copy the directory."
            )
        return self.local

    @contextmanager
    def writing(self, create: bool = False) -> Iterator[Path]:
        """Be the relation's only writer on this host, or fail at once with the reason."""
        root = self.writable()
        if not create and not root.is_dir():
            raise RelationNotFound(f"{root} does not exist any more. Build the relation again, or check the path.")
        with storage_errors(root):
            if create:
                for directory in (root / "versions", root / "data"):
                    directory.mkdir(exist_ok=True)
                sync_directory(root)
            lock = os.open(root / "writer.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RelationConflict(
                    f"another writer is changing {root} (process {_holder(lock)}). Nothing was changed; try again when "
                    "it has finished."
                ) from None
            # Only for the message above: a vacuum must be able to start on a full disk.
            with suppress(OSError):
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
            _probe_exclusive_create(root)
            yield root
        finally:
            os.close(lock)


@contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Turn what a disk refuses (it is full, broken or forbids writing) into an error that says so."""
    try:
        yield
    except DovetailError:
        raise
    except OSError as error:
        if error.errno in _FULL_OR_BROKEN | _FORBIDDEN:
            raise _refusal(root, error) from None
        raise


def _refusal(root: Path, error: OSError) -> RelationError:
    if error.errno in _FULL_OR_BROKEN:
        return RelationError(
            f"{root} cannot be written: {error.strerror}. The last version is as it was; make room, for instance by "
            "a vacuum, and try again."
        )
    return RelationReadOnly(f"{root} cannot be written: {error.strerror}.")


def _file_system_of(uri: str) -> tuple[fs.FileSystem, str]:
    try:
        return fs.FileSystem.from_uri(uri)  # type: ignore[no-any-return]
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise RelationError(f"{uri} cannot be reached: {reason}. Check the address.") from error


def _holder(lock: int) -> str:
    return os.pread(lock, 32, 0).decode(errors="replace") or "unknown"


def _probe_exclusive_create(root: Path) -> None:
    probe = root / "versions" / f".probe-{uuid.uuid4().hex}"
    try:
        probe.touch()
        os.link(probe, f"{probe}.link")
        os.unlink(f"{probe}.link")
    except OSError as error:
        if error.errno in _FULL_OR_BROKEN:
            raise _refusal(root, error) from None
        raise RelationReadOnly(
            f"{root} is on a file system that cannot create a file exclusively ({error.strerror}), so the relation can "
            "only be read there. Use a local disk such as ext4 or xfs."
        ) from None
    finally:
        probe.unlink(missing_ok=True)


def create_exclusively(path: Path, text: str, point: str = "relation.manifest.linked") -> None:
    """Create a file with this content, durably and all at once, or raise ``FileExistsError``.

    ``point`` is the fault point between the moment the name exists and the moment it is durable.
    """
    draft = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        write_durably(draft, text.encode())
        try:
            os.link(draft, path)
        except FileExistsError:
            # A network file system may repeat a request whose answer was lost: two names mean that the link is ours.
            if os.stat(draft).st_nlink != 2:
                raise
        fault_point(point)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_durably(path: Path, data: Any) -> None:
    """Write a new file that survives a crash once its directory is synced too."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
