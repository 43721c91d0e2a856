"""Pins the versions of a relation that a step of a flow needs, also while the flow is stopped."""

import os
import socket
import time
from collections.abc import Collection
from pathlib import Path

from dovetail.relation.pins import hold
from dovetail.spark.flow.store import FlowStore
from dovetail.storage.digests import digest_of

__all__ = ["FlowPin"]

LEASE_S = 7 * 86_400
_RENEW_EVERY_S = 3_600.0


class FlowPin:
    """The pin of one step. It expires a week after the last micro-batch."""

    def __init__(self, relation: str, store: FlowStore, step: str) -> None:
        self._root = Path(relation)
        self._holder = f"flow-{digest_of(os.fsencode(store.checkpoint))[:16]}-{step}"
        self._about = {"checkpoint": str(store.checkpoint), "step": step, "host": socket.gethostname()}
        self._held: set[int] | None = None
        self._renew_at_s = 0.0

    def hold(self, versions: Collection[int]) -> None:
        """Pin exactly these versions; does nothing if they are pinned and the pin is fresh."""
        now_s = time.monotonic()
        if self._held != set(versions) or now_s >= self._renew_at_s:
            hold(self._root, self._holder, versions, LEASE_S, self._about)
            self._held, self._renew_at_s = set(versions), now_s + _RENEW_EVERY_S
