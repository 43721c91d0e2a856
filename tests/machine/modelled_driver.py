"""A driver of a flow: the real commit protocol and the real target of the Parquet sink, on a modelled Spark.

The flow counts its rows. Its job reads the count from the state file that the last commit names, writes the new one,
and stages each row with the count of rows before its micro-batch: a job that went on from the wrong state is seen in
the output. The rows that arrive are 0, 1, 2, ..., so what was published must be 0, 1, 2, ... as well.

The rows also go to a side sink that has no fence of its own: there, only the epoch keeps a replaced driver away.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelled_spark import ModelledSpark, Plan, Source

from dovetail.core.errors import StateError
from dovetail.spark.flow import counting
from dovetail.spark.flow.fingerprint import FlowFingerprint
from dovetail.spark.flow.ownership import Owner
from dovetail.spark.flow.protocol import BatchProtocol, Commit, RunBatch
from dovetail.spark.flow.step import Step
from dovetail.spark.flow.store import FEWEST_COMMITS_KEPT, FlowStore
from dovetail.spark.sinks.parquet_target import ParquetTarget
from dovetail.storage.digests import digest_of
from dovetail.storage.documents import storage_errors
from dovetail.storage.simulated import SimulatedStorage
from dovetail.storage.state_files import ShardState, StateFile, shard_directory

__all__ = ["PLAIN", "Driver", "ignore", "published"]

STEP = "1-count"
FLOW = FlowFingerprint("counted", ({"name": STEP, "shards": 1},))


class CountingStep(Step):
    """Stands for the flow's step where rows are checked to add up."""

    name = STEP
    shards = 1

    fingerprint = route = decide = task = finish = None  # type: ignore[assignment]


COUNTED = CountingStep()


PLAIN = Path("/plain")


class PlainSink:
    """A side sink that publishes by renaming one file, and fences nobody off."""

    kind = "plain"

    def __init__(self, storage: SimulatedStorage) -> None:
        self._storage = storage

    def claim(self, owner: Owner, batch: int | None, receipt: Mapping[str, Any] | None) -> None:
        self._storage.make_directory(PLAIN)

    def stage(self, batch: int, rows: list[int], before: int) -> dict[str, Any]:
        name = f"batch-{batch:08d}-{uuid.uuid4().hex}"
        staged = PLAIN / f".{name}"
        self._storage.write(staged, json.dumps({"rows": rows, "before": before}).encode())
        self._storage.sync([staged, PLAIN])
        return {"name": name}

    def publish(self, receipt: Mapping[str, Any]) -> None:
        with suppress(FileNotFoundError):  # published already
            self._storage.rename(PLAIN / f".{receipt['name']}", PLAIN / receipt["name"])
        self._storage.sync([PLAIN])

    def forget(self, receipt: Mapping[str, Any]) -> None:
        pass


class TargetSink:
    """A sink of the flow: `ParquetSink` without Spark."""

    kind = "parquet"

    def __init__(self, path: Path, storage: SimulatedStorage) -> None:
        self._path, self._storage = path, storage

    def claim(self, owner: Owner, batch: int | None, receipt: Mapping[str, Any] | None) -> None:
        self.target = ParquetTarget(self._path, self._storage, owner)
        self.target.claim(batch, receipt)

    def stage(self, batch: int, rows: list[int], before: int, loses_a_file: bool) -> dict[str, Any]:
        """As `ParquetSink.stage`: two tasks write files, the driver counts what it finds, and flushes it."""
        attempt = uuid.uuid4().hex
        directory = self.target.staging / f"{batch:08d}-{attempt}"
        half = len(rows) // 2
        parts = {"part-0.parquet": rows[:half], "part-1.parquet": rows[half:]}
        for name, part in parts.items():
            if not (loses_a_file and name == "part-1.parquet"):
                content = json.dumps({"rows": part, "before": before}).encode()
                self._storage.write(directory / name, content)
        with storage_errors(directory):
            names = self._storage.names(directory)
            found = [(name, len(_rows_in(self._storage.read(directory / name)))) for name in names]
            filled = [(name, count) for name, count in found if count] or (found[:1] if batch == 0 else [])
            if filled:
                self._storage.sync([*(directory / name for name, _ in filled), directory, *directory.parents[:2]])
            else:
                self._storage.delete(directory)
        return self.target.receipt(batch, attempt, filled)

    def publish(self, receipt: Mapping[str, Any]) -> None:
        self.target.publish(receipt)

    def forget(self, receipt: Mapping[str, Any]) -> None:
        self.target.forget(receipt)


@dataclass
class Habits:
    """What a driver does besides running micro-batches."""

    clean_every: int = 2
    loses_a_file: bool = False  # a task of the next micro-batch writes to a disk that nobody else sees


class Driver:
    """One process that runs the flow from a checkpoint, until it is refused or killed."""

    def __init__(self, checkpoint: Path, target: Path, source: Source, storage: SimulatedStorage) -> None:
        self.checkpoint, self.source, self.storage = checkpoint, source, storage
        self.habits = Habits()
        self.has_started = False  # knows which flow it is
        self.done: Plan | None = None  # the last micro-batch that was published
        self.on_done: Callable[[Plan], None] = ignore
        self._sink, self._side = TargetSink(target, storage), PlainSink(storage)
        self._runs = 0

    def live(self, idle: Callable[[], bool]) -> None:
        """Start, then run micro-batches; ``idle`` waits for something to do, and says whether to go on."""
        self.start()
        while True:
            plan = self.next_plan()
            if plan is not None:
                self.run(plan)
            elif not idle():
                return

    def start(self) -> None:
        """As `Flow.write`."""
        self._store = FlowStore(self.checkpoint, self.storage)
        self._store.open(FLOW)
        self._protocol = BatchProtocol(self._store, self._sink, [self._side])
        self._protocol.start()
        self.has_started = True
        self.restart_spark()

    def restart_spark(self) -> None:
        """Let Spark read its logs."""
        self._spark = ModelledSpark(self.checkpoint, self.storage, self.source)
        self._again = self._spark.start()

    def next_plan(self) -> Plan | None:
        """The micro-batch to run: one that has to be run again, or a new one; None: there is nothing to do."""
        again, self._again = self._again, None
        return again or self._spark.plan()

    def run(self, plan: Plan) -> None:
        """As Spark with `CommitProtocol.run`."""
        self._protocol.run(plan.batch, RunBatch(_decide, lambda intent, previous: self._job(plan, previous)))
        self.done = plan
        self.on_done(plan)
        self._runs += 1
        if self._runs % self.habits.clean_every == 0:
            self._store.clean(FEWEST_COMMITS_KEPT)
        self._spark.commit(plan.batch)

    def local_state(self) -> tuple[object, ...]:
        """All that a driver knows between two micro-batches; two that know the same will do the same."""
        newest = self._protocol._newest
        return (
            self._store.owner,
            self._sink.target.staging,
            self._sink.target._last,
            None if newest is None else (newest["batch"], newest["receipt"], newest["operators"]),
            self._spark.position,
            self._again,
            self._runs % self.habits.clean_every,
            self._protocol._has_run,
        )

    def _job(self, plan: Plan, previous: Commit | None) -> dict[str, Any]:
        before = 0 if previous is None else self._saved_count(previous)
        rows = list(range(plan.start, plan.end))
        state = self._save_count(plan.batch, before + len(rows))
        receipt = self._sink.stage(plan.batch, rows, before, self.habits.loses_a_file)
        emitted = {STEP: len(rows)}
        counting.require_counts([COUNTED], None, {}, emitted, receipt["rows"])
        side = [{"sink": "plain", "receipt": self._side.stage(plan.batch, rows, before)}]
        operators = {STEP: [{**state.as_dict(), "report": {}}]}
        return {"sink": "parquet", "receipt": receipt, "side": side, "rows": emitted, "operators": operators}

    def _save_count(self, batch: int, count: int) -> ShardState:
        name = f"{shard_directory(STEP, 0)}/{batch:08d}-{uuid.uuid4().hex}.arrow"
        path, content = self._store.state_root / name, str(count).encode()
        with storage_errors(self._store.state_root):
            self.storage.write(path, content)
            self.storage.sync([path, path.parent])
        return ShardState(name, (StateFile(name, "count", 0, len(content), 1, digest_of(content)),))

    def _saved_count(self, commit: Commit) -> int:
        (file,) = commit["operators"][STEP][0]["files"]
        path = self._store.state_root / file["name"]
        try:
            content = self.storage.read(path)
        except FileNotFoundError:
            raise StateError(f"The state file {path} cannot be used: it does not exist.") from None
        if digest_of(content) != file["digest"]:
            raise StateError(f"The state file {path} cannot be used: it does not match its digest.")
        return int(content)


def ignore(plan: Plan) -> None:
    """For drivers whose progress nobody watches."""


def published(target: Path, storage: SimulatedStorage) -> list[tuple[int, int]]:
    """What readers of the target see: each row, and how many there were before its micro-batch."""
    found = []
    for name in storage.names(target):
        if name.startswith("batch-"):
            content = json.loads(storage.read(target / name))
            found += [(row, content["before"]) for row in content["rows"]]
    return sorted(found)


def _decide(previous: Commit | None, time_ms: int, previous_ms: int | None) -> dict[str, Any]:
    return {}


def _rows_in(content: bytes) -> list[int]:
    return list(json.loads(content)["rows"])
