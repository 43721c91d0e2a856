"""Learning from blocks: how values enter the cache of `auto` beside a scan.

A block of a relation sorted by code tells which join values it holds completely. Their number of rows is known and the
rows are at hand; the number of waiting tuples tells how often they occur per cycle. So no counting or switching cycle
is needed: a value enters the cache when the scan has passed it twice and found it valuable enough.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.joins.cache.border import Border
from dovetail.joins.cache.policy import CachePolicy
from dovetail.joins.cache.relation_cache import LASTING_ROWS_POOL, bytes_of_rows
from dovetail.joins.phases.scan import Scan
from dovetail.joins.protocol import RelationBlock
from dovetail.joins.state import JoinState
from dovetail.kernels.sorted_codes import expand_ranges
from dovetail.kernels.value_table import MAX_COUNT, ValueTable

__all__ = ["LearnsFromBlocks"]

FloatArray = npt.NDArray[np.float64]
_FLUSH_SHARE = 64  # rows enter the cache when this part of the shared memory has been collected
_ASKED_AHEAD = 2  # request more than was refused: a cache grows for some cycles, and each move costs one
_MOST_ASKED_SHARE = 4  # the most the cache may request per cycle, as a part of the shared memory
_CANDIDATE_SHARE = 0.75  # values with this share of the required frequency are remembered for the next pass
_CYCLES_OF_LEARNING = 3
_CYCLES_ASLEEP = 4
_WORTH_LEARNING_SHARE = 50  # learning continues while it finds this part of the cached values
_CHANCE_SHARE = 200  # this part of the waiting tuples is found by chance, even if no value is frequent
_COLLECTED_VALUE_BYTES = 3 * 8  # code, number of rows, frequency


class LearnsFromBlocks:
    """Fills the cache from the blocks of a scan."""

    def __init__(
        self, state: JoinState, scan: Scan, border: Border, policy: CachePolicy, is_enabled: bool = True
    ) -> None:
        self._is_enabled = is_enabled
        self.state, self._scan, self.border, self.policy = state, scan, border, policy
        self.on_cycle: Callable[[], None] | None = None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all observations."""
        state = self.state
        self._seen_before: ValueTable | None = None
        self._seen_now: ValueTable | None = None
        self._cycle_end = self._scan.odometer + state.spec.shard.num_rows
        self._collected: list[pa.RecordBatch] = []
        self._collected_codes: list[Int64Array] = []
        self._collected_counts: list[Int64Array] = []
        self._collected_frequencies: list[FloatArray] = []
        self._collected_bytes = 0
        self._refused_bytes = 0.0
        self.learns = self._is_enabled
        self._cycles_learned = self._cycles_asleep = 0
        self._chosen_lately = 0

    # ================================================================ what enters the cache

    def learn_from(self, block: RelationBlock, met_rows: Int64Array) -> None:
        """Choose among the values that the block holds completely, and collect their rows.

        `met_rows` has the first row of each such value, once per waiting tuple, ascending.
        """
        state, border, policy = self.state, self.border, self.policy
        # Ascending, so the rows of each value are contiguous.
        firsts = np.flatnonzero(np.concatenate([[True], met_rows[1:] != met_rows[:-1]]))
        rows, waiting = met_rows[firsts], np.diff(np.append(firsts, met_rows.size))
        now = np.asarray(waiting * policy.scale(), np.float64)
        least = max(1, math.ceil(_CANDIDATE_SHARE * policy.least_tuples_per_cycle()))
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
        worth = policy.saved_bytes(frequencies) / (policy.switching_factor * policy.cached_bytes(counts))
        is_chosen = (worth > 1.0) & (counts <= min(state.results.max_rows, MAX_COUNT - 1))
        is_chosen &= border.cache.probe(codes).is_miss
        self._remember(codes[~is_chosen], now[~is_chosen])
        chosen = np.flatnonzero(is_chosen)
        self._chosen_lately += chosen.size
        if chosen.size:
            taken = self._collect(block, rows[chosen], codes[chosen], counts[chosen], frequencies[chosen])
            # Remember values that found no room, for the next pass.
            self._remember(codes[chosen[taken:]], now[chosen[taken:]])

    def _remember(self, codes: Int64Array, waiting: FloatArray) -> None:
        """Keep how often values occurred in this cycle, as far as there is room."""
        state, border = self.state, self.border
        if codes.size == 0:
            return
        if self._seen_now is None:
            capacity = ValueTable.capacity_within(border.memory.learning_bytes // 2)
            if capacity == 0 or not state.ledger.has_room_for(ValueTable.nbytes_of(capacity)):
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
        """Copy the rows of chosen values out of the block, for as many values as fit; returns how many."""
        state, border, policy = self.state, self.border, self.policy
        cached_bytes = np.cumsum(policy.cached_bytes(counts))
        collected = sum(earlier.size for earlier in self._collected_codes)
        growth_bytes = max(0, border.cache.table_growth_bytes(collected + codes.size))
        room = border.memory.cache_limit_bytes - border.cache.nbytes - self._collected_bytes - growth_bytes
        fitting = int(np.searchsorted(cached_bytes, room, side="right"))
        if fitting < codes.size:
            self._refused_bytes += float(cached_bytes[-1] - (cached_bytes[fitting - 1] if fitting else 0.0))
        if fitting == 0:
            return 0
        rows, codes, counts, frequencies = rows[:fitting], codes[:fitting], counts[:fitting], frequencies[:fitting]
        taken_bytes = 0
        if border.cache.keeps_rows:
            _, taken = expand_ranges(rows.astype(np.int64), counts.astype(np.int32))
            batch = block.rows.take(pa.array(taken))
            taken_bytes = bytes_of_rows(batch)
            held_bytes = taken_bytes + _COLLECTED_VALUE_BYTES * codes.size
            if held_bytes > room or not state.ledger.has_room_for(held_bytes):
                self._refused_bytes += held_bytes
                return 0
        elif not state.ledger.has_room_for(_COLLECTED_VALUE_BYTES * codes.size):
            return 0
        if border.cache.keeps_rows:
            self._collected.append(batch)
        self._collected_codes.append(codes)
        self._collected_counts.append(counts)
        self._collected_frequencies.append(frequencies)
        self._collected_bytes += taken_bytes + _COLLECTED_VALUE_BYTES * codes.size
        border.switching_account.resize(self._collected_bytes)
        return fitting

    def _flush(self) -> None:
        """Move the collected rows into the cache."""
        state, border, policy = self.state, self.border, self.policy
        if not self._collected_codes:
            return
        codes, counts = np.concatenate(self._collected_codes), np.concatenate(self._collected_counts)
        frequencies = np.concatenate(self._collected_frequencies)
        growth_bytes = max(0, border.cache.table_growth_bytes(codes.size))
        has_room = state.ledger.has_room_for(self._collected_bytes + growth_bytes + border.cache.table_bytes)
        entering_bytes = self._collected_bytes + growth_bytes
        is_within = border.cache.nbytes + entering_bytes <= border.memory.cache_limit_bytes
        # Values looked up meanwhile may have entered already, and an abandoned step may have run twice.
        is_within &= bool(border.cache.probe(codes).is_miss.all()) and np.unique(codes).size == codes.size
        batches: list[pa.RecordBatch] = []
        if self._collected and has_room and is_within:
            batches = [pa.concat_batches(self._collected, memory_pool=LASTING_ROWS_POOL)]
        self.drop()
        if not (has_room and is_within):
            self._refused_bytes += entering_bytes
            return
        if border.cache.keeps_rows:
            border.cache.insert(np.repeat(codes, counts), batches, policy.credit(frequencies))
        else:
            border.cache.insert_counts(codes, counts, policy.credit(frequencies))
        state.metrics.cache_insertions += codes.size
        border.account_cache()
        border.tidy_cache()
        policy.measure_rows()

    def drop(self) -> None:
        """Drop collected rows that have not entered the cache."""
        border = self.border
        self._collected, self._collected_codes = [], []
        self._collected_counts, self._collected_frequencies = [], []
        self._collected_bytes = 0
        border.switching_account.resize(0)

    def upkeep(self) -> None:
        """Between two blocks: fill the cache, end a cycle, move the border."""
        border, policy = self.border, self.policy
        if self._collected_bytes > border.shared_bytes // _FLUSH_SHARE:
            self._flush()
        if self._scan.odometer >= self._cycle_end:
            self._end_cycle()
        policy.move_asked_border()
        border.look_over_window()

    def _end_cycle(self) -> None:
        state, border, policy = self.state, self.border, self.policy
        self._cycle_end = self._scan.odometer + max(1, state.spec.shard.num_rows)
        self._flush()
        self._seen_before, self._seen_now = self._seen_now, None
        self._account_learning()
        if policy.is_tenth_cycle():
            policy.evict()
        self._decide_to_learn()
        if self.on_cycle is not None:
            self.on_cycle()
        if self._refused_bytes:
            wanted = min(_ASKED_AHEAD * self._refused_bytes, border.shared_bytes / _MOST_ASKED_SHARE)
            limit = min(int(border.cache.nbytes + wanted + border.slack_bytes), border.most_for_cache)
            self._refused_bytes = 0.0
            if limit > border.memory.cache_limit_bytes:
                border.ask(limit)

    def _decide_to_learn(self) -> None:
        """Learn for at least two cycles; pause for some if that found little."""
        state, border = self.state, self.border
        if not self.learns:
            self._cycles_asleep -= 1
            self.learns = self._is_enabled and self._cycles_asleep <= 0
            return
        self._cycles_learned += 1
        if self._cycles_learned < _CYCLES_OF_LEARNING:
            return
        worthwhile = max(len(border.cache) // _WORTH_LEARNING_SHARE, state.window_capacity // _CHANCE_SHARE)
        if self._chosen_lately <= worthwhile:
            self.sleep(_CYCLES_ASLEEP)
        self._cycles_learned = self._chosen_lately = 0

    def sleep(self, cycles: int) -> None:
        """Choose no values for some cycles."""
        self.learns, self._cycles_asleep = False, cycles

    def _account_learning(self) -> None:
        tables = (self._seen_before, self._seen_now)
        self.border.account_learning("blocks", sum(table.nbytes for table in tables if table is not None))
