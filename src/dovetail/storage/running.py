"""The lock in a flow's checkpoint, released when the process that holds it ends."""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from dovetail.core.errors import StateError
from dovetail.storage.documents import storage_errors
from dovetail.storage.local import make_private_directory

__all__ = ["RunnerLock", "running", "who_runs"]

_LOCK = "runner.lock"
_TRIES, _RETRY_SECONDS = 50, 0.02


@contextmanager
def running(checkpoint: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of a flow for the duration of a block.

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
    lock = RunnerLock(checkpoint, "command")
    try:
        yield
    finally:
        lock.release()


class RunnerLock:
    """The lock of a flow, held until `release`; a `StateError` if another process runs the flow.

    Within one process each role can have it once: the command holds it while Spark starts, and its query as well.
    """

    _held: ClassVar[dict[Path, tuple[int, set[str]]]] = {}  # by directory: the descriptor, and who has taken it
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, checkpoint: str | os.PathLike[str], role: str) -> None:
        root = (Path(checkpoint) / "dovetail").absolute()
        with storage_errors(root):
            make_private_directory(root.parent)
            # A checkpoint that others can write to was made so by somebody: driver and workers are two users then.
            given = root.parent.stat().st_mode & 0o777
            make_private_directory(root, given if given & 0o022 else 0o700)
        self._root, self._role, self._is_held = root.resolve(), role, True
        with self._guard:
            lock, roles = self._held.get(self._root) or (_locked(self._root), set())
            if role in roles:
                raise _already_runs(os.getpid(), "this host")
            self._held[self._root] = (lock, roles | {role})

    def release(self) -> None:
        """Let others run the flow; nothing happens the second time."""
        with self._guard:
            if not self._is_held:
                return
            self._is_held = False
            lock, roles = self._held.pop(self._root)
            if roles > {self._role}:
                self._held[self._root] = (lock, roles - {self._role})
            else:
                os.close(lock)


def _locked(root: Path) -> int:
    with storage_errors(root):
        lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    for tries_left in reversed(range(_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # Whoever asks `who_runs` holds the lock for a moment as well.
            if tries_left:
                time.sleep(_RETRY_SECONDS)
                continue
            other = _read(lock)
            os.close(lock)
            raise _already_runs(other.get("pid", "unknown"), other.get("host", "this host")) from None
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since_ms": int(time.time() * 1000)}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(holder).encode(), 0)
    return lock


def _already_runs(pid: object, host: object) -> StateError:
    return StateError(
        f"Process {pid} on {host} already runs this flow.",
        hint="Stop it first, or use a different checkpoint for this flow.",
    )


def who_runs(checkpoint: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The process that runs a flow: ``pid``, ``host``, ``since_ms``; None if it is not running."""
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
