"""The cache phase that stands before a scan, and the border between cache and window: what `balanced` and `auto` share.

Every offered tuple is looked up in the cache first. What the cache knows is answered at once; the rest enters the
window. Any tuple may wait instead of being answered, and any value may leave the cache at any time: the cache never
decides what the result is, only when it comes.

A part of a batch is taken in piece by piece, and for each piece what the cache answers is made before anything
changes. So a predicate that raises leaves the operator as it was, and an iterator that is given up has either had a
piece's answer or not had the piece accepted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import BudgetError
from dovetail.kernels.sorted_codes import expand_ranges
from dovetail.operators.cache import CacheProbe, RelationCache
from dovetail.operators.memory_plan import MAX_BATCH_ROWS, MemoryPlan, plan_memory
from dovetail.operators.mesh import MeshJoin
from dovetail.operators.output import BatchRows
from dovetail.operators.spec import JoinSpec
from dovetail.operators.window import StreamWindow

__all__ = ["CachedMeshJoin"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_LEARNING_SHARE = 64  # this part of the window's memory is for counting join values
_SMALL_LEARNING_BYTES = 1024  # or so much, where that is more
_MOST_LEARNING_SHARE = 16  # but not more than this part
_FEWEST_ADMITTED = 1024
_ADMISSIONS_PER_WINDOW = 64


@dataclass(frozen=True)
class _Answer:
    """What the cache gives for a piece of a batch, ready to be put out.

    Attributes
    ----------
    probe
        What the cache knows of the piece.
    positions, relation, rows
        The pairs; see `Results.give_pairs`. Without a relation: tuples by themselves.
    matched, unmatched, hits, rejected
        Tuples that match, that do not, that the cache answered with rows; pairs that were no match.
    """

    probe: CacheProbe
    positions: Int64Array
    relation: pa.RecordBatch | None
    rows: Int64Array | None
    matched: int
    unmatched: int
    hits: int
    rejected: int


class CachedMeshJoin(MeshJoin):
    """MESHJOIN behind a cache. Subclasses decide what is cached."""

    needs_equality: ClassVar[bool] = True

    # What the cache may hold; the window gets the rest.
    _cache_limit_bytes = 0
    # What the window needs, where it is to take no more; None: all that the cache leaves.
    _needed_bytes: int | None = None
    # The part of the budget that is for output on its way.
    _output_share: ClassVar[int] = 16

    def __init__(self, spec: JoinSpec) -> None:
        super().__init__(spec)
        verifies = self.results.plan.verifies
        self._needs_pairs = spec.how in ("inner", "left") or verifies
        needs_rows = bool(spec.relation_columns) or verifies
        self._cache = RelationCache(spec.shard.schema if needs_rows else pa.schema([]))
        self._cache_account = self._ledger.reserve("cache")
        self._learning_account = self._ledger.reserve("learning")
        self._probe: CacheProbe | None = None
        self._prepared: _Answer | None = None
        self._known: tuple[int, CacheProbe] | None = None
        self._admission_limit: int | None = None
        self._entered = 0  # tuples that ever entered the window
        self._expected_miss_share = 1.0

    @property
    def cache(self) -> RelationCache:
        """What is cached now, to look at."""
        return self._cache

    # ================================================================ the cache phase

    def _admission_rows(self) -> int:
        if self.spec.ordered:
            return super()._admission_rows()
        room = MAX_BATCH_ROWS if self._window is None else self._window.capacity - len(self._window)
        # Of those looked at together, as many should miss as there is room for; what is known of each takes memory.
        most = max(_FEWEST_ADMITTED, min(2 * self.results.max_rows, MAX_BATCH_ROWS))
        return int(min(max(room / self._expected_miss_share, _FEWEST_ADMITTED), most))

    def _accept(
        self, batch: pa.RecordBatch, codes: Int64Array, is_null: BoolArray, may_drop: bool
    ) -> Iterator[pa.RecordBatch]:
        try:
            yield from super()._accept(batch, codes, is_null, may_drop)
        finally:
            self._probe = self._prepared = self._known = None

    def _select_waiting(self, batch: pa.RecordBatch, codes: Int64Array, is_null: BoolArray) -> Int64Array:
        if len(self._cache) == 0:
            self._probe = None
            return np.flatnonzero(~is_null)
        probe = self._probe_once(codes)
        is_waiting = probe.is_miss & ~is_null
        self._expected_miss_share = max(1 / 64, np.count_nonzero(is_waiting) / max(1, codes.size))
        if self.spec.ordered and self.pending:
            # Results of tuples that need not wait are held for the sake of those that do; without room for that, more
            # tuples wait.
            results = np.cumsum(np.where(is_null | is_waiting, 0, np.maximum(probe.counts, 1)))
            fitting = int(np.searchsorted(results, self._results_that_can_be_held(), side="right"))
            is_waiting[fitting:] = ~is_null[fitting:]
        self._probe = probe
        return np.flatnonzero(is_waiting)

    def _probe_once(self, codes: Int64Array) -> CacheProbe:
        """Look up codes, unless they were the last to be: while tuples wait for room, the same ones come again."""
        place = codes.__array_interface__["data"][0]
        if self._known is not None:
            known_place, known = self._known
            if known_place == place and len(known) >= codes.size and known.revision == self._cache.revision:
                return known.part(0, codes.size)
        probe = self._cache.probe(codes)
        self._known = place, probe
        return probe

    def _results_that_can_be_held(self) -> int:
        free_bytes = self._ledger.free_bytes - 2 * self._memory.output_bytes
        return max(0, int(free_bytes / (self.results.plan.row_bytes + 8)))

    def _take_in(
        self, part: pa.RecordBatch, codes: Int64Array, is_null: BoolArray, waiting: Int64Array
    ) -> Iterator[pa.RecordBatch]:
        self._entered += waiting.size
        probe = self._probe
        if probe is None or waiting.size == part.num_rows:
            yield from super()._take_in(part, codes, is_null, waiting)
            return
        is_answered = np.ones(part.num_rows, np.bool_)
        is_answered[waiting] = False
        weights = np.where(is_null[: codes.size], 0, probe.counts[: codes.size]) if self._needs_pairs else 1
        results = np.cumsum(np.where(is_answered, np.maximum(weights, 1), 0))
        start = done = 0
        while start < part.num_rows:
            stop = max(start + 1, int(np.searchsorted(results, done + self.results.max_rows, side="right")))
            done = int(results[stop - 1])
            low, high = np.searchsorted(waiting, [start, stop]).tolist()
            rows = part.slice(start, stop - start)
            nulls, found = is_null[start:stop], probe.part(start, stop)
            answered = np.flatnonzero(is_answered[start:stop])
            # May raise, and changes nothing; what follows changes everything and does not raise.
            self._prepared = self._prepare(rows, nulls, answered, found) if answered.size else None
            yield from super()._take_in(rows, codes[start:stop], nulls, waiting[low:high] - start)
            start = stop

    def _prepare(self, batch: pa.RecordBatch, is_null: BoolArray, answered: Int64Array, probe: CacheProbe) -> _Answer:
        """Make what is put out for rows of a piece that need not wait."""
        self._cache.require_unchanged(probe)
        counts = np.where(is_null, 0, probe.counts)[answered]
        hits = int(np.count_nonzero(counts if probe.is_looked_up is None else counts[~probe.is_looked_up[answered]]))
        is_matched = counts > 0
        positions, relation, rejected = answered, None, 0
        if self._needs_pairs:
            which, rows_known = expand_ranges(probe.first_rows[answered], counts.astype(np.int32))
            relation, positions, rejected = self._matching_rows(batch, answered[which], rows_known, probe)
            is_matched = np.isin(answered, positions) if rejected else is_matched
        matched = int(np.count_nonzero(is_matched))
        rows: Int64Array | None = None
        how = self.spec.how
        if how in ("semi", "anti"):
            positions, relation = answered[is_matched if how == "semi" else ~is_matched], None
        elif how == "left" and matched < answered.size:
            alone = answered[~is_matched]
            rows = np.concatenate([np.arange(positions.size), np.full(alone.size, -1)])
            positions = np.concatenate([positions, alone])
            if self.spec.ordered:
                order = np.argsort(positions, kind="stable")
                positions, rows = positions[order], rows[order]
        return _Answer(probe, positions, relation, rows, matched, answered.size - matched, hits, rejected)

    def _matching_rows(
        self, batch: pa.RecordBatch, positions: Int64Array, rows: Int64Array, probe: CacheProbe
    ) -> tuple[pa.RecordBatch, Int64Array, int]:
        """The relation's half of the pairs that are matches, the stream's half, and how many pairs are not."""
        if not self._cache.keeps_rows:
            return pa.RecordBatch.from_pylist([], schema=self._cache.schema), positions, 0
        order, relation = self._rows_of_pairs(positions, rows, probe)
        if order is not None and self.spec.ordered:
            back = np.empty(order.size, np.int64)
            back[order] = np.arange(order.size)
            relation = relation.take(pa.array(back))
        elif order is not None:
            positions = positions[order]
        if not self.results.plan.verifies:
            return relation, positions, 0
        count = positions.size
        kept = np.flatnonzero(self.results.plan.verify(BatchRows(batch), positions, relation, np.arange(count)))
        if kept.size < count:
            relation, positions = relation.take(pa.array(kept)), positions[kept]
        return relation, positions, count - kept.size

    def _rows_of_pairs(
        self, positions: Int64Array, rows: Int64Array, probe: CacheProbe
    ) -> tuple[Int64Array | None, pa.RecordBatch]:
        """The relation's rows of pairs in the order that costs least: row i belongs to pair ``order[i]``."""
        return self._cache.gather(rows)

    def _answer(
        self, batch: pa.RecordBatch, codes: Int64Array, is_null: BoolArray, rows: Int64Array, tickets: Int64Array
    ) -> Iterator[pa.RecordBatch]:
        answer, self._prepared = self._prepared, None
        if answer is None:
            yield from super()._answer(batch, codes, is_null, rows, tickets)
            return
        metrics = self.metrics
        metrics.matched_tuples += answer.matched
        metrics.unmatched_tuples += answer.unmatched
        metrics.cache_hits += answer.hits
        looked_up = 0 if answer.probe.is_looked_up is None else int(np.count_nonzero(answer.probe.is_looked_up[rows]))
        metrics.lookups += looked_up
        metrics.negative_hits += rows.size - answer.hits - looked_up - int(np.count_nonzero(is_null))
        metrics.pairs_rejected += answer.rejected
        self._cache.observe(answer.probe, rows[~is_null[rows]])
        positions = answer.positions
        if self._shedding is not None and answer.relation is not None:
            self._shedding.observe(codes[positions if answer.rows is None else positions[answer.rows >= 0]])
        if answer.relation is None:
            yield from self.results.give_tuples(BatchRows(batch), positions, tickets[positions])
        elif positions.size:
            yield from self.results.give_pairs(
                BatchRows(batch), positions, answer.relation, answer.rows, tickets[positions], is_pinned=True
            )

    # ================================================================ the border between cache and window

    def _plan_memory(self, spec: JoinSpec) -> MemoryPlan:
        per_tuple = self._matcher.bytes_per_tuple
        plan = plan_memory(spec, who=self.kind, bytes_per_tuple=per_tuple, output_share=self._output_share)
        if plan.output_rows < _FEWEST_ADMITTED:
            plan = super()._plan_memory(spec)
        small = min(_SMALL_LEARNING_BYTES, plan.window_bytes // _MOST_LEARNING_SHARE)
        self._learning_bytes = max(plan.window_bytes // _LEARNING_SHARE, small)
        self._shared_bytes = plan.window_bytes - self._learning_bytes
        return replace(plan, window_bytes=self._window_bytes(self._cache_limit_bytes))

    def _window_bytes(self, cache_limit_bytes: int) -> int:
        """What the window may take beside a cache that may hold so much."""
        left_bytes = self._shared_bytes - cache_limit_bytes
        return left_bytes if self._needed_bytes is None else min(self._needed_bytes, left_bytes)

    def _window_tuple_bytes(self) -> float:
        """v_S: what a waiting tuple takes, with everything that belongs to it."""
        capacity = self.window_capacity
        return self._window_bytes(self._cache_limit_bytes) / capacity if capacity else float("inf")

    def _move_border(self, cache_limit_bytes: int) -> bool:
        """Let the cache hold so much and the window the rest; False, with nothing changed, if that cannot be now."""
        if self._admission_limit is not None and self.pending > self._admission_limit:
            return False
        if cache_limit_bytes != self._cache_limit_bytes:
            if not self._fit_window(self._window_bytes(cache_limit_bytes)):
                return False
            self._cache_limit_bytes = cache_limit_bytes
        self._admission_limit = None
        return True

    def _fit_window(self, window_bytes: int) -> bool:
        """Let the window take so much, in place; False, with nothing changed, if what waits does not allow it now."""
        memory = replace(self._memory, window_bytes=window_bytes)
        capacity = self._capacity_for(self._paged_bytes, memory)
        window = self._window
        if window is not None and len(window) == 0:
            self._replace_window(None)
        elif window is not None:
            free_bytes = self._ledger.free_bytes + self._block_account.held_bytes
            growth_bytes = max(0, self._growth_bytes(capacity))
            if self._pairs_done or len(window) > capacity or window.resize_bytes + growth_bytes > free_bytes:
                return False
            if growth_bytes > self._ledger.free_bytes:
                return False
            self._window_account.resize(window.nbytes + growth_bytes)
            window.resize(max(1, capacity))
            self._window_account.resize(window.nbytes)
        self._memory = memory
        return True

    def _growth_bytes(self, capacity: int) -> int:
        assert self._window is not None
        columns, ordered = self._stream_columns, self.spec.ordered
        return self._window.bytes_for(columns, capacity, ordered) - self._window.bytes_for(
            columns, self._window.capacity, ordered
        )

    def _capacity_beside(self, cache_limit_bytes: int) -> int:
        """How many tuples may wait for `_move_border` to succeed."""
        memory = replace(self._memory, window_bytes=self._window_bytes(cache_limit_bytes))
        free_bytes = self._ledger.free_bytes + self._block_account.held_bytes
        most = StreamWindow.resizable_within(free_bytes)
        return max(1, min(most, self._capacity_for(self._paged_bytes, memory)))

    def _room_for(self, part: pa.RecordBatch, waiting: Int64Array) -> int:
        room = super()._room_for(part, waiting)
        if self._admission_limit is not None:
            room = min(room, max(0, self._admission_limit - self.pending))
        if room == waiting.size or not self.pending or self._shedding is not None:
            return room
        # Few at a time would make many small chunks and batches: they enter when there is room for a good number.
        least = min(self.window_capacity // _ADMISSIONS_PER_WINDOW, self.spec.chunk_rows or self.window_capacity)
        return room if room >= least else 0

    def _account_cache(self) -> None:
        """Bring the cache's account up to date; it must have been checked that there is room."""
        self._cache_account.resize(self._cache.nbytes)

    def _tidy_cache(self) -> None:
        # What is planned for a batch of output is free between two steps.
        self._cache.tidy(max(0, self._ledger.free_bytes))
        self._account_cache()

    # ================================================================ other budgets, restarts

    def _forget_cache(self) -> None:
        """Begin with an empty cache; results do not depend on it."""
        self._cache.clear()
        self._probe = None
        self._cache_limit_bytes = 0
        self._admission_limit = None
        self._memory = replace(self._memory, window_bytes=self._window_bytes(0))
        self._cache_account.resize(0)
        self._learning_account.resize(0)

    def _replan(self, spec: JoinSpec) -> None:
        before = self._learning_bytes, self._shared_bytes
        try:
            super()._replan(spec)
        except BudgetError:
            self._learning_bytes, self._shared_bytes = before
            if not self._cache_limit_bytes and not self._learning_account.held_bytes:
                raise
            self._replan_without_cache(spec)

    def _replan_without_cache(self, spec: JoinSpec) -> None:
        kept, before = self._put_cache_aside(), (self._learning_bytes, self._shared_bytes)
        try:
            super()._replan(spec)
        except BudgetError:
            self._learning_bytes, self._shared_bytes = before
            self._put_cache_back(kept)
            raise
        self._forget_cache()

    def _put_cache_aside(self) -> tuple[int, int, int, MemoryPlan]:
        kept = (
            self._cache_limit_bytes,
            self._cache_account.held_bytes,
            self._learning_account.held_bytes,
            self._memory,
        )
        self._cache_limit_bytes = 0
        self._memory = replace(self._memory, window_bytes=self._window_bytes(0))
        self._cache_account.resize(0)
        self._learning_account.resize(0)
        return kept

    def _put_cache_back(self, kept: tuple[int, int, int, MemoryPlan]) -> None:
        self._cache_limit_bytes, cache_bytes, learning_bytes, self._memory = kept
        self._cache_account.resize(cache_bytes)
        self._learning_account.resize(learning_bytes)

    def _restore_checked(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        kept = self._put_cache_aside()
        try:
            super()._restore_checked(tables, values)
        except Exception:
            self._put_cache_back(kept)
            raise
        self._forget_cache()
