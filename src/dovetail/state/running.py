"""Who runs a flow: a lock in its checkpoint that ends with the process that holds it."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.errors import StateError
from dovetail.state.documents import storage_errors

__all__ = ["running", "who_runs"]

_LOCK = "runner.lock"


@contextmanager
def running(checkpoint: str | os.PathLike[str]) -> Iterator[None]:
    """Be the only runner of a flow for the duration of a block.

    Raises
    ------
    StateError
        If another process runs it.

    Examples
    --------
    >>> import tempfile
    >>> checkpoint = tempfile.mkdtemp()
    >>> with running(checkpoint):
    ...     who_runs(checkpoint)["pid"] == os.getpid()
    True
    >>> who_runs(checkpoint) is None
    True
    """
    root = Path(checkpoint) / "dovetail"
    with storage_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = _read(lock)
            raise StateError(
                f"Process {other.get('pid', 'unknown')} on {other.get('host', 'this host')} runs this flow already.",
                hint="Stop it first, or give this flow a checkpoint of its own.",
            ) from None
        os.ftruncate(lock, 0)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since_ms": int(time.time() * 1000)}
        os.pwrite(lock, json.dumps(holder).encode(), 0)
        yield
    finally:
        os.close(lock)


def who_runs(checkpoint: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The process that runs a flow: ``pid``, ``host``, ``since_ms``; None if none does."""
    try:
        lock = os.open(Path(checkpoint) / "dovetail" / _LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(lock)
        return None
    finally:
        os.close(lock)


def _read(lock: int) -> dict[str, Any]:
    try:
        return dict(json.loads(os.pread(lock, 1000, 0)))
    except ValueError:
        return {}
