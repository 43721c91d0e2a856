"""HYBRIDJOIN: what has waited longest says which block of the relation to read (Naeem et al., 2011, section 4).

What it computes
    The exact join of every offered stream tuple with one version of a relation's shard: equality of keys, or equality
    plus a residual condition; one-to-many and many-to-many; inner, left, semi, anti. Conditions without equality are
    for `mesh`.
How
    Waiting tuples are in a hash table and a queue (the window). The code at the front of the queue picks, through the
    relation's resident index, the block of b rows in which its rows are; the block is read and joined with everything
    that waits; every tuple that found its rows leaves, from the middle of the queue. Reads do not depend on arrivals:
    `step` goes on for as long as something waits.
Exactness
    One step is a *visit*: a set of position ranges, fixed before the first read, that holds every row of the code that
    picked it, in all segments of the shard. Any other code takes part only if the index says that all its rows lie in
    the ranges of the visit, too; then it meets all of them in this visit and its tuples leave at its end. A code of
    which the block holds some rows only is passed over, and waits for a visit of its own. Ranges are read in pieces of
    at most b rows, so that a join value with a million rows stays within the budget. A visit that was interrupted is
    finished before any tuple enters.
No match
    A code that the index excludes never waits. The code that picked a visit and found nothing leaves, unmatched; and as
    long as such codes turn up, each visit also looks for other waiting codes that should have been in its block and
    were not, which leave as well.
Memory
    The relation's resident index, one block, one batch of output, and the window, which gets the rest of the budget;
    with ``ordered``, held results.
What is emitted when
    inner: each pair when its row's block is read. semi: a tuple at its first match. left and anti: unmatched tuples at
    the end of the visit that found out. ``ordered``: a tuple stays in the window, done, until those before it are done.
What a restart keeps
    The window, an unfinished visit, held results, counters.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.operators.admission import Offered
from dovetail.operators.base import SemiStreamOperator
from dovetail.operators.memory_plan import MemoryPlan, plan_memory
from dovetail.operators.protocol import RelationBlock
from dovetail.operators.spec import JoinSpec
from dovetail.operators.tuple_store import Positions
from dovetail.relation.format import FENCE_STRIDE

__all__ = ["HybridJoin"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Interval = tuple[int, int]
_AGE_CLASSES = 16  # how finely `oldest` is known, in parts of the window
_MOST_AGES = 4 * _AGE_CLASSES
_NO_CODES = np.empty(0, np.int64)


@dataclass
class _Visit:
    """A disk step under way.

    Attributes
    ----------
    code
        The oldest code, which picked it.
    covered
        The positions that it reads: rows of (start, stop), ascending and apart.
    unread
        What of them is still to be read and joined.
    block_stop
        Where the block that is being joined ends.
    low_code, high_code
        The lowest and highest code read so far.
    codes_met
        Codes that took part, ascending.
    is_begun
        Whether a block of it has been joined to the end.
    """

    code: int
    covered: Int64Array
    unread: list[Interval]
    block_stop: int = 0
    low_code: int | None = None
    high_code: int | None = None
    codes_met: Int64Array = field(default_factory=lambda: _NO_CODES)
    is_begun: bool = False

    def has_all_of(self, queries: Int64Array, starts: Int64Array, stops: Int64Array, count: int) -> BoolArray:
        """Which of ``count`` codes have all their ranges, as ``locate`` gives them, in this visit."""
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
        """Codes took part; where codes ascend with positions, they come in order, but those of a cut may repeat."""
        met = self.codes_met
        if ascend and codes.size and (met.size == 0 or met[-1] < codes[0]):
            self.codes_met = np.concatenate([met, codes])
        else:
            self.codes_met = np.union1d(met, codes)

    def advance(self) -> None:
        """The block that was being joined is done."""
        _, stop = self.unread[0]
        self.is_begun = True
        self.unread[:1] = [(self.block_stop, stop)] if self.block_stop < stop else []


class HybridJoin(SemiStreamOperator):
    """Join a stream with a relation, reading the block that the oldest waiting tuple asks for.

    Examples
    --------
    >>> import tempfile
    >>> from dovetail.operators.spec import join_spec
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.record_batch({"__code": [2, 7, 1], "id": [2, 7, 1]})
    >>> join = HybridJoin(join_spec(relation, stream.schema, how="left", budget="1MB"))
    >>> [row for batch in join.offer(stream) for row in batch.to_pylist()], join.pending
    ([{'id': 7, 'city': None}], 2)
    >>> [row for batch in join.step() for row in batch.to_pylist()], join.pending
    ([{'id': 1, 'city': 'Rome'}, {'id': 2, 'city': 'Oslo'}, {'id': 2, 'city': 'Bergen'}], 0)
    """

    kind = "hybrid"

    def __init__(self, spec: JoinSpec) -> None:
        super().__init__(spec)
        self._ledger.reserve("index", spec.shard.index_bytes)
        self._visit: _Visit | None = None
        self._seeks_unmatched = False
        # Codes between these two need no look into the index on arrival: the index does not exclude these two.
        self._placed_codes: Interval | None = None

    def _plan_memory(self, spec: JoinSpec) -> MemoryPlan:
        return plan_memory(spec, who=self.kind, other_bytes=spec.shard.index_bytes)

    def _max_chunks(self, memory: MemoryPlan) -> int:
        return _MOST_AGES

    # ---------------------------------------------------------------- the loop

    def _disk_step(self) -> Iterator[pa.RecordBatch]:
        yield from self._leave_done()
        oldest = None if self._window is None else self._window.index.oldest
        if oldest is None:
            return
        # Read the oldest join attribute value from Q.
        visit = self._visit = self._unfinished or self._visit_for(oldest[1])
        while visit.unread:
            # Load a partition p of R into the disk buffer, using that value as an index.
            block = self._read_block(visit.unread[0][0], self._rows_to_read(visit))
            visit.note_read(block)
            # For each tuple r in p: if r is in H, output r joined with H.
            yield from self._join_block(block)
            visit.advance()
            self._pairs_done = 0
        # Delete all matched tuples from H and the corresponding nodes from Q.
        yield from self._finish(visit)

    @property
    def _unfinished(self) -> _Visit | None:
        """The visit that was interrupted; one that has put nothing out yet is as good as none."""
        visit = self._visit
        return visit if visit is not None and (visit.is_begun or self._pairs_done) else None

    def _rows_to_read(self, visit: _Visit) -> int:
        start, stop = visit.unread[0]
        return visit.block_stop - start if self._pairs_done else min(self.block_rows, stop - start)

    def _matches(self, block: RelationBlock, rows: Positions, positions: Positions) -> Int64Array | None:
        """Which candidate pairs are matches: of codes that take part in the visit, and with whatever else must hold."""
        visit, window = self._visit, self._window
        assert visit is not None
        assert window is not None
        codes = block.codes[rows]
        is_first = np.ones(codes.size, np.bool_)
        np.not_equal(codes[1:], codes[:-1], out=is_first[1:])
        distinct = codes[is_first]
        takes_part = self._takes_part(visit, block, distinct)
        kept = None if takes_part.all() else np.flatnonzero(takes_part[np.cumsum(is_first) - 1])
        if self.spec.ordered:
            still = np.arange(rows.size) if kept is None else kept
            kept = still[~window.is_done_at(positions[still])]
        visit.note_met(distinct[takes_part], ascend=self.spec.shard.num_segments == 1)
        if kept is None:
            return super()._matches(block, rows, positions)
        verified = super()._matches(block, rows[kept], positions[kept])
        return kept if verified is None else kept[verified]

    def _takes_part(self, visit: _Visit, block: RelationBlock, codes: Int64Array) -> BoolArray:
        """Which codes, all of one block and in its order, have all their rows in the visit."""
        shard = self.spec.shard
        if shard.stats.is_unique:
            # The row that was met is the only one.
            return np.ones(codes.size, np.bool_)
        if shard.num_segments > 1:
            return visit.has_all_of(*shard.locate(codes), codes.size)
        # Codes and positions ascend together: a code that is neither the block's first nor its last has no rows
        # outside, whatever the index says. That must not depend on which of the codes are asked about together.
        takes_part: BoolArray = (codes != block.codes[0]) & (codes != block.codes[-1])
        unsure = np.flatnonzero(~takes_part)
        takes_part[unsure] = visit.has_all_of(*shard.locate(codes[unsure]), unsure.size)
        return takes_part

    # ---------------------------------------------------------------- where to read

    def _visit_for(self, code: int) -> _Visit:
        """The block in which the code's first rows are, and its rows in the shard's other segments."""
        shard = self.spec.shard
        _, starts, stops = shard.locate(np.array([code]))
        if starts.size == 0:
            return _Visit(code, np.zeros((1, 2), np.int64), [])
        # Blocks lie on a grid that divides no stride of the index, so that a block holds all of most codes' rows.
        grid = self.block_rows // FENCE_STRIDE * FENCE_STRIDE or self.block_rows
        start = int(starts[0]) // grid * grid
        stop = min(max(start + grid, int(stops[0])), shard.num_rows)
        intervals = [(start, stop)]
        if starts.size > 1:
            intervals += self._in_other_segments((start, stop), starts[1:], stops[1:])
        intervals = _merged(intervals)
        return _Visit(code, np.array(intervals, np.int64), intervals)

    def _in_other_segments(self, block: Interval, starts: Int64Array, stops: Int64Array) -> list[Interval]:
        """Where in other segments the block's codes are; if that is too much, where those of one code are."""
        shard, (block_start, block_stop) = self.spec.shard, block
        ends = shard.codes_at(np.array([block_start, block_stop - 1]))
        queries, all_starts, all_stops = shard.locate(ends)
        lows = all_starts[(queries == 0) & (all_starts >= block_stop)]
        highs = all_stops[(queries == 1) & (all_stops >= block_stop)]
        found = []
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            low = max(lows[lows <= start].tolist(), default=start)
            high = min(highs[highs >= stop].tolist(), default=stop)
            is_affordable = ends[0] <= ends[1] and high - low <= stop - start + self.block_rows
            found.append((low, high) if is_affordable else (start, stop))
        return found

    # ---------------------------------------------------------------- leaving

    def _finish(self, visit: _Visit) -> Iterator[pa.RecordBatch]:
        """End a visit: what took part leaves, and so does what it proved to match nothing."""
        assert self._window is not None
        has_met = bool((visit.codes_met == visit.code).any())
        self._seeks_unmatched |= not has_met
        leaving = visit.codes_met if has_met else np.union1d(visit.codes_met, np.array([visit.code]))
        if self.spec.ordered:
            self._mark_done(leaving)
            for positions in self._unmatched_in(visit):
                self._window.mark_done(positions)
            self._visit = None
            if self.results.cut_ticket is not None:
                self._restart_after(self.results.cut_ticket)
                self.results.cut_ticket = None
            yield from self._leave_done()
            return
        yield from self._leave_codes(leaving)
        for positions in self._unmatched_in(visit):
            yield from self._leave(positions)
        self._visit = None

    def _unmatched_in(self, visit: _Visit) -> Iterator[Int64Array]:
        """Find tuples whose code lies among those that were read, and was not there."""
        window, place, found = self._window, 0, 0
        assert window is not None
        if not self._seeks_unmatched or visit.low_code is None or visit.high_code is None:
            return
        while place < window.index.ring_size:
            positions, place = window.index.positions_between(
                visit.low_code, visit.high_code, place, self.results.max_rows
            )
            positions = positions[~window.is_done_at(positions)]
            codes = window.codes_at(positions)
            positions = positions[visit.has_all_of(*self.spec.shard.locate(codes), codes.size)]
            found += positions.size
            yield positions
        # Looking costs a pass over the window: not again before a code turns up that matches nothing.
        self._seeks_unmatched = found > 0

    def _mark_done(self, codes: Int64Array) -> None:
        """Ordered output: tuples of these codes have all their results, which wait for their turn."""
        assert self._window is not None
        state = None
        while True:
            _, positions, state = self._window.probe(codes, state, self.results.max_rows)
            self._window.mark_done(positions)
            if state is None:
                return

    def _leave_done(self) -> Iterator[pa.RecordBatch]:
        """Ordered output: let the oldest tuples leave, as far as they are done."""
        window = self._window
        if not self.spec.ordered or window is None or len(window) == 0 or self._unfinished is not None:
            return
        is_waiting = ~window.is_done_at(window.live_positions())
        yield from self._leave_oldest(int(np.argmax(is_waiting)) if is_waiting.any() else is_waiting.size)

    # ---------------------------------------------------------------- the way in

    def _accept(self, offered: Offered, may_drop: bool) -> Iterator[pa.RecordBatch]:
        # What enters now has not met what an unfinished visit has read.
        while self._unfinished is not None:
            if self.pending:
                yield from self._one_step()
            else:
                self._visit, self._pairs_done = None, 0
        yield from super()._accept(offered, may_drop)

    def _select_waiting(self, offered: Offered) -> Int64Array:
        """The rows whose code the index does not exclude; in ordered output the others wait for their turn, too."""
        codes, is_waiting = offered.codes, ~offered.is_null
        if self.spec.ordered:
            return np.flatnonzero(is_waiting)
        low, high = self._placed_codes or (1, 0)
        unsure = np.flatnonzero(is_waiting & ((codes < low) | (codes > high)))
        if unsure.size:
            queries, _, _ = self.spec.shard.locate(codes[unsure])
            is_waiting[unsure] = False
            is_waiting[unsure[queries]] = True
            placed = codes[unsure[queries]]
            if placed.size:
                low, high = (low, high) if low <= high else (int(placed[0]), int(placed[0]))
                self._placed_codes = min(low, int(placed.min())), max(high, int(placed.max()))
        return np.flatnonzero(is_waiting)

    def _deadline(self) -> int:
        # Chunks do not leave as a whole here; they tell the age of what waits, as finely as there is room for.
        if self._window is not None and self._window.chunks.is_full:
            return self._window.chunks.newest.deadline
        return self._arrivals // max(1, self.window_capacity // _AGE_CLASSES)

    # ---------------------------------------------------------------- saving

    def _save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
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

    def _load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
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


def _merged(intervals: list[Interval]) -> list[Interval]:
    """The same positions as intervals that are ascending and apart."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
