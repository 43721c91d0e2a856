"""Every strategy in a process of its own: what the process takes is what the budget says, and hardly more."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.joins import OPERATORS
from dovetail.relation import Relation
from dovetail.testing.faults import load_program

PROCESS = load_program(Path(__file__).with_name("joining_process.py"))
EVERY_STRATEGY = pytest.mark.parametrize("kind", list(OPERATORS))

# A tenth of the budget: what is computed for a block or a batch is not accounted for by the byte (positions, masks),
# and allocators round up to pages.
MOST_OF_BUDGET = 1.1
# Whatever the budget: objects of Python and Arrow, small arrays in new arenas of the interpreter and of malloc.
CONSTANT_BYTES = 4_000_000
# What Arrow's usual allocator keeps for later, more or less of it after the warm-up.
USUAL_ALLOCATOR_BYTES = 16_000_000
# Those that keep tuples or pages: their process must grow with the budget, or nothing was measured.
FILLED = ("mesh", "hybrid", "balanced", "index_nested_loop")
LEAST_OF_BUDGET = 0.4


def allowed(budget: int) -> int:
    return int(budget * MOST_OF_BUDGET) + CONSTANT_BYTES


def assert_right(measured: dict[str, Any], streams: list[str], rows_by_key: list[np.ndarray], tuples: int) -> None:
    """Count and sums of what came out, against those of the join of as many tuples as were taken."""
    counts, sums = rows_by_key
    for name, part in zip(streams, measured["parts"], strict=True):
        keys = PROCESS.stream_keys(name, counts.size, tuples)[: part["tuples"]]
        assert part["rows"] == counts[keys].sum()
        assert part["of_rows"] == sums[keys].sum()
        assert part["of_tuples"] == (counts[keys] * np.arange(keys.size)).sum()


def of_large_relation() -> list[np.ndarray]:
    """For each key how many rows it has, and the sum of their numbers."""
    numbers = np.arange(600_000)
    keys = np.where(numbers % 10 == 0, numbers // 100, numbers)
    return [np.bincount(keys, minlength=600_000), np.bincount(keys, numbers, 600_000).astype(np.int64)]


@EVERY_STRATEGY
@pytest.mark.parametrize(
    ("budget", "io"),
    [
        pytest.param(8_000_000, "map", id="8MB"),
        pytest.param(8_000_000, "buffered", id="8MB-buffered"),
        pytest.param(32_000_000, "map", id="32MB"),
    ],
)
def test_process_takes_no_more_than_the_budget(
    nursery: Any, large_relation: Relation, kind: str, budget: int, io: str
) -> None:
    least = 200_000 if kind in ("mesh", "hybrid", "balanced") else 4_096
    measured = nursery.measure(kind, budget, large_relation, io=io, least=least, seconds=0.3)
    assert measured["held"] <= budget
    assert measured["above"] <= allowed(budget)
    if kind in FILLED:
        assert measured["above"] >= LEAST_OF_BUDGET * budget
        assert measured["samples"] >= 20
    assert_right(measured, ["uniform", "zipf"], of_large_relation(), 400_000)


@pytest.mark.parametrize("kind", ["lookup", "auto"])
def test_usual_allocator_keeps_a_constant_besides(usual_nursery: Any, large_relation: Relation, kind: str) -> None:
    budget = 32_000_000
    measured = usual_nursery.measure(kind, budget, large_relation, least=50_000, seconds=0.3)
    assert measured["above"] <= allowed(budget) + USUAL_ALLOCATOR_BYTES
    assert_right(measured, ["uniform", "zipf"], of_large_relation(), 400_000)


# ================================================================ wide rows

BUDGET = 64_000_000
ONCE_EACH = [np.ones(2_000, np.int64), np.arange(2_000)]


@EVERY_STRATEGY
def test_hot_key_with_wide_documents(nursery: Any, wide_relation: Relation, kind: str) -> None:
    # All tuples come in one batch: their results together are 5 GB, or 1 GB where a strategy copies more than lookups.
    tuples = 20_000 if kind == "lookup" else 4_000
    how = {"streams": ["hot"], "tuples": tuples, "batch_rows": tuples, "distinct": 2_000}
    measured = nursery.measure(kind, BUDGET, wide_relation, **how)
    assert measured["above"] <= allowed(BUDGET)
    assert max(part["most_bytes"] for part in measured["parts"]) <= BUDGET
    assert_right(measured, ["hot"], ONCE_EACH, tuples)


@EVERY_STRATEGY
@pytest.mark.parametrize("how", ["inner", "left"])
def test_wide_tuples(nursery: Any, wide_relation: Relation, kind: str, how: str) -> None:
    streams, text_bytes, batch_rows = ["uniform", "zipf"], 20_000, 100
    measured = nursery.measure(
        kind,
        BUDGET,
        wide_relation,
        how=how,
        streams=streams,
        tuples=5_000,
        batch_rows=batch_rows,
        text_bytes=text_bytes,
        # Half of the tuples match nothing.
        distinct=4_000,
        shift=1,
    )
    # Tuples that enter are copied out of the batch that brought them.
    assert measured["above"] <= allowed(BUDGET) + batch_rows * text_bytes
    if kind in ("mesh", "hybrid", "balanced"):
        assert measured["above"] >= LEAST_OF_BUDGET * BUDGET
    for name, part in zip(streams, measured["parts"], strict=True):
        keys = PROCESS.stream_keys(name, 4_000, 5_000) + 1
        matched = keys[keys < 2_000]
        assert part["rows"] == (matched.size if how == "inner" else keys.size)
        assert part["of_rows"] == matched.sum()


# ================================================================ what does not fit


@EVERY_STRATEGY
def test_document_wider_than_the_budget_is_refused(nursery: Any, too_wide_relation: Relation, kind: str) -> None:
    budget = 8_000_000
    how = {"streams": ["hot"], "tuples": 100, "distinct": 2_000}
    measured = nursery.measure(kind, budget, too_wide_relation, **how)
    assert "error" in measured
    assert measured["minimum_bytes"] > 20_000_000
    assert str(measured["minimum_bytes"]) in measured["error"]
    assert measured["above"] <= allowed(budget), "it is refused before it is copied"


@EVERY_STRATEGY
def test_tuple_wider_than_the_budget_is_refused(nursery: Any, wide_relation: Relation, kind: str) -> None:
    budget = 1_000_000
    how = {"streams": ["uniform"], "tuples": 8, "batch_rows": 4, "text_bytes": 5_000_000, "distinct": 1_000}
    measured = nursery.measure(kind, budget, wide_relation, shift=1, **how)
    assert "error" in measured
    assert measured["minimum_bytes"] > 5_000_000
    assert str(measured["minimum_bytes"]) in measured["error"]
    assert measured["above"] <= allowed(budget)
