"""What every semi-stream join promises, one situation after the other, for each operator."""

import datetime
import decimal
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.errors import BudgetError, DovetailError, PlanError, SchemaError, StateError
from dovetail.memory import Budget
from dovetail.model import CostFactors
from dovetail.operators import (
    OPERATORS,
    BatchPredicate,
    Comparison,
    JoinSpec,
    LeastJoinedFirst,
    OldestFirst,
    Random,
    Range,
    SemiStreamOperator,
    Snapshot,
    join_spec,
)
from dovetail.relation import Relation
from dovetail.testing.batches import stream_batches, with_codes
from dovetail.testing.driver import Driver, drive
from dovetail.testing.oracle import join_oracle, join_oracle_by_tuple
from dovetail.testing.rows import assert_same_groups, assert_same_rows, rows_of
from dovetail.testing.shard import MemoryShard
from dovetail.testing.snapshots import through_storage

pytestmark = pytest.mark.parametrize("kind", list(OPERATORS))
EVERY_JOIN_TYPE = pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])

CITIES = [
    {"id": 1, "city": "Rome", "since": 0, "until": 10},
    {"id": 2, "city": "Oslo", "since": 0, "until": 5},
    {"id": 2, "city": "Bergen", "since": 5, "until": 10},
    {"id": 3, "city": None, "since": 0, "until": 1},
]
CITY_SCHEMA = pa.schema({"id": pa.int64(), "city": pa.string(), "since": pa.int64(), "until": pa.int64()})
STREAM = [
    {"id": 2, "t": 4},
    {"id": 7, "t": 5},
    {"id": None, "t": 6},
    {"id": 1, "t": 20},
    {"id": 2, "t": 7},
]
STREAM_SCHEMA = pa.schema({"id": pa.int64(), "t": pa.int64()})


def shard_of(rows: list[dict[str, Any]], schema: pa.Schema = CITY_SCHEMA) -> MemoryShard:
    return MemoryShard.of_rows(rows, schema, lambda row: row["id"])


def spec_of(rows: list[dict[str, Any]], schema: pa.Schema = STREAM_SCHEMA, **options: Any) -> JoinSpec:
    options.setdefault("budget", Budget(50_000))
    options.setdefault("shard", shard_of(rows))
    options.setdefault("identity", {"relation": "cities", "version": 1, "shard": 0})
    coded = schema.insert(0, pa.field("__code", pa.int64()))
    return JoinSpec(stream_schema=coded, on=(("id", "id"),), **options)


def batch_of(rows: list[dict[str, Any]], schema: pa.Schema = STREAM_SCHEMA) -> pa.RecordBatch:
    (batch,) = stream_batches(rows, on="id", schema=schema)
    return batch


def minimum_of(kind: str, spec: JoinSpec) -> int:
    with pytest.raises(BudgetError, match="too small") as refused:
        OPERATORS[kind](replace(spec, budget=Budget(1)))
    assert refused.value.minimum_bytes is not None
    assert str(refused.value.minimum_bytes) in str(refused.value)
    return refused.value.minimum_bytes


def state_of(operator: SemiStreamOperator) -> tuple[Any, ...]:
    """Everything that an operator would save, to be compared before and after a refusal."""
    saved = operator.snapshot()
    values = dict(saved.values)
    seconds = ("cpu_seconds", "disk_seconds")
    values["metrics"] = {name: value for name, value in values["metrics"].items() if name not in seconds}
    tables = {name: table.to_pylist() for name, table in saved.tables.items()}
    return saved.kind, saved.fingerprint, values, tables, operator.sizes(), operator.pending


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
        (lambda rows: np.ones(rows + 1, np.bool_), "predicate fickle gave .* values for"),
        (lambda rows: np.ones(rows, np.int64), "predicate fickle gave int64 instead of a boolean array"),
        (lambda rows: pa.array(["x"] * rows), "predicate fickle gave string instead of a boolean array"),
        (lambda rows: None, "predicate fickle gave NoneType instead of a boolean array"),
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


# ================================================================ bad input


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (pa.record_batch({"id": [1], "t": [1]}), "no column '__code'"),
        (pa.record_batch({"__code": [1], "id": [1]}), "no column 't'"),
        (pa.record_batch({"__code": [1], "id": [1], "t": ["x"]}), "Column 't' of the stream batch is string"),
        (pa.record_batch({"__code": [1], "id": [1], "t": [1], "more": [1]}), "column 'more'"),
        (pa.record_batch({"__code": ["1"], "id": [1], "t": [1]}), "Column '__code' of the stream batch is string"),
    ],
)
def test_batch_of_another_schema_is_refused(kind: str, batch: pa.RecordBatch, message: str) -> None:
    operator = OPERATORS[kind](spec_of(CITIES))
    list(operator.offer(batch_of(STREAM)))
    before = state_of(operator)
    with pytest.raises(SchemaError, match=message):
        operator.offer(batch)
    assert state_of(operator) == before


def test_what_is_no_record_batch_is_refused(kind: str) -> None:
    with pytest.raises(PlanError, match="RecordBatch, not list"):
        OPERATORS[kind](spec_of(CITIES)).offer([{"id": 1}])  # type: ignore[arg-type]


def test_columns_in_another_order_are_accepted(kind: str) -> None:
    batch = batch_of(STREAM).select(["t", "id", "__code"])
    operator = OPERATORS[kind](spec_of(CITIES))
    drive(operator, [batch], expected=join_oracle(STREAM, CITIES, "id"))


# ================================================================ memory


def test_budget_below_the_minimum_is_refused_and_the_minimum_works(kind: str) -> None:
    spec = spec_of(CITIES, how="left")
    minimum = minimum_of(kind, spec)
    with pytest.raises(BudgetError, match=str(minimum)):
        OPERATORS[kind](replace(spec, budget=Budget(minimum - 1)))
    operator = OPERATORS[kind](replace(spec, budget=Budget(minimum)))
    expected = join_oracle(STREAM * 20, CITIES, "id", "left")
    drive(operator, [batch_of(STREAM * 20)], expected=expected, measure_arrays=True, borrowed=[spec, operator.spec])


def test_budget_below_what_is_held_is_refused(kind: str) -> None:
    spec = spec_of(CITIES)
    operator = OPERATORS[kind](spec)
    rows = [{"id": 2, "t": number} for number in range(200)]
    output = list(operator.offer(batch_of(rows)))
    before = state_of(operator)
    with pytest.raises(BudgetError, match="too small") as refused:
        operator.resize_budget(minimum_of(kind, spec) // 2)
    assert refused.value.minimum_bytes is not None
    assert state_of(operator) == before
    assert operator.budget == spec.budget
    output += operator.drain()
    assert_same_rows(rows_of(output), join_oracle(rows, CITIES, "id"))


def test_budget_can_shrink_and_grow_while_tuples_wait(kind: str) -> None:
    rows = [{"id": 2, "t": number} for number in range(50)]
    driver = Driver(OPERATORS[kind](spec_of(CITIES)))
    driver.offer(batch_of(rows))
    driver.call(lambda operator: operator.resize_budget("40kB"))
    driver.offer(batch_of(rows))
    driver.call(lambda operator: operator.resize_budget("1MB"))
    driver.offer(batch_of(rows))
    driver.drain()
    assert_same_rows(driver.rows(), join_oracle(rows * 3, CITIES, "id"))


@pytest.mark.parametrize("name", ["block_rows", "chunk_rows"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_retune_refuses_what_is_no_number_of_rows(kind: str, name: str, value: Any) -> None:
    operator = OPERATORS[kind](spec_of(CITIES))
    with pytest.raises(PlanError, match=name):
        operator.retune(**{name: value})


@pytest.fixture(scope="module")
def large_relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    """20,000 rows of 1.2 kB, so that a thousandth is 24 kB; a tenth of them with repeated keys."""
    numbers = np.arange(20_000)
    keys = np.where(numbers % 10 == 0, numbers // 100, numbers)
    table = pa.table({"id": keys, "n": numbers, "pay": [f"{number:01180d}" for number in numbers]})
    return Relation.build(table, tmp_path_factory.mktemp("contract") / "large", on="id", shards=1)


@pytest.mark.parametrize("percent", [0.1, 0.5, 1, 10, 100])
@pytest.mark.parametrize("ordered", [False, True])
def test_budgets_from_a_thousandth_of_the_relation_to_all_of_it(
    kind: str, percent: float, ordered: bool, large_relation: Relation
) -> None:
    generator = np.random.default_rng(11)
    print("seed 11")
    keys = generator.integers(0, 25_000, 300)
    rows = [{"id": int(key), "t": number} for number, key in enumerate(keys)]
    batch = batch_of(rows)
    budget = Budget.percent_of(large_relation.stats.bytes, percent)
    spec = join_spec(large_relation, batch.schema, select=["n"], ordered=ordered, budget=budget, how="left")
    operator = OPERATORS[kind](spec)
    relation_rows = large_relation.shard(0, columns=["id", "n"]).read_block(0, 20_000).rows.to_pylist()
    oracle: Any = join_oracle_by_tuple if ordered else join_oracle
    expected = oracle(rows, relation_rows, "id", "left", select=["n"])
    drive(
        operator,
        [batch.slice(start, 50) for start in range(0, 300, 50)],
        expected=None if ordered else expected,
        expected_groups=expected if ordered else None,
        measure_arrays=True,
        borrowed=[spec],
    )


# ================================================================ real relations


@EVERY_JOIN_TYPE
@pytest.mark.parametrize("key", ["id", "name"])
def test_relation_with_appended_changed_and_deleted_rows(kind: str, how: Any, key: str, tmp_path: Path) -> None:
    def rows_between(low: int, high: int, text: str) -> list[dict[str, Any]]:
        return [{"id": number, "name": f"n{number}", "text": text} for number in range(low, high)]

    relation = Relation.build(pa.Table.from_pylist(rows_between(0, 300, "old")), tmp_path / "r", on=key, shards=1)
    relation = relation.append(pa.Table.from_pylist(rows_between(250, 350, "more")))
    relation = relation.upsert(pa.Table.from_pylist(rows_between(100, 120, "new")))
    relation = relation.delete(pa.Table.from_pylist(rows_between(10, 60, "")))
    live = relation.shard(0).read_block(0, 10_000).rows.to_pylist()
    assert 300 < len(live) < 400
    stream = [{key: row[key], "t": number} for number, row in enumerate(rows_between(0, 400, ""))]
    schema = pa.schema({key: pa.int64() if key == "id" else pa.string(), "t": pa.int64()})
    (batch,) = stream_batches(stream, on=key, schema=schema)
    operator = OPERATORS[kind](
        join_spec(relation, batch.schema, how=how, select=["text"], budget="100kB", block_rows=37)
    )
    drive(operator, [batch], expected=join_oracle(stream, live, key, how, select=["text"]))


@pytest.mark.parametrize("io", ["map", "buffered"])
def test_ways_to_read_give_the_same(kind: str, io: Any, large_relation: Relation) -> None:
    rows = [{"id": number * 7, "t": number} for number in range(200)]
    batch = batch_of(rows)
    operator = OPERATORS[kind](join_spec(large_relation, batch.schema, select=["n"], budget="300kB", io=io))
    live = large_relation.shard(0, columns=["id", "n"]).read_block(0, 20_000).rows.to_pylist()
    drive(operator, [batch], expected=join_oracle(rows, live, "id", select=["n"]))


def test_only_what_the_join_needs_is_read(kind: str, large_relation: Relation) -> None:
    batch = batch_of([{"id": 5001, "t": 1}])
    spec = join_spec(large_relation, batch.schema, select=["n"], condition=Comparison("t", "<", "n"), budget="300kB")
    assert spec.shard.schema.names == ["n"]
    assert rows_of(drive(OPERATORS[kind](spec), [batch])) == [{"id": 5001, "t": 1, "n": 5001}]
    semi = join_spec(large_relation, batch.schema, how="semi", budget="300kB")
    assert semi.shard.schema.names == []
    assert rows_of(drive(OPERATORS[kind](semi), [batch])) == [{"id": 5001, "t": 1}]


# ================================================================ saving and restoring


def waiting_operator(kind: str, **options: Any) -> SemiStreamOperator:
    operator = OPERATORS[kind](spec_of(CITIES, **options))
    list(operator.offer(batch_of(STREAM)))
    return operator


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"identity": {"relation": "cities", "version": 2, "shard": 0}}, "version 1, the operator has 2"),
        ({"identity": {"relation": "towns", "version": 1, "shard": 0}}, "relation 'cities', the operator has 'towns'"),
        ({"identity": {"relation": "cities", "version": 1, "shard": 1}}, "shard 0, the operator has 1"),
        ({"how": "left"}, "how 'inner', the operator has 'left'"),
        ({"ordered": True}, "ordered False, the operator has True"),
        ({"code_kind": "xxhash64"}, "code_kind 'value', the operator has 'xxhash64'"),
        ({"condition": Comparison("t", "<", "until")}, "condition None"),
    ],
)
def test_snapshot_of_something_else_is_refused(kind: str, change: dict[str, Any], message: str) -> None:
    saved = waiting_operator(kind).snapshot()
    other = waiting_operator(kind, **change)
    before = state_of(other)
    with pytest.raises(StateError, match=message):
        other.restore(saved)
    assert state_of(other) == before


def test_snapshot_of_another_version_is_refused_even_where_nobody_named_the_relation(kind: str) -> None:
    table = pa.Table.from_pylist(CITIES, schema=CITY_SCHEMA)
    codes = [row["id"] for row in CITIES]
    shards = [MemoryShard(table, codes, version=version) for version in (1, 2)]
    first, second = (OPERATORS[kind](spec_of(CITIES, shard=shard, identity={})) for shard in shards)
    with pytest.raises(StateError, match="shard_version"):
        second.restore(first.snapshot())


def test_snapshot_of_another_operator_is_refused(kind: str) -> None:
    operator = waiting_operator(kind)
    before = state_of(operator)
    saved = replace(operator.snapshot(), kind="something else")
    with pytest.raises(StateError, match="snapshot is of 'something else'"):
        operator.restore(saved)
    assert state_of(operator) == before


@pytest.mark.parametrize("damage", ["values", "metrics", "chunks", "no window", "no chunks"])
def test_damaged_snapshot_is_refused(kind: str, damage: str) -> None:
    saved = waiting_operator(kind).snapshot()
    values = dict(saved.values)
    if damage == "values":
        values = {}
    elif damage == "metrics":
        values["metrics"] = {"no such counter": 1}
    elif damage == "chunks":
        values["chunks"] = [["x", 0, 0]]
    tables = dict(saved.tables)
    if damage.startswith("no "):
        if not values["chunks"]:
            # Nothing waits in it: a window that nobody accounts for is as wrong.
            values["chunks"] = [[1, 0, 0]]
        elif damage == "no window":
            del tables["window"]
        else:
            values["chunks"] = []
    operator = waiting_operator(kind)
    before = state_of(operator)
    with pytest.raises(StateError):
        operator.restore(Snapshot(saved.kind, saved.fingerprint, tables, values))
    assert state_of(operator) == before


def test_offer_that_is_given_up_has_put_out_what_it_accepted(kind: str) -> None:
    spec = spec_of(CITIES, how="left")
    operator = OPERATORS[kind](replace(spec, budget=Budget(minimum_of(kind, spec))))
    offered = operator.offer(batch_of([{"id": None, "t": number} for number in range(200)]))
    given = next(offered).num_rows
    offered.close()  # type: ignore[attr-defined]
    assert operator.metrics.stream_tuples_in == operator.metrics.unmatched_tuples == given < 200


def test_block_joined_in_part_keeps_its_size(kind: str) -> None:
    """The pairs that are done with are counted, so a shorter block would lose or repeat results."""
    spec = spec_of([{"id": 2, "city": "Oslo", "until": number} for number in range(400)], block_rows=400)
    operator = OPERATORS[kind](replace(spec, budget=Budget(minimum_of(kind, spec) + 4_000)))
    rows = [row for batch in operator.offer(batch_of([{"id": 2, "t": 0}])) for row in batch.to_pylist()]
    step = operator.step()
    rows += [row for batch in itertools.islice(step, 1) for row in batch.to_pylist()]
    step.close()  # type: ignore[attr-defined]
    if operator.pending and len(rows) < 400:
        with suppress(PlanError):
            operator.retune(block_rows=1)
    rows += [row for batch in operator.drain() for row in batch.to_pylist()]
    assert len(rows) == 400


def test_snapshot_that_does_not_fit_the_budget_is_refused(kind: str) -> None:
    rows = [{"id": 2, "t": number} for number in range(500)]
    operator = OPERATORS[kind](spec_of(CITIES))
    list(operator.offer(batch_of(rows)))
    small = OPERATORS[kind](replace(operator.spec, budget=Budget(minimum_of(kind, operator.spec))))
    if operator.pending == 0:
        small.restore(operator.snapshot())
        assert small.metrics.stream_tuples_in == 500, "nothing waits, so everything fits"
        assert small.metrics.output_rows == 1000
        return
    before = state_of(small)
    with pytest.raises(BudgetError, match="too small"):
        small.restore(operator.snapshot())
    assert state_of(small) == before


@pytest.mark.parametrize("calibrated", [False, True])
def test_explain_tells_what_it_does_now(kind: str, calibrated: bool) -> None:
    operator = waiting_operator(kind)
    list(operator.drain())
    plan = operator.explain(CostFactors.of_papers(probe_s=1e-7, output_s=1e-7) if calibrated else None)
    assert plan.strategy == kind
    assert plan.block_rows == operator.block_rows
    assert plan.budget_bytes == operator.budget.total_bytes
    assert plan.total_bytes == operator.size()
    assert plan.service_rate > 0
    assert kind in plan.text()
    assert plan.as_dict()["strategy"] == kind


def test_counters_go_on_after_a_restore(kind: str) -> None:
    operator = waiting_operator(kind)
    fresh = OPERATORS[kind](operator.spec)
    fresh.restore(through_storage(operator.snapshot()))
    list(fresh.drain())
    assert fresh.metrics.stream_tuples_in == len(STREAM)
    assert fresh.metrics.tuples_left == len(STREAM)


# ================================================================ shedding


SHEDDING = [Random(rate=0.5, seed=3), Random(rate=1.0), OldestFirst(), LeastJoinedFirst()]


@pytest.mark.parametrize("policy", SHEDDING, ids=lambda policy: f"{policy.name}-{getattr(policy, 'rate', '')}")
@EVERY_JOIN_TYPE
def test_kept_output_is_exact_for_the_kept_tuples(kind: str, how: Any, policy: Any) -> None:
    rows = [{"id": number % 5, "t": number} for number in range(400)]
    spec = spec_of(CITIES, how=how, select=("city",), shed=policy)
    spec = replace(spec, budget=Budget(minimum_of(kind, spec) + 200))
    operator = OPERATORS[kind](spec)
    batch = batch_of(rows)
    output = drive(operator, [batch.slice(start, 40) for start in range(0, 400, 40)])
    metrics = operator.metrics
    assert metrics.tuples_left == 400
    assert set(metrics.shed) <= {policy.name}
    given = rows_of(output)
    given_t = {row["t"] for row in given}
    # What was kept and gives nothing by itself cannot be seen in the output, so exactness is asked of what was given.
    expected = join_oracle([row for row in rows if row["t"] in given_t], CITIES, "id", how, select=["city"])
    assert_same_rows(given, expected)
    assert (
        len(given_t)
        == {
            "inner": metrics.matched_tuples,
            "semi": metrics.matched_tuples,
            "anti": metrics.unmatched_tuples,
            "left": metrics.matched_tuples + metrics.unmatched_tuples,
        }[how]
    )


@pytest.mark.parametrize("policy", SHEDDING, ids=lambda policy: f"{policy.name}-{getattr(policy, 'rate', '')}")
def test_nothing_is_shed_while_the_input_fits(kind: str, policy: Any) -> None:
    operator = OPERATORS[kind](spec_of(CITIES, shed=policy))
    drive(operator, [batch_of(STREAM)] * 5, expected=join_oracle(STREAM * 5, CITIES, "id"))
    assert operator.metrics.shed_tuples == 0


def test_nothing_is_shed_unless_asked_for(kind: str) -> None:
    rows = [{"id": number % 5, "t": number} for number in range(400)]
    spec = spec_of(CITIES)
    operator = OPERATORS[kind](replace(spec, budget=Budget(minimum_of(kind, spec))))
    drive(operator, [batch_of(rows)], expected=join_oracle(rows, CITIES, "id"))
    assert operator.metrics.shed == {}


def test_every_error_is_one_of_ours(kind: str) -> None:
    with pytest.raises(DovetailError):
        OPERATORS[kind](spec_of(CITIES, how="outer"))
