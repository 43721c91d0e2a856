"""Every semi-stream join against the oracle: random streams, relations, budgets, b, w, interleavings and restarts.

An example is a stream, a relation (keys skewed, repeated, unmatched, NULL, NaN; codes real or colliding), a join and a
schedule of offers, steps, drains, snapshots with restore, and changes of b, w and budget. The driver holds the operator
to its promises after every action; at the end the rows must be the oracle's.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from dovetail.core.errors import BudgetError, PlanError
from dovetail.core.memory import Budget
from dovetail.joins import OPERATORS, AllOf, BatchPredicate, Comparison, JoinSpec, Range, SemiStreamOperator
from dovetail.testing.batches import stream_batches
from dovetail.testing.driver import drive
from dovetail.testing.oracle import join_oracle, join_oracle_by_tuple
from dovetail.testing.shard import MemoryShard
from dovetail.testing.strategies import JoinCase, join_cases, schedules

EVERY_OPERATOR = pytest.mark.parametrize("kind", list(OPERATORS))
JOIN_TYPES = st.sampled_from(["inner", "left", "semi", "anti"])
# Where the window is only just large enough, tuples wait for room in most examples.
EXTRA_BYTES = st.sampled_from([0, 1, 200, 2_000, 20_000])
SMALL = st.none() | st.integers(1, 9)
# 100 in CI: with four tests for each operator, and one more for mesh, more than 2,000 examples in all.
EXAMPLES = settings().max_examples


def minimum_budget(kind: str, spec: JoinSpec) -> int:
    """The least budget that the operator accepts for this join."""
    with pytest.raises(BudgetError) as refused:
        OPERATORS[kind](replace(spec, budget=Budget(1)))
    assert refused.value.minimum_bytes is not None
    return refused.value.minimum_bytes


def spec_of(case: JoinCase, kind: str, extra_bytes: int, **options: Any) -> JoinSpec:
    batches = case.batches()
    spec = JoinSpec(
        shard=case.shard(),
        stream_schema=batches[0].schema,
        on=case.on,
        code_kind=case.code_kind,
        identity={"relation": "case", "version": 1, "shard": 0},
        **options,
    )
    return replace(spec, budget=Budget(minimum_budget(kind, spec) + extra_bytes))


def smaller_blocks(operator: SemiStreamOperator) -> None:
    retune(operator, block_rows=max(1, operator.block_rows - 1), chunk_rows=2)


def single_row_blocks(operator: SemiStreamOperator) -> None:
    retune(operator, block_rows=1, chunk_rows=5)


def retune(operator: SemiStreamOperator, **changes: int) -> None:
    """Change b and w, which is refused while a block is joined in part."""
    try:
        operator.retune(**changes)
    except PlanError:
        note("refused")


def larger_budget(operator: SemiStreamOperator) -> None:
    operator.resize_budget(operator.budget.total_bytes + 5_000)


def smaller_budget(operator: SemiStreamOperator) -> None:
    """Shrink where that is possible; a refusal must leave everything as it was, which the driver checks."""
    try:
        operator.resize_budget(max(1, operator.budget.total_bytes - 3_000))
    except BudgetError:
        note("refused")


CHANGES = [smaller_blocks, single_row_blocks, larger_budget, smaller_budget]


@EVERY_OPERATOR
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_oracle_any_interleaving_gives_the_exact_join(kind: str, data: st.DataObject) -> None:
    case = data.draw(join_cases(max_stream_rows=60))
    how = data.draw(JOIN_TYPES)
    spec = spec_of(
        case, kind, data.draw(EXTRA_BYTES), how=how, block_rows=data.draw(SMALL), chunk_rows=data.draw(SMALL)
    )
    batches = case.batches(seed=data.draw(st.integers(0, 99)), max_batch_rows=data.draw(st.sampled_from([1, 8, 40])))
    drive(
        OPERATORS[kind](spec),
        batches,
        data.draw(schedules(len(batches), calls=CHANGES, give_ups=True)),
        make_operator=lambda: OPERATORS[kind](replace(spec, budget=Budget(200_000))),
        expected=case.expected(how),
    )


@EVERY_OPERATOR
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_oracle_size_is_what_arrays_hold(kind: str, data: st.DataObject) -> None:
    case = data.draw(join_cases(max_stream_rows=60))
    how, ordered = data.draw(JOIN_TYPES), data.draw(st.booleans())
    spec = spec_of(case, kind, data.draw(EXTRA_BYTES), how=how, ordered=ordered)
    operator = OPERATORS[kind](spec)
    batches = case.batches(seed=data.draw(st.integers(0, 99)), max_batch_rows=30)
    drive(
        operator,
        batches,
        data.draw(schedules(len(batches), snapshots=False, give_ups=True)),
        measure_arrays=True,
        borrowed=[spec],
        expected=None if ordered else case.expected(how),
        expected_groups=case.expected_groups(how) if ordered else None,
    )


@EVERY_OPERATOR
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_oracle_ordered_output_is_in_stream_order(kind: str, data: st.DataObject) -> None:
    case = data.draw(join_cases(max_stream_rows=60))
    how = data.draw(JOIN_TYPES)
    spec = spec_of(
        case,
        kind,
        data.draw(EXTRA_BYTES),
        how=how,
        ordered=True,
        block_rows=data.draw(SMALL),
        chunk_rows=data.draw(SMALL),
    )
    batches = case.batches(seed=data.draw(st.integers(0, 99)), max_batch_rows=data.draw(st.sampled_from([1, 8, 40])))
    drive(
        OPERATORS[kind](spec),
        batches,
        data.draw(schedules(len(batches), calls=CHANGES, give_ups=True)),
        make_operator=lambda: OPERATORS[kind](replace(spec, budget=Budget(200_000))),
        expected_groups=case.expected_groups(how),
    )


@EVERY_OPERATOR
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_oracle_residual_conditions_hold_besides_equality(kind: str, data: st.DataObject) -> None:
    case = data.draw(join_cases(max_stream_rows=40))
    how, ordered = data.draw(JOIN_TYPES), data.draw(st.booleans())
    condition = data.draw(
        st.sampled_from(
            [
                Range("x", "low", "high"),
                AllOf(Comparison("x", ">=", "low"), Comparison("x", "<", "high")),
                BatchPredicate(Range("x", "low", "high").mask, ["x"], ["low", "high"], name="in_range"),
            ]
        )
    )
    spec = spec_of(case, kind, data.draw(EXTRA_BYTES), how=how, ordered=ordered, condition=condition)
    batches = case.batches(seed=data.draw(st.integers(0, 99)), max_batch_rows=20)
    drive(
        OPERATORS[kind](spec),
        batches,
        data.draw(schedules(len(batches), calls=CHANGES, give_ups=True)),
        make_operator=lambda: OPERATORS[kind](replace(spec, budget=Budget(200_000))),
        expected=None if ordered else case.expected(how, case.in_range),
        expected_groups=case.expected_groups(how, case.in_range) if ordered else None,
    )


@pytest.mark.parametrize("kind", [kind for kind, operator in OPERATORS.items() if not operator.needs_equality])
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_oracle_conditions_without_equality(kind: str, data: st.DataObject) -> None:
    case = data.draw(join_cases(max_stream_rows=40, key_kinds=["integer"]))
    how, ordered = data.draw(JOIN_TYPES), data.draw(st.booleans())
    in_range = Range("x", "low", "high")
    condition = data.draw(st.sampled_from([in_range, BatchPredicate(in_range.mask, name="in_range")]))
    columns = ["v", "low", "high"]
    codes = [None if row[case.relation_key[0]] is None else 0 for row in case.relation_rows]
    shard = MemoryShard(case.relation_table(), codes, columns, include_null_keys=True)
    batches = stream_batches(case.stream_rows, [], case.stream_schema, data.draw(st.integers(0, 99)), 20)
    spec = JoinSpec(shard=shard, stream_schema=batches[0].schema, on=(), how=how, condition=condition, ordered=ordered)
    spec = replace(spec, budget=Budget(minimum_budget(kind, spec) + data.draw(EXTRA_BYTES)))
    rows = [{name: row[name] for name in columns} for row in case.relation_rows]
    oracle = join_oracle_by_tuple if ordered else join_oracle
    expected: Any = oracle(case.stream_rows, rows, (), how, case.in_range, equi=False, select=columns)
    drive(
        OPERATORS[kind](spec),
        batches,
        data.draw(schedules(len(batches), calls=CHANGES, give_ups=True)),
        make_operator=lambda: OPERATORS[kind](replace(spec, budget=Budget(200_000))),
        expected=None if ordered else expected,
        expected_groups=expected if ordered else None,
    )
