"""One shard of an aggregation that emits groups when they are closed, in one micro-batch.

The state has one row of partial aggregates per open group. A row of the join adds to its group; a "closed" notice ends
it. Both may come in one micro-batch in any order, so groups end with the micro-batch: the join reports a value as
closed only when no later row has it, so all rows of a closed group have arrived by then.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.errors import SchemaError
from dovetail.core.metrics import OperatorMetrics
from dovetail.joins.promises.join import CLOSED_ROW
from dovetail.runtime.shard_job import ShardInput, ShardResult

__all__ = ["Aggregate", "AggregateKind", "ClosedGroupsTask"]

AggregateKind = Literal["count", "sum", "min", "max"]
_GROUPS, _IS_CLOSED = "groups", "__closed"
_FEWEST_TOGETHER = 1 << 16


@dataclass(frozen=True)
class Aggregate:
    """One column of the result."""

    kind: AggregateKind
    column: int | None  # its place among the columns that travel; None: rows are counted
    result: pa.DataType

    @property
    def partial(self) -> pa.DataType:
        """The type until the group is closed; sums of integers get spare room."""
        is_sum_of_integers = self.kind == "sum" and pa.types.is_integer(self.result)
        return pa.decimal128(38, 0) if is_sum_of_integers else self.result

    @property
    def merge(self) -> str:
        """The aggregation that merges partial results."""
        return "sum" if self.kind == "count" else self.kind

    def of_rows(self, values: list[pa.Array], is_joined: pa.Array) -> pa.Array:
        """What each row adds."""
        if self.column is None:
            return is_joined.cast(pa.int64())
        column = values[self.column]
        if self.kind == "count":
            return pc.and_(column.is_valid(), is_joined).cast(pa.int64())
        # A row that closes its group has only the join columns, and adds nothing.
        column = pc.if_else(is_joined, column, pa.scalar(None, column.type))
        if pa.types.is_decimal(self.partial) and not pa.types.is_decimal(column.type):
            return column.cast(pa.int64()).cast(pa.decimal128(19, 0)).cast(self.partial)
        return column.cast(self.partial)

    def finished(self, partial: pa.ChunkedArray) -> pa.ChunkedArray:
        try:
            return partial.cast(self.result)
        except pa.ArrowInvalid:
            raise SchemaError(
                f"A sum of a closed group is beyond {self.result}.",
                hint="Cast the column to double before it is summed.",
            ) from None


@dataclass(frozen=True)
class ClosedGroupsTask:
    """The groups of one shard; see `dovetail.runtime.shard_job.ShardTask`.

    The columns of its rows are the code, the notice, the keys, then the values.
    """

    keys: tuple[pa.DataType, ...]  # types of the key columns
    aggregates: tuple[Aggregate, ...]
    output_names: tuple[str, ...]  # internal names of the result columns: the keys, then the aggregates

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Add the rows to their groups, and emit the closed ones."""
        state = given.state
        totals = OperatorMetrics() if state is None else OperatorMetrics.from_dict(state.values["metrics"])
        files = () if state is None else state.files
        groups = self._merged([self._nothing(), *(given.read(file) for file in files)])
        waiting: list[pa.Table] = []
        for rows in self._rows(given.batches):
            totals.stream_tuples_in += rows.num_rows
            waiting.append(self._merged([rows]))
            # Merged with all groups only when as many rows have accumulated, so that merging costs as much as reading.
            if sum(part.num_rows for part in waiting) > max(_FEWEST_TOGETHER, groups.num_rows):
                groups, waiting = self._merged([groups, *waiting]), []
        groups = self._merged([groups, *waiting])
        is_closed = pc.equal(groups[_IS_CLOSED], 1)
        for batch in self._finished(groups.filter(is_closed)):
            totals.output_rows += batch.num_rows
            yield batch
        still_open = groups.filter(pc.invert(is_closed)).combine_chunks()
        report = {
            "pending": 0,
            "oldest_ms": None,
            "memory": {"groups": groups.nbytes},
            "metrics": totals.as_dict(),
            "state_rows": {"open": still_open.num_rows},
            "version": None,
        }
        return ShardResult([(_GROUPS, still_open)], (), {"metrics": totals.as_dict()}, report)

    # ================================================================ groups

    @property
    def _key_names(self) -> list[str]:
        return list(self.output_names[: len(self.keys)])

    @property
    def _aggregate_names(self) -> list[str]:
        return list(self.output_names[len(self.keys) :])

    def _nothing(self) -> pa.Table:
        types = [*self.keys, *(aggregate.partial for aggregate in self.aggregates), pa.int8()]
        names = [*self.output_names, _IS_CLOSED]
        return pa.table([pa.array([], kind) for kind in types], names=names)

    def _rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        """What each row adds to its group, without quarantined rows and rows without a key, which are in no group."""
        for batch in batches:
            is_joined = batch.column(1).is_null()
            is_closing = pc.equal(batch.column(1), CLOSED_ROW).fill_null(False)
            keys = [column.cast(kind) for column, kind in zip(batch.columns[2:], self.keys, strict=False)]
            values = batch.columns[2 + len(self.keys) :]
            columns = [*keys, *(aggregate.of_rows(values, is_joined) for aggregate in self.aggregates)]
            table = pa.table([*columns, is_closing.cast(pa.int8())], names=[*self.output_names, _IS_CLOSED])
            counts = pc.or_(is_joined, is_closing)
            for key in keys:
                counts = pc.and_(counts, key.is_valid())
            yield table.filter(counts)

    def _merged(self, parts: list[pa.Table]) -> pa.Table:
        """One row per group."""
        table = pa.concat_tables(parts)
        how = [(name, each.merge) for name, each in zip(self._aggregate_names, self.aggregates, strict=True)]
        # A single thread orders groups by their first rows: two runs of a task give the same result.
        merged = table.group_by(self._key_names, use_threads=False).aggregate([*how, (_IS_CLOSED, "max")])
        merged = merged.select([*self._key_names, *(f"{name}_{kind}" for name, kind in how), f"{_IS_CLOSED}_max"])
        return merged.rename_columns([*self.output_names, _IS_CLOSED]).cast(self._nothing().schema)

    def _finished(self, groups: pa.Table) -> Iterator[pa.RecordBatch]:
        keys = [groups[name] for name in self._key_names]
        found = [each.finished(groups[n]) for n, each in zip(self._aggregate_names, self.aggregates, strict=True)]
        table = pa.table([*keys, *found], names=list(self.output_names))
        yield from (batch for batch in table.combine_chunks().to_batches() if batch.num_rows)
