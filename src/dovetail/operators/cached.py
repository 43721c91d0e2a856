"""The cache phase that stands before a scan, and the border between cache and window: what `balanced` and `auto` share.

Every offered tuple is looked up in the cache first. What the cache knows is answered at once; the rest enters the
window. Any tuple may wait instead of being answered, and any value may leave the cache at any time: the cache never
decides what the result is, only when it comes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import BudgetError
from dovetail.kernels.sorted_codes import expand_ranges
from dovetail.operators.admission import Answer, Offered
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
class CacheAnswer(Answer):
    """What the cache gives for rows of a piece.

    Attributes
    ----------
    probe
        What the cache knows of the piece.
    joined
        The rows of the piece that the pairs belong to, once for each pair; None where only tuples were asked for.
    hits, rejected
        Rows that the cache answered with relation rows; pairs that were no match.
    """

    probe: CacheProbe
    joined: Int64Array | None = field(repr=False)
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
        self.results.reserved_bytes = self._learning_bytes
        self._probe: CacheProbe | None = None
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

    def _accept(self, offered: Offered, may_drop: bool) -> Iterator[pa.RecordBatch]:
        try:
            yield from super()._accept(offered, may_drop)
        finally:
            self._probe = self._known = None

    def _select_waiting(self, offered: Offered) -> Int64Array:
        codes, is_null = offered.codes, offered.is_null
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

    def _results_per_row(self, offered: Offered) -> Int64Array:
        if self._probe is None or not self._needs_pairs:
            return super()._results_per_row(offered)
        return np.where(offered.is_null, 0, self._probe.counts[: len(offered)])

    def _enter(self, piece: Offered, entering: Int64Array) -> None:
        self._entered += entering.size
        super()._enter(piece, entering)

    def _prepare(self, piece: Offered, answered: Int64Array, start: int) -> Answer:
        if self._probe is None:
            return super()._prepare(piece, answered, start)
        return self._answer_of(piece, answered, self._probe.part(start, start + len(piece)))

    def _answer_of(self, piece: Offered, answered: Int64Array, probe: CacheProbe) -> CacheAnswer:
        """Make what is put out for rows of a piece of which something is known."""
        self._cache.require_unchanged(probe)
        counts = np.where(piece.is_null, 0, probe.counts)[answered]
        hits = int(np.count_nonzero(counts if probe.is_looked_up is None else counts[~probe.is_looked_up[answered]]))
        is_matched = counts > 0
        owners, relation, rejected = answered, None, 0
        if self._needs_pairs:
            which, rows_known = expand_ranges(probe.first_rows[answered], counts.astype(np.int32))
            relation, owners, rejected = self._matching_rows(piece.rows, answered[which], rows_known, probe)
            is_matched = np.isin(answered, owners) if rejected else is_matched
        matched = int(np.count_nonzero(is_matched))
        joined, rows = (None if relation is None else owners), None
        how, plan, side = self.spec.how, self.results.plan, BatchRows(piece.rows)
        if how in ("semi", "anti"):
            owners = answered[is_matched if how == "semi" else ~is_matched]
            batch = plan.unmatched(side, owners) if owners.size else None
        else:
            assert relation is not None
            if how == "left" and matched < answered.size:
                alone = answered[~is_matched]
                rows = np.concatenate([np.arange(owners.size), np.full(alone.size, -1)])
                owners = np.concatenate([owners, alone])
                if self.spec.ordered:
                    order = np.argsort(owners, kind="stable")
                    owners, rows = owners[order], rows[order]
            batch = plan.joined(side, owners, relation, rows) if owners.size else None
        unmatched = int(answered.size) - matched
        return CacheAnswer(batch, owners, matched, unmatched, probe, joined, hits, rejected)

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

    def _count_answer(self, answer: Answer, piece: Offered, answered: Int64Array) -> None:
        super()._count_answer(answer, piece, answered)
        if not isinstance(answer, CacheAnswer):
            return
        metrics, probe = self.metrics, answer.probe
        metrics.cache_hits += answer.hits
        looked_up = 0 if probe.is_looked_up is None else int(np.count_nonzero(probe.is_looked_up[answered]))
        metrics.lookups += looked_up
        metrics.negative_hits += answered.size - answer.hits - looked_up - int(np.count_nonzero(piece.is_null))
        metrics.pairs_rejected += answer.rejected
        self._cache.observe(probe, answered[~piece.is_null[answered]])
        if self._shedding is not None and answer.joined is not None:
            self._shedding.observe(piece.codes[answer.joined])

    # ================================================================ the border between cache and window

    def _plan_memory(self, spec: JoinSpec) -> MemoryPlan:
        per_tuple = self._matcher.bytes_per_tuple
        plan = plan_memory(spec, who=self.kind, bytes_per_tuple=per_tuple, output_share=self._output_share)
        if plan.output_rows < _FEWEST_ADMITTED:
            plan = plan_memory(spec, who=self.kind, bytes_per_tuple=per_tuple)
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
        return self._window.nbytes_at(capacity, self._window.max_chunks) - self._window.nbytes

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

    def _planned_bytes(self) -> int:
        learning_bytes = self._learning_bytes - self._learning_account.held_bytes
        cache_bytes = self._cache_limit_bytes - self._other_bytes("held", "shedding", "learning")
        return max(0, learning_bytes) + max(0, cache_bytes)

    def _give_up_extras(self) -> bool:
        if self._other_bytes("held", "shedding") == 0:
            return False
        self.metrics.cache_evictions += len(self._cache)
        if not self.pending:
            self._replace_window(None)
        self._forget_cache()
        return True

    def _account_cache(self) -> None:
        """Bring the cache's account up to date; should it take more than there is, do without what is cached."""
        if not self._try_resize(self._cache_account, self._cache.nbytes):
            self.metrics.cache_evictions += len(self._cache)
            self._cache.clear()
            self._cache_account.resize(0)

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
        self.results.reserved_bytes = self._learning_bytes

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
