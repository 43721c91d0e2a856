"""Broken promises, of every kind and policy, and promises that there is no room for."""

from datetime import date, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError, PlanError, PromiseError, SchemaError
from dovetail.joins.multiway import TimeWindow, mjoin_spec
from dovetail.joins.promises import REASON_COLUMN, Metadata, MetadataJoin, Order, Punctuation
from dovetail.testing.snapshots import through_storage

UNIQUE = {"keys": ["a"]}
CLUSTERED = {"clustered": ["a"]}
ASCENDING = {"ordered": {"a": Order("ascending", slack=2)}}
DESCENDING = {"ordered": {"a": "descending"}}


def quarantined(join: Any) -> list[tuple[str, Any, str]]:
    return [
        (name, row["k"], row[REASON_COLUMN])
        for name, batch in join.join.take_quarantined()
        for row in batch.to_pylist()
    ]


@pytest.mark.parametrize(
    ("promise", "keys", "kind", "broken"),
    [
        (UNIQUE, [1, 2, 1], "unique", [1]),
        (CLUSTERED, [1, 1, 2, 1, 3], "clustered", [1]),
        (ASCENDING, [5, 3, 9, 6, 7], "ordered", [6]),
        (DESCENDING, [5, 5, 3, 4, 3], "ordered", [4]),
    ],
)
@pytest.mark.parametrize("kind_of_key", ["integer", "text"])
@pytest.mark.parametrize("is_one_batch", [True, False])
def test_rows_that_break_a_static_promise_are_put_aside_with_the_reason(
    script: Any, promise: Any, keys: list[int], kind: str, broken: list[int], kind_of_key: str, is_one_batch: bool
) -> None:
    is_text = kind_of_key == "text"
    if is_text and promise is ASCENDING:
        promise, keys, broken = {"ordered": {"a": "ascending"}}, [5, 5, 3, 9], [3]
    join = script("ab", Metadata(**promise, on_broken_promise="quarantine"), keys=kind_of_key)
    rows = [(f"k{k}" if is_text else k, f"a{n}") for n, k in enumerate(keys)]
    if is_one_batch:
        join.offer("a", *rows)
    else:
        for row in rows:
            join.offer("a", row)
    expected = [f"k{k}" if is_text else k for k in broken]
    found = quarantined(join)
    assert [(name, k) for name, k, _ in found] == [("a", k) for k in expected]
    assert join.join.metrics.broken_promises == {kind: len(broken)}
    assert join.join.metrics.tuples_in["a"] == len(keys)
    # It was not joined, and nothing else was lost.
    joined = [join.offer("b", (f"k{k}" if is_text else k, "b")) for k in sorted(set(keys))]
    assert sum(map(len, joined)) == len(keys) - len(broken)
    assert quarantined(join) == []


@pytest.mark.parametrize("kind_of_key", ["integer", "text"])
def test_row_that_matches_an_earlier_punctuation_of_its_input_is_refused(script: Any, kind_of_key: str) -> None:
    key = (lambda k: f"k{k}") if kind_of_key == "text" else (lambda k: k)
    join = script("ab", keys=kind_of_key)
    join.promise("a", Punctuation.between("k", key(3), key(5)), key(7))
    with pytest.raises(
        PromiseError, match=r"Input 'a' broke its promise with a row of k='?k?4'?: it matches an earlier"
    ):
        join.offer("a", (key(2), "fine"), (key(4), "broken"), (key(7), "broken too"))
    # Nothing of the slice was accepted, and the operator goes on.
    assert join.join.metrics.tuples_in["a"] == 0
    assert join.offer("b", (key(4), "the other input may")) == []
    assert join.offer("a", (key(2), "fine"), (None, "no key")) == []


def test_punctuation_on_another_column_is_a_promise_and_is_passed_on(script: Any) -> None:
    join = script("ab", Metadata(on_broken_promise="count"))
    join.offer("a", (1, "red"))
    join.promise("a", Punctuation({"a": "red"}))
    assert join.passed_on() == []
    join.offer("a", (2, "red"), (2, "blue"))
    assert join.join.metrics.broken_promises == {"punctuation": 1}
    assert join.held() == (2, 0)
    join.promise("b", 1)
    join.labels(join.join.step(idle=True))
    # No red row is held any more.
    assert sorted(join.passed_on()) == ["a = red", "k = 1"]


def test_broken_promises_are_noticed_after_a_restart(script: Any) -> None:
    metadata = Metadata(clustered=["a"], ordered={"b": "ascending"}, on_broken_promise="quarantine")
    join = script("ab", metadata, keys="text")
    join.offer("a", ("x", "1"), ("y", "2"))
    join.offer("b", ("m", "1"))
    join.promise("b", "q")
    join.offer("b", ("b", "broken before"))
    again = script("ab", metadata, keys="text")
    again.join.restore(through_storage(join.join.snapshot()))
    again.offer("a", ("y", "3"), ("x", "4"))
    again.offer("b", ("a", "5"), ("m", "6"), ("q", "7"))
    assert [(name, key) for name, key, _ in quarantined(again)] == [("b", "b"), ("a", "x"), ("b", "a"), ("b", "q")]
    assert again.join.metrics.broken_promises == {"ordered": 2, "clustered": 1, "punctuation": 1}


def test_second_row_of_a_unique_key_is_noticed_when_the_first_is_on_disk(script: Any, tmp_path: Any) -> None:
    options = {"spill_directory": tmp_path, "flushing": "random"}
    join = script("ab", Metadata(keys=["a"], on_broken_promise="quarantine"), **options)
    join.offer("a", *[(k, "a") for k in range(50)])
    join.join.flush("a")
    join.offer("a", (7, "again"), (50, "new"))
    assert [k for _, k, _ in quarantined(join)] == [7]


def test_quarantined_rows_that_nobody_fetches_are_refused_before_they_are_accepted(script: Any) -> None:
    join = script("ab", Metadata(on_broken_promise="quarantine"), budget="40kB")
    join.promise("a", 1)
    rows = [(1, "x" * 200)] * 100
    with pytest.raises(BudgetError, match="quarantined tuples wait to be fetched"):
        join.offer("a", *rows)
    accepted = join.join.metrics.tuples_in["a"]
    assert len(quarantined(join)) == accepted
    assert join.offer("a", (2, "fine")) == []


def test_slack_of_dates_and_ends_of_the_domain(script: Any) -> None:
    order = {"a": Order("ascending", slack=timedelta(days=2))}
    join = script("ab", Metadata(ordered=order, on_broken_promise="count"), keys="date")
    join.offer("a", (date(2026, 1, 10), "x"), (date(2026, 1, 8), "in time"), (date(2026, 1, 7), "too late"))
    assert join.join.metrics.broken_promises == {"ordered": 1}
    edge = script("ab", Metadata(ordered={"a": "descending"}))
    edge.offer("a", (2**63 - 1, "x"), (0, "y"), (-(2**63), "z"))
    assert edge.held()[0] == 3


@pytest.mark.parametrize("keys", ["integer", "text"])
@pytest.mark.parametrize("is_static", [True, False])
def test_promises_beyond_their_room_are_forgotten_counted_and_safe(script: Any, keys: str, is_static: bool) -> None:
    metadata = Metadata(keys=["a"], clustered=["b"] if is_static else [])
    join = script("ab", metadata, keys=keys, budget="200kB")
    # Every second value, so that no two are neighbours.
    values = [2 * int(k) if keys == "integer" else f"k{k}" for k in np.random.default_rng(5).permutation(4000)]
    for start in range(0, 4000, 500):
        part = values[start : start + 500]
        join.offer("a", *[(k, "a") for k in part])
        assert len(join.offer("b", *[(k, "b") for k in part])) == 500
        if not is_static:
            join.promise("b", Punctuation.one_of("k", part))
        join.labels(join.join.step(idle=True))
        # What was promised was used before it was forgotten; only the last cluster is still open.
        assert join.held() == (1 if is_static else 0, 0)
        join.passed_on()
    assert join.join.metrics.punctuations_forgotten > 1000
    assert join.join.sizes()["promises"] <= 200_000 // 16
    assert join.join.punctuations_held < 1000
    # Forgotten is not broken: a value that is no longer remembered is joined as any other.
    assert join.join.metrics.broken_promises == {}


def test_a_million_values_in_any_order_are_one_range() -> None:
    schemas = {n: pa.schema({"k": pa.int64(), n: pa.int64()}) for n in "ab"}
    join = MetadataJoin(mjoin_spec(schemas, on="k", budget="256MB"), Metadata(propagate=False))
    order = pa.array(np.random.default_rng(3).permutation(1_000_000))
    assert list(join.punctuate("b", Punctuation.one_of("k", order))) == []
    assert join.punctuations_held == 1
    assert join.metrics.punctuations_forgotten == 0


@pytest.mark.parametrize(("keys", "count"), [("integer", 1_000_000), ("text", 100_000)])
def test_a_million_values_that_cannot_be_merged_stay_within_their_room(keys: str, count: int) -> None:
    schemas = {n: pa.schema({"k": pa.int64() if keys == "integer" else pa.string(), n: pa.int64()}) for n in "ab"}
    spec = mjoin_spec(schemas, on="k", budget="16MB")
    join = MetadataJoin(spec, Metadata(propagate=False))
    # Every second number, so that no two are neighbours.
    numbers = pa.array(2 * np.random.default_rng(3).permutation(count))
    values = numbers if keys == "integer" else numbers.cast(pa.string())
    held = pa.record_batch([values.slice(0, 1000), pa.array(range(1000))], schema=schemas["a"])
    assert list(join.offer("a", spec.with_codes("a", held))) == []
    assert list(join.punctuate("b", Punctuation.one_of("k", values))) == []
    # All of them were used: every tuple was purged, whether its promise is still remembered or not.
    assert join.state_rows() == {"a": 0, "b": 0}
    assert join.sizes()["promises"] <= 1_000_000
    assert join.peak_bytes <= spec.budget.total_bytes
    assert join.punctuations_held + join.metrics.punctuations_forgotten == count
    assert join.metrics.punctuations_forgotten > count * 0.8


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keys": ["z"]}, PlanError, "keys= names 'z'; the inputs are a, b"),
        ({"keys": "a"}, PlanError, "names of inputs, in a list"),
        ({"ordered": {"z": "ascending"}}, PlanError, "ordered= names 'z'"),
        ({"ordered": {"a": "upwards"}}, PlanError, "ascending or descending, not 'upwards'"),
        ({"ordered": {"a": Order("ascending", 3)}}, SchemaError, "no distances, so they cannot have a slack"),
        ({"goal": "speed"}, PlanError, "goal='speed' is none of rate, memory"),
        ({"purging": "never"}, PlanError, "purging='never' is none of immediate, batched"),
        ({"on_broken_promise": "ignore"}, PlanError, "none of error, quarantine, count"),
        ({"purge_count": 0}, PlanError, "at least 1"),
        ({"purge_memory": 2.0}, PlanError, "at most 1"),
        ({"memory_share": 0.9}, PlanError, "at most a quarter"),
    ],
)
def test_metadata_that_cannot_be_is_refused(script: Any, options: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        script("ab", Metadata(**options), keys="text")


def test_metadata_needs_one_join_attribute_and_orders_one_column() -> None:
    schema = pa.schema({"k": pa.int64(), "j": pa.int64()})
    chain = {"a": pa.schema({"k": pa.int64()}), "b": schema, "c": pa.schema({"j": pa.int64()})}
    with pytest.raises(PlanError, match="one join attribute that all inputs share"):
        MetadataJoin(mjoin_spec(chain, on=[("a.k", "b.k"), ("b.j", "c.j")]), Metadata())
    two = mjoin_spec({"a": schema, "b": schema}, on=["k", "j"])
    with pytest.raises(PlanError, match="an order needs one join column, and there are 2"):
        MetadataJoin(two, Metadata(ordered={"a": "ascending"}))
    with pytest.raises(PlanError, match="slack"):
        Order("ascending", slack=-1)


@pytest.mark.parametrize("keys", ["integer", "text"])
def test_clusters_and_orders_by_micro_batches_do_not_depend_on_the_order_within_one(script: Any, keys: str) -> None:
    key = (lambda k: f"k{k}") if keys == "text" else (lambda k: k)
    metadata = Metadata(keys=["a"], clustered=["b"], goal="memory", is_batchwise=True, on_broken_promise="quarantine")
    join = script("ab", metadata, keys=keys)
    join.offer("a", *[(key(k), "a") for k in range(5)])
    join.offer("b", (key(1), "b"), (key(0), "b"), (key(1), "b"))
    join.labels(join.join.end_batch())
    assert join.held() == (5, 0)
    # 0 is over, since this micro-batch has rows and none of it; one without rows ends nothing.
    join.offer("b", (key(2), "b"), (key(1), "b"))
    join.labels(join.join.end_batch())
    join.labels(join.join.end_batch())
    assert join.held() == (4, 0)
    again = script("ab", metadata, keys=keys)
    again.join.restore(through_storage(join.join.snapshot()))
    again.offer("b", (key(0), "broken"), (key(2), "b"))
    again.labels(again.join.end_batch())
    assert again.held() == (3, 0)
    assert [k for _, k, _ in quarantined(again)] == [key(0)]


def test_descending_order_by_micro_batches(script: Any) -> None:
    metadata = Metadata(ordered={"b": "descending"}, goal="memory", is_batchwise=True, on_broken_promise="quarantine")
    join = script("ab", metadata)
    join.offer("a", *[(k, "a") for k in range(10)])
    join.offer("b", (5, "b"), (9, "b"), (7, "b"))
    join.labels(join.join.end_batch())
    assert join.held() == (6, 3)
    join.offer("b", (6, "broken"), (5, "b"), (4, "b"))
    assert [k for _, k, _ in quarantined(join)] == [6]


def test_rows_that_end_their_value_close_it(script: Any) -> None:
    join = script("ab", Metadata(goal="memory"), keys="text")
    join.offer("a", ("x", "1"), ("y", "2"))
    ends = pa.record_batch({"k": ["x", None, "x"]})
    assert join.labels(join.join.punctuate_rows("b", ends)) == []
    assert join.held() == (1, 0)
    assert join.join.metrics.punctuations_in == 1


def test_quarantined_rows_go_to_who_waits_for_them_and_take_no_room(script: Any) -> None:
    join = script("ab", Metadata(on_broken_promise="quarantine"), budget="40kB")
    given: list[tuple[str, int]] = []
    join.join.on_quarantined = lambda name, rows: given.append((name, rows.num_rows))
    join.promise("a", 1)
    # More than may wait to be fetched.
    assert join.offer("a", *[(1, "x" * 200)] * 100) == []
    assert {name for name, _ in given} == {"a"}
    assert sum(count for _, count in given) == 100
    assert join.join.take_quarantined() == []


@pytest.mark.parametrize("policy", ["error", "quarantine"])
def test_row_that_is_late_is_late_whatever_was_promised_since(script: Any, policy: str) -> None:
    window = TimeWindow(1000, {"a": "ta", "b": "tb"}, late="side")
    join = script("ab", Metadata(keys=["a"], on_broken_promise=policy), time=True, window=window)
    join.offer("a", (1, 100, "a1"), (2, 100, "a2"))
    join.labels(join.join.punctuate_rows("b", pa.record_batch({"k": [1]}), np.array([150])))
    join.labels(join.join.advance(200))
    # Of the moment before the punctuation, and behind the watermark; and a unique key once more, as late.
    assert join.offer("b", (1, 140, "late")) == []
    assert join.offer("a", (2, 150, "late")) == []
    assert [(name, rows.column("k").to_pylist()) for name, rows in join.join.take_late()] == [("b", [1]), ("a", [2])]
    assert join.join.metrics.broken_promises == {}
    if policy == "quarantine":
        join.offer("b", (1, 210, "broken"))
        assert [(name, key) for name, key, _ in quarantined(join)] == [("b", 1)]
