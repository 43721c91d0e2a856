"""Batched lookups: each distinct code of a batch is looked up once, and nothing waits.

Rows are gathered in disk order and then taken as often as tuples need them, in stream order. A batch is cut into pieces
by the number and bytes of its results before rows are read, so a hot row of a megabyte stays within the budget. A tuple
with more results than one batch holds is emitted in several.

Where rows are read from a device, a batch may be much larger (`sweeps`): as many tuples as the budget has room for.
Their rows are read in one pass in disk order, in which reads that are close to each other become one, and held until
the tuples are answered.

Tuples that wait in a window can be looked up too. A tuple that has met part of the relation in a scan is joined with
the rest only.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.memory_plan import MAX_BATCH_ROWS, MemoryPlan, plan_memory
from dovetail.joins.output.columns import BatchRows
from dovetail.joins.output.emission import Candidates, emit_tuples
from dovetail.joins.phases.admission import Offered
from dovetail.joins.phases.alone import Alone
from dovetail.joins.phases.row_source import HELD_PIECE_BYTES, Found, HeldRows, IndexedRows, RowSource
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.leaving import Leaving
from dovetail.kernels.distinct import distinct_codes
from dovetail.relation.widths import fixed_row_bytes, row_widths, widest_row

__all__ = ["LOOKUP_BYTES_PER_TUPLE", "Lookup", "Observe", "plan_lookups"]

Observe = Callable[[Int64Array, Int64Array, Found], None]
"""Called with an accepted batch: its distinct codes, the number of tuples of each, and what was found."""

LOOKUP_BYTES_PER_TUPLE = 12 * 8  # codes, numbers, places and counts during a lookup
_MOST_BATCH_BYTES = 32 << 20  # larger output batches have no benefit
_OUTPUT_SHARE = 4
_FEWEST_TUPLES = 16
_BYTES_PER_PAIR = 6 * 8  # query, position, place, owner, row and order
_SWEEP_SHARE = 0.9  # of the free memory, for the tuples of a sweep and their rows
_OUTPUT_ROWS_BESIDE = 8  # of the widest kind that must fit beside a sweep
_MOST_HELD_BYTES = 1 << 30  # the offsets of a column of strings reach twice as far


def plan_lookups(who: str, spec: JoinSpec) -> MemoryPlan:
    """Divide a budget: the resident index, output in flight, and the memory of a batch of lookups."""
    row_bytes = LOOKUP_BYTES_PER_TUPLE + int(spec.shard.row_bytes) + 1
    other_bytes = spec.shard.index_bytes + _FEWEST_TUPLES * row_bytes
    return plan_memory(
        spec, who=who, has_window=False, other_bytes=other_bytes, output_share=_OUTPUT_SHARE, is_block_in_place=True
    )


@dataclass(frozen=True)
class _Pairs:
    """Candidates of a batch of tuples: tuple i has positions ``order[first[i] : first[i] + counts[i]]``."""

    first: Int64Array
    counts: Int64Array
    positions: Int64Array
    distinct: Int64Array
    tuples_of: Int64Array  # the number of tuples per distinct code
    found: Found
    source: RowSource


class Lookup:
    """Answers tuples by index, in batches; `observe` learns of every batch."""

    def __init__(self, state: JoinState, source: RowSource, observe: Observe | None = None) -> None:
        self.state, self.source, self.observe = state, source, observe
        self.sweeps = False  # whether as many tuples as possible are looked up together
        self._index = IndexedRows(state)
        self._account = state.ledger.reserve("lookup")
        self.alone = Alone(state, self._candidates_of, state.ledger.reserve("alone"))
        self._fixed_stream_bytes = fixed_row_bytes(state.stream_columns)
        self._needs_rows = bool(state.spec.relation_columns) or state.results.plan.verifies

    # ================================================================ tuples that are offered

    def accept(self, offered: Offered, may_drop: bool = True) -> Generator[pa.RecordBatch, None, None]:
        """Accept all tuples and emit their results; none is ever dropped."""
        yield from self.alone.finish()
        start = 0
        try:
            while start < len(offered):
                together = self._tuples_together()
                if self.sweeps:
                    # Sweeps of one length read less than long ones and a short one.
                    left = len(offered) - start
                    together = max(together, -(-left // -(-left // self._tuples_of_sweep())))
                stop = min(start + together, len(offered))
                start += yield from self._look_up(offered.part(start, stop))
        finally:
            self._account.resize(0)

    @property
    def has_room(self) -> bool:
        """Whether lookups fit the memory left by a window."""
        return self.state.ledger.free_bytes // 4 >= _FEWEST_TUPLES * LOOKUP_BYTES_PER_TUPLE

    def _tuples_together(self) -> int:
        """How many tuples to look up together: their data must fit beside the rows and their output."""
        free_bytes = self.state.ledger.free_bytes // 4
        return max(_FEWEST_TUPLES, min(MAX_BATCH_ROWS, free_bytes // LOOKUP_BYTES_PER_TUPLE))

    def _bytes_of_sweep(self) -> int:
        """The memory for the tuples of a sweep and their rows, besides what reading them needs."""
        passing_bytes = self.state.spec.shard.pass_bytes + 2 * HELD_PIECE_BYTES if self._needs_rows else 0
        return min(int(_SWEEP_SHARE * self.state.ledger.free_bytes), _MOST_HELD_BYTES) - passing_bytes

    def _tuples_of_sweep(self) -> int:
        """How many tuples there is room for if all their rows are held; 1 if there is too little for a sweep."""
        shard = self.state.spec.shard
        row_bytes = (shard.row_bytes if self._needs_rows else 0.0) + _BYTES_PER_PAIR
        matches = max(1.0, shard.live_rows / max(1, shard.stats.distinct_codes))
        return max(1, int(self._bytes_of_sweep() / (LOOKUP_BYTES_PER_TUPLE + matches * row_bytes)))

    def _held(self, pairs: _Pairs, rows: pa.RecordBatch) -> _Pairs:
        """The same candidates of tuples with their rows in memory, if there is room for them and for output."""
        if not self._needs_rows or not pairs.positions.size:
            return pairs
        positions = np.sort(pairs.positions, kind="stable")
        most_bytes, widest = self._bytes_of_sweep(), pairs.source.widest_at(positions)
        for_output = int((1.0 - _SWEEP_SHARE) * self.state.ledger.free_bytes)
        if _OUTPUT_ROWS_BESIDE * (widest + widest_row(rows)) > for_output:
            return pairs
        if widest * positions.size > most_bytes:
            widths = pairs.source.widths(positions)
            if (widths * positions.size if isinstance(widths, int) else int(widths.sum())) > most_bytes:
                return pairs
        with_buffers = self._account.held_bytes + self.state.spec.shard.pass_bytes + 2 * HELD_PIECE_BYTES
        before = self._account.held_bytes
        self._account.resize(with_buffers)
        held = HeldRows(pairs.source, positions)
        self._account.resize(before)
        self._account.grow(min(held.nbytes, self.state.ledger.free_bytes))
        self.state.metrics.relation_rows_read += int(positions.size)
        return replace(pairs, source=held)

    def _look_up(self, part: Offered) -> Generator[pa.RecordBatch, None, int]:
        """Look up the tuples of a part, emit their results, and return how many were accepted."""
        state, metrics = self.state, self.state.metrics
        part = part.part(0, self._tuples_within(self.source, part.codes, part.is_null))
        is_null = part.is_null if part.is_null.any() else None
        self._account.resize(LOOKUP_BYTES_PER_TUPLE * len(part))

        def count(first: int, last: int, has_match: BoolArray) -> None:
            matched = int(np.count_nonzero(has_match[first:last]))
            metrics.stream_tuples_in += last - first
            metrics.null_key_tuples += 0 if is_null is None else int(np.count_nonzero(is_null[first:last]))
            metrics.matched_tuples += matched
            metrics.unmatched_tuples += last - first - matched
            state.arrivals += last - first

        def emit_alone(row: int) -> Iterator[pa.RecordBatch]:
            self._account.resize(0)
            return self.alone.emit(part, row, lambda one, has_match: count(0, 1, np.array([has_match])))

        if len(part) == 1 and is_null is None and self._has_very_many(self.source, part.codes):
            yield from emit_alone(0)
            return 1
        pairs = self._find(self.source, part.codes, is_null)
        if len(part) > MAX_BATCH_ROWS:
            pairs = self._held(pairs, part.rows)
        held_bytes = self._account.held_bytes
        side = BatchRows(part.rows, may_share=True)
        widths = self._result_widths(pairs, part.rows)
        self._count_lookups(pairs)
        for start, stop in self._pieces(pairs.counts, widths):
            reached = start
            if not self._is_too_large(start, stop, pairs.counts, widths):
                self._require_room(start, stop, widths)
                found = self._candidates(pairs, start, stop)
                reached = yield from emit_tuples(state.spec, state.results, side, None, start, stop, found, count)
                self._account.resize(held_bytes)
                del found
            if reached < stop:
                del pairs  # with the rows that are held
                yield from emit_alone(reached)
                return reached + 1
        return len(part)

    # ================================================================ finding

    @property
    def _most_pairs(self) -> int:
        """The maximum number of (tuple, row) pairs in memory."""
        return max(self.state.results.max_rows, self.state.ledger.free_bytes // 4 // _BYTES_PER_PAIR)

    def _has_very_many(self, source: RowSource, code: Int64Array) -> bool:
        """Whether one code has more rows than that."""
        if self.state.spec.shard.stats.max_multiplicity <= self._most_pairs:
            return False
        return int(source.count(code)[0]) > self._most_pairs

    def _tuples_within(self, source: RowSource, codes: Int64Array, is_null: BoolArray | None) -> int:
        """How many of the first tuples have few enough rows to be looked up together; at least one."""
        if codes.size * self.state.spec.shard.stats.max_multiplicity <= self._most_pairs:
            return int(codes.size)
        distinct, numbers = distinct_codes(codes)
        counts = source.count(distinct)[numbers]
        if is_null is not None:
            counts[is_null] = 0
        ends = np.cumsum(np.maximum(counts, 1))
        return max(1, int(np.searchsorted(ends, self._most_pairs, side="right")))

    def _find(self, source: RowSource, codes: Int64Array, is_null: BoolArray | None) -> _Pairs:
        """Look up the distinct codes, in the order of the index."""
        keyed = None if is_null is None else np.flatnonzero(~is_null)
        distinct, numbers = distinct_codes(codes if keyed is None else codes[keyed])
        order = np.argsort(distinct)
        rank = np.empty(order.size, np.int64)
        rank[order] = np.arange(order.size)
        distinct, ranks = distinct[order], rank[numbers]
        found = source.find(distinct)
        # The pairs of a query are contiguous, whatever the order of the queries.
        starts = np.flatnonzero(np.diff(found.queries, prepend=-1))
        firsts_of, counts_of = np.zeros(distinct.size, np.int64), np.zeros(distinct.size, np.int64)
        firsts_of[found.queries[starts]] = starts
        counts_of[found.queries[starts]] = np.diff(starts, append=found.queries.size)
        first, counts = firsts_of[ranks], counts_of[ranks]
        if keyed is not None:
            first, counts = _spread(first, keyed, codes.size), _spread(counts, keyed, codes.size)
        tuples_of = np.bincount(ranks, minlength=distinct.size)
        return _Pairs(first, counts, found.positions, distinct, tuples_of, found, source)

    def _count_lookups(self, pairs: _Pairs) -> None:
        metrics, is_cached = self.state.metrics, pairs.found.is_cached
        if is_cached is None:
            metrics.lookups += pairs.distinct.size
        else:
            metrics.lookups += int(np.count_nonzero(~is_cached))
            has_rows = np.zeros(pairs.distinct.size, np.bool_)
            has_rows[pairs.found.queries] = True
            metrics.cache_hits += int(pairs.tuples_of[is_cached & has_rows].sum())
            metrics.negative_hits += int(pairs.tuples_of[is_cached & ~has_rows].sum())
        if self.observe is not None:
            self.observe(pairs.distinct, pairs.tuples_of, pairs.found)

    # ================================================================ tuples that wait

    def answer_waiting(
        self, leaving: Leaving, met_rows: Callable[[Int64Array], tuple[Int64Array, Int64Array]]
    ) -> Generator[pa.RecordBatch, None, None]:
        """Look up all waiting tuples, emit their results and release them; not for ordered output.

        Tuples with more results than one batch holds stay. For tuples at window positions, `met_rows` returns the row
        from which on each has met the relation in a scan, and how many rows it has met.
        """
        state = self.state
        passed = 0
        try:
            while state.pending > passed:
                window = state.window
                assert window is not None
                together = self._tuples_together()
                places = window.oldest_positions(passed + together)[passed:]
                codes = window.codes_at(places)
                within = self._tuples_within(self._index, codes, None)
                places, codes = places[:within], codes[:within]
                if within == 1 and self._has_very_many(self._index, codes):
                    passed += 1
                    continue
                self._account.resize(LOOKUP_BYTES_PER_TUPLE * within)
                # Waiting tuples missed the cache, and only the relation's positions tell what they have met.
                pairs = self._find(self._index, codes, None)
                pairs = self._unmet(pairs, *met_rows(places))
                passed += yield from self._answer(leaving, places, pairs)
        finally:
            self._account.resize(0)

    def _answer(self, leaving: Leaving, places: Int64Array, pairs: _Pairs) -> Generator[pa.RecordBatch, None, int]:
        """Emit and release waiting tuples; returns how many stay."""
        state, window, stay = self.state, self.state.window, 0
        assert window is not None
        widths = self._result_widths(pairs, None)
        was_matched = window.is_matched_at(places)
        self._count_lookups(pairs)

        def let_go(first: int, last: int, has_match: BoolArray) -> None:
            gone = places[first:last]
            if gone.size:
                assert state.window is not None
                state.window.mark_matched(gone[has_match[first:last]])
                leaving.let_go(gone)

        for start, stop in self._pieces(pairs.counts, widths):
            is_too_large = self._is_too_large(start, stop, pairs.counts, widths)
            if is_too_large or (stop - start == 1 and not self._fits_beside(start, widths)):
                stay += stop - start
                continue
            found = self._candidates(pairs, start, stop)
            reached = yield from emit_tuples(
                state.spec, state.results, window, places, start, stop, found, let_go, was_matched
            )
            del found
            self._account.resize(LOOKUP_BYTES_PER_TUPLE * places.size)
            stay += stop - reached
        return stay

    def _unmet(self, pairs: _Pairs, begins: Int64Array, met: Int64Array) -> _Pairs:
        """Leave out rows that tuples have met in a scan."""
        if not met.any():
            return pairs
        rows = self.state.spec.shard.num_rows
        owners = np.repeat(np.arange(pairs.counts.size), pairs.counts)
        ends = np.cumsum(pairs.counts)
        at = np.repeat(pairs.first - (ends - pairs.counts), pairs.counts) + np.arange(owners.size)
        is_new = (pairs.positions[at] - begins[owners]) % max(1, rows) >= met[owners]
        owners, at = owners[is_new], at[is_new]
        counts = np.bincount(owners, minlength=pairs.counts.size).astype(np.int64)
        first = np.cumsum(counts) - counts
        return replace(pairs, first=first, counts=counts, positions=pairs.positions[at])

    # ================================================================ pieces that fit

    def _result_widths(self, pairs: _Pairs, rows: pa.RecordBatch | None) -> Int64Array | None:
        """Bytes of all results per tuple, before rows are read; None if all fit in any division."""
        state, counts = self.state, pairs.counts
        if rows is None:
            assert state.window is not None
            widest_tuple = state.window.widest_gathered
        else:
            widest_tuple = self._fixed_stream_bytes if self._fixed_stream_bytes is not None else widest_row(rows)
        needs_rows = self._needs_rows and pairs.positions.size > 0
        order = np.argsort(pairs.positions, kind="stable") if needs_rows else None
        widest = 0 if order is None else pairs.source.widest_at(pairs.positions[order])
        results = min(int(np.maximum(counts, 1).sum()), state.results.max_rows)
        if results * (widest_tuple + widest) <= self._most_bytes:
            return None
        of_stream: Int64Array | int = widest_tuple if rows is None else row_widths(rows, np.arange(counts.size))
        own = np.maximum(counts, 1) * of_stream
        if order is None:
            return np.asarray(own, np.int64)
        widths = np.broadcast_to(np.asarray(pairs.source.widths(pairs.positions[order]), np.int64), order.shape)
        of_pair = np.empty(order.size, np.int64)
        of_pair[order] = widths
        ends = np.concatenate([[0], np.cumsum(of_pair)])
        return np.asarray(own + ends[pairs.first + counts] - ends[pairs.first], np.int64)

    @property
    def _most_bytes(self) -> int:
        """The maximum bytes of results built together; their rows are gathered beside them."""
        return min(_MOST_BATCH_BYTES, self.state.ledger.free_bytes // 3)

    def _pieces(self, counts: Int64Array, widths: Int64Array | None) -> Iterator[tuple[int, int]]:
        """Cut tuples into pieces whose results fit; a single tuple may still not."""
        most_rows, most_bytes = self.state.results.max_rows, self._most_bytes
        row_ends = np.cumsum(np.maximum(counts, 1))
        byte_ends = None if widths is None else np.cumsum(widths)
        start = 0
        while start < counts.size:
            rows_before = int(row_ends[start - 1]) if start else 0
            stop = int(np.searchsorted(row_ends, rows_before + most_rows, side="right"))
            if byte_ends is not None:
                bytes_before = int(byte_ends[start - 1]) if start else 0
                stop = min(stop, int(np.searchsorted(byte_ends, bytes_before + most_bytes, side="right")))
            stop = max(start + 1, stop)
            yield start, stop
            start = stop

    def _is_too_large(self, start: int, stop: int, counts: Int64Array, widths: Int64Array | None) -> bool:
        """Whether a single tuple has more results than are built together."""
        if stop - start > 1 or counts[start] <= 1:
            return False
        is_wide = widths is not None and bool(widths[start] > self._most_bytes)
        return is_wide or bool(counts[start] > self.state.results.max_rows)

    def _require_room(self, start: int, stop: int, widths: Int64Array | None) -> None:
        """Refuse a tuple whose only result does not fit beside its gathered row, before anything is read."""
        if stop - start == 1 and not self._fits_beside(start, widths):
            assert widths is not None
            self.state.results.require_room(2 * int(widths[start]))

    def _fits_beside(self, row: int, widths: Int64Array | None) -> bool:
        """Whether the results of one tuple fit the free memory together with the rows gathered for them."""
        return widths is None or not self._needs_rows or 2 * int(widths[row]) <= self.state.ledger.free_bytes

    def _candidates(self, pairs: _Pairs, start: int, stop: int) -> Candidates:
        """Read the rows of tuples ``[start, stop)``, each once."""
        counts = pairs.counts[start:stop]
        ends = np.cumsum(counts)
        owners = np.repeat(np.arange(start, stop), counts)
        at = np.repeat(pairs.first[start:stop] - (ends - counts), counts) + np.arange(owners.size)
        is_single = int(counts.max(initial=0)) <= 1
        if not self._needs_rows:
            empty = pa.RecordBatch.from_pylist([], schema=pairs.source.schema)
            return Candidates(empty, owners, np.zeros(owners.size, np.int64), is_single)
        if start == 0 and stop == pairs.counts.size:
            needed, rows = pairs.positions, at
        else:
            used, rows = np.unique(at, return_inverse=True)
            needed = pairs.positions[used]
        # In disk order, unless already ordered.
        if needed.size > 1 and bool(np.any(needed[1:] < needed[:-1])):
            order = np.argsort(needed, kind="stable")
            place = np.empty(order.size, np.int64)
            place[order] = np.arange(order.size)
            needed, rows = needed[order], place[rows]
        relation = pairs.source.gather(needed)
        if not isinstance(pairs.source, HeldRows):
            self.state.metrics.relation_rows_read += needed.size
        self._account.grow(min(int(relation.nbytes), self.state.ledger.free_bytes))
        return Candidates(relation, owners, rows, is_single)

    def _candidates_of(self, code: int) -> Iterator[pa.RecordBatch]:
        """The rows of one code, in pieces that fit, by ranges: even their positions may be too many."""
        state, shard = self.state, self.state.spec.shard
        _, starts, stops = shard.locate(np.array([code]))
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            rows = max(1, min(state.results.max_rows, stop - start))
            while start < stop:
                block = shard.read_block(start, min(rows, stop - start))
                if rows > 1 and block.nbytes > max(self._most_bytes, 1):
                    rows //= 2
                    continue
                state.metrics.relation_rows_read += block.stop - block.start
                mine = np.flatnonzero(block.codes == code)
                if mine.size:
                    piece = block.rows.take(pa.array(mine))
                    self._account.resize(min(int(piece.nbytes), state.ledger.free_bytes))
                    yield piece
                    del piece
                    self._account.resize(0)
                start = block.stop


def _spread(values: Int64Array, rows: Int64Array, size: int) -> Int64Array:
    """The values at these rows, 0 elsewhere."""
    spread = np.zeros(size, np.int64)
    spread[rows] = values
    return spread
