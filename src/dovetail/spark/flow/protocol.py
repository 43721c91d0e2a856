"""The order of a micro-batch's writes, which makes state and output atomic: intent, job, commit, publish.

Micro-batch b, in four steps:

1. *Intent.* If commit b exists, go to step 4 with it. If intent b exists, use it. Else create it: batch time, Spark's
offsets, relation versions, how far each disk phase goes. It is durable before any task runs. 2. *Job.* Computes the new
state and the staged output from the intent and commit b-1. 3. *Commit.* ``commits/<b>.json`` is created exclusively:
state files, receipts, reports. 4. *Publish.* The driver checks that it was not replaced, and the sinks make the staged
output visible, idempotently. Then Spark commits b.

A crash anywhere replays b from its intent and commit b-1. Neither Spark nor tasks appear here, so every order of
crashes, restores and second drivers can be tested without them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.core.errors import StateError
from dovetail.core.faultpoints import fault_point
from dovetail.core.version import __version__
from dovetail.spark.flow.flow_time import FlowTime
from dovetail.spark.flow.ownership import Owner
from dovetail.spark.flow.spark_half import Offsets
from dovetail.spark.flow.store import FlowStore
from dovetail.spark.flow.torn_entries import drop_torn_entries

__all__ = ["BatchProtocol", "Commit", "Publisher", "RunBatch"]

Commit = dict[str, Any]
_RESTORE = "Restore the whole checkpoint directory from one copy, or start the flow with a new checkpoint."


class Publisher(Protocol):
    """The protocol's view of a sink."""

    kind: str

    def claim(self, owner: Owner, batch: int | None, receipt: Mapping[str, Any] | None) -> None:
        """Fence off other drivers of the flow; refuse a target with micro-batches that the checkpoint does not know.

        ``batch`` is the newest commit of the checkpoint, and ``receipt`` what it has staged for this sink.
        """

    def publish(self, receipt: Mapping[str, Any]) -> None:
        """Make the staged rows visible; idempotent."""

    def forget(self, receipt: Mapping[str, Any]) -> None:
        """The micro-batch will not be published again: its staged files may be removed."""


@dataclass(frozen=True)
class RunBatch:
    """The caller's part of a micro-batch."""

    decide: Callable[[Commit | None, int, int | None], dict[str, Any]]
    """The steps' part of a new intent, from the last commit, the batch's time and the previous one's."""
    job: Callable[[Mapping[str, Any], Commit | None], dict[str, Any]]
    """Run the job, from the intent and the last commit; returns its part of the commit."""
    is_draining: bool = False


class BatchProtocol:
    """Runs the micro-batches of one driver. ``side`` sinks are published before the flow's own ``sink``."""

    def __init__(self, store: FlowStore, sink: Publisher, side: Sequence[Publisher] = ()) -> None:
        self._store, self._sink, self._side = store, sink, tuple(side)
        self._time = FlowTime()
        self._newest: Commit | None = None
        self._has_run = False

    # ================================================================ at the start

    def start(self) -> None:
        """Check that both halves of the checkpoint belong together, and fence off other drivers."""
        newest = self._store.newest_commit()
        committed = None if newest is None else newest["batch"]
        drop_torn_entries(self._store.checkpoint, self._store.storage, self._store.last_intent(), committed)
        self._require_halves(newest)
        if newest is not None:
            self._receipts(newest)
        # Not earlier: a refused start must not disturb the running driver.
        self._store.take_over()
        newest = self._store.newest_commit()
        staged: Mapping[int, Mapping[str, Any]] = {}
        if newest is not None:
            staged = {id(publisher): receipt for publisher, receipt in self._receipts(newest)}
        for publisher in (*self._side, self._sink):
            publisher.claim(self._store.owner, None if newest is None else newest["batch"], staged.get(id(publisher)))

    def _require_halves(self, newest: Commit | None) -> None:
        half = self._store.spark_half
        planned, query_id = half.newest(), half.query_id()
        if newest is None:
            if planned or half.has_committed():
                raise StateError(
                    f"Spark's checkpoint has planned micro-batch {planned}, but {self._store.root} has no commit.",
                    hint=_RESTORE,
                )
            return
        if query_id is None:
            raise StateError(
                f"{self._store.checkpoint} has lost Spark's part of the checkpoint; the flow's part has micro-batch "
                f"{newest['batch']}.",
                hint=_RESTORE,
            )
        self._require_same_query(newest, query_id)
        batch = newest["batch"]
        if planned is None or planned < batch or planned > batch + 1:
            last = "nothing" if planned is None else f"micro-batch {planned}"
            raise StateError(
                f"Spark's part of the checkpoint {self._store.checkpoint} ends with {last}, the flow's with "
                f"micro-batch {batch}: they are not of one moment.",
                hint=_RESTORE,
            )
        self._require_same_rows(newest, half.offsets(batch))

    # ================================================================ a micro-batch

    def run(self, batch: int, caller: RunBatch) -> tuple[Commit, Commit | None, bool]:
        """Process one micro-batch; returns its commit, the previous one, and whether the commit is new."""
        fault_point("flow.batch.before")
        half = self._store.spark_half
        query_id = half.require_query_id()
        if not self._has_run:
            half.make_identity_durable()
            self._has_run = True
        commit, previous = self._store.commit(batch), self._previous(batch)
        for document in (commit, previous):
            if document is not None:
                self._require_same_query(document, query_id)
        if previous is not None:
            # Spark has moved on, so the previous micro-batch is never published again.
            for publisher, receipt in self._receipts(previous):
                publisher.forget(receipt)
        offsets = half.offsets(batch)
        is_new = commit is None
        if commit is None:
            intent = self._store.intent(batch) or self._create_intent(batch, previous, query_id, offsets, caller)
            self._require_same_rows(intent, offsets)
            with self._told_if_replaced(batch):
                body = caller.job(intent, previous)
            commit = self._store.create_commit(batch, {**_carried(intent, self._store.flow_id), **body})
        self._require_same_rows(commit, offsets)
        # After the exclusive create: a driver replaced in between notices here, and its successor finds the commit.
        self._store.require_newest(batch)
        fault_point("flow.publish.before")
        with self._told_if_replaced(batch):
            for publisher, receipt in self._receipts(commit):
                publisher.publish(receipt)
        fault_point("flow.publish.after")
        self._newest = commit
        return commit, previous, is_new

    @contextmanager
    def _told_if_replaced(self, batch: int) -> Iterator[None]:
        """A replaced driver loses its files: report that it was replaced, not the errors that follow from it."""
        try:
            yield
        except Exception:
            self._store.require_newest(batch)
            raise

    def _previous(self, batch: int) -> Commit | None:
        if batch == 0:
            return None
        if self._newest is not None and self._newest["batch"] == batch - 1:
            return self._newest
        previous = self._store.commit(batch - 1)
        if previous is None:
            newest = self._store.last_batch()
            raise StateError(
                f"Spark's checkpoint continues with micro-batch {batch}, but {self._store.root} has no commit of "
                f"{batch - 1}: {'it has none' if newest is None else f'the newest is {newest}'}.",
                hint=_RESTORE,
            )
        return previous

    def _create_intent(
        self, batch: int, previous: Commit | None, query_id: str, offsets: Offsets | None, caller: RunBatch
    ) -> dict[str, Any]:
        if offsets is None:
            raise StateError(f"Spark's part of the checkpoint has no offsets of micro-batch {batch}.", hint=_RESTORE)
        self._store.spark_half.make_durable(batch)
        wall_ms = int(time.time() * 1000)
        time_ms = self._time.of_batch(wall_ms, previous)
        body = {
            "batch": batch,
            "flow": self._store.flow_id,
            "epoch": self._store.epoch.number,
            "query": query_id,
            "offsets": offsets.as_dict(),
            "time_ms": time_ms,
            "wall_ms": wall_ms,
            "drain": caller.is_draining,
            "dovetail": __version__,
            "operators": caller.decide(previous, time_ms, None if previous is None else int(previous["time_ms"])),
        }
        return self._store.create_intent(batch, body)

    # ================================================================ checks

    def _require_same_query(self, document: Mapping[str, Any], query_id: str) -> None:
        if document["query"] != query_id:
            raise StateError(
                f"{self._store.root} belongs to the query {document['query']}, Spark's part of the checkpoint to "
                f"{query_id}: they were not made together.",
                hint=_RESTORE,
            )

    def _require_same_rows(self, document: Mapping[str, Any], offsets: Offsets | None) -> None:
        """Refuse an intent or commit made for other rows than Spark now gives this micro-batch."""
        recorded = document.get("offsets")
        if recorded is None:
            return  # of format 1, which did not record them
        if offsets is None or recorded["digest"] != offsets.digest:
            raise StateError(
                f"Micro-batch {document['batch']} was begun with other rows than Spark gives it now: "
                f"{self._store.checkpoint}/offsets/{document['batch']} or a log of its sources was changed or lost.",
                hint=_RESTORE,
            )

    def _receipts(self, commit: Commit) -> list[tuple[Publisher, Mapping[str, Any]]]:
        """The receipts of a commit, each with its sink."""
        if commit.get("resumed"):
            return []  # published by the flow that this one continues
        side = commit.get("side", [])
        if [part["sink"] for part in side] != [publisher.kind for publisher in self._side]:
            raise StateError(
                f"Micro-batch {commit['batch']} was staged with {len(side)} side sinks, this flow has "
                f"{len(self._side)}.",
                hint="Start the flow as it was, until one more micro-batch is through, or with a new checkpoint.",
            )
        if commit["sink"] != self._sink.kind:
            raise StateError(
                f"Micro-batch {commit['batch']} was staged for a {commit['sink']} sink, which may still have to "
                f"publish it; this flow writes to {self._sink.kind}.",
                hint=f"Start the flow with the {commit['sink']} sink, or with a new checkpoint.",
            )
        pairs = zip(self._side, side, strict=True)
        beside = [(publisher, part["receipt"]) for publisher, part in pairs if part["receipt"] is not None]
        return [*beside, (self._sink, commit["receipt"])]


def _carried(intent: Mapping[str, Any], flow_id: str) -> dict[str, Any]:
    """The part of a commit that repeats its intent."""
    carried = {name: intent[name] for name in ("batch", "query", "time_ms", "drain")}
    if "offsets" in intent:
        carried["offsets"] = {"digest": intent["offsets"]["digest"]}
        carried["wall_ms"] = intent["wall_ms"]
    return {**carried, "flow": flow_id}
