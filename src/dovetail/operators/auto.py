"""The strategy that chooses by itself: SSBJ's cache in front, then scan or index, whichever the cost model says.

What it computes
    The exact join of every offered stream tuple with one version of a relation's shard: equality of keys, or equality
    plus a residual condition; one-to-many and many-to-many; inner, left, semi, anti.
How
    The cache phase answers what the cache knows. For the rest there are three ways, and any mixture of them is exact:

    lookup
        The index finds the rows as the tuples arrive, a batch at a time, and nothing waits. Best where pages are in
        memory and the window is small against the relation.
    scan
        The window meets the relation block by block, in order, as in MESHJOIN. Because the relation is sorted by code,
        a block tells which join values it holds whole; their tuples have met all their rows and leave at once, which
        makes room for others: a tuple waits half a cycle on average, not a whole one.
    skip
        Where few tuples wait, the index says where their rows can be. Rows that no waiting tuple can need count as
        met without being read, if reading them would take longer than moving there.
What is cached
    The cache inequality, as for `balanced`, but without its rounds of cycles: when a block holds a join value whole,
    its number of rows is known and the rows are at hand, so that the value can enter the cache there and then. Its
    frequency is the mean of two passes.
Exactness
    A tuple leaves early only when all rows of its code were in one block that it met, or at its deadline, when it has
    met or skipped every row once. Tuples answered by lookup never enter the window.
Memory
    One block, one batch of output, the counters, the cache, and the window, which has the rest.
What is emitted when
    Answers of cache and lookups at once; the rest as the scan meets it.
What a restart keeps
    The window, the place in the scan, held results, counters. The cache is not kept: it is found again.
Not cached
    Values with more rows than fit a batch of output, or more than 4,094.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import BudgetError
from dovetail.model.costs import CostFactors, LoopCost
from dovetail.model.explain import Plan
from dovetail.operators.adaptive import Objective
from dovetail.operators.admission import Answer, Offered
from dovetail.operators.block_cache import BlockCacheJoin
from dovetail.operators.cache import CacheProbe
from dovetail.operators.cached import CacheAnswer
from dovetail.operators.explaining import factors_for, plan_of
from dovetail.operators.memory_plan import MemoryPlan, with_blocks_in_place
from dovetail.operators.mesh import MeshJoin
from dovetail.operators.protocol import RelationBlock
from dovetail.operators.spec import JoinSpec
from dovetail.operators.tuple_store import Positions
from dovetail.relation.format import FENCE_STRIDE
from dovetail.relation.io import PAGE_BYTES

__all__ = ["AutoJoin", "factors_for"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_EARLY_STEPS = 1.5  # what it costs to find out which tuples of a block may leave, in steps
_BATCH_ROWS = 65_536
_USUAL_WINDOW = 65_536  # tuples, for what a probe costs before there is a window
_TAKE_S = 2e-5
_CYCLES_PER_JUDGEMENT = 5
_CYCLES_WITHOUT_CACHE = 20
_PROBES_PER_LOOK = 3  # what a look into the cache and the learning cost, in probes
_LEAST_CODE, _GREATEST_CODE = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
_MUCH_UNMATCHED = 0.05
_NO_FLAGS = np.zeros(0, np.bool_)
_NO_ROWS = np.zeros(0, np.int64)


class AutoJoin(BlockCacheJoin):
    """Join a stream with a relation by cache, scan and index, whatever is cheapest for what there is.

    Parameters
    ----------
    spec
        The join.
    objective
        ``"rate"``: serve as much as the budget allows. ``"memory"``: hold as little as the stream needs.
    factors
        What operations cost here; None: `factors_for` the shard.
    switching_factor
        See `BalancedJoin`.

    Examples
    --------
    >>> import tempfile
    >>> from dovetail.operators.spec import join_spec
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.record_batch({"__code": [2, 7], "id": [2, 7]})
    >>> join = AutoJoin(join_spec(relation, stream.schema, how="left", budget="1MB"))
    >>> given = [row for batch in join.offer(stream) for row in batch.to_pylist()]
    >>> given += [row for batch in join.drain() for row in batch.to_pylist()]
    >>> sorted(str(row["city"]) for row in given)
    ['Bergen', 'None', 'Oslo']
    >>> join.explain().strategy
    'auto'
    """

    kind = "auto"

    def __init__(
        self,
        spec: JoinSpec,
        *,
        objective: Objective = "rate",
        factors: CostFactors | None = None,
        switching_factor: float = 1.0,
    ) -> None:
        self.factors = factors_for(spec.shard) if factors is None else factors
        super().__init__(spec, objective, switching_factor)
        self._is_sorted = spec.shard.num_segments == 1
        self._met_rows: list[Int64Array] = []
        self._is_whole: BoolArray = _NO_FLAGS
        self._seeks_unmatched = False
        self._unmatched_by_cycle = self._entered_by_cycle = 0
        self._cycles_judged = self._hits_judged = self._offered_judged = 0
        self._choose_ways()

    def _plan_memory(self, spec: JoinSpec) -> MemoryPlan:
        plan = super()._plan_memory(spec)
        if spec.block_rows is not None:
            return plan
        if self._reads_in_place(spec):
            # A long block costs nothing where it is a view; its part of the budget stays: the window moves through it.
            return with_blocks_in_place(plan, spec)
        # Longer blocks take fewer reads and steps, and leave less for the window.
        best = (self._cycle_seconds(plan.block_rows, _USUAL_WINDOW) / self._shared_bytes, plan.block_rows)
        longer = 2 * plan.block_rows
        while longer <= spec.shard.num_rows and longer * spec.shard.row_bytes <= spec.budget.total_bytes / 2:
            try:
                super()._plan_memory(replace(spec, block_rows=longer))
            except BudgetError:
                break
            best = min(best, (self._cycle_seconds(longer, _USUAL_WINDOW) / self._shared_bytes, longer))
            longer *= 2
        return super()._plan_memory(replace(spec, block_rows=best[1]))

    # ================================================================ which way

    def _cycle_seconds(self, block_rows: int, window_tuples: int) -> float:
        """What one cycle over the relation costs, whatever waits."""
        rows, factors = self.spec.shard.num_rows, self.factors
        steps = -(-rows // block_rows)
        read_s = rows * self.spec.shard.row_bytes / factors.bandwidth_bytes_per_s
        return read_s + rows * factors.probe_s.at(window_tuples) + steps * (factors.read_call_s + factors.step_s)

    def _scan_seconds(self, leaves_early: bool) -> float:
        """What a tuple costs by scan, the window being full."""
        capacity, factors = max(1, self.window_capacity), self.factors
        own = factors.append_s.at(capacity) + factors.output_s
        cycle_s = self._cycle_seconds(self.block_rows, self.window_capacity)
        if not leaves_early:
            return own + factors.expire_s.at(capacity) + cycle_s / capacity
        steps = -(-self.spec.shard.num_rows // self.block_rows)
        finding_s = _EARLY_STEPS * factors.step_s * steps
        return own + factors.remove_s.at(capacity) + (cycle_s + finding_s) / capacity / 2

    def _lookup_seconds(self) -> float:
        """What a tuple costs by lookup: a page of codes and a page of rows, if they are on a disk."""
        factors = self.factors
        page_s = factors.read_seconds(PAGE_BYTES, sequential=False)
        # Rows are taken per record batch of the relation, of which a batch of tuples meets most.
        page_s += _TAKE_S * self.spec.shard.num_rows / (_BATCH_ROWS * max(1, self.results.max_rows))
        return factors.lookup_s + factors.gather_s + factors.output_s + (2 * page_s if page_s > 1e-6 else page_s)

    @property
    def leaves_early(self) -> bool:
        """Whether tuples leave a scan as soon as they have met all their rows."""
        return self._leaves_early

    @property
    def looks_up(self) -> bool:
        """Whether tuples that the cache does not know are looked up in the index as they arrive."""
        return self._looks_up

    def _choose_ways(self) -> None:
        """Compare what a tuple costs in each way, with the memory as it is divided now."""
        can_leave_early = self._is_sorted and not self.spec.ordered
        whole_cycle_s = self._scan_seconds(False)
        half_cycle_s = self._scan_seconds(True) if can_leave_early else math.inf
        self._leaves_early = half_cycle_s < whole_cycle_s
        self._looks_up = self._lookup_seconds() < min(half_cycle_s, whole_cycle_s)
        self._cycles_waited = 0.5 if self._leaves_early else 1.0

    def _end_cycle(self) -> None:
        self._choose_ways()
        # Tuples without a match that the cache did not know: is it worth a pass over the window to find them early?
        metrics = self.metrics
        unmatched = metrics.unmatched_tuples - metrics.negative_hits - metrics.null_key_tuples
        entered = max(1, self._entered - self._entered_by_cycle)
        self._seeks_unmatched = unmatched - self._unmatched_by_cycle > _MUCH_UNMATCHED * entered
        self._unmatched_by_cycle, self._entered_by_cycle = unmatched, self._entered
        super()._end_cycle()
        self._judge_cache()

    def _judge_cache(self) -> None:
        """Do without a cache where looking into it costs more than it saves."""
        self._cycles_judged += 1
        if self._cycles_judged < _CYCLES_PER_JUDGEMENT or not self._learns or self.objective == "memory":
            return
        self._cycles_judged = 0
        metrics, factors = self.metrics, self.factors
        hits, offered = metrics.cache_hits + metrics.negative_hits, metrics.stream_tuples_in
        share = (hits - self._hits_judged) / max(1, offered - self._offered_judged)
        self._hits_judged, self._offered_judged = hits, offered
        missed_s = self._scan_seconds(self._leaves_early) - factors.output_s
        if share * missed_s < _PROBES_PER_LOOK * factors.cache_probe_s.at(max(1, len(self._cache))):
            self.metrics.cache_evictions += len(self._cache)
            self._cache.clear()
            self._account_cache()
            self._give_back()
            self._sleep(_CYCLES_WITHOUT_CACHE)

    def _move_border(self, cache_limit_bytes: int) -> bool:
        has_moved = super()._move_border(cache_limit_bytes)
        if has_moved:
            self._choose_ways()
        return has_moved

    # ================================================================ lookup

    def _admission_rows(self) -> int:
        if self.looks_up and not self.spec.ordered:
            return max(1024, self.results.max_rows)
        return super()._admission_rows()

    def _select_waiting(self, offered: Offered) -> Int64Array:
        waiting = super()._select_waiting(offered)
        if waiting.size == 0 or not self.looks_up or (self.spec.ordered and self.pending):
            return waiting
        codes = offered.codes
        probe = self._probe or self._cache.probe(codes)
        counts = self._rows_in_index(codes[waiting])
        # A tuple with very many rows waits for the scan, which puts them out bit by bit.
        is_answered = counts <= self.results.max_rows
        answered = waiting[is_answered]
        is_looked_up = np.zeros(codes.size, np.bool_)
        is_looked_up[answered] = True
        all_counts = probe.counts.copy()
        all_counts[answered] = counts[is_answered]
        self._probe = replace(probe, counts=all_counts, is_looked_up=is_looked_up)
        return waiting[~is_answered]

    def _rows_in_index(self, codes: Int64Array) -> Int64Array:
        """How many rows each code has, or can have at most where no code has many."""
        if self.spec.shard.stats.is_unique:
            # Whether there is one is found out piece by piece, with where it is.
            return np.ones(codes.size, np.int64)
        distinct, which = np.unique(codes, return_inverse=True)
        return self.spec.shard.count(distinct)[which]

    def _answer_of(self, piece: Offered, answered: Int64Array, probe: CacheProbe) -> CacheAnswer:
        if probe.is_looked_up is None or not probe.is_looked_up.any():
            return super()._answer_of(piece, answered, probe)
        # As many rows as a batch of output has at most: where each is need not be kept for more at a time.
        asked = np.flatnonzero(probe.is_looked_up)
        queries, positions = self.spec.shard.lookup(piece.codes[asked])
        found = np.bincount(queries, minlength=asked.size).astype(np.int64)
        first_rows, counts = probe.first_rows.copy(), probe.counts.copy()
        first_rows[asked], counts[asked] = np.cumsum(found) - found, found
        known = replace(probe, first_rows=first_rows, counts=counts, index_positions=positions)
        return super()._answer_of(piece, answered, known)

    def _rows_of_pairs(
        self, positions: Int64Array, rows: Int64Array, probe: CacheProbe
    ) -> tuple[Int64Array | None, pa.RecordBatch]:
        if probe.is_looked_up is None or probe.index_positions is None:
            return super()._rows_of_pairs(positions, rows, probe)
        is_looked_up = probe.is_looked_up[positions]
        by_cache, by_index = np.flatnonzero(~is_looked_up), np.flatnonzero(is_looked_up)
        orders, batches = [], []
        if by_cache.size:
            order, batch = self._cache.gather(rows[by_cache])
            orders.append(by_cache if order is None else by_cache[order])
            batches.append(batch)
        if by_index.size:
            wanted = probe.index_positions[rows[by_index]]
            self.metrics.relation_rows_read += by_index.size
            for which, batch in self.spec.shard.gather_grouped(wanted):
                orders.append(by_index[which])
                batches.append(batch)
        if not batches:
            return None, pa.RecordBatch.from_pylist([], schema=self._cache.schema)
        return np.concatenate(orders), batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def _count_answer(self, answer: Answer, piece: Offered, answered: Int64Array) -> None:
        super()._count_answer(answer, piece, answered)
        if isinstance(answer, CacheAnswer) and answer.probe.is_looked_up is not None:
            self._learn_from_lookups(piece.codes[np.flatnonzero(answer.probe.is_looked_up)])

    # ================================================================ scan

    def _disk_step(self) -> Iterator[pa.RecordBatch]:
        # What the step before left undone, if it was given up.
        self._upkeep()
        yield from self._expire()
        rows_left = min(self.block_rows, self.spec.shard.num_rows - self.position)
        while self.pending and rows_left > 0:
            skipped = 0 if self._pairs_done else self._rows_to_skip()
            if skipped:
                self._advance(skipped)
                yield from self._expire()
                rows_left = min(self.block_rows, self.spec.shard.num_rows - self.position)
                continue
            block = self._read_block(self.position, self._rows_to_read(rows_left))
            self._interrupted_rows = block.stop - block.start
            self._met_rows = []
            self._is_whole = self._whole_first_rows(block) if self._learns or self._leaves_early else _NO_FLAGS
            yield from self._join_block(block)
            met_rows = np.concatenate(self._met_rows) if self._met_rows else _NO_ROWS
            self._met_rows, self._is_whole = [], _NO_FLAGS
            if met_rows.size and self._learns:
                self._learn_from(block, met_rows)
            # From here on nothing is lost if the iterator is given up: what has not left yet leaves at its deadline.
            MeshJoin._advance(self, block.stop - block.start)
            rows_left -= block.stop - block.start
            if met_rows.size and self._leaves_early and self.spec.how in ("inner", "left"):
                yield from self._leave_codes(block.codes[met_rows[np.diff(met_rows, prepend=-1) != 0]])
            if self._seeks_unmatched and self._leaves_early:
                yield from self._leave_unmatched(block)
            yield from self._expire()
            self._upkeep()

    def _advance(self, rows: int) -> None:
        super()._advance(rows)
        self._upkeep()

    def _whole_first_rows(self, block: RelationBlock) -> BoolArray:
        """Which rows of a block are the first of a value that has all its rows in it."""
        codes = block.codes
        is_first = np.ones(codes.size, np.bool_)
        if not self._is_sorted or codes.size == 0:
            return np.zeros(codes.size, np.bool_)
        np.not_equal(codes[1:], codes[:-1], out=is_first[1:])
        if block.start > 0:
            is_first[codes == codes[0]] = False
        if block.stop < self.spec.shard.num_rows:
            is_first[codes == codes[-1]] = False
        return is_first

    def _matches(self, block: RelationBlock, rows: Positions, positions: Positions) -> Int64Array | None:
        whole = np.flatnonzero(self._is_whole[rows]) if self._is_whole.size else _NO_FLAGS
        if whole.size:
            self._met_rows.append(np.asarray(rows[whole], np.int64))
        return super()._matches(block, rows, positions)

    def _leave_unmatched(self, block: RelationBlock) -> Iterator[pa.RecordBatch]:
        """Let tuples leave whose rows would have been in the block, and were not; it costs a pass over the window."""
        window, codes = self._window, block.codes
        if window is None or codes.size == 0:
            return
        low = int(codes[0]) + 1 if block.start > 0 else _LEAST_CODE
        high = int(codes[-1]) - 1 if block.stop < self.spec.shard.num_rows else _GREATEST_CODE
        place = 0
        while low <= high and place < window.index.ring_size and len(window):
            positions, place = window.index.positions_between(low, high, place, self.results.max_rows)
            yield from self._leave(positions)

    def _rows_to_skip(self) -> int:
        """How many rows from here on nobody that waits can need, where not reading them is cheaper than reading."""
        window, shard, factors = self._window, self.spec.shard, self.factors
        if window is None or shard.num_rows == 0:
            return 0
        seconds_per_row = shard.row_bytes / factors.bandwidth_bytes_per_s + factors.probe_s.at(len(window))
        # Moving there, and finding out where, must take less than reading on.
        moving_s = factors.seek_s + factors.read_call_s + factors.lookup_s * len(window)
        break_even = max(float(FENCE_STRIDE), moving_s / max(seconds_per_row, 1e-12))
        if len(window) * break_even > shard.num_rows:
            return 0
        until = min(shard.num_rows, self.position + window.chunks.oldest.deadline - self._odometer)
        _, starts, stops = shard.locate(window.codes_at(window.live_positions()))
        ahead = starts[stops > self.position]
        needed = int(ahead.min()) if ahead.size else until
        skipped = min(needed, until) - self.position
        return skipped if skipped >= break_even or min(needed, until) == until else 0

    # ================================================================ other budgets, restarts

    def _replan(self, spec: JoinSpec) -> None:
        super()._replan(spec)
        self._choose_ways()

    def _forget_cache(self) -> None:
        super()._forget_cache()
        self._choose_ways()

    # ================================================================ explain

    def explain(self, factors: CostFactors | None = None) -> Plan:
        """What it does now, what it predicts of that, and what limits it."""
        metrics, factors = self.metrics, self.factors if factors is None else factors
        hit_ratio = (metrics.cache_hits + metrics.negative_hits) / max(1, metrics.stream_tuples_in)
        looks_up = self.looks_up
        steps = max(1, -(-self.spec.shard.num_rows // self.block_rows))
        window = 0 if looks_up else self.window_capacity
        chunk = max(1, round(window / (steps * self._cycles_waited))) if window else 0
        missed_s = self._lookup_seconds() if looks_up else self._scan_seconds(self.leaves_early)
        hit_s = factors.cache_probe_s.at(max(1, len(self._cache))) + factors.output_s
        per_tuple = factors.stream_read_s + hit_ratio * hit_s + (1.0 - hit_ratio) * missed_s
        read_s = self._disk_seconds_per_miss(looks_up) * (1.0 - hit_ratio)
        served = chunk / max(1e-9, 1.0 - hit_ratio) if chunk else 1.0
        cost = LoopCost({"read": read_s * served, "cpu": (per_tuple - read_s) * served}, stream_tuples=served)
        way = "looked up in the index as they come" if looks_up else "joined by the scan"
        why = f"Tuples that the cache does not know are {way}; the disk takes {read_s / per_tuple:.0%} of the time."
        access = "index" if looks_up else "scan"
        return plan_of(self, "auto", access, cost, why, chunk, window, self._cache.num_rows, hit_ratio)

    def _disk_seconds_per_miss(self, looks_up: bool) -> float:
        factors = self.factors
        if looks_up:
            return self._lookup_seconds() - factors.lookup_s - factors.gather_s - factors.output_s
        read_s = self.spec.shard.num_rows * self.spec.shard.row_bytes / factors.bandwidth_bytes_per_s
        return read_s * self._cycles_waited / max(1, self.window_capacity)
