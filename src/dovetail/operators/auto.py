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

from dovetail.kernels.sorted_codes import expand_ranges
from dovetail.kernels.value_table import MAX_COUNT, ValueTable
from dovetail.model.costs import CostFactors, Curve
from dovetail.model.explain import Bottleneck, Plan
from dovetail.operators.adaptive import AdaptiveCacheJoin, Objective
from dovetail.operators.cache import CacheProbe, bytes_of_rows
from dovetail.operators.mesh import MeshJoin
from dovetail.operators.protocol import RelationBlock, RelationShard
from dovetail.operators.spec import JoinSpec
from dovetail.operators.switching import ENTRY_BYTES
from dovetail.operators.tuple_store import Positions
from dovetail.relation.io import PAGE_BYTES, SimulatedDisk

__all__ = ["AutoJoin", "factors_for"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_FLUSH_SHARE = 64  # rows enter the cache when so much of what is shared has come together
_MOST_ASKED_SHARE = 4  # the most that the cache may ask for in a cycle, as a part of what is shared
_CANDIDATE_SHARE = 0.5
_PERIOD_LOOKUPS = 4  # lookups per cached row after which the cache is looked over, where nothing is scanned
_COLLECTED_VALUE_BYTES = 3 * 8  # code, number of rows, frequency
_NO_FLAGS = np.zeros(0, np.bool_)


def factors_for(shard: RelationShard) -> CostFactors:
    """Cost factors to begin with: those of a usual processor, and of the disk that the shard is read from.

    `dovetail.calibrate` measures them; pass what it gives where the difference matters.
    """
    disk = shard.disk
    cpu = CostFactors(
        seek_s=1e-4,
        bandwidth_bytes_per_s=1e9,
        read_call_s=2e-5,
        probe_s=Curve(((1 << 12, 8e-9), (1 << 20, 25e-9))),
        cache_probe_s=Curve.constant(30e-9),
        output_s=150e-9,
        expire_s=Curve.constant(60e-9),
        stream_read_s=10e-9,
        append_s=Curve.constant(80e-9),
        lookup_s=200e-9,
        gather_s=300e-9,
        step_s=3e-4,
    )
    if isinstance(disk, SimulatedDisk):
        return cpu.with_disk(seek_s=disk.seek_s, bandwidth_bytes_per_s=disk.bandwidth_bytes_per_s)
    if disk is None and shard.io_mode == "map":
        return cpu.with_disk(seek_s=0.0, bandwidth_bytes_per_s=20e9)
    return cpu


class AutoJoin(AdaptiveCacheJoin):
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
        self._leaving: list[Int64Array] = []
        self._met_rows: list[Int64Array] = []
        self._is_whole: BoolArray = _NO_FLAGS
        self._begin_learning()
        self._choose_ways()

    def _begin_learning(self) -> None:
        self._seen_before: ValueTable | None = None
        self._seen_now: ValueTable | None = None
        self._cycle_end = self._odometer + self.spec.shard.num_rows
        self._collected: list[pa.RecordBatch] = []
        self._collected_codes: list[Int64Array] = []
        self._collected_counts: list[Int64Array] = []
        self._collected_frequencies: list[npt.NDArray[np.float64]] = []
        self._collected_bytes = 0
        self._refused_bytes = 0.0
        self._left_unmatched = self._left_in_all = 0
        self._looked_up_since = 0

    # ================================================================ which way

    def _cycle_seconds(self) -> float:
        """What one cycle over the relation costs, whatever waits."""
        rows, factors = self.spec.shard.num_rows, self.factors
        steps = -(-rows // self.block_rows)
        read_s = rows * self.spec.shard.row_bytes / factors.bandwidth_bytes_per_s
        return read_s + rows * factors.probe_s.at(self.window_capacity) + steps * (factors.read_call_s + factors.step_s)

    def _scan_seconds(self, leaves_early: bool) -> float:
        """What a tuple costs by scan, the window being full."""
        capacity, factors = max(1, self.window_capacity), self.factors
        share = self._cycle_seconds() / capacity
        own = factors.append_s.at(capacity) + factors.expire_s.at(capacity) + factors.output_s
        return own + (share / 2 + 2 * factors.expire_s.at(capacity) if leaves_early else share)

    def _lookup_seconds(self) -> float:
        """What a tuple costs by lookup: a page of codes and a page of rows, if they are on a disk."""
        factors = self.factors
        page_s = factors.read_seconds(PAGE_BYTES, sequential=False)
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

    def _select_waiting(self, batch: pa.RecordBatch, codes: Int64Array, is_null: BoolArray) -> Int64Array:
        waiting = super()._select_waiting(batch, codes, is_null)
        if waiting.size == 0 or not self.looks_up:
            return waiting
        probe = self._probe or self._cache.probe(codes)
        queries, positions = self.spec.shard.lookup(codes[waiting])
        counts = np.bincount(queries, minlength=waiting.size).astype(np.int64)
        firsts = np.cumsum(counts) - counts
        # A tuple with very many rows waits for the scan, which puts them out bit by bit.
        is_answered = counts <= self.results.max_rows
        if self.spec.ordered and self.pending:
            is_answered[:] = False
        answered = waiting[is_answered]
        is_looked_up = np.zeros(codes.size, np.bool_)
        is_looked_up[answered] = True
        first_rows, all_counts = probe.first_rows.copy(), probe.counts.copy()
        first_rows[answered], all_counts[answered] = firsts[is_answered], counts[is_answered]
        self._probe = replace(
            probe, first_rows=first_rows, counts=all_counts, is_looked_up=is_looked_up, index_positions=positions
        )
        return waiting[~is_answered]

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

    def _answer(
        self, batch: pa.RecordBatch, codes: Int64Array, is_null: BoolArray, rows: Int64Array, tickets: Int64Array
    ) -> Iterator[pa.RecordBatch]:
        probe = None if self._prepared is None else self._prepared.probe
        if probe is not None and probe.is_looked_up is not None:
            missed = np.flatnonzero(probe.is_looked_up)
            self._learn_from_lookups(codes[missed])
        yield from super()._answer(batch, codes, is_null, rows, tickets)

    # ================================================================ scan

    def _disk_step(self) -> Iterator[pa.RecordBatch]:
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
            self._leaving, self._met_rows = [], []
            self._is_whole = self._whole_first_rows(block)
            yield from self._join_block(block)
            self._learn_from(block)
            # From here on nothing is lost if the iterator is given up: what has not left yet leaves at its deadline.
            MeshJoin._advance(self, block.stop - block.start)
            rows_left -= block.stop - block.start
            if self._leaving and self.leaves_early and self.spec.how in ("inner", "left"):
                yield from self._leave(np.concatenate(self._leaving))
            self._leaving, self._met_rows, self._is_whole = [], [], _NO_FLAGS
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
        whole = np.flatnonzero(self._is_whole[rows])
        if whole.size:
            self._leaving.append(np.asarray(positions[whole], np.int64))
            self._met_rows.append(np.asarray(rows[whole], np.int64))
        return super()._matches(block, rows, positions)

    def _rows_to_skip(self) -> int:
        """How many rows from here on nobody that waits can need, where not reading them is cheaper than reading."""
        window, shard, factors = self._window, self.spec.shard, self.factors
        if window is None or shard.num_rows == 0:
            return 0
        seconds_per_row = max(shard.row_bytes / factors.bandwidth_bytes_per_s, 1e-12)
        break_even = max(1.0, (factors.seek_s + factors.read_call_s) / seconds_per_row)
        if len(window) * break_even > shard.num_rows:
            return 0
        until = min(shard.num_rows, self.position + window.chunks[0].deadline - self._odometer)
        _, starts, stops = shard.locate(window.codes_at(window.live_positions()))
        ahead = starts[stops > self.position]
        needed = int(ahead.min()) if ahead.size else until
        skipped = min(needed, until) - self.position
        return skipped if skipped >= break_even or min(needed, until) == until else 0

    # ================================================================ what enters the cache

    def _learn_from(self, block: RelationBlock) -> None:
        """Choose among the values that the block holds whole, and take their rows along."""
        if not self._met_rows:
            return
        met = np.concatenate(self._met_rows)
        rows, waiting = np.unique(met, return_counts=True)
        now = np.asarray(waiting * self._scale(), np.float64)
        least = max(1.0, _CANDIDATE_SHARE * self._least_tuples_per_cycle())
        often = np.flatnonzero(now >= least)
        if often.size == 0:
            return
        rows, now = rows[often], now[often]
        codes = block.codes[rows]
        before = np.zeros(codes.size)
        if self._seen_before is not None:
            found = self._seen_before.find(codes)
            before = np.where(found >= 0, self._seen_before.rows_at(found), 0)
        frequencies = (before + now) / 2
        counts = np.searchsorted(block.codes, codes, side="right") - rows
        worth = self._saved_bytes(frequencies) / (self.switching_factor * self._cached_bytes(counts))
        is_chosen = (worth > 1.0) & (counts <= min(self.results.max_rows, MAX_COUNT - 1))
        is_chosen &= self._cache.probe(codes).is_miss
        self._remember(codes[~is_chosen], now[~is_chosen])
        chosen = np.flatnonzero(is_chosen)
        if chosen.size:
            self._collect(block, rows[chosen], codes[chosen], counts[chosen], frequencies[chosen])

    def _least_tuples_per_cycle(self) -> float:
        """How often a value with one row must come to be worth its place."""
        saved_bytes = self._cycles_waited * self._window_tuple_bytes()
        return self.switching_factor * (self._row_bytes + ENTRY_BYTES) / saved_bytes

    def _remember(self, codes: Int64Array, waiting: npt.NDArray[np.float64]) -> None:
        """Keep how often values came in this cycle, as far as there is room."""
        if codes.size == 0:
            return
        if self._seen_now is None:
            capacity = ValueTable.capacity_within(self._learning_bytes // 2)
            if capacity == 0:
                return
            self._seen_now = ValueTable(capacity)
            self._account_learning()
        room = self._seen_now.capacity - len(self._seen_now)
        best = np.argsort(-waiting, kind="stable")[:room]
        self._seen_now.put(codes[best], rows=waiting[best].astype(np.int64))

    def _collect(
        self,
        block: RelationBlock,
        rows: Int64Array,
        codes: Int64Array,
        counts: Int64Array,
        frequencies: npt.NDArray[np.float64],
    ) -> None:
        """Copy the rows of chosen values out of the block, as many values as there is room for."""
        cached_bytes = np.cumsum(self._cached_bytes(counts))
        room = self._cache_limit_bytes - self._cache.nbytes - self._collected_bytes
        fitting = int(np.searchsorted(cached_bytes, room, side="right"))
        if fitting < codes.size:
            self._refused_bytes += float(cached_bytes[-1] - (cached_bytes[fitting - 1] if fitting else 0.0))
        if fitting == 0:
            return
        rows, codes, counts, frequencies = rows[:fitting], codes[:fitting], counts[:fitting], frequencies[:fitting]
        taken_bytes = 0
        if self._cache.keeps_rows:
            _, taken = expand_ranges(rows.astype(np.int64), counts.astype(np.int32))
            batch = block.rows.take(pa.array(taken))
            taken_bytes = bytes_of_rows(batch)
            held_bytes = taken_bytes + _COLLECTED_VALUE_BYTES * codes.size
            if held_bytes > room or not self._ledger.has_room_for(held_bytes):
                self._refused_bytes += held_bytes
                return
            self._collected.append(batch)
        self._collected_codes.append(codes)
        self._collected_counts.append(counts)
        self._collected_frequencies.append(frequencies)
        self._collected_bytes += taken_bytes + _COLLECTED_VALUE_BYTES * codes.size
        self._switching_account.resize(self._collected_bytes)

    def _flush(self) -> None:
        """Move what was collected into the cache."""
        if not self._collected_codes:
            return
        codes, counts = np.concatenate(self._collected_codes), np.concatenate(self._collected_counts)
        frequencies = np.concatenate(self._collected_frequencies)
        growth_bytes = max(0, self._cache.table_growth_bytes(codes.size))
        has_room = self._ledger.has_room_for(self._collected_bytes + growth_bytes + self._cache.table_bytes)
        entering_bytes = self._collected_bytes + growth_bytes
        is_within = self._cache.nbytes + entering_bytes <= self._cache_limit_bytes
        batches = [pa.concat_batches(self._collected)] if self._collected and has_room and is_within else []
        self._drop_collected()
        if not (has_room and is_within):
            self._refused_bytes += entering_bytes
            return
        if self._cache.keeps_rows:
            self._cache.insert(np.repeat(codes, counts), batches, self._credit(frequencies))
        else:
            self._cache.insert_counts(codes, counts, self._credit(frequencies))
        self.metrics.cache_insertions += codes.size
        self._account_cache()
        self._tidy_cache()
        if self._cache.num_rows:
            self._row_bytes = (self._cache.nbytes - self._cache.table_bytes) / self._cache.num_rows

    def _drop_collected(self) -> None:
        self._collected, self._collected_codes = [], []
        self._collected_counts, self._collected_frequencies = [], []
        self._collected_bytes = 0
        self._switching_account.resize(0)

    def _upkeep(self) -> None:
        """Between two blocks: let rows enter the cache, end a cycle, move the border."""
        if self._collected_bytes > self._shared_bytes // _FLUSH_SHARE:
            self._flush()
        if self._odometer >= self._cycle_end:
            self._end_cycle()
        self._move_asked_border()

    def _end_cycle(self) -> None:
        self._cycle_end = self._odometer + max(1, self.spec.shard.num_rows)
        self._choose_ways()
        self._flush()
        self._seen_before, self._seen_now = self._seen_now, None
        self._account_learning()
        if self._is_tenth_cycle():
            self._evict()
        if self._refused_bytes:
            wanted = min(self._refused_bytes, self._shared_bytes / _MOST_ASKED_SHARE)
            limit = min(int(self._cache.nbytes + wanted + self._slack()), self._most_for_cache())
            self._refused_bytes = 0.0
            if limit > self._cache_limit_bytes:
                self._ask_for_border(limit)

    def _account_learning(self) -> None:
        tables = (self._seen_before, self._seen_now)
        self._learning_account.resize(sum(table.nbytes for table in tables if table is not None))

    # ---------------------------------------------------------------- learning from lookups

    def _accept(
        self, batch: pa.RecordBatch, codes: Int64Array, is_null: BoolArray, may_drop: bool
    ) -> Iterator[pa.RecordBatch]:
        table = self._seen_now
        if table is not None and self._looked_up_since >= _PERIOD_LOOKUPS * max(table.capacity, len(self._cache)):
            self._cache_what_was_looked_up(table)
        yield from super()._accept(batch, codes, is_null, may_drop)

    def _learn_from_lookups(self, codes: Int64Array) -> None:
        """Count what was looked up."""
        if self._seen_now is None:
            capacity = ValueTable.capacity_within(self._learning_bytes)
            if capacity == 0 or self._seen_before is not None:
                self._seen_before = None
                self._account_learning()
                return
            self._seen_now = ValueTable(capacity)
            self._account_learning()
        table = self._seen_now
        found = table.find(codes)
        table.observe(found)
        added = np.unique(codes[found < 0])[: table.capacity - len(table)]
        table.put(added, frequencies=1)
        self._looked_up_since += codes.size

    def _cache_what_was_looked_up(self, table: ValueTable) -> None:
        """Give the cache the memory that no window needs, and the values that came most often."""
        self._looked_up_since = 0
        if self._window is not None and len(self._window) == 0:
            self._replace_window(None)
        if self._window is None and self._move_border(self._most_for_cache()):
            codes, _, _, frequencies = table.items()
            often = np.flatnonzero(frequencies > 1)
            often = often[np.argsort(-frequencies[often], kind="stable")]
            codes, frequencies = codes[often], frequencies[often]
            self._make_room_for(codes, frequencies)
            self._insert_looked_up(codes, frequencies)
        self._seen_now = None
        self._account_learning()
        self._cache.reset_frequencies()

    def _make_room_for(self, codes: Int64Array, frequencies: Int64Array) -> None:
        """Evict values that came less often than those that want to enter."""
        room = self._cache_limit_bytes - self._cache.nbytes - self._slack()
        wanted = codes.size * (self._row_bytes + ENTRY_BYTES) - room
        if wanted <= 0 or codes.size == 0:
            return
        cached, _, counts, asked = self._cache.values()
        order = np.argsort(asked / self._cached_bytes(counts), kind="stable")
        freed = np.cumsum(self._cached_bytes(counts[order]))
        leaving = order[: int(np.searchsorted(freed, wanted)) + 1]
        leaving = leaving[asked[leaving] < np.median(frequencies)]
        self.metrics.cache_evictions += self._cache.evict(cached[leaving])
        self._tidy_cache()

    def _insert_looked_up(self, codes: Int64Array, frequencies: Int64Array) -> None:
        counts = self.spec.shard.count(codes)
        room = self._cache_limit_bytes - self._cache.nbytes - self._slack()
        room = min(room, self._ledger.free_bytes // 2)
        fits = (np.cumsum(self._cached_bytes(counts)) <= room) & (counts <= min(self.results.max_rows, MAX_COUNT - 1))
        codes, frequencies, counts = codes[fits], frequencies[fits], counts[fits]
        if codes.size == 0:
            return
        credit = np.zeros(codes.size, np.int64)
        self._insert_negative(codes[counts == 0], frequencies[counts == 0].astype(np.float64))
        codes, credit = codes[counts > 0], credit[counts > 0]
        if not self._cache.keeps_rows:
            self._cache.insert_counts(codes, counts[counts > 0], credit)
        elif codes.size:
            queries, positions = self.spec.shard.lookup(codes)
            page_rows = max(1, self.results.max_rows)
            # A page at a time, each with whole values, so that copies stay small.
            for start in range(0, codes.size, page_rows):
                mine = (queries >= start) & (queries < start + page_rows)
                batch = self.spec.shard.gather(positions[mine])
                self._cache.insert(codes[queries[mine]], [batch], credit[start : start + page_rows])
        self.metrics.cache_insertions += codes.size
        self._account_cache()
        self._tidy_cache()

    # ================================================================ other budgets, restarts

    def _replan(self, spec: JoinSpec) -> None:
        super()._replan(spec)
        self._asked_limit_bytes = self._admission_limit = None
        self._drop_collected()
        self._begin_learning()
        self._account_learning()
        self._choose_ways()

    def _forget_cache(self) -> None:
        super()._forget_cache()
        self._begin_learning()
        self._choose_ways()

    # ================================================================ explain

    def explain(self) -> Plan:
        """What it does now, what it predicts of that, and what limits it."""
        metrics, factors = self.metrics, self.factors
        offered = max(1, metrics.stream_tuples_in)
        hit_ratio = (metrics.cache_hits + metrics.negative_hits) / offered
        looks_up = self.looks_up
        steps = max(1, -(-self.spec.shard.num_rows // self.block_rows))
        window = 0 if looks_up else self.window_capacity
        chunk = max(1, round(window / (steps * self._cycles_waited))) if window else 0
        missed_s = self._lookup_seconds() if looks_up else self._scan_seconds(self.leaves_early)
        hit_s = factors.cache_probe_s.at(max(1, len(self._cache))) + factors.output_s
        per_tuple = factors.stream_read_s + hit_ratio * hit_s + (1.0 - hit_ratio) * missed_s
        read_s = self._disk_seconds_per_miss(looks_up) * (1.0 - hit_ratio)
        served = chunk / max(1e-9, 1.0 - hit_ratio) if chunk else 1.0
        terms = {"read": read_s * served, "cpu": (per_tuple - read_s) * served}
        binds: Bottleneck = "disk" if read_s > per_tuple / 2 else "cpu"
        way = "looked up in the index as they come" if looks_up else "joined by the scan"
        return Plan(
            strategy="auto",
            objective=self.objective,
            access="index" if looks_up else "scan",
            block_rows=self.block_rows,
            chunk_tuples=chunk,
            window_tuples=window,
            cache_rows=self._cache.num_rows,
            hit_ratio=hit_ratio,
            memory_bytes=self.sizes(),
            budget_bytes=self.budget.total_bytes,
            required_rate=None,
            service_rate=1.0 / per_tuple if per_tuple > 0 else math.inf,
            loop_seconds=per_tuple * served,
            loop_terms=terms,
            binds=binds,
            why=f"Tuples that the cache does not know are {way}; the disk takes {read_s / per_tuple:.0%} of the time.",
        )

    def _disk_seconds_per_miss(self, looks_up: bool) -> float:
        factors = self.factors
        if looks_up:
            return self._lookup_seconds() - factors.lookup_s - factors.gather_s - factors.output_s
        read_s = self.spec.shard.num_rows * self.spec.shard.row_bytes / factors.bandwidth_bytes_per_s
        return read_s * self._cycles_waited / max(1, self.window_capacity)
