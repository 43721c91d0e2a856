"""Learning from lookups: lookups are counted, and from time to time the most frequent values enter the cache.

If tuples are looked up nothing waits, so the cache may use the window's memory. Counting costs as much as a lookup of a
cached page, so it is done only if reads wait for a device.
"""

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.joins.cache.border import Border
from dovetail.joins.cache.policy import CachePolicy
from dovetail.joins.cache.relation_cache import bytes_of_rows
from dovetail.joins.cache.switching import ENTRY_BYTES
from dovetail.joins.phases.row_source import Found
from dovetail.joins.state import JoinState
from dovetail.kernels.value_table import MAX_COUNT, ValueTable

__all__ = ["LearnsFromLookups"]

_ROOM = 2.0  # for the values that enter: they may have more than one row, and a table is not filled to the brim
_PERIOD_LOOKUPS = 4  # lookups per counted or cached value after which the cache is renewed


class LearnsFromLookups:
    """Fills the cache with the values looked up most often."""

    def __init__(self, state: JoinState, border: Border, policy: CachePolicy) -> None:
        self.state, self.border, self.policy = state, border, policy
        self.begin_anew()

    def begin_anew(self) -> None:
        """Reset the counts."""
        self._table: ValueTable | None = None
        self._looked_up = 0

    def observe(self, codes: Int64Array, tuples: Int64Array, found: Found) -> None:
        """Count distinct codes that were looked up, with the number of tuples of each."""
        border = self.border
        if found.is_cached is not None:
            border.cache.note_asked(codes, tuples)
            codes, tuples = codes[~found.is_cached], tuples[~found.is_cached]
        table = self._counter()
        if table is None:
            return
        known = table.find(codes)
        is_known = known >= 0
        table.put(codes[is_known], frequencies=table.frequencies_at(known[is_known]) + tuples[is_known])
        room = table.capacity - len(table)
        table.put(codes[~is_known][:room], frequencies=tuples[~is_known][:room])
        self._looked_up += int(tuples.sum())

    def _counter(self) -> ValueTable | None:
        if self._table is None:
            capacity = ValueTable.capacity_within(self.border.memory.learning_bytes)
            if capacity == 0 or not self.state.ledger.has_room_for(ValueTable.nbytes_of(capacity)):
                return None
            self._table = ValueTable(capacity)
            self.border.account_learning("lookups", self._table.nbytes)
        return self._table

    def look_over(self) -> None:
        """Between two batches: renew the cache if enough was counted."""
        table, state, border = self._table, self.state, self.border
        if table is None or self._looked_up < _PERIOD_LOOKUPS * max(table.capacity, len(border.cache)):
            return
        self._looked_up = 0
        if state.window is not None and len(state.window) == 0:
            state.replace_window(None)
        codes, _, _, frequencies = table.items()
        often = np.flatnonzero(frequencies > 1)
        often = often[np.argsort(-frequencies[often], kind="stable")]
        codes, frequencies = codes[often], frequencies[often]
        # No more than what they need: the rest serves tuples that wait, and values that never come again need none.
        wanted_bytes = border.cache.nbytes + int(_ROOM * codes.size * (self.policy.row_bytes + ENTRY_BYTES))
        limit = min(border.most_for_cache, max(border.memory.cache_limit_bytes, wanted_bytes))
        if state.window is None and border.move(limit):
            self._make_room_for(codes, frequencies)
            self._insert(codes, frequencies)
        self._table = None
        border.account_learning("lookups", 0)
        border.cache.reset_frequencies()

    def _make_room_for(self, codes: Int64Array, frequencies: Int64Array) -> None:
        """Evict values that occurred less often than the candidates."""
        state, border, policy = self.state, self.border, self.policy
        room = border.memory.cache_limit_bytes - border.cache.nbytes - border.slack_bytes
        wanted = codes.size * (policy.row_bytes + ENTRY_BYTES) - room
        if wanted <= 0 or codes.size == 0:
            return
        cached, _, counts, asked = border.cache.values()
        order = np.argsort(asked / policy.cached_bytes(counts), kind="stable")
        freed = np.cumsum(policy.cached_bytes(counts[order]))
        leaving = order[: int(np.searchsorted(freed, wanted)) + 1]
        leaving = leaving[asked[leaving] < np.median(frequencies)]
        state.metrics.cache_evictions += border.cache.evict(cached[leaving])
        border.tidy_cache()

    def _insert(self, codes: Int64Array, frequencies: Int64Array) -> None:
        state, border, policy = self.state, self.border, self.policy
        is_new = border.cache.probe(codes).is_miss
        codes, frequencies = codes[is_new], frequencies[is_new]
        counts = state.spec.shard.count(codes)
        policy.insert_negative(codes[counts == 0], frequencies[counts == 0].astype(np.float64))
        codes, counts = codes[counts > 0], counts[counts > 0]
        limit = border.memory.cache_limit_bytes - border.cache.nbytes - border.slack_bytes
        room = min(limit, state.ledger.free_bytes // 2)
        most_rows = min(state.results.max_rows, MAX_COUNT - 1)
        fits = (np.cumsum(policy.cached_bytes(counts)) <= room) & (counts <= most_rows)
        codes, counts = codes[fits], counts[fits]
        # One page at a time, each with complete values, so that copies stay small.
        starts = np.flatnonzero(np.diff((np.cumsum(counts) - 1) // most_rows, prepend=-1))
        ends = np.append(starts, codes.size)[1:]  # empty if no value fits
        for start, stop in zip(starts.tolist(), ends.tolist(), strict=True):
            if not self._insert_page(codes[start:stop], counts[start:stop]):
                break
        border.tidy_cache()

    def _insert_page(self, codes: Int64Array, counts: Int64Array) -> bool:
        """Read the rows of values and insert them; False if there is no room."""
        state, border = self.state, self.border
        batches: list[pa.RecordBatch] = []
        row_codes = codes
        if border.cache.keeps_rows:
            queries, positions = state.spec.shard.lookup(codes)
            batches, row_codes = [state.spec.shard.gather(positions)], codes[queries]
        entering_bytes = sum(bytes_of_rows(batch) for batch in batches)
        entering_bytes += max(0, border.cache.table_growth_bytes(codes.size))
        has_room = state.ledger.has_room_for(entering_bytes + border.cache.table_bytes)
        if not has_room or border.cache.nbytes + entering_bytes > border.memory.cache_limit_bytes:
            return False
        if border.cache.keeps_rows:
            border.cache.insert(row_codes, batches, np.zeros(codes.size, np.int64))
        else:
            border.cache.insert_counts(codes, counts)
        state.metrics.cache_insertions += codes.size
        border.account_cache()
        return True
