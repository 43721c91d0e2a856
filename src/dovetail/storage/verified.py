"""Record of the segment batches or pages that this host has already checked against their digests.

Checking every batch in every worker process would read the relation once per worker; checking none would return wrong
rows from a damaged disk. The first reader of a batch checks it and records this in a small shared file in the host's
temporary directory: one byte per batch or page, mapped by every process. The name of that file contains the digest and
the inode, size and timestamps of the data files, so a replaced or rewritten file is checked again. Damage that changes
none of these, such as a bit that decays on disk after the first check, is not detected.

Marks of deleted files go in two ways. Whoever deletes the files calls `forget_marks`, which reaches the marks of its
own host. On every host, a process that makes a mark looks through all of them, at most every ten minutes, and removes
those whose file no longer exists: a mark ends with the path of its first file.
"""

import mmap
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

SWEEP_EVERY_S = 600
_LAST_SWEEP = "verified.swept"
_OLD_MARK_S = 7 * 86_400


def verification_marks(
    data_files: Sequence[Path], digest: str, batches: int, unit: str = "batches"
) -> npt.NDArray[np.uint8]:
    """One mutable byte per batch of these files, non-zero once a process on this host has checked the batch.

    Units other than batches have marks of their own: an earlier release would take one for the other.
    """
    if not data_files or batches == 0:
        return np.zeros(batches, np.uint8)
    directory = private_directory("verified")
    if directory is None:
        return np.zeros(batches, np.uint8)
    name = "-".join([digest, *map(_identity, data_files), *([] if unit == "batches" else [unit])])
    try:
        descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        # With a full or read-only temporary directory, batches are checked again. Rows are never wrong.
        return np.zeros(batches, np.uint8)
    try:
        # Not ftruncate: it reserves no space, so on a full disk the first write would be a bus error.
        os.posix_fallocate(descriptor, 0, batches)
        if os.fstat(descriptor).st_size == batches:
            os.pwrite(descriptor, os.fsencode(data_files[0].absolute()), batches)
            _sweep_from_time_to_time(directory)
        return np.frombuffer(mmap.mmap(descriptor, batches), np.uint8)
    except OSError:
        return np.zeros(batches, np.uint8)
    finally:
        os.close(descriptor)


def _identity(file: Path) -> str:
    info = file.stat()
    return f"{info.st_dev:x}.{info.st_ino:x}.{info.st_size:x}.{info.st_mtime_ns:x}.{info.st_ctime_ns:x}"


def forget_marks(digests: Iterable[str]) -> None:
    """Remove this host's marks of deleted segments, identified by the digest of their index."""
    directory = private_directory("verified")
    if directory is None:
        return
    gone = set(digests)
    for entry in os.scandir(directory):
        if entry.name.partition("-")[0] in gone:
            with suppress(FileNotFoundError):
                os.unlink(entry.path)


def _sweep_from_time_to_time(directory: Path) -> None:
    """Remove the marks of files that no longer exist, unless a process of this host has done so lately."""
    last = directory.parent / _LAST_SWEEP
    now_s = time.time()
    with suppress(FileNotFoundError):
        # A clock that went back must not end all sweeps.
        if 0 <= now_s - last.stat().st_mtime < SWEEP_EVERY_S:
            return
    last.touch()
    for entry in os.scandir(directory):
        with suppress(FileNotFoundError):
            path = _marked_file(entry.path)
            is_gone = not os.path.lexists(path) if path else now_s - entry.stat().st_mtime > _OLD_MARK_S
            if is_gone:
                os.unlink(entry.path)


def _marked_file(mark: str) -> bytes:
    """The path at the end of a mark, after a byte of two flags per batch; none in marks of earlier versions."""
    with open(mark, "rb") as file:
        return file.read().lstrip(b"\0\1\2\3")


def private_directory(kind: str) -> Path | None:
    """A directory on this host that only this user can write, so that no other user can mark data as verified."""
    parent = Path(tempfile.gettempdir()) / f"dovetail-{os.getuid()}"
    try:
        for directory in (parent, parent / kind):
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            info = os.lstat(directory)
            # Only inspect, never repair: the path may belong to another user, or be a link to other files of ours.
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
                return None
    except OSError:
        return None
    return parent / kind
