"""A multi-way join that uses what its inputs promise, as a step of the commit protocol and as a shard's task.

Where the result has a column of notices, it is NULL in joined rows. A row with ``"closed"`` says that no later row has
its join columns' values; it comes with the micro-batch that gave the last of them, so a sink sees both or neither. Any
other text is the reason why that row of an input was not joined.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.operators.metadata import REASON_COLUMN, Metadata, MetadataJoin
from dovetail.operators.metadata.join import CLOSED_ROW
from dovetail.operators.metadata.punctuation import BoundPunctuation, points_of
from dovetail.operators.mjoin import MJoinSpec
from dovetail.operators.mjoin.output import MultiOutput
from dovetail.relation.format import SHARD_COLUMN
from dovetail.spark.join_metadata import IS_DATA_TOO, IS_PATTERN, JoinMetadata, mark_column
from dovetail.spark.late_rows import LateWriter
from dovetail.spark.multi_join_step import MultiJoinStep
from dovetail.spark.multi_join_task import MultiJoinTask
from dovetail.spark.shard_job import ShardInput, ShardResult
from dovetail.spark.steps import BatchClock, StepExplanation, StepRecord

__all__ = ["MetadataJoinStep", "MetadataJoinTask"]

_MOST_VALUES = 1_000_000


class MetadataJoinStep(MultiJoinStep):
    """A join of several streams on one attribute, with promises; see `MultiJoinStep` for the other parameters.

    Parameters
    ----------
    promised
        What is known of the inputs.
    """

    def __init__(self, promised: JoinMetadata, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._promised = promised
        promised.metadata.check(self.spec)
        hidden = {mark_column(name) for name in promised.marked}
        fields = list(self._joined)
        if promised.notices is not None:
            # A row that is no result has NULL in all that it does not speak of.
            fields = [T.StructField(f.name, f.dataType, True, f.metadata) for f in fields]
            fields.append(T.StructField(promised.notices, T.StringType()))
        visible = [field.name for field in fields if field.name not in hidden]
        self._put_out_as(T.StructType(fields), {name: name for name in visible})

    @property
    def notices(self) -> str | None:
        """The column that tells closed join values, where there is one."""
        return self._promised.notices

    @property
    def join_columns(self) -> list[str]:
        """The join columns as the result has them."""
        attribute = self.spec.attributes[0]
        return list(attribute.columns[attribute.inputs[0]])

    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on."""
        return {**super().fingerprint(), "kind": "metadata_join", "metadata": dict(self._promised.described)}

    def explanation(self) -> StepExplanation:
        """As of any multi-way join, with what is promised and the paper's name for such a join."""
        plain, metadata = super().explanation(), self._promised.metadata
        promised = {
            "algorithm": metadata.algorithm(self.spec),
            "keys": sorted(metadata.keys) or None,
            "clustered": sorted(metadata.clustered) or None,
            "ordered": sorted(metadata.ordered) or None,
            "punctuations": [f"{name}: {of}" for name, of in self._promised.described["punctuations"].items()] or None,
            "purging": metadata.purging_used,
            "broken": metadata.on_broken_promise,
        }
        return replace(plain, facts={**plain.facts, **promised})

    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        """As of any multi-way join; punctuations that do not name the whole join key go to every shard."""
        rows = super().route(inputs)
        if not self._promised.patterns:
            return rows
        tag, goes_everywhere = F.floor(F.col(SHARD_COLUMN) / self.shards).cast("int"), F.lit(False)
        for name in self._promised.patterns:
            member = self._members[name]
            mark = self.layout.names[self.layout.places[member.number][member.schema.names.index(mark_column(name))]]
            is_pattern = (tag == member.number) & (F.coalesce(F.col(mark), F.lit(0)) == IS_PATTERN)
            goes_everywhere = goes_everywhere | is_pattern
        everywhere = F.array(*(tag * self.shards + shard for shard in range(self.shards)))
        own = F.array(F.col(SHARD_COLUMN))
        others = [F.col(name) for name in rows.columns if name != SHARD_COLUMN]
        return rows.select(F.explode(F.when(goes_everywhere, everywhere).otherwise(own)).alias(SHARD_COLUMN), *others)

    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        """As of any multi-way join, and the punctuations that functions give."""
        return {**super().decide(previous, clock), "punctuations": self._promised.given(self.spec, clock)}

    def needs_order(self, is_last: bool) -> bool:
        """Which row breaks a promise depends on the order."""
        return True

    def publish(self, record: StepRecord, state_root: Path, batch: int) -> None:
        """Make late and quarantined rows visible."""
        super().publish(record, state_root, batch)
        if self._promised.quarantine is not None:
            self._promised.quarantine.publish(record, state_root, batch)

    def task(self, is_last: bool) -> "MetadataJoinTask":
        """The join of one shard."""
        plain = super().task(is_last)
        return MetadataJoinTask(
            **{field.name: getattr(plain, field.name) for field in fields(MultiJoinTask)},
            metadata=self._promised.metadata,
            marked=self._promised.marked,
            timed=self._promised.timed,
            patterns=dict(self._promised.patterns),
            has_notices=self._promised.notices is not None,
            has_quarantine=self._promised.quarantine is not None,
            shards=self.shards,
        )


@dataclass(frozen=True)
class MetadataJoinTask(MultiJoinTask):
    """The join of one shard; see `MultiJoinTask`.

    Attributes
    ----------
    metadata
        What is known of the inputs.
    marked, timed
        Inputs with marked rows, and those whose marks wait for the watermark.
    patterns
        For inputs whose stream of punctuations does not name the whole join key, the columns that it names.
    has_notices
        Whether the last column of the output is that of notices.
    has_quarantine
        Whether rows that broke a promise have a side output.
    shards
        How many there are.
    """

    metadata: Metadata
    marked: frozenset[str]
    timed: frozenset[str]
    patterns: Mapping[str, tuple[str, ...]]
    has_notices: bool
    has_quarantine: bool
    shards: int

    def new_join(self, spec: MJoinSpec) -> MetadataJoin:
        """The operator."""
        return MetadataJoin(spec, self.metadata)

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Join the shard's rows; what they and the intent promise takes effect after them."""
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
            yield from self._put_out(join.advance(intent["watermark"]))
        ended: list[tuple[str, pa.RecordBatch]] = []
        for name, batch in self._arrivals(given.batches):
            rows, ends = self._without_marks(name, batch)
            if ends is not None:
                ended.append((name, ends))
            yield from self._put_out(join.offer(name, rows))
            yield from self._quarantined(join)
        yield from self._put_out(self._promise(join, ended))
        yield from self._put_out(self._promise_given(join, intent["punctuations"], given.shard))
        yield from self._put_out(join.end_batch())
        yield from self._put_out(join.drain() if intent["drain"] else join.step(idle=True))
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
        """The rows that are data, and those that end their join value."""
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
        """Values of the whole join key concern their own shard only; any other punctuation, all of them."""
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
        # One without a time never takes effect.
        return column.cast(pa.int64()).fill_null(2**63 - 1).to_numpy(zero_copy_only=False)

    # ================================================================ output

    def _put_out(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not self.has_notices:
            yield from super()._put_out(batches)
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
        """One row for every join value of this shard that no later result has."""
        for values in join.take_closed_values():
            codes = join.collection.readers[0].of_values(values).codes
            mine = values.filter(pa.array(shard_of_codes(codes, self.shards) == shard))
            columns = [
                mine.column(name) if name in mine.schema.names else pa.nulls(mine.num_rows, kind)
                for name, kind in zip(join.output_schema.names, join.output_schema.types, strict=True)
            ]
            batch = pa.RecordBatch.from_arrays(columns, schema=_all_nullable(join.output_schema))
            yield from self._noticed(batch, pa.array(np.full(mine.num_rows, CLOSED_ROW), pa.string()))


def _is_of_shard(shards: int, shard: int, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = shard_of_codes(codes, shards) == shard
    return found


def _all_nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])
