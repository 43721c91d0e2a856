"""One shard of a flow's join, driven by hand: what it does is decided by its state, its rows and the intent alone."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from dovetail import Relation
from dovetail.errors import StateError
from dovetail.relation import IoMode
from dovetail.spark.flow_step import EnrichStep
from dovetail.spark.flow_task import FlowJoinTask
from dovetail.spark.join_plan import plan_join
from dovetail.spark.live_operators import LIVE
from dovetail.spark.shard_job import TRAILER_COLUMN, ShardInput, ShardJob, ShardResult, unpack_trailer
from dovetail.spark.steps import BatchClock
from dovetail.state import FlowFingerprint, FlowStore, ShardState, write_tables

KEYS = 40_000
CITIES = pa.table({"k": list(range(0, KEYS, 2)), "city": [f"c{key % 13}" for key in range(0, KEYS, 2)]})


class Shard:
    """A shard's task and its state directory, driven micro-batch by micro-batch."""

    def __init__(self, spark: SparkSession, root: Path, strategy: str, alive: bool = False, io: IoMode = "map") -> None:
        relation = Relation.build(CITIES, root / "cities", on="k", shards=1)
        stream = spark.createDataFrame([], "n long, k long")
        plan = plan_join(stream, relation, on="k", how="left", strategy=strategy, budget="400kB", io=io)
        self.step = EnrichStep("1-enrich", plan, stream, 1_000, "query")
        self.task: FlowJoinTask = self.step.task(is_last=alive)
        self.store = FlowStore(root / "checkpoint")
        self.store.open(FlowFingerprint("f", (self.step.fingerprint(),)))
        self.batch = 0
        self.time_ms = 10_000

    def rows(self, first: int, count: int) -> list[pa.RecordBatch]:
        numbers = list(range(first, first + count))
        keys = [number * 7919 % KEYS for number in numbers]
        names = self.task.stream_schema.names
        return [pa.RecordBatch.from_arrays([pa.array(numbers), pa.array(keys)], names=names)]

    def intent(self, after_ms: int, drains: bool = False) -> dict[str, Any]:
        clock = BatchClock(self.time_ms + after_ms, self.time_ms, drains)
        return self.step.decide(None, clock)

    def run(
        self, state: ShardState | None, batches: list[pa.RecordBatch], intent: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], ShardState, ShardResult]:
        """One run of the task: its rows, its new state, and what it said besides."""
        work = self.task.run(ShardInput(0, state, self.store.state_root, iter(batches), intent))
        given: list[dict[str, Any]] = []
        while True:
            try:
                given += next(work).to_pylist()
            except StopIteration as end:
                result: ShardResult = end.value
                break
        files = write_tables(self.store.state_root, "1-enrich", 0, self.batch, result.tables)
        self.batch += 1
        saved = ShardState(f"state-{self.batch}", (*result.kept, *files), result.values)
        if result.on_saved is not None:
            result.on_saved(saved)
        return given, saved, result


@pytest.mark.parametrize("strategy", ["mesh", "balanced", "auto", "hybrid"])
def test_two_runs_from_the_same_state_give_the_same_rows_in_the_same_batches(
    spark: SparkSession, tmp_path: Path, strategy: str
) -> None:
    shard = Shard(spark, tmp_path, strategy)
    state: ShardState | None = None
    for number in range(6):
        batches, intent = shard.rows(300 * number, 300), shard.intent(after_ms=200)
        first, saved, _ = shard.run(state, batches, intent)
        second, again, _ = shard.run(state, batches, intent)
        assert first == second
        assert [file.digest for file in saved.files] == [file.digest for file in again.files]
        state = saved
        shard.time_ms += 200


def test_scan_passes_the_shard_once_per_delay_and_what_is_due_leaves(spark: SparkSession, tmp_path: Path) -> None:
    # Copied blocks are short; a mapped one would be nearly the whole shard.
    shard = Shard(spark, tmp_path, "mesh", io="buffered")
    given, state, result = shard.run(None, shard.rows(0, 200), shard.intent(after_ms=0))
    assert (given, result.report["pending"]) == ([], 200)
    arrived_ms = shard.time_ms
    matched: list[dict[str, Any]] = []
    for waited_ms in (400, 800):
        shard.time_ms = arrived_ms + waited_ms - 400
        given, state, result = shard.run(state, [], shard.intent(after_ms=400))
        matched += given
        assert result.report["pending"] == 200
        assert result.report["oldest_ms"] == arrived_ms
    # Most of the shard was passed, so most matches are out; but no tuple has met it whole.
    assert 60 < len(matched) < 100
    shard.time_ms = arrived_ms + 800
    given, state, result = shard.run(state, [], shard.intent(after_ms=200))
    assert result.report["pending"] == 0
    assert len(matched) + len(given) == 200
    assert state.files == ()


def test_living_operator_goes_on_only_from_its_very_own_state(spark: SparkSession, tmp_path: Path) -> None:
    shard = Shard(spark, tmp_path, "balanced", alive=True)
    names = shard.task.stream_schema.names
    LIVE.clear()
    before, first, _ = shard.run(None, shard.rows(0, 300), shard.intent(after_ms=100))
    ((state_id, living),) = LIVE.kept().values()
    assert state_id == first.state_id
    _, second, _ = shard.run(first, shard.rows(300, 300), shard.intent(after_ms=100))
    ((state_id, same),) = LIVE.kept().values()
    assert same is living
    assert state_id == second.state_id
    # The micro-batch was not committed and runs again: the operator has seen its rows already, so it may not be used.
    again, third, _ = shard.run(first, shard.rows(300, 300), shard.intent(after_ms=100))
    ((_, other),) = LIVE.kept().values()
    assert other is not living
    rest, last, _ = shard.run(third, [], shard.intent(after_ms=100, drains=True))
    assert sorted(row[names[0]] for row in before + again + rest) == list(range(600))
    assert last.files == ()


def test_operators_that_live_on_take_no_more_than_they_may(spark: SparkSession, tmp_path: Path) -> None:
    shard = Shard(spark, tmp_path, "mesh", alive=True)
    LIVE.clear()
    shard.run(None, shard.rows(0, 300), shard.intent(after_ms=100))
    assert len(LIVE) == 1
    small = Shard(spark, tmp_path / "other", "mesh", alive=True)
    small.run(None, small.rows(0, 300), small.intent(after_ms=100))
    # There was no room for a second one beside it.
    assert [owner for owner, _ in LIVE.kept()] == [small.task.owner]


def test_tuples_that_wait_for_another_relation_are_not_lost_in_silence(spark: SparkSession, tmp_path: Path) -> None:
    shard = Shard(spark, tmp_path, "mesh")
    _, state, _ = shard.run(None, shard.rows(0, 50), shard.intent(after_ms=0))
    changed = ShardState(state.state_id, state.files, {**state.values, "relation_id": "another"})
    with pytest.raises(StateError, match="50 tuples of shard 0 wait for a relation that was at"):
        shard.run(changed, [], shard.intent(after_ms=0))


def test_error_of_a_task_is_told_in_its_trailer(spark: SparkSession, tmp_path: Path) -> None:
    class Failing:
        def run(self, given: ShardInput) -> Any:
            yield next(given.batches)
            raise StateError("no room")

    schema = pa.schema({"n": pa.int64()})
    job = ShardJob(str(tmp_path), "1-x", 0, Failing(), (), {}, schema, shards=5)
    rows = pa.record_batch({"__shard": pa.array([-5, 4], pa.int32()), "n": [None, 7]})
    given = [row for batch in job(iter([rows])) for row in batch.to_pylist()]
    assert given[0] == {"n": 7, TRAILER_COLUMN: None}
    assert given[1]["n"] is None
    assert unpack_trailer(given[1][TRAILER_COLUMN])["error"]["message"] == "no room"
    assert list(job(iter([]))) == []
