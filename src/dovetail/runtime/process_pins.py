"""Versions of relations that queries of this process were planned with, pinned for as long as it lives.

Nobody tells when a DataFrame is no longer used: it may be evaluated as long as the process lives. A thread renews the
pins; when the process was killed, they expire within ten minutes.
"""

import atexit
import os
import socket
import threading
import uuid
from pathlib import Path

from dovetail.relation.pins import hold, release
from dovetail.relation.relation import Relation

__all__ = ["pin_for_this_process"]

LEASE_S = 600
_RENEW_EVERY_S = LEASE_S / 5


class _ProcessPins:
    """The pins of this process: one file per relation."""

    def __init__(self) -> None:
        self._holder = f"process-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._about = {"pid": os.getpid(), "host": socket.gethostname()}
        self._versions: dict[Path, set[int]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def add(self, root: Path, version: int) -> None:
        with self._lock:
            is_first = not self._versions
            versions = self._versions.setdefault(root, set())
            if version not in versions:
                versions.add(version)
                hold(root, self._holder, versions, LEASE_S, self._about)
            if is_first:
                threading.Thread(target=self._renew, name="dovetail-pins", daemon=True).start()
                atexit.register(self.release)

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_EVERY_S):
            with self._lock:
                for root, versions in self._versions.items():
                    hold(root, self._holder, versions, LEASE_S, self._about)

    def release(self) -> None:
        """Give all of them back; a forked process, which also ends, has none of these."""
        if self._about["pid"] != os.getpid():
            return
        self._ended.set()
        with self._lock:
            for root in self._versions:
                release(root, self._holder)
            self._versions.clear()


_PINS = _ProcessPins()


def _begin_anew() -> None:
    """In a forked process: the pins are its parent's, and so is the thread."""
    global _PINS
    _PINS = _ProcessPins()


os.register_at_fork(after_in_child=_begin_anew)


def pin_for_this_process(relation: Relation) -> None:
    """Keep a version from vacuums as long as this process lives; does nothing where the directory cannot be written."""
    if relation.filesystem is None:
        _PINS.add(Path(relation.path), relation.version)
