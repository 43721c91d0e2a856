"""MESHJOIN: a stream meets a relation that is scanned over and over (Polyzotis et al., 2007, section 3).

What it computes
    The exact join of every offered stream tuple with one version of a relation's shard: equality of keys, equality plus
    a residual condition, or any condition without equality; one-to-many and many-to-many; inner, left, semi, anti.
How
    The relation is read cyclically in blocks of b rows, sequentially, without an index. Stream tuples enter the window
    in chunks of at most w between two steps; each block is joined with the whole window; a chunk leaves when it has met
    every row exactly once. That is counted in rows: the scan keeps an *odometer* of rows passed, and a chunk that
    enters at odometer o leaves at o + N. So b and w may change at any time, and a last, shorter block needs no special
    care: a block is cut where it would show a chunk a row for the second time.
Memory
    One block, one batch of output, and the window, which gets the rest of the budget; with ``ordered``, held results.
    Where a block is a view of mapped pages it takes none of the budget, and is as long as the relation's record batch:
    fewer, longer steps, whose fixed costs would otherwise bind at small budgets.
What is emitted when
    inner: each pair when its row's block is read. semi: a tuple at its first match. left and anti: unmatched tuples
    when they leave. Tuples with a NULL key at once.
What a restart keeps
    The window, the place in the scan, held results, counters.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from dovetail.operators.base import SemiStreamOperator
from dovetail.operators.memory_plan import MemoryPlan, plan_memory
from dovetail.operators.spec import JoinSpec

__all__ = ["MeshJoin"]


class MeshJoin(SemiStreamOperator):
    """Join a stream with a relation by a cyclic scan.

    Examples
    --------
    >>> import tempfile
    >>> from dovetail.operators.spec import join_spec
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.record_batch({"__code": [2, 7], "id": [2, 7]})
    >>> join = MeshJoin(join_spec(relation, stream.schema, how="left", budget="1MB"))
    >>> list(join.offer(stream)), join.pending
    ([], 2)
    >>> [row for batch in join.drain() for row in batch.to_pylist()]
    [{'id': 2, 'city': 'Oslo'}, {'id': 2, 'city': 'Bergen'}, {'id': 7, 'city': None}]
    """

    kind = "mesh"
    needs_equality = False

    def __init__(self, spec: JoinSpec) -> None:
        super().__init__(spec)
        self._odometer = 0
        self._interrupted_rows = 0

    @property
    def position(self) -> int:
        """The relation row that the next block begins with."""
        return self._odometer % self.spec.shard.num_rows if self.spec.shard.num_rows else 0

    def _plan_memory(self, spec: JoinSpec) -> MemoryPlan:
        per_tuple = self._matcher.bytes_per_tuple
        return plan_memory(spec, who=self.kind, bytes_per_tuple=per_tuple, is_block_in_place=self._reads_in_place(spec))

    def _reads_in_place(self, spec: JoinSpec) -> bool:
        # Other joins make arrays as long as the block, which would have to be accounted for.
        return spec.has_equality and spec.how in ("inner", "left") and spec.shard.reads_in_place

    def _deadline(self) -> int:
        return self._odometer + self.spec.shard.num_rows

    def _disk_step(self) -> Iterator[pa.RecordBatch]:
        yield from self._expire()
        rows_left = min(self.block_rows, self.spec.shard.num_rows - self.position)
        while self.pending and rows_left > 0:
            # Read b pages from R; the w tuples of S are already in H and Q.
            block = self._read_block(self.position, self._rows_to_read(rows_left))
            self._interrupted_rows = block.stop - block.start
            # For each tuple r in the b pages of R: output r joined with H.
            yield from self._join_block(block)
            self._advance(block.stop - block.start)
            rows_left -= block.stop - block.start
            # Dequeue the tuples that have met all of R, and remove them from H.
            yield from self._expire()

    def _rows_to_read(self, rows_left: int) -> int:
        """How many rows of a block come before the oldest chunk would see one again."""
        assert self._window is not None
        if self._pairs_done:
            return self._interrupted_rows
        return min(rows_left, self._window.chunks.oldest.deadline - self._odometer)

    def _advance(self, rows: int) -> None:
        self._odometer += rows
        self._pairs_done = 0
        if self.position == 0:
            self.metrics.cycles += 1
        if self.results.cut_ticket is not None:
            self._restart_after(self.results.cut_ticket)
            self.results.cut_ticket = None

    def _expire(self) -> Iterator[pa.RecordBatch]:
        window = self._window
        while window is not None and len(window) and window.chunks.oldest.deadline <= self._odometer:
            yield from self._leave_oldest(window.chunks.oldest.live)

    def _save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        return {}, {"odometer": self._odometer, "interrupted_rows": self._interrupted_rows}

    def _load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        odometer, interrupted_rows = int(values["odometer"]), int(values["interrupted_rows"])
        self._odometer, self._interrupted_rows = odometer, interrupted_rows
