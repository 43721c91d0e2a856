"""One shard of a flow's join, driven by hand: what it does is decided by its state, its rows and the intent alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from dovetail import Relation
from dovetail.core.errors import BudgetError, StateError
from dovetail.costs import CostFactors
from dovetail.costs.host import HostCosts
from dovetail.joins.options import FlowOptions
from dovetail.relation import IoMode
from dovetail.runtime.enrich_shard import FlowJoinTask
from dovetail.runtime.live_operators import LIVE
from dovetail.runtime.shard_job import TRAILER_COLUMN, ShardInput, ShardJob, ShardResult, unpack_trailer
from dovetail.spark.flow.fingerprint import FlowFingerprint
from dovetail.spark.flow.step import BatchClock
from dovetail.spark.flow.store import FlowStore
from dovetail.spark.plan.join_plan import plan_join
from dovetail.spark.steps.flow_enrich import EnrichStep
from dovetail.storage.state_files import ShardState, write_tables

KEYS = 40_000
CITIES = pa.table({"k": list(range(0, KEYS, 2)), "city": [f"c{key % 13}" for key in range(0, KEYS, 2)]})


class Shard:
    """A shard's task and its state directory, driven micro-batch by micro-batch."""

    def __init__(
        self,
        spark: SparkSession,
        root: Path,
        strategy: str,
        alive: bool = False,
        io: IoMode = "map",
        costs: HostCosts | None = None,
        cities: int = len(CITIES),
        **options: Any,
    ) -> None:
        relation = Relation.build(CITIES.slice(0, cities), root / "cities", on="k", shards=1)
        stream = spark.createDataFrame([], "n long, k long")
        options = {"budget": "400kB", "flow": FlowOptions("1 second")} | options
        plan = plan_join(stream, relation, on="k", how="left", strategy=strategy, io=io, **options)
        plan = plan if costs is None else replace(plan, recipe=replace(plan.recipe, costs=costs))
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


FEW = 1_500
SLOW = CostFactors.of_papers(seek_s=0.0, bandwidth_bytes_per_s=5_000)
"""A disk on which a pass over the shard takes seconds, so that a few hundred tuples per second are many."""


@pytest.mark.parametrize("alive", [False, True], ids=["restored", "alive"])
@pytest.mark.parametrize("strategy", ["mesh", "balanced"])
def test_memory_follows_the_observed_rate_and_results_stay_exact(
    spark: SparkSession, tmp_path: Path, strategy: str, alive: bool
) -> None:
    LIVE.clear()
    options: dict[str, Any] = {"objective": "memory", "budget": "4MB"}
    shard = Shard(spark, tmp_path, strategy, alive, "buffered", HostCosts(SLOW, SLOW), FEW, **options)
    given: list[dict[str, Any]] = []
    state: ShardState | None = None
    held: dict[int, list[int]] = {}
    first = 0
    for rate in [50] * 3 + [2_000] * 2 + [20] * 4:
        batches, intent = shard.rows(first, 10 * rate), shard.intent(after_ms=10_000)
        rows, saved, result = shard.run(state, batches, intent)
        if not alive:
            again, same, _ = shard.run(state, batches, intent)
            assert rows == again
            assert saved.values["memory"] == same.values["memory"]
        given, state = given + rows, saved
        first += 10 * rate
        shard.time_ms += 10_000
        held.setdefault(rate, []).append(sum(result.report["memory"].values()))
        assert held[rate][-1] <= shard.task.budget_bytes
    assert state is not None
    low, high, lowest = held[50][-1], max(held[2_000]), held[20][-1]
    assert lowest <= low < high / 2, held
    rest, _, _ = shard.run(state, [], shard.intent(after_ms=10_000, drains=True))
    names = shard.task.stream_schema.names
    joined = given + rest
    assert sorted(row[names[0]] for row in joined) == list(range(first))
    assert all((row["city"] is None) == (row[names[1]] % 2 == 1 or row[names[1]] >= 2 * FEW) for row in joined)


def test_memory_for_a_rate_that_is_asked_for_is_the_least_within_the_budget(
    spark: SparkSession, tmp_path: Path
) -> None:
    sizes = []
    for number, rate in enumerate((20.0, 3_000.0, 1e9)):
        root = tmp_path / str(number)
        options: dict[str, Any] = {"objective": "memory", "rate": rate, "budget": "4MB"}
        shard = Shard(spark, root, "mesh", False, "buffered", HostCosts(SLOW, SLOW), FEW, **options)
        rows, state, result = shard.run(None, shard.rows(0, 3_000), shard.intent(after_ms=0))
        rest, _, _ = shard.run(state, [], shard.intent(after_ms=100, drains=True))
        assert len(rows + rest) == 3_000
        assert shard.task.fitted_bytes is not None
        assert sum(result.report["memory"].values()) <= shard.task.fitted_bytes
        sizes.append(shard.task.fitted_bytes)
    assert sizes[0] < sizes[1] / 2 < sizes[1] < sizes[2] == 4_000_000


def test_tuples_that_wait_for_another_rate_are_restored_with_all_of_the_budget(
    spark: SparkSession, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"objective": "memory", "budget": "4MB", "costs": HostCosts(SLOW, SLOW), "cities": FEW}
    fast = Shard(spark, tmp_path, "mesh", False, "buffered", rate=3_000.0, **options)
    given, state, result = fast.run(None, fast.rows(0, 3_000), fast.intent(after_ms=0))
    assert result.report["pending"] > 1_000
    # The same checkpoint, started again for a stream that has become slow: what waits is more than that one may let in.
    assert fast.task.fitted_bytes is not None
    little = fast.task.fitted_bytes // 4
    slow = replace(fast.task, fitted_bytes=little, block_rows=None)
    fast.task = replace(slow, budget_bytes=little)
    with pytest.raises(BudgetError, match="too small"):
        fast.run(state, [], fast.intent(after_ms=100))
    fast.task = slow
    rest, _, _ = fast.run(state, [], fast.intent(after_ms=100, drains=True))
    assert len(given + rest) == 3_000


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
