"""The interface between the operators and a relation's shard, and what operators save."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.relation.format import ShardStats
from dovetail.relation.io import Disk, IoMode
from dovetail.relation.reads.read_costs import ReadCosts

__all__ = ["CODE_COLUMN", "RelationBlock", "RelationShard", "Snapshot"]

CODE_COLUMN = "__code"
"""The int64 column of a stream batch that holds the join code; NULL where the key has a NULL."""


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
    def lookup(self, codes: Int64Array, *, in_order: bool = True) -> tuple[Int64Array, Int64Array]: ...
    def locate(self, codes: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]: ...
    def count(self, codes: Int64Array) -> Int64Array: ...
    def gather(self, positions: Int64Array) -> pa.RecordBatch: ...
    def gather_grouped(self, positions: Int64Array) -> Iterator[tuple[Int64Array, pa.RecordBatch]]: ...
    def gather_ascending(
        self, positions: Int64Array, *, in_pass: bool = False
    ) -> Iterator[tuple[int, pa.RecordBatch]]: ...
    def widest(self, start: int, stop: int) -> int: ...
    def widest_at(self, positions: Int64Array) -> int: ...
    def widths(self, positions: Int64Array) -> Int64Array | int: ...
    def codes_at(self, positions: Int64Array) -> Int64Array: ...
    def absent_share(self) -> float: ...
    @property
    def pass_bytes(self) -> int: ...
    @property
    def read_costs(self) -> ReadCosts | None: ...


@dataclass(frozen=True)
class Snapshot:
    """The whole state of an operator between two calls: Arrow tables and a JSON-able dict.

    Attributes
    ----------
    kind
        The operator: ``"mesh"``, ``"index_nested_loop"``, ...
    fingerprint
        Relation, version, shard, join and stream schema. `restore` refuses any other.
    tables
        Waiting tuples (``window``), and other rows that the operator keeps.
    values
        Numbers and texts: the scan position, counters.

    Examples
    --------
    >>> Snapshot("mesh", {"version": 3}, {}, {"odometer": 7}).values["odometer"]
    7
    """

    kind: str
    fingerprint: Mapping[str, Any]
    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
