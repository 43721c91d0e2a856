"""What every semi-stream join offers, what it saves, and what it needs of a relation's shard."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.memory import Budget
from dovetail.metrics import OperatorMetrics
from dovetail.relation.format import ShardStats
from dovetail.relation.io import Disk, IoMode

__all__ = ["CODE_COLUMN", "RelationBlock", "RelationShard", "SemiStreamJoin", "Snapshot"]

CODE_COLUMN = "__code"
"""The int64 column of a stream batch that holds the join code; NULL where the key has a NULL."""

Int64Array = npt.NDArray[np.int64]


class RelationBlock(Protocol):
    """The live rows at positions ``[start, stop)`` of a shard, and their codes."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def codes(self) -> Int64Array: ...
    @property
    def rows(self) -> pa.RecordBatch: ...
    @property
    def nbytes(self) -> int: ...


class RelationShard(Protocol):
    """What the operators use of `dovetail.relation.ShardReader`."""

    num_rows: int
    live_rows: int
    schema: pa.Schema
    stats: ShardStats
    version: int
    number: int

    @property
    def disk(self) -> Disk | None: ...
    @property
    def io_mode(self) -> IoMode: ...
    @property
    def row_bytes(self) -> float: ...
    @property
    def index_bytes(self) -> int: ...
    @property
    def num_segments(self) -> int: ...
    @property
    def reads_in_place(self) -> bool: ...
    def rows_in_place(self, start: int) -> int: ...
    def read_block(self, start: int, rows: int) -> RelationBlock: ...
    def lookup(self, codes: Int64Array) -> tuple[Int64Array, Int64Array]: ...
    def locate(self, codes: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]: ...
    def count(self, codes: Int64Array) -> Int64Array: ...
    def gather(self, positions: Int64Array) -> pa.RecordBatch: ...
    def gather_grouped(self, positions: Int64Array) -> Iterator[tuple[Int64Array, pa.RecordBatch]]: ...
    def codes_at(self, positions: Int64Array) -> Int64Array: ...


@dataclass(frozen=True)
class Snapshot:
    """The whole state of an operator between two calls: Arrow tables and a dict that JSON can hold.

    Attributes
    ----------
    kind
        The operator that it is of: ``"mesh"``, ``"index_nested_loop"``, ...
    fingerprint
        Relation, version, shard, join and stream schema that the state is about. `restore` refuses any other.
    tables
        What waits (``window``), and what else the operator keeps.
    values
        Numbers and texts: the place in the scan, counters.

    Examples
    --------
    >>> Snapshot("mesh", {"version": 3}, {}, {"odometer": 7}).values["odometer"]
    7
    """

    kind: str
    fingerprint: Mapping[str, Any]
    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


class SemiStreamJoin(Protocol):
    """A join of one shard of a stream with one shard of a relation.

    The iterators that `offer`, `step` and `drain` give do the work as they are consumed: exhaust one before the
    next call. Where one is given up or raises, everything it has already given counts as delivered; the next
    `step` goes on from there, and ``metrics.stream_tuples_in`` tells how many tuples were accepted.
    """

    kind: str
    metrics: OperatorMetrics

    @property
    def output_schema(self) -> pa.Schema:
        """Columns of every batch given: join columns, the stream's others, the relation's others."""

    @property
    def pending(self) -> int:
        """Stream tuples that were accepted and still wait."""

    @property
    def oldest(self) -> int | None:
        """How many tuples had been offered before the oldest that waits (at most so many); None if none does."""

    def offer(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Accept all tuples of the batch, making room with disk steps where the budget asks for it."""

    def step(self) -> Iterator[pa.RecordBatch]:
        """Do one disk step: one block of the relation against everything that waits."""

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Step until nothing waits."""

    def size(self) -> int:
        """Bytes held now; never above the budget."""

    def sizes(self) -> dict[str, int]:
        """Bytes held per component; the sum is `size`."""

    def resize_budget(self, budget: str | int | Budget) -> None:
        """Work within another budget from now on; refused, with nothing changed, if what waits does not fit."""

    def retune(self, *, block_rows: int | None = None, chunk_rows: int | None = None) -> None:
        """Change b or w from the next step on; no result is lost or repeated."""

    def snapshot(self) -> Snapshot:
        """The whole state, to be given to `restore` of an operator with the same spec."""

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot; refused, with nothing changed, if it is of something else."""
