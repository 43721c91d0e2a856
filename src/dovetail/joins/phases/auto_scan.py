"""The scan of `auto`: tuples leave early, and values are cached, if a block holds all rows of a join value.

The relation is sorted by code, so a block tells which join values it holds completely. Their tuples have met all their
rows and leave at once, which makes room: a tuple waits half a cycle on average, not a whole one. If few tuples wait,
the index tells where their rows can be; rows that no waiting tuple can need count as met without being read, if reading
them takes longer than skipping.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.cache.from_blocks import LearnsFromBlocks
from dovetail.joins.phases.choice import Choice
from dovetail.joins.phases.scan import Observer, Scan
from dovetail.joins.protocol import RelationBlock
from dovetail.joins.state import JoinState
from dovetail.joins.window.leaving import Leaving
from dovetail.joins.window.tuple_store import Positions
from dovetail.relation.format import FENCE_STRIDE

__all__ = ["AutoScan"]

_CYCLES_PER_JUDGEMENT = 5
_CYCLES_WITHOUT_CACHE = 20
_PROBES_PER_LOOK = 3  # the cost of probing the cache and learning, in probes
_LEAST_CODE, _GREATEST_CODE = int(np.iinfo(np.int64).min), int(np.iinfo(np.int64).max)
_MUCH_UNMATCHED = 0.05
_NO_FLAGS = np.zeros(0, np.bool_)
_NO_ROWS = np.zeros(0, np.int64)


class AutoScan(Observer):
    """Stands beside the scan of `auto`."""

    def __init__(
        self, state: JoinState, scan: Scan, leaving: Leaving, learning: LearnsFromBlocks, choice: Choice
    ) -> None:
        self.state, self._scan, self._leaving, self.learning, self.choice = state, scan, leaving, learning, choice
        self._is_sorted = state.spec.shard.num_segments == 1
        self._met_rows: list[Int64Array] = []
        self._met = _NO_ROWS
        self._is_whole: BoolArray = _NO_FLAGS
        self._seeks_unmatched = False
        self._unmatched_by_cycle = self._entered_by_cycle = 0
        self._cycles_judged = self._hits_judged = self._offered_judged = 0
        learning.on_cycle = self._end_cycle

    def select_pairs(self, block: RelationBlock, rows: Positions, positions: Positions) -> Int64Array | None:
        """Record which tuples met all rows of their value; all pairs take part."""
        whole = np.flatnonzero(self._is_whole[rows]) if self._is_whole.size else _NO_FLAGS
        if whole.size:
            self._met_rows.append(np.asarray(rows[whole], np.int64))
        return None

    # ================================================================ beside the scan

    def rows_to_skip(self) -> int:
        window, shard, factors = self.state.window, self.state.spec.shard, self.choice.factors
        if window is None or shard.num_rows == 0:
            return 0
        seconds_per_row = shard.row_bytes / factors.bandwidth_bytes_per_s + factors.probe_s.at(len(window))
        # Finding the target and skipping to it must take less than reading on.
        moving_s = factors.seek_s + factors.read_call_s + factors.lookup_s * len(window)
        break_even = max(float(FENCE_STRIDE), moving_s / max(seconds_per_row, 1e-12))
        if len(window) * break_even > shard.num_rows:
            return 0
        position = self._scan.position
        until = min(shard.num_rows, position + window.chunks.oldest.deadline - self._scan.odometer)
        _, starts, stops = shard.locate(window.codes_at(window.live_positions()))
        ahead = starts[stops > position]
        needed = int(ahead.min()) if ahead.size else until
        skipped = min(needed, until) - position
        return skipped if skipped >= break_even or min(needed, until) == until else 0

    def begin_block(self, block: RelationBlock) -> None:
        self._met_rows = []
        is_wanted = self.learning.learns or self.choice.leaves_early
        self._is_whole = self._whole_first_rows(block) if is_wanted else _NO_FLAGS

    def end_block(self, block: RelationBlock) -> None:
        self._met = np.concatenate(self._met_rows) if self._met_rows else _NO_ROWS
        self._met_rows, self._is_whole = [], _NO_FLAGS
        if self._met.size and self.learning.learns:
            self.learning.learn_from(block, self._met)

    def leave_early(self, block: RelationBlock) -> Iterator[pa.RecordBatch]:
        met, self._met = self._met, _NO_ROWS
        if not self.choice.leaves_early:
            return
        if met.size and self.state.spec.how in ("inner", "left"):
            yield from self._leaving.codes(block.codes[met[np.diff(met, prepend=-1) != 0]])
        if self._seeks_unmatched:
            yield from self._leave_unmatched(block)

    def upkeep(self) -> None:
        self.learning.upkeep()

    def _whole_first_rows(self, block: RelationBlock) -> BoolArray:
        """The rows of a block that are the first of a value with all its rows in it."""
        codes = block.codes
        is_first = np.ones(codes.size, np.bool_)
        if not self._is_sorted or codes.size == 0:
            return np.zeros(codes.size, np.bool_)
        np.not_equal(codes[1:], codes[:-1], out=is_first[1:])
        if block.start > 0:
            is_first[codes == codes[0]] = False
        if block.stop < self.state.spec.shard.num_rows:
            is_first[codes == codes[-1]] = False
        return is_first

    def _leave_unmatched(self, block: RelationBlock) -> Iterator[pa.RecordBatch]:
        """Release tuples whose rows would have been in the block and were not; costs a pass over the window."""
        window, codes = self.state.window, block.codes
        if window is None or codes.size == 0:
            return
        low = int(codes[0]) + 1 if block.start > 0 else _LEAST_CODE
        high = int(codes[-1]) - 1 if block.stop < self.state.spec.shard.num_rows else _GREATEST_CODE
        place = 0
        while low <= high and place < window.index.ring_size and len(window):
            positions, place = window.index.positions_between(low, high, place, self.state.results.max_rows)
            yield from self._leaving.at(positions)

    # ================================================================ once per cycle

    def _end_cycle(self) -> None:
        self.choice.choose_scan()
        self.learning.policy.cycles_waited = self.choice.cycles_waited
        # Is it worth a pass over the window to find unmatched tuples early that missed the cache?
        metrics, entered = self.state.metrics, self.state.entered
        unmatched = metrics.unmatched_tuples - metrics.negative_hits - metrics.null_key_tuples
        share = (unmatched - self._unmatched_by_cycle) / max(1, entered - self._entered_by_cycle)
        self._seeks_unmatched = share > _MUCH_UNMATCHED
        self._unmatched_by_cycle, self._entered_by_cycle = unmatched, entered
        self._judge_cache()

    def _judge_cache(self) -> None:
        """Disable the cache if probing it costs more than it saves."""
        learning, border = self.learning, self.learning.border
        self._cycles_judged += 1
        if self._cycles_judged < _CYCLES_PER_JUDGEMENT or not learning.learns or border.objective == "memory":
            return
        self._cycles_judged = 0
        metrics, factors, choice = self.state.metrics, self.choice.factors, self.choice
        hits, offered = metrics.cache_hits + metrics.negative_hits, metrics.stream_tuples_in
        share = (hits - self._hits_judged) / max(1, offered - self._offered_judged)
        self._hits_judged, self._offered_judged = hits, offered
        missed_s = choice.scan_seconds(choice.leaves_early, self.state.window_capacity) - factors.output_s
        if share * missed_s < _PROBES_PER_LOOK * factors.cache_probe_s.at(max(1, len(border.cache))):
            metrics.cache_evictions += len(border.cache)
            border.cache.clear()
            border.account_cache()
            border.give_back()
            learning.sleep(_CYCLES_WITHOUT_CACHE)
