"""One shard of a multi-way join that uses the promises of its inputs, in one micro-batch.

If the result has a notice column, it is NULL in joined rows. A row with ``"closed"`` says that no later row has its
values of the join columns; it comes with the micro-batch that emitted the last of them, so a sink sees both or neither.
Any other text is the reason why that row of an input was not joined.
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.multiway import MJoinSpec
from dovetail.joins.multiway.output import MultiOutput
from dovetail.joins.promises import REASON_COLUMN, Metadata, MetadataJoin
from dovetail.joins.promises.join import CLOSED_ROW
from dovetail.joins.promises.punctuation import BoundPunctuation, points_of
from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.runtime.late_rows import LateWriter
from dovetail.runtime.multi_join import MultiJoinTask
from dovetail.runtime.shard_job import ShardInput, ShardResult

__all__ = ["ENDS", "IS_DATA_TOO", "IS_PATTERN", "MetadataJoinTask", "mark_column"]

_MOST_VALUES = 1_000_000

ENDS, IS_DATA_TOO, IS_PATTERN = 1, 2, 3
"""Values of a mark: the row ends its join value; it does and is also a row of the input; it is a punctuation on its
non-NULL columns, for every shard. No mark: it is only a row."""


def mark_column(name: str) -> str:
    """The hidden column that marks an input's rows that end their join value."""
    return f"~ends {name}"


@dataclass(frozen=True)
class MetadataJoinTask(MultiJoinTask):
    """The join of one shard; see `MultiJoinTask`."""

    metadata: Metadata
    marked: frozenset[str]  # inputs with marked rows
    timed: frozenset[str]  # inputs whose marks wait for the watermark
    patterns: Mapping[str, tuple[str, ...]]  # the columns of punctuation streams that do not name the whole join key
    has_notices: bool  # whether the last output column is the notice
    has_quarantine: bool  # whether rows that broke a promise have a side output
    shards: int  # number of shards
    trusted: frozenset[str] = frozenset()  # inputs that are results of another join, which are not checked
    # Per input of a tree, the user's column names by the internal ones, for messages.
    written: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def new_join(self, spec: MJoinSpec) -> MetadataJoin:
        return MetadataJoin(spec, self.metadata, self.trusted, self.written)

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Join the shard's rows; their promises and those of the intent take effect after them."""
        intent = given.intent
        live = self._continued(given)
        join = live.join
        assert isinstance(join, MetadataJoin)
        if self.shards > 1:
            join.expect_only(partial(_is_of_shard, self.shards, given.shard))
        late = LateWriter(Path(live.spill.name))
        join.on_late = late.add
        join.on_quarantined = late.add_quarantined if self.has_quarantine else None
        join.set_time(intent["time_ms"])
        if intent["watermark"] is not None:
            yield from self._emit(join.advance(intent["watermark"]))
        ended: list[tuple[str, pa.RecordBatch]] = []
        for name, batch in self._arrivals(given.batches):
            rows, ends = self._without_marks(name, batch)
            if ends is not None:
                ended.append((name, ends))
            yield from self._emit(join.offer(name, rows))
            yield from self._quarantined(join)
        yield from self._emit(self._promise(join, ended))
        yield from self._emit(self._promise_given(join, intent["punctuations"], given.shard))
        yield from self._emit(join.end_batch())
        yield from self._emit(join.drain() if intent["drain"] else join.step(idle=True))
        if self.has_notices:
            yield from self._closed(join, given.shard)
        join.on_quarantined = None
        result = self._result(given, live, late)
        result.report["counters"].update(  # what is so now, of all shards together
            {"punctuations_held": join.punctuations_held, "purge_lag": join.purge_lag}
        )
        return result

    # ================================================================ promises

    def _without_marks(self, name: str, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
        """The rows that are data, and the rows that end their join value."""
        if name not in self.marked:
            return batch, None
        marks = batch.column(mark_column(name)).fill_null(0).to_numpy(zero_copy_only=False)
        if not marks.any():
            return batch, None
        is_data = (marks == 0) | (marks == IS_DATA_TOO)
        return batch.filter(pa.array(is_data)), batch.filter(pa.array(marks > 0))

    def _promise(self, join: MetadataJoin, ended: list[tuple[str, pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        for name, rows in ended:
            times = self._times(name, rows) if name in self.timed else None
            yield from join.punctuate_rows(name, rows, times, self.patterns.get(name))

    def _promise_given(
        self, join: MetadataJoin, given: Mapping[str, list[Mapping[str, Any]]], shard: int
    ) -> Iterator[pa.RecordBatch]:
        """Values of the whole join key concern only their own shard; any other punctuation all shards."""
        for name, described in given.items():
            reader = join.collection.readers[self.spec.names.index(name)]
            for bound in map(BoundPunctuation.from_dict, described):
                values = points_of(bound, reader.columns, _MOST_VALUES)
                if values is None:
                    yield from join.punctuate(name, bound.unbound())
                else:
                    is_mine = shard_of_codes(reader.of_values(values).codes, self.shards) == shard
                    yield from join.punctuate_rows(name, values.filter(pa.array(is_mine)))

    def _times(self, name: str, rows: pa.RecordBatch) -> Any:
        assert self.spec.window is not None
        column = rows.column(self.spec.window.columns_of(name)[0])  # type: ignore[union-attr]
        # A punctuation without a time never takes effect.
        return column.cast(pa.int64()).fill_null(2**63 - 1).to_numpy(zero_copy_only=False)

    # ================================================================ output

    def _emit(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not self.has_notices:
            yield from super()._emit(batches)
            return
        for batch in batches:
            yield from self._noticed(batch, pa.nulls(batch.num_rows, pa.string()))

    def _noticed(self, batch: pa.RecordBatch, notices: pa.Array) -> Iterator[pa.RecordBatch]:
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays([*batch.columns, notices], names=list(self.output_names))

    def _quarantined(self, join: MetadataJoin) -> Iterator[pa.RecordBatch]:
        output = MultiOutput(self.spec)
        for name, batch in join.take_quarantined():
            rows = batch.select(self.spec.schemas[name].names)
            around = output.nulls_around(self.spec.names.index(name), rows)
            yield from self._noticed(around, batch.column(REASON_COLUMN))

    def _closed(self, join: MetadataJoin, shard: int) -> Iterator[pa.RecordBatch]:
        """One row per join value of this shard that no later result has."""
        for values in join.take_closed_values():
            codes = join.collection.readers[0].of_values(values).codes
            mine = values.filter(pa.array(shard_of_codes(codes, self.shards) == shard))
            columns = [
                mine.column(name) if name in mine.schema.names else pa.nulls(mine.num_rows, kind)
                for name, kind in zip(join.output_schema.names, join.output_schema.types, strict=True)
            ]
            batch = pa.RecordBatch.from_arrays(columns, schema=_all_nullable(join.output_schema))
            yield from self._noticed(batch, pa.array(np.full(mine.num_rows, CLOSED_ROW), pa.string()))


def _is_of_shard(shards: int, shard: int, codes: Int64Array) -> BoolArray:
    found: BoolArray = shard_of_codes(codes, shards) == shard
    return found


def _all_nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])
