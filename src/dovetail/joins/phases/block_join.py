"""Reads blocks of the relation and joins each with all waiting tuples."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.core.errors import BudgetError
from dovetail.core.memory import format_bytes
from dovetail.joins.protocol import RelationBlock
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.leaving import Leaving
from dovetail.joins.window.tuple_store import Positions

__all__ = ["BlockJoin", "never_in_place"]

SelectPairs = Callable[[RelationBlock, Positions, Positions], Int64Array | None]


def never_in_place(spec: JoinSpec) -> bool:
    """Blocks are copies, whose memory counts."""
    return False


class BlockJoin:
    """Reads blocks within the budget and joins them with the window.

    `reads_in_place` tells whether the blocks of a join are views of mapped pages, which are not memory of this process.
    """

    def __init__(
        self, state: JoinState, leaving: Leaving, reads_in_place: Callable[[JoinSpec], bool] = never_in_place
    ) -> None:
        self.state, self._leaving = state, leaving
        self._reads_in_place = reads_in_place
        # Which candidate pairs of a block take part; None: all. Set by the disk phase.
        self.select_pairs: SelectPairs | None = None

    # ---------------------------------------------------------------- reading

    def read(self, start: int, rows: int) -> RelationBlock:
        """Read rows of the relation; fewer if they are too wide to fit."""
        state = self.state
        block, size_bytes = self.read_any(start, rows)
        is_view = block.stop - start <= self._rows_in_place(start)
        wanted_bytes = max(0 if is_view else size_bytes, state.memory.block_bytes)
        extra_bytes = wanted_bytes - state.block_account.held_bytes
        # A partly joined block had that room; a shorter one has other pairs, so results would be lost or repeated.
        output_bytes = 0 if state.pairs_done else self._output_room(block, size_bytes)
        if extra_bytes + output_bytes > state.ledger.free_bytes:
            if rows > 1 and not state.pairs_done:
                return self.read(start, rows // 2)
            if extra_bytes > 0:
                state.extras.give_up()
            if state.pairs_done and extra_bytes > state.ledger.free_bytes:
                needed = state.ledger.held_bytes + extra_bytes
                raise BudgetError(
                    f"The interrupted block does not fit any more: {needed} bytes "
                    f"({format_bytes(needed)}) are needed, the budget has {state.budget.total_bytes}.",
                    hint="Enlarge the budget with resize_budget, then continue with step.",
                    minimum_bytes=needed,
                )
        state.block_account.resize(wanted_bytes)
        return block

    def read_any(self, start: int, rows: int) -> tuple[RelationBlock, int]:
        """Read rows of the relation, count the read, and return the block with its size, which is costly to compute."""
        state = self.state
        if not state.pairs_done:
            # An interrupted block keeps its length, even if it is read in another way now.
            rows = min(rows, self._rows_in_place(start) or rows)
        began = time.perf_counter()
        block = state.spec.shard.read_block(start, rows)
        state.metrics.disk_seconds += time.perf_counter() - began
        state.metrics.blocks_read += 1
        state.metrics.relation_rows_read += block.stop - block.start
        size_bytes = block.nbytes
        state.metrics.bytes_read += size_bytes
        return block, size_bytes

    def _rows_in_place(self, start: int) -> int:
        """How many rows can be read from here on without a copy; 0 if blocks are copied anyway."""
        spec = self.state.spec
        return spec.shard.rows_in_place(start) if self._reads_in_place(spec) else 0

    def _output_room(self, block: RelationBlock, size_bytes: int) -> int:
        """The memory to leave free for output: as planned, and at least two of the block's rows."""
        memory = self.state.memory
        if size_bytes <= memory.read_bytes:
            return 0
        return max(memory.output_bytes, 2 * size_bytes // max(1, block.stop - block.start))

    # ---------------------------------------------------------------- joining

    def join(self, block: RelationBlock) -> Iterator[pa.RecordBatch]:
        """Join a block with all waiting tuples.

        Progress is kept in ``state.pairs_done``, so that an interrupted block can be joined again without repeating a
        result. The caller resets it to 0 when it moves on.
        """
        state, window = self.state, self.state.window
        assert window is not None
        how = state.spec.how
        leaves_at_match = how in ("semi", "anti") and not state.spec.ordered
        if leaves_at_match:
            window.clear_matches()
        leaving: list[Int64Array] = []
        seen = 0
        for rows, positions in state.matcher.pairs(block, window, state.results.max_rows):
            done, first, seen = max(0, state.pairs_done - seen), seen, seen + rows.size
            if done >= rows.size:
                continue
            rows, positions = rows[done:], positions[done:]
            kept = self._matches(block, rows, positions)
            if kept is not None:
                rows, positions = rows[kept], positions[kept]
            if state.shedding is not None:
                state.shedding.observe(window.codes_at(positions))
            if leaves_at_match:
                positions = np.unique(np.asarray(positions, np.int64))
                leaving.append(positions[~window.is_matched_at(positions)])
            window.mark_matched(positions)
            if how in ("inner", "left"):
                yield from self._emit(block, rows, positions, kept, first + done)
                state.pairs_done = seen
        if leaving:
            yield from self._leaving.at(np.concatenate(leaving))

    def _matches(self, block: RelationBlock, rows: Positions, positions: Positions) -> Int64Array | None:
        """Which candidate pairs are matches; None if all are."""
        selected = None if self.select_pairs is None else self.select_pairs(block, rows, positions)
        if selected is not None:
            rows, positions = rows[selected], positions[selected]
        state = self.state
        plan = state.results.plan
        if not plan.verifies:
            return selected
        assert state.window is not None
        kept = np.flatnonzero(plan.verify(state.window, positions, block.rows, rows))
        state.metrics.pairs_rejected += int(rows.size - kept.size)
        return kept if selected is None else selected[kept]

    def _emit(
        self, block: RelationBlock, rows: Positions, positions: Positions, kept: Int64Array | None, first: int
    ) -> Iterator[pa.RecordBatch]:
        """Emit matches; the first examined candidate has the number ``first``."""
        state, window = self.state, self.state.window
        assert window is not None

        def on_progress(done: int) -> None:
            state.pairs_done = first + (done if kept is None else int(kept[done - 1]) + 1)

        tickets = window.tickets_at(positions) if state.spec.ordered else None
        widest = None
        if block.stop > block.start:
            widest = window.widest_gathered + state.spec.shard.widest(block.start, block.stop)
        yield from state.results.give_pairs(window, positions, block.rows, rows, tickets, on_progress, widest)
