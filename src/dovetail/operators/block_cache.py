"""How values enter the cache of `auto`: out of the blocks of a scan, or out of what was looked up.

A block of a relation that is sorted by code tells which join values it holds whole. Of those, the number of rows is
known and the rows are at hand; how many tuples of them wait tells how often they come in a cycle. So there is no cycle
to count and none to switch: a value enters the cache when the scan has passed it twice and found it worth its place.

Where tuples are looked up instead, nothing waits; then what is looked up is counted, and now and then the values that
came most often enter, in the place of those that came least.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.kernels.sorted_codes import expand_ranges
from dovetail.kernels.value_table import MAX_COUNT, ValueTable
from dovetail.operators.adaptive import AdaptiveCacheJoin, Objective
from dovetail.operators.admission import Offered
from dovetail.operators.cache import LASTING_ROWS_POOL, bytes_of_rows
from dovetail.operators.protocol import RelationBlock
from dovetail.operators.spec import JoinSpec
from dovetail.operators.switching import ENTRY_BYTES

__all__ = ["BlockCacheJoin"]

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
_FLUSH_SHARE = 64  # rows enter the cache when so much of what is shared has come together
_ASKED_AHEAD = 2  # more is asked for than was refused: a cache grows for some cycles, and each move costs one
_MOST_ASKED_SHARE = 4  # the most that the cache may ask for in a cycle, as a part of what is shared
_CANDIDATE_SHARE = 0.75  # values that come this much less often than they should are remembered for the next pass
_PERIOD_LOOKUPS = 4  # lookups per counted or cached value after which the cache is looked over
_CYCLES_OF_LEARNING = 3
_CYCLES_ASLEEP = 4
_WORTH_LEARNING_SHARE = 50  # learning goes on while it finds this part of what is cached
_CHANCE_SHARE = 200  # so many of what waits are found by chance, even where no value is frequent
_COLLECTED_VALUE_BYTES = 3 * 8  # code, number of rows, frequency


class BlockCacheJoin(AdaptiveCacheJoin):
    """A join behind a cache that is filled from blocks and lookups."""

    def __init__(self, spec: JoinSpec, objective: Objective, switching_factor: float) -> None:
        super().__init__(spec, objective, switching_factor)
        self._begin_learning()

    def _begin_learning(self) -> None:
        self._seen_before: ValueTable | None = None
        self._seen_now: ValueTable | None = None
        self._cycle_end = self._odometer + self.spec.shard.num_rows
        self._collected: list[pa.RecordBatch] = []
        self._collected_codes: list[Int64Array] = []
        self._collected_counts: list[Int64Array] = []
        self._collected_frequencies: list[FloatArray] = []
        self._collected_bytes = 0
        self._refused_bytes = 0.0
        self._looked_up_since = 0
        self._learns = True
        self._cycles_learned = self._cycles_asleep = 0
        self._chosen_lately = 0

    # ================================================================ what enters the cache

    def _learn_from(self, block: RelationBlock, met_rows: Int64Array) -> None:
        """Choose among the values that the block holds whole, and take their rows along.

        Parameters
        ----------
        block
            What was joined.
        met_rows
            The first row of each such value, once for every tuple of it that waits; ascending.
        """
        # They ascend, so that each value's are side by side.
        firsts = np.flatnonzero(np.concatenate([[True], met_rows[1:] != met_rows[:-1]]))
        rows, waiting = met_rows[firsts], np.diff(np.append(firsts, met_rows.size))
        now = np.asarray(waiting * self._scale(), np.float64)
        least = max(1, math.ceil(_CANDIDATE_SHARE * self._least_tuples_per_cycle()))
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
        self._chosen_lately += chosen.size
        if chosen.size:
            taken = self._collect(block, rows[chosen], codes[chosen], counts[chosen], frequencies[chosen])
            # What found no room this time is to be known the next.
            self._remember(codes[chosen[taken:]], now[chosen[taken:]])

    def _least_tuples_per_cycle(self) -> float:
        """How often a value with one row must come to be worth its place."""
        saved_bytes = self._cycles_waited * self._window_tuple_bytes()
        return self.switching_factor * (self._row_bytes + ENTRY_BYTES) / saved_bytes

    def _remember(self, codes: Int64Array, waiting: FloatArray) -> None:
        """Keep how often values came in this cycle, as far as there is room."""
        if codes.size == 0:
            return
        if self._seen_now is None:
            capacity = ValueTable.capacity_within(self._learning_bytes // 2)
            if capacity == 0 or not self._ledger.has_room_for(ValueTable.nbytes_of(capacity)):
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
        frequencies: FloatArray,
    ) -> int:
        """Copy the rows of chosen values out of the block, as many values as there is room for, and tell how many."""
        cached_bytes = np.cumsum(self._cached_bytes(counts))
        collected = sum(earlier.size for earlier in self._collected_codes)
        growth_bytes = max(0, self._cache.table_growth_bytes(collected + codes.size))
        room = self._cache_limit_bytes - self._cache.nbytes - self._collected_bytes - growth_bytes
        fitting = int(np.searchsorted(cached_bytes, room, side="right"))
        if fitting < codes.size:
            self._refused_bytes += float(cached_bytes[-1] - (cached_bytes[fitting - 1] if fitting else 0.0))
        if fitting == 0:
            return 0
        rows, codes, counts, frequencies = rows[:fitting], codes[:fitting], counts[:fitting], frequencies[:fitting]
        taken_bytes = 0
        if self._cache.keeps_rows:
            _, taken = expand_ranges(rows.astype(np.int64), counts.astype(np.int32))
            batch = block.rows.take(pa.array(taken))
            taken_bytes = bytes_of_rows(batch)
            held_bytes = taken_bytes + _COLLECTED_VALUE_BYTES * codes.size
            if held_bytes > room or not self._ledger.has_room_for(held_bytes):
                self._refused_bytes += held_bytes
                return 0
        elif not self._ledger.has_room_for(_COLLECTED_VALUE_BYTES * codes.size):
            return 0
        if self._cache.keeps_rows:
            self._collected.append(batch)
        self._collected_codes.append(codes)
        self._collected_counts.append(counts)
        self._collected_frequencies.append(frequencies)
        self._collected_bytes += taken_bytes + _COLLECTED_VALUE_BYTES * codes.size
        self._switching_account.resize(self._collected_bytes)
        return fitting

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
        # What was looked up meanwhile may have entered already, and a step that was given up may have come twice.
        is_within &= bool(self._cache.probe(codes).is_miss.all()) and np.unique(codes).size == codes.size
        batches: list[pa.RecordBatch] = []
        if self._collected and has_room and is_within:
            batches = [pa.concat_batches(self._collected, memory_pool=LASTING_ROWS_POOL)]
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
        self._look_over_window()

    def _end_cycle(self) -> None:
        self._cycle_end = self._odometer + max(1, self.spec.shard.num_rows)
        self._flush()
        self._seen_before, self._seen_now = self._seen_now, None
        self._account_learning()
        if self._is_tenth_cycle():
            self._evict()
        self._decide_to_learn()
        if self._refused_bytes:
            wanted = min(_ASKED_AHEAD * self._refused_bytes, self._shared_bytes / _MOST_ASKED_SHARE)
            limit = min(int(self._cache.nbytes + wanted + self._slack()), self._most_for_cache())
            self._refused_bytes = 0.0
            if limit > self._cache_limit_bytes:
                self._ask_for_border(limit)

    def _decide_to_learn(self) -> None:
        """Learn for two cycles at least, and not at all for some when that found little."""
        if not self._learns:
            self._cycles_asleep -= 1
            self._learns = self._cycles_asleep <= 0
            return
        self._cycles_learned += 1
        if self._cycles_learned < _CYCLES_OF_LEARNING:
            return
        worthwhile = max(len(self._cache) // _WORTH_LEARNING_SHARE, self.window_capacity // _CHANCE_SHARE)
        if self._chosen_lately <= worthwhile:
            self._sleep(_CYCLES_ASLEEP)
        self._cycles_learned = self._chosen_lately = 0

    def _sleep(self, cycles: int) -> None:
        """Choose no values for some cycles."""
        self._learns, self._cycles_asleep = False, cycles

    def _account_learning(self) -> None:
        tables = (self._seen_before, self._seen_now)
        self._learning_account.resize(sum(table.nbytes for table in tables if table is not None))

    # ---------------------------------------------------------------- learning from lookups

    def _accept(self, offered: Offered, may_drop: bool) -> Iterator[pa.RecordBatch]:
        table = self._seen_now
        if table is not None and self._looked_up_since >= _PERIOD_LOOKUPS * max(table.capacity, len(self._cache)):
            self._cache_what_was_looked_up(table)
        yield from super()._accept(offered, may_drop)

    def _learn_from_lookups(self, codes: Int64Array) -> None:
        """Count what was looked up."""
        if self._seen_now is None:
            self._seen_before = None
            self._account_learning()
            capacity = ValueTable.capacity_within(self._learning_bytes)
            if capacity == 0 or not self._ledger.has_room_for(ValueTable.nbytes_of(capacity)):
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
        is_new = self._cache.probe(codes).is_miss
        codes, frequencies = codes[is_new], frequencies[is_new]
        counts = self.spec.shard.count(codes)
        self._insert_negative(codes[counts == 0], frequencies[counts == 0].astype(np.float64))
        codes, counts = codes[counts > 0], counts[counts > 0]
        room = min(self._cache_limit_bytes - self._cache.nbytes - self._slack(), self._ledger.free_bytes // 2)
        most_rows = min(self.results.max_rows, MAX_COUNT - 1)
        fits = (np.cumsum(self._cached_bytes(counts)) <= room) & (counts <= most_rows)
        codes, counts = codes[fits], counts[fits]
        # A page at a time, each with whole values, so that copies stay small.
        starts = np.flatnonzero(np.diff((np.cumsum(counts) - 1) // most_rows, prepend=-1))
        ends = np.append(starts, codes.size)[1:]  # none where no value fits
        for start, stop in zip(starts.tolist(), ends.tolist(), strict=True):
            if not self._insert_page(codes[start:stop], counts[start:stop]):
                break
        self._tidy_cache()

    def _insert_page(self, codes: Int64Array, counts: Int64Array) -> bool:
        """Read the rows of values and let them enter; False if there is no room."""
        batches: list[pa.RecordBatch] = []
        row_codes = codes
        if self._cache.keeps_rows:
            queries, positions = self.spec.shard.lookup(codes)
            batches, row_codes = [self.spec.shard.gather(positions)], codes[queries]
        entering_bytes = sum(bytes_of_rows(batch) for batch in batches)
        entering_bytes += max(0, self._cache.table_growth_bytes(codes.size))
        has_room = self._ledger.has_room_for(entering_bytes + self._cache.table_bytes)
        if not has_room or self._cache.nbytes + entering_bytes > self._cache_limit_bytes:
            return False
        if self._cache.keeps_rows:
            self._cache.insert(row_codes, batches, np.zeros(codes.size, np.int64))
        else:
            self._cache.insert_counts(codes, counts)
        self.metrics.cache_insertions += codes.size
        self._account_cache()
        return True

    # ================================================================ other budgets, restarts

    def _replan(self, spec: JoinSpec) -> None:
        super()._replan(spec)
        self._asked_limit_bytes = self._admission_limit = None
        self._drop_collected()
        self._begin_learning()
        self._account_learning()

    def _forget_cache(self) -> None:
        super()._forget_cache()
        self._begin_learning()
