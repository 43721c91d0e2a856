"""Parts of the multi-way join on Spark that need no Spark: event time of a tree, rows on their way, late rows, living
operators."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dovetail.core.errors import InternalError
from dovetail.joins.multiway import TimeWindow, mjoin_spec
from dovetail.runtime.late_rows import LateWriter
from dovetail.runtime.live_operators import LiveOperators
from dovetail.runtime.multi_join import MultiJoinTask
from dovetail.runtime.shard_job import rows_of_one_shard
from dovetail.spark.flow.late_rows import SideFiles
from dovetail.spark.flow.step import BatchClock, StepRecord
from dovetail.spark.steps.event_time import EventTime
from dovetail.storage.state_files import ShardState, write_tables

WINDOW = TimeWindow(timedelta(microseconds=50), "t", timedelta(microseconds=10))
TREE = EventTime(WINDOW, {"a": "1", "b": "1", "c": "2"}, lower=("1",))


def report(watermark: int | None, pending_low: int | None = None, **latest: int) -> dict[str, Any]:
    return {"watermark": watermark, "latest": latest, "pending_low": pending_low}


def records(lower: list[dict[str, Any]], upper: list[dict[str, Any]]) -> dict[str, StepRecord]:
    return {"1": StepRecord((), tuple(lower)), "2": StepRecord((), tuple(upper))}


def test_watermark_follows_the_slowest_input_over_all_shards_and_joins() -> None:
    # Each input counts with the shard that has seen the latest of it.
    found = TREE.watermark(records([report(None, a=100), report(None, a=140, b=120)], [report(None, c=500)]))
    assert found == 120 - 10


def test_watermark_waits_for_an_input_that_has_not_begun_and_never_goes_back() -> None:
    assert TREE.watermark(records([report(None, a=100, b=100)], [report(None)])) is None
    assert TREE.watermark(records([report(80, a=100, b=85)], [report(80, c=90)])) == 80
    assert TREE.watermark(records([report(80, a=100)], [report(80)])) == 80


def test_results_that_a_lower_join_owes_hold_the_watermark_back() -> None:
    owes = [report(60, pending_low=75, a=200, b=200), report(60, a=200, b=200)]
    assert TREE.watermark(records(owes, [report(60, pending_low=62, c=200)])) == 75
    settled = [report(75, a=200, b=200), report(75, a=200, b=200)]
    assert TREE.watermark(records(settled, [report(75, pending_low=62, c=200)])) == 190


def test_join_above_an_outer_join_purges_up_to_what_that_may_still_emit() -> None:
    def decided(completed: int | None, own: int | None) -> dict[str, Any]:
        lower = [{**report(80, a=200, b=200), "completed": completed}, {**report(80, a=200), "completed": 150}]
        previous = records(lower, [report(own, c=200)])
        return TREE.decide(previous, BatchClock(1, None, False), "2", ("1",))

    # Late is what is behind the watermark of the inputs; purged is up to what may still come from below.
    assert decided(90, 70) == {"watermark": 90, "late_before": 190}
    assert decided(60, 70) == {"watermark": 70, "late_before": 190}, "it never goes back"
    assert decided(None, None) == {"watermark": None, "late_before": 190}


def heard(watermark: int | None, seen: Any, rows: dict[str, int], **latest: int) -> dict[str, Any]:
    return {**report(watermark, **latest), "seen": seen, "counters": {"tuples_in": rows}}


def test_idle_input_does_not_hold_the_watermark_back_and_counts_again_when_it_is_back() -> None:
    time = EventTime(WINDOW, {"a": "1", "b": "1"}, idle_after_ms=1_000)

    def decided(now_ms: int, seen: Any, rows: dict[str, int], **latest: int) -> dict[str, Any]:
        step = StepRecord((), (heard(80, seen, rows, **latest),))
        return time.decide({"1": step}, BatchClock(now_ms, now_ms - 400, is_draining=False))

    first = time.decide(None, BatchClock(5_000, None, is_draining=False))
    assert first == {"watermark": None, "seen": {"a": [0, 5_000], "b": [0, 5_000]}, "idle": []}
    both = decided(5_400, first["seen"], {"a": 2, "b": 1}, a=200, b=100)
    assert (both["watermark"], both["idle"]) == (90, [])
    silent = decided(6_000, both["seen"], {"a": 3, "b": 1}, a=300, b=100)
    assert silent["seen"] == {"a": [3, 6_000], "b": [1, 5_400]}
    assert (silent["watermark"], silent["idle"]) == (90, [])
    idle = decided(6_500, silent["seen"], {"a": 4, "b": 1}, a=400, b=100)
    assert (idle["watermark"], idle["idle"]) == (390, ["b"])
    back = decided(6_800, idle["seen"], {"a": 5, "b": 2}, a=500, b=120)
    # It never goes back: what the report says was reached stands, whatever came since.
    assert (back["watermark"], back["idle"]) == (110, [])


def test_no_input_is_idle_because_the_flow_was_stopped_and_nothing_moves_while_all_are() -> None:
    time = EventTime(WINDOW, {"a": "1", "b": "1"}, idle_after_ms=1_000)
    step = StepRecord((), (heard(80, {"a": [3, 2_000], "b": [1, 1_500]}, {"a": 3, "b": 1}, a=300, b=100),))
    restarted = time.decide({"1": step}, BatchClock(900_000, 2_000, is_draining=False))
    assert (restarted["watermark"], restarted["idle"]) == (90, [])
    later = time.decide({"1": step}, BatchClock(902_000, 900_000, is_draining=False))
    assert (later["watermark"], later["idle"]) == (80, ["a", "b"])


SHARDS = 9


def routed(shard: int, numbers: list[int | None], tag: int = 0) -> pa.RecordBatch:
    """Rows as the shuffle gives them; None: the tick."""
    places = [-1 - shard if number is None else tag * SHARDS + shard for number in numbers]
    return pa.record_batch({"__shard": pa.array(places, pa.int32()), "n": pa.array(numbers, pa.int64())})


@pytest.mark.parametrize("numbers", [[None, 1, 2, 3], [1, 2, None, 3], [1, 2, 3, None]])
def test_shard_is_known_wherever_among_its_rows_the_tick_is(numbers: list[int | None]) -> None:
    batches = [routed(7, [])] + [routed(7, numbers[at : at + 2]) for at in (0, 2)]
    shard, rows = rows_of_one_shard(iter(batches), SHARDS)
    assert shard == 7
    assert [row for batch in rows for row in batch.to_pylist()] == [{"n": 1}, {"n": 2}, {"n": 3}]


@pytest.mark.parametrize("shard", [0, 7])
def test_tags_are_told_by_the_numbers_of_the_rows(shard: int) -> None:
    batches = [routed(shard, [1, 2], tag=3), routed(shard, [None]), routed(shard, [4]), routed(shard, [5], tag=1)]
    found, rows = rows_of_one_shard(iter(batches), SHARDS, has_tags=True)
    assert found == shard
    assert [(row["__shard"], row["n"]) for batch in rows for row in batch.to_pylist()] == [
        (3, 1),
        (3, 2),
        (0, 4),
        (1, 5),
    ]


def test_rows_without_a_tick_or_of_two_shards_are_refused() -> None:
    tick = routed(7, [None])
    for batches, message in (
        ([routed(7, [1])], "no tick"),
        ([tick, routed(8, [None])], "several shards"),
        ([tick, tick], "several shards"),
        ([tick, routed(8, [1], tag=2)], "several shards"),
    ):
        _, rows = rows_of_one_shard(iter(batches), SHARDS)
        with pytest.raises(InternalError, match=message):
            list(rows)


def test_runs_of_an_input_are_offered_together_in_any_order_within_a_part_of_the_budget() -> None:
    schemas = {name: pa.schema({"k": pa.int64()}) for name in "ab"}

    def offered(budget: int) -> list[tuple[str, list[int]]]:
        spec = mjoin_spec(schemas, on="k", budget=budget)
        task = MultiJoinTask(spec, (3, 5), 1, ((0,), (0,)), ("k",), "owner", 0)
        tags = [[5, 5, 3], [3, 5, 3]]
        batches = [
            pa.record_batch({"i": pa.array(t, pa.int32()), "c": [10 * n + x for x in t], "k": [10 * n + x for x in t]})
            for n, t in enumerate(tags)
        ]
        return [(name, batch.column("k").to_pylist()) for name, batch in task._arrivals(iter(batches))]

    assert offered(1_000_000) == [("a", [3, 13, 13]), ("b", [5, 5, 15])]
    assert offered(600) == [("a", [3]), ("b", [5, 5]), ("a", [13, 13]), ("b", [15])]


def test_late_rows_wait_on_disk_and_are_published_any_number_of_times(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir()
    (tmp_path / "state" / "1-multi_join" / "00001").mkdir(parents=True)
    writer = LateWriter(tmp_path / "spill")
    assert writer.tables() == []
    for numbers in ([1, 2], [3]):
        hidden = pa.nulls(len(numbers), pa.int8())
        writer.add("a", pa.record_batch({"~key k 0": numbers, "v": [f"v{n}" for n in numbers], "~ends a": hidden}))
    writer.add("b", pa.record_batch({"w": [True]}))
    tables = writer.tables()
    assert [(name, table.num_rows) for name, table in tables] == [("late a", 3), ("late b", 1)]
    assert list((tmp_path / "spill").iterdir()) == []
    files = write_tables(tmp_path / "state", "1-multi_join", 1, 7, tables)
    assert [file.table for file in files] == ["late a", "late b"]
    record = StepRecord((ShardState("nothing"), ShardState("late", tuple(files))), ({}, {}))
    output = SideFiles(tmp_path / "late", {"a": ["k", "v"], "b": ["w"]})
    for _ in range(2):
        output.publish(record, tmp_path / "state", 7)
        found = sorted(str(path.relative_to(tmp_path / "late")) for path in (tmp_path / "late").rglob("*.*"))
        assert found == ["a/batch-00000007-00001.parquet", "b/batch-00000007-00001.parquet"]
    rows = pq.read_table(tmp_path / "late" / found[0]).to_pylist()
    assert rows == [{"k": n, "v": f"v{n}"} for n in (1, 2, 3)]


class _Operator:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def test_operators_live_on_for_their_own_state_and_within_bounds() -> None:
    live = LiveOperators()
    first, second = _Operator(40), _Operator(50)
    live.keep("step", 0, "s1", first)
    live.keep("step", 1, "s2", second)
    assert live.take("step", 0, "s1") is first
    assert live.take("step", 0, "s1") is None, "it is used by one task only"
    live.keep("step", 0, "s3", first)
    live.make_room(20, most_bytes=100)
    assert list(live.kept()) == [("step", 0)], "the longest unused goes first"
    live.make_room(20, most_bytes=10)
    assert len(live) == 0
