"""Bounds between event times, conditions between pairs, and the time index that saves comparisons."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dovetail.core.errors import DovetailError, PlanError, StateError
from dovetail.joins.conditions import BatchPredicate, Comparison
from dovetail.joins.multiway import MJoin, MJoinTree, PairCondition, TimeBound, TimeDistance, TimeWindow, mjoin_spec
from dovetail.joins.multiway.planner import plan_multiway
from dovetail.joins.multiway.windows import furthest_apart
from dovetail.joins.promises import Metadata, MetadataJoin, Punctuation
from dovetail.joins.protocol import Snapshot
from dovetail.testing.rows import rows_of
from dovetail.testing.snapshots import through_storage

TIMES = {name: f"t{name}" for name in "abc"}


def window(*bounds: TimeBound, width: int | None = None, **options: Any) -> TimeWindow:
    return TimeWindow(width, TIMES, bounds=bounds, **options)


def test_payment_is_joined_within_an_hour_after_its_order_and_not_before(script: Any) -> None:
    join = script("ab", time=True, window=window(TimeBound("a", "b", 0, 60)))
    join.offer("a", (1, 100, "order"))
    assert join.offer("b", (1, 99, "too early")) == []
    assert join.offer("b", (1, 100, "at once")) == [("order", "at once")]
    assert join.offer("b", (1, 160, "at last"), (1, 161, "too late")) == [("order", "at last")]
    # An order that arrives after its payment finds it too.
    assert join.offer("a", (1, 101, "next")) == [("next", "at last"), ("next", "too late")]


def test_each_side_is_purged_when_no_later_row_can_match_it(script: Any) -> None:
    join = script("ab", time=True, window=window(TimeBound("a", "b", 0, 60)))
    join.offer("a", (1, 100, "x"))
    join.offer("b", (2, 100, "y"))
    assert join.labels(join.join.advance(100)) == []
    assert join.join.state_rows() == {"a": 1, "b": 1}
    join.labels(join.join.advance(101))
    # No order from 101 on has a payment at 100; payments for the order may come until 160.
    assert join.join.state_rows() == {"a": 1, "b": 0}
    join.labels(join.join.advance(160))
    assert join.join.state_rows()["a"] == 1
    join.labels(join.join.advance(161))
    assert join.join.state_rows()["a"] == 0


def test_row_without_a_match_leaves_when_its_own_bound_has_passed(script: Any) -> None:
    join = script("ab", time=True, how="full", window=window(TimeBound("a", "b", 5, 60)))
    join.offer("a", (1, 100, "x"))
    join.offer("b", (1, 104, "y"))
    # The payment needs an order at 99 or before, which is late already.
    assert join.labels(join.join.advance(100)) == [(None, "y")]
    assert join.labels(join.join.advance(160)) == []
    assert join.labels(join.join.advance(161)) == [("x", None)]


def test_input_without_an_end_is_kept_and_bounds_imply_others(script: Any) -> None:
    bounds = [TimeBound("a", "b", 0, 10), TimeBound("b", "c", None, 5)]
    assert furthest_apart("abc", window(*bounds)) == ((0, 10, 15), (0, 0, 5), (None, None, 0))
    join = script("abc", time=True, window=window(*bounds))
    join.offer("a", (1, 100, "x"))
    join.offer("c", (1, 0, "z"))
    join.labels(join.join.advance(115))
    assert join.join.state_rows() == {"a": 1, "b": 0, "c": 1}
    join.labels(join.join.advance(1_000))
    assert join.join.state_rows() == {"a": 0, "b": 0, "c": 1}


@pytest.mark.parametrize("plan", ["single", "binary", [["a", "c"], "b"], ["a", ["b", "c"]]], ids=str)
def test_conditions_are_checked_where_their_inputs_meet_in_any_plan(plan: Any) -> None:
    schemas = {n: pa.schema({"k": pa.int64(), f"t{n}": pa.int64(), n: pa.int64()}) for n in "abc"}
    conditions = [
        PairCondition("a", "b", Comparison("a", "<", "b")),
        PairCondition("c", "a", BatchPredicate(lambda c, a: pc.not_equal(c["c"], a["a"]), name="differ")),
        PairCondition("b", "c", TimeDistance("tb", "tc", None, 2)),
        PairCondition("a", "c", Comparison("k", "<=", "k")),
    ]
    bounds = window(TimeBound("a", "b", 0, 10), TimeBound("c", "b", -5, 5))
    spec = mjoin_spec(schemas, on="k", window=bounds, conditions=conditions, budget="3MB")
    tree = MJoinTree(spec, plan_multiway(spec.graph, force=plan))
    chance, rows = np.random.default_rng(18), {n: list[dict[str, int]]() for n in "abc"}
    out = []
    for _ in range(120):
        name = "abc"[chance.integers(3)]
        row = {"k": int(chance.integers(3)), f"t{name}": int(chance.integers(20)), name: int(chance.integers(6))}
        rows[name].append(row)
        out += rows_of(tree.offer(name, pa.RecordBatch.from_pylist([row], schema=schemas[name])))
    expected = [
        {**a, **b, **c}
        for a in rows["a"]
        for b in rows["b"]
        for c in rows["c"]
        if a["k"] == b["k"] == c["k"]
        and 0 <= b["tb"] - a["ta"] <= 10
        and -5 <= b["tb"] - c["tc"] <= 5
        and a["a"] < b["b"]
        and c["c"] != a["a"]
        and c["tc"] - b["tb"] <= 2
    ]
    assert len(expected) > 20
    key = lambda row: sorted(row.items())  # noqa: E731
    assert sorted(out, key=key) == sorted(expected, key=key)


def hot_key(join: MJoin, rows: int, step: int) -> None:
    """One key all the time; a tuple of each input per moment."""
    for start in range(0, rows, step):
        for name in "ab":
            times = np.arange(start, start + step)
            batch = pa.record_batch({"k": np.ones(step, np.int64), f"t{name}": times, name: times})
            for _ in join.offer(name, join.spec.with_codes(name, batch)):
                pass


@pytest.mark.parametrize("bounds", [(), (TimeBound("a", "b", -5, 5),)], ids=["width", "bound"])
def test_hot_key_is_expanded_only_within_its_window(bounds: Any) -> None:
    schemas = {n: pa.schema({"k": pa.int64(), f"t{n}": pa.int64(), n: pa.int64()}) for n in "ab"}
    times = TimeWindow(None if bounds else 5, TIMES, bounds=bounds)
    join = MJoin(mjoin_spec(schemas, on="k", window=times, budget="4MB"))
    hot_key(join, 2_000, 100)
    assert join.metrics.output_rows == sum(1 for a in range(2_000) for d in range(-5, 6) if 0 <= a + d < 2_000)
    # Without the index a tuple is compared with the whole history of its key: two million comparisons.
    assert join.metrics.comparisons == join.metrics.output_rows


def test_chunks_of_an_earlier_version_are_filtered_and_gain_the_index_when_merged(script: Any) -> None:
    options: dict[str, Any] = {"time": True, "window": TimeWindow(5, TIMES)}
    before = script("ab", **options)
    # Stored by a version that kept rows of a key in the order of arrival.
    before.offer("a", (1, 30, "late"), (1, 10, "early"), (1, 20, "middle"))
    stored = through_storage(before.join.snapshot())
    chunks = {name: {k: v for k, v in about.items() if k != "timed"} for name, about in stored.values["chunks"].items()}
    (name,) = chunks
    table = stored.tables[name]
    reversed_rows = table.take(list(range(table.num_rows))[::-1])
    old = Snapshot(
        stored.kind, stored.fingerprint, {**stored.tables, name: reversed_rows}, {**stored.values, "chunks": chunks}
    )
    after = script("ab", **options)
    after.join.restore(old)
    assert after.offer("b", (1, 12, "x")) == [("early", "x")]
    assert after.join.metrics.comparisons == 3
    for number in range(3):
        after.offer("a", (2, 10, f"other {number}"))
    assert after.offer("b", (1, 22, "y")) == [("middle", "y")]
    assert after.join.metrics.comparisons == 4


def test_snapshot_with_other_conditions_is_refused() -> None:
    schemas = {n: pa.schema({"k": pa.int64(), n: pa.int64()}) for n in "ab"}
    plain = mjoin_spec(schemas, on="k")
    compared = mjoin_spec(schemas, on="k", conditions=[PairCondition("a", "b", Comparison("a", "<", "b"))])
    with pytest.raises(StateError, match="another join"):
        MJoin(compared).restore(MJoin(plain).snapshot())
    assert "conditions" not in plain.fingerprint(), "snapshots from before there were any still open"
    assert "bounds" not in mjoin_spec(
        {n: s.append(pa.field(f"t{n}", pa.int64())) for n, s in schemas.items()}, on="k", window=TimeWindow(5, TIMES)
    ).fingerprint().get("window", {})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: TimeBound("a", "a", 0, 1), "itself"),
        (lambda: TimeBound("a", "b"), "without an end"),
        (lambda: TimeBound("a", "b", 5, 1), "from 5 to 1 after"),
        (lambda: TimeBound("a", "b", 0.5, 1), "low=0.5"),  # type: ignore[arg-type]
        (lambda: furthest_apart("ab", window(TimeBound("a", "z", 0, 1))), "names 'z'"),
        (
            lambda: furthest_apart("abc", window(*(TimeBound(*pair, 1, 2) for pair in ("ab", "bc", "ca")))),
            "No rows can satisfy",
        ),
    ],
)
def test_impossible_bounds_are_refused(wrong: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        wrong()


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        (PairCondition("a", "z", Comparison("a", "<", "b")), "names 'z'.*inputs are a, b"),
        (PairCondition("a", "a", Comparison("a", "<", "a")), "with itself"),
        (PairCondition("a", "b", Comparison("a", "<", "missing")), "no column 'missing'"),
        (PairCondition("a", "b", TimeDistance("a", "missing", 0, 1)), "no column 'missing'"),
        (PairCondition("a", "b", TimeDistance("a", "text", 0, 1)), "no distance between int64 and string"),
        (PairCondition("a", "b", Comparison("a", "<", "text")), "cannot be compared"),
        (PairCondition("a", "b", "a < b"), "'a < b' is not a condition"),  # type: ignore[arg-type]
        (Comparison("a", "<", "b"), "not a condition between two inputs"),
    ],
)
def test_conditions_that_cannot_be_checked_are_refused(condition: Any, told: str) -> None:
    schemas = {
        "a": pa.schema({"k": pa.int64(), "a": pa.int64()}),
        "b": pa.schema({"k": pa.int64(), "text": pa.string()}),
    }
    with pytest.raises(DovetailError, match=told):
        mjoin_spec(schemas, on="k", conditions=[condition])


def test_conditions_hold_for_spilled_tuples_and_after_a_restart(tmp_path: Path) -> None:
    schemas = {n: pa.schema({"k": pa.int64(), f"t{n}": pa.timestamp("us"), n: pa.int64()}) for n in "ab"}
    bounds = TimeWindow(None, TIMES, bounds=[TimeBound("a", "b", timedelta(0), timedelta(microseconds=10))])
    conditions = [PairCondition("a", "b", Comparison("a", "!=", "b"))]
    spec = mjoin_spec(
        schemas, on="k", window=bounds, conditions=conditions, budget="1MB", spill_directory=tmp_path, how="left"
    )

    def offered(join: MJoin, name: str, *rows: tuple[int, int]) -> list[tuple[Any, Any]]:
        times, values = zip(*rows, strict=True)
        columns = [pa.array([1] * len(rows)), pa.array(times, pa.timestamp("us")), pa.array(values)]
        batch = pa.RecordBatch.from_arrays(columns, schema=schemas[name])
        return [(row["a"], row["b"]) for row in rows_of(join.offer(name, join.spec.with_codes(name, batch)))]

    join = MJoin(spec)
    offered(join, "a", (100, 1), (120, 2))
    join.flush("a", "b")
    assert offered(join, "b", (105, 7), (101, 1), (115, 7)) == []
    again = MJoin(replace(spec, spill_directory=tmp_path / "again"))
    again.restore(through_storage(join.snapshot()))
    for each in (join, again):
        assert [(r["a"], r["b"]) for r in rows_of(each.drain())] == [(1, 7)]
        assert [(r["a"], r["b"]) for r in rows_of(each.advance(131))] == [(2, None)]


@pytest.mark.parametrize("how", ["inner", "left"])
def test_promises_purge_and_change_no_result_with_bounds_and_conditions(how: Any) -> None:
    schemas = {n: pa.schema({"k": pa.int64(), f"t{n}": pa.int64(), n: pa.int64()}) for n in "ab"}
    conditions = [PairCondition("a", "b", Comparison("a", "!=", "b"))]
    bounds = window(TimeBound("a", "b", -2, 12))
    spec = mjoin_spec(schemas, on="k", how=how, window=bounds, conditions=conditions, budget="3MB")
    plain, told = MJoin(spec), MetadataJoin(spec, Metadata(goal="memory"))
    chance, out = np.random.default_rng(6), {MJoin: list[Any](), MetadataJoin: list[Any]()}
    for key in range(40):
        for _ in range(8):
            name = "ab"[chance.integers(2)]
            time = 5 * key + int(chance.integers(10))
            rows = {"k": [key], f"t{name}": [time], name: [int(chance.integers(3))]}
            batch = spec.with_codes(name, pa.record_batch(rows, schema=schemas[name]))
            for join in (plain, told):
                out[type(join)] += rows_of(join.offer(name, batch))
        for name in "ab":
            out[MetadataJoin] += rows_of(told.punctuate(name, Punctuation({"k": key})))
        for join in (plain, told):
            out[type(join)] += rows_of(join.advance(5 * key))
    assert sum(told.state_rows().values()) == 0 < sum(plain.state_rows().values())
    for join in (plain, told):
        for name in "ab":
            join.finish(name)
        out[type(join)] += rows_of(join.drain())
    key_of = lambda row: str(sorted(row.items()))  # noqa: E731
    assert sorted(out[MJoin], key=key_of) == sorted(out[MetadataJoin], key=key_of)
    assert len(out[MJoin]) > 50
