"""Files of a relation: durable, exclusive writes on a local disk; reads from any file system of ``pyarrow.fs``.

Writing needs two guarantees: a flushed file survives a crash, and only one of several writers can create a given
name. Local disks provide both (``fsync``, ``link``). ``pyarrow.fs`` provides neither, so on other file systems a
relation is read-only.
"""

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyarrow import fs

from dovetail.core.errors import DovetailError, RelationConflict, RelationError, RelationNotFound, RelationReadOnly
from dovetail.storage.interface import LockHeldError, Storage
from dovetail.storage.local import LOCAL

_FULL_OR_BROKEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})

# Directories that this process has found to be on a file system with exclusive creation: to ask costs two flushes.
_PROBED: WeakKeyDictionary[Storage, set[Path]] = WeakKeyDictionary()


class RelationFiles:
    """The directory of one relation: a local path, or a URI of any file system that ``pyarrow.fs`` supports.

    A local path is that of a `Storage`; everything that is written goes through it.
    """

    def __init__(
        self, path: str | os.PathLike[str], filesystem: fs.FileSystem | None = None, storage: Storage = LOCAL
    ) -> None:
        text = os.fspath(path)
        self.storage = storage
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
        """The full path of a file of this relation."""
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes:
        """Read a small file."""
        try:
            if self.local is not None:
                return self.storage.read(self.local / name)
            with self.filesystem.open_input_stream(self.path(name)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            raise RelationNotFound(f"{self.path(name)} does not exist.") from None

    def size(self, name: str) -> int | None:
        """The size of a file, None if it does not exist."""
        if self.local is not None:
            return self.storage.size(self.local / name)
        info = self.filesystem.get_file_info(self.path(name))
        return int(info.size or 0) if info.is_file else None

    def exists(self) -> bool:
        """Whether the directory exists, or a file in its place."""
        if self.local is not None:
            return self.storage.exists(self.local)
        return bool(self.filesystem.get_file_info(self.root).type != fs.FileType.NotFound)

    def names(self, directory: str) -> list[str]:
        """The names of the files in a directory; empty if it does not exist."""
        if self.local is not None:
            return self.storage.names(self.local / directory)
        selector = fs.FileSelector(self.path(directory), allow_not_found=True)
        return [info.base_name for info in self.filesystem.get_file_info(selector) if info.is_file]

    def map(self, name: str) -> pa.Buffer:
        """A local file as a memory-mapped buffer."""
        try:
            return self.storage.map(self.writable() / name)
        except FileNotFoundError:
            raise RelationNotFound(f"{self.path(name)} does not exist.") from None

    def writable(self) -> Path:
        """Return the local directory, or raise an error that says why the relation is read-only."""
        if self.local is None:
            raise RelationReadOnly(
                f"{self.root} is on a {self.filesystem.type_name} file system, which cannot guarantee that only one of "
                "two writers creates a file, so the relation is read-only there. Build and change it on a local "
                "disk, then copy the directory."
            )
        return self.local

    @contextmanager
    def writing(self, create: bool = False) -> Iterator[Path]:
        """Lock the relation as its only writer on this host, or fail immediately with the reason."""
        root = self.writable()
        if not create and not self.storage.exists(root):
            raise RelationNotFound(f"{root} no longer exists. Build the relation again, or check the path.")
        if create:
            with storage_errors(root):
                # The last one makes the names of all others durable, too.
                for directory in ("data", "versions"):
                    self.storage.make_directory(root / directory)
        lock = self.storage.lock(root / "writer.lock")
        try:
            with storage_errors(root):
                lock.__enter__()
        except LockHeldError as error:
            raise RelationConflict(
                f"Another writer is changing {root} (process {error.holder}). Nothing was changed; try again when it "
                "has finished."
            ) from None
        with ExitStack() as held:
            held.push(lock)
            self._require_exclusive_create(root)
            yield root

    def _require_exclusive_create(self, root: Path) -> None:
        """Refuse a file system without it before anything is written there."""
        probed = _PROBED.setdefault(self.storage, set())
        if root in probed:
            return
        probe = root / "versions" / f".probe-{uuid.uuid4().hex}"
        try:
            self.storage.create(probe, b"")
            self.storage.delete(probe)
        except OSError as error:
            if error.errno in _FULL_OR_BROKEN:
                raise _refusal(root, error) from None
            raise RelationReadOnly(
                f"{root} is on a file system that cannot create a file exclusively ({error.strerror}), so the relation "
                "is read-only there. Use a local disk such as ext4 or xfs."
            ) from None
        probed.add(root)


@contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    """Convert disk errors (full, broken, no permission) into a `RelationError`."""
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
            f"{root} cannot be written: {error.strerror}. The last version is unchanged. Free some space, for example "
            "with a vacuum, and try again."
        )
    return RelationReadOnly(f"{root} cannot be written: {error.strerror}.")


def _file_system_of(uri: str) -> tuple[fs.FileSystem, str]:
    try:
        return fs.FileSystem.from_uri(uri)  # type: ignore[no-any-return]
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise RelationError(f"{uri} cannot be reached: {reason}. Check the address.") from error
