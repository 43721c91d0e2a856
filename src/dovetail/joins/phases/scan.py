"""The scan: the relation is read over and over, and each block is joined with all waiting tuples.

This is MESHJOIN's disk phase (Polyzotis et al., 2007, section 3), alone or behind a cache. A chunk of tuples leaves
when it has met every row exactly once. The scan counts rows with an *odometer*: a chunk that enters at odometer o
leaves at o + N. So b and w may change at any time, and the last, shorter block needs no special care: a block is cut
where it would show a chunk a row for the second time.

An `Observer` stands beside the scan. It learns from the blocks what is worth caching, and may release tuples before
their deadline when they have met all their rows.
"""

from collections.abc import Generator, Iterator
from typing import Any

import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.joins.phases.block_join import BlockJoin
from dovetail.joins.protocol import RelationBlock
from dovetail.joins.spec import JoinSpec
from dovetail.joins.state import JoinState
from dovetail.joins.window.leaving import Leaving
from dovetail.joins.window.tuple_store import Positions

__all__ = ["Observer", "Scan", "reads_in_place"]


def reads_in_place(spec: JoinSpec) -> bool:
    """Whether blocks are views of mapped pages. Other joins need arrays as long as the block, which count."""
    return spec.has_equality and spec.how in ("inner", "left") and spec.shard.reads_in_place


class Observer:
    """Stands beside a scan. This one does nothing."""

    def rows_to_read(self, rows: int) -> int:
        """How many of these rows the next block may have."""
        return rows

    def rows_to_skip(self) -> int:
        """How many rows from here on no waiting tuple can need, if skipping them is cheaper than reading."""
        return 0

    def begin_block(self, block: RelationBlock) -> None:
        """A block was read and is about to be joined, or continued."""

    def end_block(self, block: RelationBlock) -> None:
        """A block was joined completely; the odometer does not count it yet."""

    def after_advance(self) -> None:
        """The odometer has moved."""

    def leave_early(self, block: RelationBlock) -> Iterator[pa.RecordBatch]:
        """Release tuples that have met all their rows in this block."""
        yield from ()

    def upkeep(self) -> None:
        """Called between two blocks."""


class Scan:
    """The disk phase that reads the relation in order."""

    def __init__(self, state: JoinState, blocks: BlockJoin, leaving: Leaving) -> None:
        self.state, self._blocks, self._leaving = state, blocks, leaving
        self.observer = Observer()
        self.odometer = 0
        self.interrupted_rows = 0

    @property
    def position(self) -> int:
        """The relation row at which the next block starts."""
        rows = self.state.spec.shard.num_rows
        return self.odometer % rows if rows else 0

    def deadline(self) -> int:
        """The odometer at which tuples that enter now have met every row."""
        return self.odometer + self.state.spec.shard.num_rows

    def step(self) -> Generator[pa.RecordBatch, None, None]:
        """Join one block with all waiting tuples."""
        state, observer = self.state, self.observer
        # Finish what an abandoned step left undone.
        observer.upkeep()
        yield from self.expire()
        rows_left = self._rows_of_step()
        while state.pending and rows_left > 0:
            skipped = 0 if state.pairs_done else observer.rows_to_skip()
            if skipped:
                self._advance(skipped)
                observer.upkeep()
                yield from self.expire()
                rows_left = self._rows_of_step()
                continue
            # Read b pages from R; the w tuples of S are already in H and Q.
            block = self._blocks.read(self.position, self._rows_to_read(rows_left))
            self.interrupted_rows = block.stop - block.start
            observer.begin_block(block)
            # For each tuple r in the b pages of R: output r joined with H.
            yield from self._blocks.join(block)
            observer.end_block(block)
            # From here on nothing is lost if the iterator is abandoned: the other tuples leave at their deadline.
            self._advance(block.stop - block.start)
            rows_left -= block.stop - block.start
            yield from observer.leave_early(block)
            # Dequeue the tuples that have met all of R, and remove them from H.
            yield from self.expire()
            observer.upkeep()

    def _rows_of_step(self) -> int:
        return min(self.state.memory.block_rows, self.state.spec.shard.num_rows - self.position)

    def _rows_to_read(self, rows_left: int) -> int:
        """How many rows of a block come before the oldest chunk would see one again."""
        window = self.state.window
        assert window is not None
        if self.state.pairs_done:
            return self.interrupted_rows
        return self.observer.rows_to_read(min(rows_left, window.chunks.oldest.deadline - self.odometer))

    def _advance(self, rows: int) -> None:
        state = self.state
        self.odometer += rows
        state.pairs_done = 0
        if self.position == 0:
            state.metrics.cycles += 1
        if state.results.cut_ticket is not None:
            self.restart_after(state.results.cut_ticket)
            state.results.cut_ticket = None
        self.observer.after_advance()

    def expire(self) -> Iterator[pa.RecordBatch]:
        """Release chunks that have met every row."""
        window = self.state.window
        while window is not None and len(window) and window.chunks.oldest.deadline <= self.odometer:
            yield from self._leaving.oldest(window.chunks.oldest.live)

    def met_rows(self, positions: Positions) -> tuple[Int64Array, Int64Array]:
        """Per waiting tuple, the row from which on it has met the relation, and how many rows it has met."""
        window, rows = self.state.window, self.state.spec.shard.num_rows
        assert window is not None
        entered_at = window.deadlines_at(positions) - rows
        return entered_at % max(1, rows), self.odometer - entered_at

    def restart_after(self, ticket: int) -> None:
        """Restart waiting tuples with a higher ticket; their held results are gone."""
        if self.state.window is not None:
            self.state.window.restart_after(ticket, self.deadline())

    def before_accept(self) -> Iterator[pa.RecordBatch]:
        """A scan has no work to finish before tuples enter."""
        yield from ()

    def save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        """Its part of a snapshot."""
        return {}, {"odometer": self.odometer, "interrupted_rows": self.interrupted_rows}

    def load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        """Continue from what `save` returned; an error changes nothing."""
        odometer, interrupted_rows = int(values["odometer"]), int(values["interrupted_rows"])
        self.odometer, self.interrupted_rows = odometer, interrupted_rows
