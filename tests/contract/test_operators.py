"""What every semi-stream join gives, one situation after the other, for each operator."""

import datetime
import decimal
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.joins import (
    OPERATORS,
    BatchPredicate,
    Comparison,
    JoinSpec,
    Range,
    SemiStreamOperator,
)
from dovetail.testing.batches import with_codes
from dovetail.testing.cities import (
    CITIES,
    STREAM,
    STREAM_SCHEMA,
    batch_of,
    minimum_of,
    shard_of,
    spec_of,
    state_of,
)
from dovetail.testing.driver import Driver, drive
from dovetail.testing.oracle import join_oracle, join_oracle_by_tuple
from dovetail.testing.rows import assert_same_groups, assert_same_rows, rows_of

pytestmark = pytest.mark.parametrize("kind", list(OPERATORS))
EVERY_JOIN_TYPE = pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])


# ================================================================ what comes out


@EVERY_JOIN_TYPE
def test_join_types_on_a_small_example(kind: str, how: Any) -> None:
    rows = {
        "inner": [(1, 20, "Rome"), (2, 4, "Bergen"), (2, 4, "Oslo"), (2, 7, "Bergen"), (2, 7, "Oslo")],
        "left": [
            (1, 20, "Rome"),
            (2, 4, "Bergen"),
            (2, 4, "Oslo"),
            (2, 7, "Bergen"),
            (2, 7, "Oslo"),
            (7, 5, None),
            (None, 6, None),
        ],
        "semi": [(1, 20), (2, 4), (2, 7)],
        "anti": [(7, 5), (None, 6)],
    }
    names = ["id", "t", "city"] if how in ("inner", "left") else ["id", "t"]
    operator = OPERATORS[kind](spec_of(CITIES, how=how, select=("city",)))
    output = drive(operator, [batch_of(STREAM)])
    assert operator.output_schema.names == names
    assert_same_rows(rows_of(output), [dict(zip(names, row, strict=True)) for row in rows[how]])


@EVERY_JOIN_TYPE
def test_output_has_the_declared_schema_from_the_first_batch_on(kind: str, how: Any) -> None:
    operator = OPERATORS[kind](spec_of(CITIES, how=how))
    for batch in drive(operator, [batch_of(STREAM[:2]), batch_of(STREAM[2:])]):
        assert batch.schema.equals(operator.output_schema)


def test_join_columns_come_first_and_once_under_the_streams_name(kind: str) -> None:
    schema = pa.schema({"t": pa.int64(), "who": pa.int64()})
    batch = with_codes(pa.record_batch([[4], [2]], schema=schema), on="who")
    spec = JoinSpec(shard=shard_of(CITIES), stream_schema=batch.schema, on=(("who", "id"),))
    operator = OPERATORS[kind](spec)
    assert operator.output_schema.names == ["who", "t", "city", "since", "until"]
    assert {row["who"] for row in rows_of(drive(operator, [batch]))} == {2}


@EVERY_JOIN_TYPE
def test_null_keys_are_answered_at_once(kind: str, how: Any) -> None:
    driver = Driver(OPERATORS[kind](spec_of(CITIES, how=how, select=("city",))))
    rows = driver.offer(batch_of([{"id": None, "t": 1}]))
    assert driver.operator.pending == 0
    expected = {"left": [{"id": None, "t": 1, "city": None}], "anti": [{"id": None, "t": 1}]}
    assert rows == expected.get(how, [])
    assert driver.operator.metrics.null_key_tuples == 1


@EVERY_JOIN_TYPE
@pytest.mark.parametrize("ordered", [False, True])
def test_empty_relation(kind: str, how: Any, ordered: bool) -> None:
    operator = OPERATORS[kind](spec_of([], how=how, select=("city",), ordered=ordered))
    expected = join_oracle(STREAM, [], "id", how, select=["city"])
    drive(operator, [batch_of(STREAM)], expected=expected)


def test_nothing_offered_gives_nothing(kind: str) -> None:
    operator = OPERATORS[kind](spec_of(CITIES))
    assert list(operator.step()) == list(operator.drain()) == list(operator.offer(batch_of([]))) == []
    assert (operator.pending, operator.oldest) == (0, None)


def test_every_column_type_of_the_stream_passes_through(kind: str) -> None:
    columns = {
        "flag": pa.array([True, None, False]),
        "small": pa.array([1, None, -1], pa.int8()),
        "double": pa.array([1.5, None, float("nan")]),
        "day": pa.array([datetime.date(2020, 1, 1), None, datetime.date(1960, 1, 1)]),
        "at": pa.array([1, None, -1], pa.timestamp("us", "UTC")),
        "price": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("-2.00")], pa.decimal128(20, 2)),
        "digest": pa.array([b"abc", None, b"xyz"], pa.binary(3)),
        "text": pa.array(["a", None, ""]),
        "blob": pa.array([b"", None, b"\x00"]),
        "long_text": pa.array(["x" * 100, None, ""], pa.large_string()),
        "items": pa.array([[1, 2], None, []], pa.list_(pa.int32())),
        "point": pa.array([{"x": 1, "y": "a"}, None, {"x": None, "y": "b"}]),
        "map": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "word": pa.array(["p", None, "q"]).dictionary_encode(),
        "nothing": pa.nulls(3),
    }
    batch = with_codes(pa.record_batch({"id": pa.array([1, 2, 9]), **columns}), on="id")
    spec = JoinSpec(
        shard=shard_of(CITIES), stream_schema=batch.schema, on=(("id", "id"),), how="left", select=("city",)
    )
    # Offered in two batches, so that paged columns have two pages.
    operator = OPERATORS[kind](spec)
    output = [*operator.offer(batch.slice(0, 1)), *operator.offer(batch.slice(1)), *operator.drain()]
    own = [name for name in batch.schema.names if name != "__code"]
    assert [f.type for f in operator.output_schema][:-1] == [batch.schema.field(name).type for name in own]
    given = rows_of(output)
    for row in batch.select(own).to_pylist():
        matches = [{n: v for n, v in match.items() if n != "city"} for match in given if match["id"] == row["id"]]
        assert len(matches) == {1: 1, 2: 2, 9: 1}[row["id"]]
        assert all(repr(match) == repr(row) for match in matches)


@pytest.mark.parametrize("ordered", [False, True])
@EVERY_JOIN_TYPE
def test_one_key_with_very_many_matches_stays_within_the_budget(kind: str, how: Any, ordered: bool) -> None:
    relation = [{"id": 5, "city": f"c{number}", "since": 0, "until": 0} for number in range(3000)]
    stream = [{"id": 5, "t": number} for number in range(6)] + [{"id": 6, "t": 9}]
    spec = spec_of(relation, how=how, ordered=ordered, select=("city",))
    spec = replace(spec, budget=Budget(minimum_of(kind, spec) + 500))
    operator = OPERATORS[kind](spec)
    most_rows = operator.results.max_rows
    oracle: Any = join_oracle_by_tuple if ordered else join_oracle
    expected = oracle(stream, relation, "id", how, select=["city"])
    groups, rows = (expected, None) if ordered else (None, expected)
    output = drive(operator, [batch_of(stream)], expected=rows, expected_groups=groups)
    assert max((batch.num_rows for batch in output), default=0) <= most_rows < 3000


# ================================================================ conditions


@EVERY_JOIN_TYPE
@pytest.mark.parametrize(
    "condition",
    [
        Range("t", "since", "until"),
        BatchPredicate(Range("t", "since", "until").mask, ["t"], ["since", "until"], "in_range"),
    ],
)
def test_residual_condition(kind: str, how: Any, condition: Any) -> None:
    operator = OPERATORS[kind](spec_of(CITIES, how=how, select=("city",), condition=condition))
    expected = join_oracle(
        STREAM, CITIES, "id", how, lambda s, r: bool(r["since"] <= s["t"] < r["until"]), select=["city"]
    )
    drive(operator, [batch_of(STREAM)], expected=expected)


class Fickle:
    """A predicate that goes wrong until it is told not to."""

    def __init__(self, wrong: Callable[[int], Any]) -> None:
        self.wrong: Callable[[int], Any] | None = wrong

    def __call__(self, stream: pa.RecordBatch, relation: pa.RecordBatch) -> Any:
        if self.wrong is not None:
            return self.wrong(stream.num_rows)
        return np.ones(stream.num_rows, np.bool_)


def _raise(_: int) -> Any:
    raise ZeroDivisionError("no such thing")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (_raise, "predicate fickle raised ZeroDivisionError: no such thing"),
        (lambda rows: np.ones(rows + 1, np.bool_), "predicate fickle returned .* values for"),
        (lambda rows: np.ones(rows, np.int64), "predicate fickle returned int64 instead of a boolean array"),
        (lambda rows: pa.array(["x"] * rows), "predicate fickle returned string instead of a boolean array"),
        (lambda rows: None, "predicate fickle returned NoneType instead of a boolean array"),
    ],
)
@EVERY_JOIN_TYPE
def test_predicate_that_goes_wrong_changes_nothing(kind: str, how: Any, wrong: Any, message: str) -> None:
    fickle = Fickle(wrong)
    condition = BatchPredicate(fickle, name="fickle")
    operator = OPERATORS[kind](spec_of(CITIES, how=how, select=("city",), condition=condition))
    stream = [row for row in STREAM if row["id"] is not None]
    before, output = _without_reads(state_of(operator)), []
    # An operator that looks at the relation at once asks when a tuple is offered, the others when they step.
    try:
        output += operator.offer(batch_of(stream))
        before = _without_reads(state_of(operator))
    except PlanError:
        assert _without_reads(state_of(operator)) == before
    with pytest.raises(PlanError, match=message):
        offer_and_drain(operator, stream)
    assert _without_reads(state_of(operator)) == before
    fickle.wrong = None
    output += offer_and_drain(operator, stream)
    assert_same_rows(rows_of(output), join_oracle(stream, CITIES, "id", how, select=["city"]))


def offer_and_drain(operator: SemiStreamOperator, stream: list[dict[str, Any]]) -> list[pa.RecordBatch]:
    """Offer what has not been accepted yet, and drain."""
    return [*operator.offer(batch_of(stream[operator.metrics.stream_tuples_in :])), *operator.drain()]


def _without_reads(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """The state without sizes of caches and counts of reads, lookups and steps, which a failed attempt adds to."""
    kind, fingerprint, values, tables, _, pending = state
    counts = ("stream_tuples_in", "matched_tuples", "unmatched_tuples", "output_rows", "shed")
    metrics = {name: values["metrics"][name] for name in counts}
    kept = {name: value for name, value in values.items() if name in ("arrivals", "chunks", "pairs_done", "cut_ticket")}
    # What else an operator saves may say which attempt was interrupted.
    waiting = {name: rows for name, rows in tables.items() if name in ("window", "held")}
    return kind, fingerprint, kept, metrics, waiting, pending


def test_predicate_that_fails_in_the_middle_repeats_and_loses_nothing(kind: str) -> None:
    relation = [{"id": 5, "city": f"c{number}", "since": 0, "until": 0} for number in range(400)]
    stream = [{"id": 5, "t": number} for number in range(3)]
    asked = 0

    def fails_at_the_third_question(s: pa.RecordBatch, r: pa.RecordBatch) -> Any:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise RuntimeError("not now")
        return np.ones(s.num_rows, np.bool_)

    condition = BatchPredicate(fails_at_the_third_question, ["t"], [], name="moody")
    spec = spec_of(relation, condition=condition, select=("city",))
    spec = replace(spec, budget=Budget(minimum_of(kind, spec) + 500))
    operator = OPERATORS[kind](spec)
    output: list[pa.RecordBatch] = []
    failures = 0
    accepted = 0
    while True:
        try:
            for batch in operator.offer(batch_of(stream[accepted:])):
                output.append(batch)
            for batch in operator.drain():
                output.append(batch)
            break
        except PlanError:
            failures += 1
            accepted = operator.metrics.stream_tuples_in
    assert failures == 1
    assert_same_rows(rows_of(output), join_oracle(stream, relation, "id", "inner", select=["city"]))


def test_condition_without_equality_is_refused_where_it_cannot_be_done(kind: str) -> None:
    spec = JoinSpec(
        shard=shard_of(CITIES),
        stream_schema=STREAM_SCHEMA,
        on=(),
        condition=Comparison("t", "<", "until"),
        select=("city",),
    )
    if OPERATORS[kind].needs_equality:
        with pytest.raises(PlanError, match="equal keys only"):
            OPERATORS[kind](spec)
    else:
        OPERATORS[kind](spec)


# ================================================================ giving up, and going on


def test_iterator_that_is_given_up_loses_and_repeats_nothing(kind: str) -> None:
    relation = [{"id": 5, "city": f"c{number}", "since": 0, "until": 0} for number in range(300)]
    spec = spec_of(relation, select=("city",))
    spec = replace(spec, budget=Budget(minimum_of(kind, spec) + 500))
    operator = OPERATORS[kind](spec)
    stream = [{"id": 5, "t": number} for number in range(3)]
    output = [batch for row in stream for batch in operator.offer(batch_of([row]))]
    while operator.pending:
        iterator = operator.drain()
        output.extend(batch for _, batch in zip(range(1), iterator, strict=False))
        iterator.close()  # type: ignore[attr-defined]
    assert_same_rows(rows_of(output), join_oracle(stream, relation, "id", "inner", select=["city"]))


def give_up_after_every_batch(operator: SemiStreamOperator, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Take one batch of every iterator and give it up, until everything was accepted and nothing comes any more."""
    output: list[pa.RecordBatch] = []

    def take_one(iterator: Any) -> int:
        taken = list(itertools.islice(iterator, 1))
        iterator.close()
        output.extend(taken)
        return len(taken)

    for batch in batches:
        while batch.num_rows:
            before = operator.metrics.stream_tuples_in
            take_one(operator.offer(batch))
            batch = batch.slice(operator.metrics.stream_tuples_in - before)
        take_one(operator.step())
    while take_one(operator.drain()):
        pass
    assert operator.pending == 0
    return output


@EVERY_JOIN_TYPE
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("extra_bytes", [0, 30_000])
def test_giving_up_every_iterator_loses_and_repeats_nothing(
    kind: str, how: Any, ordered: bool, extra_bytes: int
) -> None:
    """Tuples and rows are of very different lengths, so that what is planned as one batch must often be split."""
    relation = [
        {"id": number % 12, "city": "x" * (number % 7) ** 3, "since": 0, "until": 0}
        for number in range(60)
        if number % 12 not in (3, 4)
    ]
    lengths = [1, 400, 3, 0, 90, 700, 2]
    stream = [
        {"id": None if number % 9 == 4 else number % 14, "t": number, "note": "y" * lengths[number % 7]}
        for number in range(160)
    ]
    schema = STREAM_SCHEMA.append(pa.field("note", pa.string()))
    spec = spec_of(relation, schema, how=how, select=("city",), ordered=ordered, block_rows=5)
    budget = minimum_of(kind, spec) + 6_000 + extra_bytes
    operator = OPERATORS[kind](replace(spec, budget=Budget(budget)))
    batches = [batch_of(stream[start : start + 40], schema) for start in range(0, len(stream), 40)]
    rows = rows_of(give_up_after_every_batch(operator, batches))
    if ordered:
        assert_same_groups(rows, join_oracle_by_tuple(stream, relation, "id", how, select=["city"]))
    else:
        assert_same_rows(rows, join_oracle(stream, relation, "id", how, select=["city"]))


def test_next_call_is_refused_while_an_iterator_is_unfinished(kind: str) -> None:
    operator = OPERATORS[kind](spec_of(CITIES, how="left"))
    unfinished = operator.offer(batch_of(STREAM))
    first = next(unfinished)
    assert first.num_rows > 0
    for call in (operator.step, operator.drain, operator.snapshot):
        with pytest.raises(PlanError, match="not finished"):
            list(call())  # type: ignore[operator]
    list(unfinished)
    list(operator.drain())
