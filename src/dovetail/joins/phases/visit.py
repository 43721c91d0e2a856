"""The visit: the oldest waiting tuple decides which block of the relation to read.

This is HYBRIDJOIN's disk phase (Naeem et al., 2011, section 4). The code at the front of the queue picks, through the
relation's resident index, the block of b rows that contains its rows; the block is joined with all waiting tuples;
every tuple that found its rows leaves, from the middle of the queue.

One step is a *visit*: a set of position ranges, fixed before the first read, with every row of the code that picked it,
in all segments of the shard. Another code takes part only if the index says that all its rows lie in these ranges; then
it meets all of them, and its tuples leave at the end of the visit. A code with only some of its rows in the block waits
for its own visit. Ranges are read in pieces of at most b rows, so a join value with a million rows stays within the
budget. An interrupted visit is finished before any tuple enters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.memory_plan import MemoryPlan
from dovetail.joins.phases.admission import NullKeys, Offered
from dovetail.joins.phases.block_join import BlockJoin
from dovetail.joins.protocol import RelationBlock
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.leaving import Leaving
from dovetail.joins.window.tuple_store import Positions
from dovetail.relation.format import FENCE_STRIDE

__all__ = ["NotExcluded", "Visits", "age_classes"]

Interval = tuple[int, int]
_AGE_CLASSES = 16  # the resolution of `oldest`, in parts of the window
_NO_CODES = np.empty(0, np.int64)


def age_classes(spec: JoinSpec, memory: MemoryPlan) -> int:
    """The maximum number of chunks of a window whose chunks only tell ages."""
    return 4 * _AGE_CLASSES


@dataclass
class _Visit:
    """A disk step in progress."""

    code: int  # the oldest code, which picked the visit
    covered: Int64Array  # the positions it reads: rows of (start, stop), ascending and disjoint
    unread: list[Interval]  # the part still to be read and joined
    block_stop: int = 0  # the end of the current block
    low_code: int | None = None  # the lowest and highest code read so far
    high_code: int | None = None
    codes_met: Int64Array = field(default_factory=lambda: _NO_CODES)  # codes that took part, ascending
    is_begun: bool = False  # whether a block was joined completely

    def has_all_of(self, queries: Int64Array, starts: Int64Array, stops: Int64Array, count: int) -> BoolArray:
        """Which of ``count`` codes have all their ranges, as returned by ``locate``, in this visit."""
        place = np.maximum(np.searchsorted(self.covered[:, 0], starts, side="right") - 1, 0)
        is_inside = (self.covered[place, 0] <= starts) & (stops <= self.covered[place, 1])
        has_all = np.ones(count, np.bool_)
        has_all[queries[~is_inside]] = False
        return has_all

    def note_read(self, block: RelationBlock) -> None:
        self.block_stop = block.stop
        if block.codes.size:
            low, high = int(block.codes.min()), int(block.codes.max())
            self.low_code = low if self.low_code is None else min(low, self.low_code)
            self.high_code = high if self.high_code is None else max(high, self.high_code)

    def note_met(self, codes: Int64Array, ascend: bool) -> None:
        """Record codes that took part; if codes ascend with positions, they come in order, but may repeat at cuts."""
        met = self.codes_met
        if ascend and codes.size and (met.size == 0 or met[-1] < codes[0]):
            self.codes_met = np.concatenate([met, codes])
        else:
            self.codes_met = np.union1d(met, codes)

    def advance(self) -> None:
        """The current block is done."""
        _, stop = self.unread[0]
        self.is_begun = True
        self.unread[:1] = [(self.block_stop, stop)] if self.block_stop < stop else []


class Visits:
    """The disk phase that reads the block that the oldest waiting tuple needs."""

    def __init__(self, state: JoinState, blocks: BlockJoin, leaving: Leaving, step: Any) -> None:
        self.state, self._blocks, self._leaving = state, blocks, leaving
        self._one_step = step  # a whole step of the driver, which counts it
        blocks.select_pairs = self._select_pairs
        self._visit: _Visit | None = None
        self._seeks_unmatched = False

    def restart_after(self, ticket: int) -> None:
        """Restart waiting tuples with a higher ticket; their held results are gone."""
        if self.state.window is not None:
            self.state.window.restart_after(ticket, self.deadline())

    def deadline(self) -> int:
        """Chunks do not leave as a whole here; they tell the age of waiting tuples, as finely as there is room for."""
        state = self.state
        if state.window is not None and state.window.chunks.is_full:
            return state.window.chunks.newest.deadline
        return state.arrivals // max(1, state.window_capacity // _AGE_CLASSES)

    def before_accept(self) -> Iterator[pa.RecordBatch]:
        """Finish an interrupted visit: tuples that enter have not met what it has read."""
        state = self.state
        while self._unfinished is not None:
            if state.pending:
                yield from self._one_step()
            else:
                self._visit, state.pairs_done = None, 0

    # ---------------------------------------------------------------- the loop

    def step(self) -> Iterator[pa.RecordBatch]:
        state = self.state
        yield from self._leave_done()
        oldest = None if state.window is None else state.window.index.oldest
        if oldest is None:
            return
        # Read the oldest join attribute value from Q.
        visit = self._visit = self._unfinished or self._visit_for(oldest[1])
        while visit.unread:
            # Load a partition p of R into the disk buffer, using that value as an index.
            block = self._blocks.read(visit.unread[0][0], self._rows_to_read(visit))
            visit.note_read(block)
            # For each tuple r in p: if r is in H, output r joined with H.
            yield from self._blocks.join(block)
            visit.advance()
            state.pairs_done = 0
        # Delete all matched tuples from H and the corresponding nodes from Q.
        yield from self._finish(visit)

    @property
    def _unfinished(self) -> _Visit | None:
        """The interrupted visit; None if it has emitted nothing yet."""
        state = self.state
        visit = self._visit
        return visit if visit is not None and (visit.is_begun or state.pairs_done) else None

    def _rows_to_read(self, visit: _Visit) -> int:
        state = self.state
        start, stop = visit.unread[0]
        return visit.block_stop - start if state.pairs_done else min(state.memory.block_rows, stop - start)

    def _select_pairs(self, block: RelationBlock, rows: Positions, positions: Positions) -> Int64Array | None:
        """Which candidate pairs have codes that take part in the visit; None if all do."""
        state = self.state
        visit, window = self._visit, state.window
        assert visit is not None
        assert window is not None
        codes = block.codes[rows]
        is_first = np.ones(codes.size, np.bool_)
        np.not_equal(codes[1:], codes[:-1], out=is_first[1:])
        distinct = codes[is_first]
        takes_part = self._takes_part(visit, block, distinct)
        kept = None if takes_part.all() else np.flatnonzero(takes_part[np.cumsum(is_first) - 1])
        if state.spec.ordered:
            still = np.arange(rows.size) if kept is None else kept
            kept = still[~window.is_done_at(positions[still])]
        visit.note_met(distinct[takes_part], ascend=state.spec.shard.num_segments == 1)
        return kept

    def _takes_part(self, visit: _Visit, block: RelationBlock, codes: Int64Array) -> BoolArray:
        """Which codes, all of one block and in its order, have all their rows in the visit."""
        state = self.state
        shard = state.spec.shard
        if shard.stats.is_unique:
            # The row that was met is the only one.
            return np.ones(codes.size, np.bool_)
        if shard.num_segments > 1:
            return visit.has_all_of(*shard.locate(codes), codes.size)
        # Codes and positions ascend together: a code that is neither the block's first nor its last has no rows
        # outside, whatever the index says. The result must not depend on which codes are queried together.
        takes_part: BoolArray = (codes != block.codes[0]) & (codes != block.codes[-1])
        unsure = np.flatnonzero(~takes_part)
        takes_part[unsure] = visit.has_all_of(*shard.locate(codes[unsure]), unsure.size)
        return takes_part

    # ---------------------------------------------------------------- where to read

    def _visit_for(self, code: int) -> _Visit:
        """The block with the code's first rows, and its rows in the shard's other segments."""
        state = self.state
        shard = state.spec.shard
        _, starts, stops = shard.locate(np.array([code]))
        if starts.size == 0:
            return _Visit(code, np.zeros((1, 2), np.int64), [])
        # Blocks lie on a grid that splits no index stride, so a block holds all rows of most codes.
        grid = state.memory.block_rows // FENCE_STRIDE * FENCE_STRIDE or state.memory.block_rows
        start = int(starts[0]) // grid * grid
        stop = min(max(start + grid, int(stops[0])), shard.num_rows)
        intervals = [(start, stop)]
        if starts.size > 1:
            intervals += self._in_other_segments((start, stop), starts[1:], stops[1:])
        intervals = _merged(intervals)
        return _Visit(code, np.array(intervals, np.int64), intervals)

    def _in_other_segments(self, block: Interval, starts: Int64Array, stops: Int64Array) -> list[Interval]:
        """The ranges of the block's codes in other segments; if that is too much, those of one code."""
        state = self.state
        shard, (block_start, block_stop) = state.spec.shard, block
        ends = shard.codes_at(np.array([block_start, block_stop - 1]))
        queries, all_starts, all_stops = shard.locate(ends)
        lows = all_starts[(queries == 0) & (all_starts >= block_stop)]
        highs = all_stops[(queries == 1) & (all_stops >= block_stop)]
        found = []
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            low = max(lows[lows <= start].tolist(), default=start)
            high = min(highs[highs >= stop].tolist(), default=stop)
            is_affordable = ends[0] <= ends[1] and high - low <= stop - start + state.memory.block_rows
            found.append((low, high) if is_affordable else (start, stop))
        return found

    # ---------------------------------------------------------------- leaving

    def _finish(self, visit: _Visit) -> Iterator[pa.RecordBatch]:
        """End a visit: release tuples that took part, and those it proved to match nothing."""
        state = self.state
        assert state.window is not None
        has_met = bool((visit.codes_met == visit.code).any())
        self._seeks_unmatched |= not has_met
        leaving = visit.codes_met if has_met else np.union1d(visit.codes_met, np.array([visit.code]))
        if state.spec.ordered:
            self._mark_done(leaving)
            for positions in self._unmatched_in(visit):
                state.window.mark_done(positions)
            self._visit = None
            if state.results.cut_ticket is not None:
                self.restart_after(state.results.cut_ticket)
                state.results.cut_ticket = None
            yield from self._leave_done()
            return
        yield from self._leaving.codes(leaving)
        for positions in self._unmatched_in(visit):
            yield from self._leaving.at(positions)
        self._visit = None

    def _unmatched_in(self, visit: _Visit) -> Iterator[Int64Array]:
        """Tuples whose code lies in the range that was read, but was not there."""
        state = self.state
        window, place, found = state.window, 0, 0
        assert window is not None
        if not self._seeks_unmatched or visit.low_code is None or visit.high_code is None:
            return
        while place < window.index.ring_size:
            positions, place = window.index.positions_between(
                visit.low_code, visit.high_code, place, state.results.max_rows
            )
            positions = positions[~window.is_done_at(positions)]
            codes = window.codes_at(positions)
            positions = positions[visit.has_all_of(*state.spec.shard.locate(codes), codes.size)]
            found += positions.size
            yield positions
        # This costs a pass over the window: not again until a code without a match turns up.
        self._seeks_unmatched = found > 0

    def _mark_done(self, codes: Int64Array) -> None:
        """Ordered output: tuples of these codes have all their results, which wait for their turn."""
        window, place = self.state.window, None
        assert window is not None
        while True:
            _, positions, place = window.probe(codes, place, self.state.results.max_rows)
            window.mark_done(positions)
            if place is None:
                return

    def _leave_done(self) -> Iterator[pa.RecordBatch]:
        """Ordered output: release the oldest tuples as far as they are done."""
        state = self.state
        window = state.window
        if not state.spec.ordered or window is None or len(window) == 0 or self._unfinished is not None:
            return
        is_waiting = ~window.is_done_at(window.live_positions())
        yield from self._leaving.oldest(int(np.argmax(is_waiting)) if is_waiting.any() else is_waiting.size)

    # ---------------------------------------------------------------- saving

    def save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        visit = self._unfinished
        values: dict[str, Any] = {"seeks_unmatched": self._seeks_unmatched, "visit": None}
        if visit is None:
            return {}, values
        values["visit"] = {
            "code": visit.code,
            "covered": visit.covered.tolist(),
            "unread": [list(interval) for interval in visit.unread],
            "block_stop": visit.block_stop,
            "low_code": visit.low_code,
            "high_code": visit.high_code,
            "is_begun": visit.is_begun,
        }
        return {"visit_codes": pa.table({"code": pa.array(visit.codes_met, pa.int64())})}, values

    def load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        saved, visit = values["visit"], None
        if saved is not None:
            visit = _Visit(
                code=int(saved["code"]),
                covered=np.array(saved["covered"], np.int64).reshape(-1, 2),
                unread=[(int(start), int(stop)) for start, stop in saved["unread"]],
                block_stop=int(saved["block_stop"]),
                low_code=saved["low_code"],
                high_code=saved["high_code"],
                codes_met=np.asarray(tables["visit_codes"].column("code").to_numpy(), np.int64),
                is_begun=bool(saved["is_begun"]),
            )
        self._seeks_unmatched, self._visit = bool(values["seeks_unmatched"]), visit


class NotExcluded(NullKeys):
    """Tuples whose code the resident index excludes match nothing and never wait, like those with a NULL key."""

    def __init__(self, state: JoinState) -> None:
        super().__init__(state)
        # Codes between these two need no index probe: the index does not exclude these two.
        self._placed_codes: Interval | None = None

    def select_waiting(self, offered: Offered) -> Int64Array:
        """The rows whose code the index does not exclude; with ordered output the others wait for their turn too."""
        state = self.state
        codes, is_waiting = offered.codes, ~offered.is_null
        if state.spec.ordered:
            return np.flatnonzero(is_waiting)
        low, high = self._placed_codes or (1, 0)
        unsure = np.flatnonzero(is_waiting & ((codes < low) | (codes > high)))
        if unsure.size:
            queries, _, _ = state.spec.shard.locate(codes[unsure])
            is_waiting[unsure] = False
            is_waiting[unsure[queries]] = True
            placed = codes[unsure[queries]]
            if placed.size:
                low, high = (low, high) if low <= high else (int(placed[0]), int(placed[0]))
                self._placed_codes = min(low, int(placed.min())), max(high, int(placed.max()))
        return np.flatnonzero(is_waiting)


def _merged(intervals: list[Interval]) -> list[Interval]:
    """The same positions as ascending, disjoint intervals."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
