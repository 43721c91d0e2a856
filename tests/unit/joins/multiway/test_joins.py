"""What the multi-way join gives, and when: join types, windows, late tuples, probing sequences."""

from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError, PlanError, SchemaError
from dovetail.joins.multiway import MJoin, TimeWindow, TupleWindow, mjoin_spec


def window_of(names: str, width: int = 10, **options: Any) -> TimeWindow:
    return TimeWindow(width, {name: f"t{name}" for name in names}, **options)


# ---------------------------------------------------------------- join types


def test_arrival_of_any_input_gives_all_combinations(script: Any) -> None:
    join = script("abc")
    assert join.offer("b", (1, "b1"), (1, "b2"), (2, "b3")) == []
    assert join.offer("c", (1, "c1")) == []
    assert join.offer("a", (1, "a1"), (3, "a2"), (None, "a3")) == [("a1", "b1", "c1"), ("a1", "b2", "c1")]
    assert join.offer("c", (1, "c2")) == [("a1", "b1", "c2"), ("a1", "b2", "c2")]
    assert join.join.metrics.null_tuples == 1
    assert join.end() == []


def test_left_join_of_three_keeps_driving_rows_that_are_in_no_combination(script: Any) -> None:
    join = script("abc", how="left", driving="b")
    join.offer("b", (1, "b1"), (2, "b2"))
    assert join.offer("b", (None, "b3")) == [(None, "b3", None)]
    join.offer("a", (1, "a1"), (2, "a2"))
    assert join.offer("c", (1, "c1")) == [("a1", "b1", "c1")]
    assert join.end() == [(None, "b2", None)]


@pytest.mark.parametrize(
    ("how", "at_once", "at_end"),
    [
        ("right", [("a1", "b1")], [(None, "b2")]),
        ("full", [("a1", "b1")], [(None, "b2"), ("a2", None)]),
        ("semi", [("a1",)], []),
        ("anti", [], [("a2",)]),
    ],
)
def test_join_types_of_two_inputs(
    script: Any, how: str, at_once: list[tuple[str, ...]], at_end: list[tuple[str, ...]]
) -> None:
    join = script("ab", how=how)
    join.offer("a", (1, "a1"), (2, "a2"))
    assert join.offer("b", (1, "b1"), (3, "b2")) == at_once
    assert join.offer("b", (1, "b3")) == ([] if how in ("semi", "anti") else [("a1", "b3")])
    assert join.end() == at_end


def test_key_of_an_unmatched_right_row_is_its_own(script: Any) -> None:
    join = script("ab", how="right")
    join.offer("b", (5, "b1"))
    join.join.finish("a")
    join.join.finish("b")
    assert [batch.to_pylist() for batch in join.join.drain()] == [[{"k": 5, "a": None, "b": "b1"}]]


def test_codes_that_collide_do_not_join_different_keys(script: Any) -> None:
    join = script("abc", text=True)
    for name in "abc":
        rows = pa.record_batch({"k": ["x", "y"], name: [f"{name}x", f"{name}y"]})
        batch = rows.add_column(0, "__code", pa.array([7, 7]))
        out = join.labels(join.join.offer(name, batch))
    assert out == [("ax", "bx", "cx"), ("ay", "by", "cy")]
    assert join.join.metrics.comparisons > join.join.metrics.output_rows


# ---------------------------------------------------------------- windows


def test_event_time_window_is_pairwise_and_both_ends_count(script: Any) -> None:
    join = script("abc", time=True, window=window_of("abc"))
    join.offer("a", (1, 100, "a100"), (1, 95, "a95"))
    join.offer("b", (1, 110, "b110"))
    # 95 and 110 are too far apart, though 104 is near both.
    assert join.offer("c", (1, 104, "c104")) == [("a100", "b110", "c104")]


def test_state_outside_every_window_is_purged(script: Any) -> None:
    join = script("ab", time=True, window=window_of("ab"))
    join.offer("a", *[(k, k, f"a{k}") for k in range(20)])
    join.offer("b", *[(k, 200, f"b{k}") for k in range(20)])
    assert join.labels(join.join.advance(25)) == []
    assert join.join.state_rows() == {"a": 5, "b": 20}
    assert join.labels(join.join.advance(30)) == []
    assert join.join.state_rows() == {"a": 0, "b": 20}
    assert join.join.metrics.purged_rows == 20
    assert join.labels(join.join.advance(211)) == []
    assert join.join.size() == join.join.sizes()["bookkeeping"]


def test_unmatched_row_comes_once_and_only_when_it_can_no_longer_match(script: Any) -> None:
    join = script("ab", time=True, how="full", window=window_of("ab"))
    join.offer("a", (1, 100, "a100"))
    assert join.labels(join.join.advance(110)) == []
    assert join.offer("b", (1, 110, "b110")) == [("a100", "b110")]
    join.offer("a", (2, 111, "a111"))
    assert join.labels(join.join.advance(121)) == []
    assert join.labels(join.join.advance(122)) == [("a111", None)]
    assert join.labels(join.join.advance(122)) == []
    assert join.end() == []


def test_late_rows_are_counted_and_dropped_even_where_their_input_is_preserved(script: Any) -> None:
    join = script("ab", time=True, how="left", window=window_of("ab"))
    join.labels(join.join.advance(100))
    assert join.offer("a", (1, 99, "late"), (None, 99, "late too"), (1, 100, "in time")) == []
    assert join.join.metrics.late_tuples == 2
    assert join.join.take_late() == []
    assert join.end() == [("in time", None)]


def test_late_rows_reach_the_side_output_once(script: Any) -> None:
    join = script("ab", time=True, window=window_of("ab", late="side"))
    join.labels(join.join.advance(100))
    join.offer("b", (1, 99, "late"))
    assert join.join.sizes()["late"] > 0
    [(name, rows)] = join.join.take_late()
    assert (name, rows.to_pylist()) == ("b", [{"k": 1, "tb": 99, "b": "late"}])
    assert join.join.take_late() == []


def test_late_rows_that_nobody_fetches_are_refused_before_they_are_accepted(script: Any) -> None:
    join = script("ab", time=True, window=window_of("ab", late="side"), budget="40kB")
    join.labels(join.join.advance(100))
    late = [(1, 99, "late" * 100)] * 100
    with pytest.raises(BudgetError, match="late tuples wait to be fetched"):
        join.offer("b", *late)
    accepted = join.join.metrics.tuples_in["b"]
    assert sum(rows.num_rows for _, rows in join.join.take_late()) == accepted
    assert join.offer("b", (1, 101, "b")) == []


@pytest.mark.parametrize("how", ["semi", "anti"])
def test_rows_that_are_decided_leave_the_state(script: Any, how: str) -> None:
    join = script("ab", time=True, how=how, window=window_of("ab"))
    join.offer("a", *[(k, 100, f"a{k}") for k in range(10)])
    join.offer("b", *[(k, 100, "b") for k in range(8)])
    join.labels(join.join.advance(101))
    assert join.join.state_rows()["a"] == 2
    assert join.end() == ([] if how == "semi" else [("a8",), ("a9",)])


def test_null_event_time_matches_nothing_and_is_still_preserved(script: Any) -> None:
    join = script("ab", time=True, how="left", window=window_of("ab"))
    join.offer("b", (1, None, "b"))
    assert join.offer("a", (1, None, "a")) == [("a", None)]
    assert join.join.metrics.null_tuples == 2


def test_watermark_reached_is_the_slowest_inputs_and_does_not_wait_for_ended_ones(script: Any) -> None:
    join = script("ab", time=True, window=window_of("ab", lateness=5))
    join.offer("a", (1, 100, "a"), (1, 60, "a"))
    assert join.join.watermark_reached() is None
    join.offer("b", (1, 70, "b"))
    assert join.join.watermark_reached() == 65
    join.join.finish("b")
    assert join.join.watermark_reached() == 95


def test_timestamps_and_a_timedelta_make_a_window() -> None:
    schema = pa.schema({"k": pa.int64(), "ts": pa.timestamp("us", tz="UTC")})
    spec = mjoin_spec(
        {"a": schema, "b": schema.set(1, pa.field("tb", pa.timestamp("us", tz="UTC")))},
        on="k",
        window=TimeWindow(timedelta(seconds=2), {"a": "ts", "b": "tb"}),
    )
    join = MJoin(spec)
    second = 1_000_000
    a = pa.record_batch([[1, 1], pa.array([0, second], pa.timestamp("us", tz="UTC"))], schema=spec.schemas["a"])
    b = pa.record_batch([[1], pa.array([3 * second], pa.timestamp("us", tz="UTC"))], schema=spec.schemas["b"])
    assert list(join.offer("a", spec.with_codes("a", a))) == []
    [out] = join.offer("b", spec.with_codes("b", b))
    assert out.column("ts").cast(pa.int64()).to_pylist() == [second]


def test_window_of_tuples_counts_arrivals_of_all_inputs(script: Any) -> None:
    join = script("ab", window=TupleWindow(3))
    join.offer("a", (1, "a0"), (1, "a1"))
    assert join.offer("b", (9, "b2"), (1, "b3"), (1, "b4")) == [("a0", "b3"), ("a1", "b3"), ("a1", "b4")]
    join.offer("b", *[(8, "x")] * 8)
    assert join.join.state_rows()["a"] == 0


# ---------------------------------------------------------------- probing sequence


def test_sequence_follows_the_selectivities_as_they_drift(script: Any) -> None:
    join = script("abc")
    join.offer("b", *[(k % 2, "b") for k in range(20)])
    join.offer("c", *[(k, "c") for k in range(20)])
    for _ in range(3):
        join.offer("a", (0, "a"))
    assert join.join.chooser.order(0) == (2, 1)
    join.offer("c", *[(0, "c")] * 100)
    for _ in range(8):
        join.offer("a", (0, "a"))
    assert join.join.chooser.order(0) == (1, 2)
    assert join.join.metrics.reorders >= 2


def test_good_sequence_makes_fewer_comparisons_and_the_same_results(script: Any) -> None:
    comparisons, results = [], []
    for order in ("cb", "bc"):
        join = script("abc", sequences={"a": order})
        join.offer("b", *[(k % 5, "b") for k in range(50)])
        join.offer("c", *[(k, "c") for k in range(3, 8)])
        before = join.join.metrics.comparisons
        results.append(join.offer("a", *[(k, "a") for k in range(10)]))
        comparisons.append(join.join.metrics.comparisons - before)
    assert results[0] == results[1]
    assert comparisons[0] < comparisons[1]


# ---------------------------------------------------------------- bad input


def test_budget_below_the_minimum_is_refused_with_the_minimum(script: Any) -> None:
    with pytest.raises(BudgetError, match="at least") as refused:
        script("abc", budget=10)
    minimum = refused.value.minimum_bytes
    join = script("abc", budget=minimum)
    assert join.offer("a", (1, "a")) == []


def test_state_that_does_not_fit_without_a_spill_directory_is_refused_and_nothing_is_lost(script: Any) -> None:
    join = script("ab", budget="40kB")
    with pytest.raises(BudgetError, match="no spill directory"):
        join.offer("a", *[(k, "x" * 1000) for k in range(100)])
    accepted = join.join.metrics.tuples_in["a"]
    assert 0 < accepted < 100
    assert len(join.offer("b", *[(k, "b") for k in range(accepted)])) == accepted


def test_tuple_larger_than_its_share_of_the_budget_is_refused(script: Any) -> None:
    join = script("ab", budget="40kB")
    with pytest.raises(BudgetError, match=r"One tuple of input 'a'.*Raise the budget"):
        join.offer("a", (1, "x" * 50_000))


SCHEMA = pa.schema({"k": pa.int64(), "v": pa.string()})
OTHER = pa.schema({"k": pa.int64(), "w": pa.string()})


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ({"a": SCHEMA, "b": pa.schema({"k": pa.string()})}, {"on": "k"}, "a.k is int64 and b.k is string"),
        ({"a": SCHEMA, "b": SCHEMA}, {"on": "k"}, "both have a column 'v'"),
        ({"a": SCHEMA, "b": OTHER}, {"on": "x"}, "Input 'a' has no column 'x'"),
        ({"a": SCHEMA, "b": OTHER}, {"on": "k", "how": "outer"}, "how='outer' is none of"),
        ({"a": SCHEMA, "b": OTHER}, {"on": "k", "driving": "b"}, "only a left join has a driving input"),
        ({"a": SCHEMA, "b": OTHER}, {"on": "k", "window": TimeWindow(5, "ts")}, "no time column 'ts'"),
        ({"a": SCHEMA, "b": OTHER}, {"on": "k", "window": TimeWindow(5, {"a": "v", "b": "w"})}, "'v' .* is string"),
        ({"a": SCHEMA, "b": OTHER}, {"on": "k", "window": TimeWindow(5, {"a": "k"})}, "no time column of input 'b'"),
        (
            {"a": SCHEMA.append(pa.field("t", pa.date32())), "b": OTHER.append(pa.field("u", pa.int64()))},
            {"on": "k", "window": TimeWindow(5, {"a": "t", "b": "u"})},
            "time column of input 'a' is date32",
        ),
        ({"a": SCHEMA, "b": OTHER}, {"on": "k", "partitions": 3}, "power of two"),
        ({"a": SCHEMA, "b": OTHER}, {"on": "k", "sequences": {"a": ["a"]}}, "not an order of b"),
        ({"a": SCHEMA, "b": OTHER}, {"on": "k", "flushing": "some"}, "flushing='some'"),
        ({"a": pa.schema({"k": pa.int64(), "__x": pa.int64()}), "b": OTHER}, {"on": "k"}, "reserved name"),
    ],
)
def test_join_that_cannot_be_is_refused_before_data_moves(
    inputs: dict[str, pa.Schema], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((PlanError, SchemaError), match=message):
        mjoin_spec(inputs, **options)


def test_window_without_a_time_column_is_refused() -> None:
    with pytest.raises(PlanError, match="needs a time column"):
        TimeWindow(10)
    with pytest.raises(PlanError, match="an integer of at least 1"):
        TupleWindow(0)


def test_batches_and_calls_that_do_not_fit_are_refused_and_change_nothing(script: Any) -> None:
    join = script("ab", time=True, window=window_of("ab"))
    with pytest.raises(SchemaError, match="no int64 column '__code'"):
        join.join.offer("a", pa.record_batch({"k": [1]}))
    with pytest.raises(SchemaError, match="no column 'ta'"):
        join.join.offer("a", pa.record_batch({"__code": [1], "k": [1]}))
    with pytest.raises(PlanError, match="no input 'z'"):
        join.join.offer("z", pa.record_batch({"k": [1]}))
    join.labels(join.join.advance(5))
    with pytest.raises(PlanError, match="behind the previous one"):
        join.join.advance(4)
    join.join.set_time(10)
    with pytest.raises(PlanError, match="time went backwards"):
        join.join.set_time(9)
    join.join.finish("a")
    with pytest.raises(PlanError, match="has ended"):
        join.offer("a", (1, 100, "a"))
    with pytest.raises(PlanError, match="no event-time window"):
        script("ab").join.advance(1)
