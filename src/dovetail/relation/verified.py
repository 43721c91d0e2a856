"""Which record batches of a segment this host has already checked against their digests.

Checking every batch in every worker process would read the relation once per worker; checking none would return wrong
rows from a damaged disk. So the first reader of a batch checks it and says so in a small shared file in the host's
temporary directory: one byte per batch, mapped by every process. The name of that file contains the digest, and the
inode, the size and the times of the data files, so that a replaced or rewritten file is checked again. What it cannot
see is damage that leaves all of those as they were, such as a bit that decays on the disk after the first check.
"""

import mmap
import os
import stat
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt


def verification_marks(data_files: Sequence[Path], digest: str, batches: int) -> npt.NDArray[np.uint8]:
    """One mutable byte per batch of these files: non-zero once some process of this host has checked it."""
    if not data_files or batches == 0:
        return np.zeros(batches, np.uint8)
    directory = _private_directory()
    if directory is None:
        return np.zeros(batches, np.uint8)
    name = "-".join([digest, *map(_identity, data_files)])
    try:
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        # A full or read-only temporary directory costs a second check, never a wrong row.
        return np.zeros(batches, np.uint8)
    try:
        # Not ftruncate: it would promise space that a full disk does not have, and the first mark would be a bus error.
        os.posix_fallocate(descriptor, 0, batches)
        return np.frombuffer(mmap.mmap(descriptor, batches), np.uint8)
    except OSError:
        return np.zeros(batches, np.uint8)
    finally:
        os.close(descriptor)


def _identity(file: Path) -> str:
    info = file.stat()
    return f"{info.st_dev:x}.{info.st_ino:x}.{info.st_size:x}.{info.st_mtime_ns:x}.{info.st_ctime_ns:x}"


def forget_marks(digests: Iterable[str]) -> None:
    """Remove this host's marks of segments that no longer exist, known by the digest of their index."""
    directory = _private_directory()
    if directory is None:
        return
    gone = set(digests)
    for entry in os.scandir(directory):
        if entry.name.partition("-")[0] in gone:
            with suppress(FileNotFoundError):
                os.unlink(entry.path)


def _private_directory() -> Path | None:
    """A directory that only this user can write, so that nobody else can vouch for our data."""
    parent = Path(tempfile.gettempdir()) / f"dovetail-{os.getuid()}"
    try:
        for directory in (parent, parent / "verified"):
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            info = os.lstat(directory)
            # Not made right, only looked at: what lies there may be somebody else's, or a link to something of ours.
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
                return None
    except OSError:
        return None
    return parent / "verified"
