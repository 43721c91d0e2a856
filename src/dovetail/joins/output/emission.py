"""Emits the results of tuples at once: all results of a tuple in one batch, as many tuples as fit.

Results of a lookup are not found again, so tuples count as accepted, or leave the window, with the batch of their
results. The batch is built first, then its tuples are counted, then it is returned.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.output.columns import StreamSide
from dovetail.joins.output.results import Results
from dovetail.joins.spec import JoinSpec
from dovetail.joins.window.tuple_store import Positions

__all__ = ["Candidates", "emit_tuples"]

Count = Callable[[int, int, BoolArray], None]


@dataclass(frozen=True)
class Candidates:
    """Relation rows with equal codes, as pairs (tuple, row of `relation`), the tuples ascending."""

    relation: pa.RecordBatch
    owners: Positions
    rows: Positions
    is_single: bool = False  # whether every tuple has at most one


def emit_tuples(
    spec: JoinSpec,
    results: Results,
    side: StreamSide,
    places: Int64Array | None,
    start: int,
    stop: int,
    found: Candidates,
    count: Count,
    was_matched: BoolArray | None = None,
    widest: int | None = None,
    require_room: Callable[[int], None] | None = None,
) -> Generator[pa.RecordBatch, None, int]:
    """Emit the tuples ``[start, stop)`` in order; if a condition raises, nothing changes.

    Returns where it stopped: at ``stop``, or before a tuple whose results alone do not fit the free memory. The columns
    of tuple i are at ``places[i]`` of `side`, or at i. `count` is called with tuples [first, last) and which tuples
    match, before the batch with their results is returned. `was_matched` are tuples that have emitted matches before.
    `require_room` is called with the next tuple before its results, of at most `widest` bytes each, are built.
    """
    owners, rows, plan = found.owners, found.rows, results.plan
    if plan.verifies and owners.size:
        asked = owners if places is None else places[owners]
        kept = np.flatnonzero(plan.verify(side, asked, found.relation, rows))
        results.metrics.pairs_rejected += int(owners.size - kept.size)
        owners, rows = owners[kept], rows[kept]
    has_match = np.zeros(stop, np.bool_) if was_matched is None else was_matched[:stop].copy()
    has_match[owners] = True
    given, numbers = _results(spec, start, stop, owners, rows, has_match, found.is_single)

    def build(low: int, high: int) -> pa.RecordBatch:
        positions = given[low:high] if places is None else places[given[low:high]]
        if numbers is None:
            return plan.unmatched(side, positions)
        return plan.joined(side, positions, found.relation, numbers[low:high])

    at, first = start, 0
    while first < given.size:
        if require_room is not None:
            require_room(int(given[first]))
        last, batch, size_bytes = results.fit(given.size, build, first, widest)
        if last < given.size:
            last = int(np.searchsorted(given, given[last], side="left"))
            if last <= first:
                count(at, int(given[first]), has_match)
                return int(given[first])
            batch = build(first, last)
            size_bytes = results.bytes_of(batch)
        next_tuple = int(given[last]) if last < given.size else stop
        results.reserve(size_bytes)
        count(at, next_tuple, has_match)
        yield from results.hand_out(batch, size_bytes)
        del batch  # no longer accounted for, so it must not be held while the next one is built
        at, first = next_tuple, last
    count(at, stop, has_match)
    return stop


def _results(
    spec: JoinSpec,
    start: int,
    stop: int,
    owners: Positions,
    rows: Positions,
    has_match: BoolArray,
    is_single: bool,
) -> tuple[Int64Array, Positions | None]:
    """What is emitted for tuples: the tuple of each result, ascending, and the relation's row, -1 for none."""
    tuples = np.arange(start, stop)
    if spec.how in ("semi", "anti"):
        return tuples[has_match[start:stop] == (spec.how == "semi")], None
    if spec.how == "inner":
        return np.asarray(owners, np.int64), rows
    is_unmatched = ~has_match[start:stop]
    if not is_unmatched.any():
        return np.asarray(owners, np.int64), rows
    unmatched = tuples[is_unmatched]
    if is_single and owners.size + unmatched.size == tuples.size:
        numbers = np.full(tuples.size, -1, np.int64)
        numbers[owners - start] = rows
        return tuples, numbers
    given = np.concatenate([owners, unmatched])
    order = np.argsort(given, kind="stable")
    return given[order], np.concatenate([rows, np.full(unmatched.size, -1, np.int64)])[order]
