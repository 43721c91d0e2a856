"""Every semi-stream join against the oracle on streams of some hundred tuples, so that caches fill, hit and evict.

What an example is drawn from is in `dovetail.testing.long_streams`. Besides the rows, it is checked that what is to be
tested did happen: over all examples of an operator, its cache hit, held negative entries, evicted and took values in.
"""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

from dovetail.core.errors import BudgetError, PlanError
from dovetail.core.memory import Budget
from dovetail.core.metrics import OperatorMetrics
from dovetail.joins import (
    OPERATORS,
    AutoJoin,
    BalancedJoin,
    JoinSpec,
    LeastJoinedFirst,
    OldestFirst,
    Random,
    Range,
    SemiStreamOperator,
)
from dovetail.testing.driver import Driver
from dovetail.testing.long_streams import LongCase, long_cases
from dovetail.testing.rows import assert_same_groups, assert_same_rows
from dovetail.testing.schedules import random_schedule

# 40 in CI, 8 in the runs with switches. Nearly all of an example follows from seeds, so there is little to shrink.
EXAMPLES, FULL_EXAMPLES = settings().max_examples * 2 // 5, 40
PHASES = (Phase.explicit, Phase.generate)
CACHED = ["balanced", "auto"]
EXTRA_BYTES = st.sampled_from([0, 300, 4_000, 20_000, 60_000])
POLICIES = [Random(rate=0.5, seed=3), OldestFirst(), LeastJoinedFirst()]


def smaller_blocks(operator: SemiStreamOperator) -> None:
    retune(operator, max(1, operator.block_rows // 2))


def larger_blocks(operator: SemiStreamOperator) -> None:
    retune(operator, operator.block_rows + 3)


def retune(operator: SemiStreamOperator, block_rows: int) -> None:
    try:
        operator.retune(block_rows=block_rows)
    except (PlanError, BudgetError) as refusal:
        note(f"refused: {refusal}")


def other_budget(operator: SemiStreamOperator) -> None:
    """Shrink where that is possible, and grow again; a refusal must leave everything as it was."""
    before = operator.budget.total_bytes
    try:
        operator.resize_budget(before * 3 // 4)
    except BudgetError:
        operator.resize_budget(before + 500)


CHANGES = [smaller_blocks, larger_blocks, other_budget]


def make(kind: str, spec: JoinSpec, options: dict[str, Any]) -> SemiStreamOperator:
    if kind == "balanced":
        return BalancedJoin(spec, **options)
    return AutoJoin(spec, **options) if kind == "auto" else OPERATORS[kind](spec)


def minimum_budget(kind: str, spec: JoinSpec, options: dict[str, Any]) -> int:
    with pytest.raises(BudgetError) as refused:
        make(kind, replace(spec, budget=Budget(1)), options)
    assert refused.value.minimum_bytes is not None
    return refused.value.minimum_bytes


def run(kind: str, data: st.DataObject, shed: Any = None) -> OperatorMetrics:
    """Run one example, compare what comes out with the oracle, and give the operator's counters."""
    case: LongCase = data.draw(long_cases())
    how: Any = data.draw(st.sampled_from(["inner", "left", "semi", "anti"]))
    ordered, is_residual = data.draw(st.booleans()), data.draw(st.sampled_from([False, False, True]))
    options: dict[str, Any] = {}
    if kind in CACHED:
        options["switching_factor"] = data.draw(st.sampled_from([0.02, 1.0]))
        options["objective"] = data.draw(st.sampled_from(["rate", "memory"]))
    batches = case.batches(seed=data.draw(st.integers(0, 99)), max_batch_rows=data.draw(st.sampled_from([20, 90])))
    spec = JoinSpec(
        shard=case.shard(),
        stream_schema=batches[0].schema,
        on=case.on,
        how=how,
        code_kind=case.code_kind,
        condition=Range("x", "low", "high") if is_residual else None,
        block_rows=data.draw(st.sampled_from([None, 7, 32])),
        chunk_rows=data.draw(st.sampled_from([None, None, 9])),
        ordered=ordered,
        shed=shed,
        identity={"relation": "case", "version": 1, "shard": 0},
    )
    spec = replace(spec, budget=Budget(minimum_budget(kind, spec, options) + data.draw(EXTRA_BYTES)))
    large = replace(spec, budget=Budget(spec.budget.total_bytes + 300_000))
    driver = Driver(
        make(kind, spec, options),
        batches,
        make_operator=lambda: make(kind, large, options),
        measure_arrays=data.draw(st.sampled_from([False, False, False, True])),
        borrowed=[spec.shard, spec, large],
    )
    seed = data.draw(st.integers(0, 2**32 - 1))
    snapshots = data.draw(st.sampled_from([False, False, True]))
    changes = CHANGES if data.draw(st.booleans()) else []
    driver.run(random_schedule(seed, len(batches), snapshots, changes, mean_actions_between=0.4, give_ups=True))
    metrics, given_rows = driver.operator.metrics, driver.rows()
    kept = case.stream_rows
    if shed is not None:
        # What was kept and gives nothing cannot be seen in the output, so exactness is asked of what was given.
        seen = {row["t"] for row in given_rows}
        kept = [row for row in case.stream_rows if row["t"] in seen]
        count = {
            "inner": metrics.matched_tuples,
            "semi": metrics.matched_tuples,
            "anti": metrics.unmatched_tuples,
            "left": metrics.matched_tuples + metrics.unmatched_tuples,
        }[how]
        assert len(kept) == count, driver.history()
    live, condition = case.live_case(kept), case.in_range if is_residual else None
    if ordered:
        assert_same_groups(given_rows, live.expected_groups(how, condition), context=driver.history())
    else:
        assert_same_rows(given_rows, live.expected(how, condition), context=driver.history())
    return metrics


@pytest.mark.parametrize("kind", CACHED)
def test_oracle_long_streams_through_a_cache(kind: str) -> None:
    total = OperatorMetrics()

    @settings(max_examples=EXAMPLES, phases=PHASES)
    @given(data=st.data())
    def examples(data: st.DataObject) -> None:
        total.merge(run(kind, data))

    examples()
    happened = {
        name: getattr(total, name)
        for name in ("cache_hits", "negative_hits", "cache_insertions", "negative_insertions", "cache_evictions")
    }
    print(happened)
    # A handful of examples, as in the runs with switches, need not have met everything.
    assert all(happened.values()) or EXAMPLES < FULL_EXAMPLES, happened


@pytest.mark.parametrize("kind", [kind for kind in OPERATORS if kind not in CACHED])
@settings(max_examples=EXAMPLES // 4, phases=PHASES)
@given(data=st.data())
def test_oracle_long_streams_without_a_cache(kind: str, data: st.DataObject) -> None:
    run(kind, data)


@pytest.mark.parametrize("kind", [kind for kind in OPERATORS if kind not in ("index_nested_loop", "lookup")])
def test_oracle_what_is_kept_of_a_long_stream_is_exact(kind: str) -> None:
    total = OperatorMetrics()

    @settings(max_examples=EXAMPLES // 4, phases=PHASES)
    @given(data=st.data(), policy=st.sampled_from(POLICIES))
    def examples(data: st.DataObject, policy: Any) -> None:
        total.merge(run(kind, data, shed=policy))

    examples()
    assert total.shed_tuples > 0 or EXAMPLES < FULL_EXAMPLES
