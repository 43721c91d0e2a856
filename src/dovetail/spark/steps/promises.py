"""A multi-way join that uses the promises of its inputs, as a step of the commit protocol.

If the result has a column of notices, it is NULL in joined rows. ``"closed"`` means that no later row has the row's
join values; it is in the micro-batch with the last of their results, so a sink sees both or neither. Any other text is
the reason why that row of an input was not joined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.relation.format import SHARD_COLUMN
from dovetail.runtime.multi_join import MultiJoinTask
from dovetail.runtime.promises import IS_PATTERN, MetadataJoinTask, mark_column
from dovetail.spark.flow.step import BatchClock, StepExplanation, StepRecord
from dovetail.spark.steps.join_metadata import JoinMetadata
from dovetail.spark.steps.multi_join_step import MultiJoinStep

__all__ = ["MetadataJoinStep"]


class MetadataJoinStep(MultiJoinStep):
    """A `MultiJoinStep` with promises: all inputs share one join attribute."""

    def __init__(self, promised: JoinMetadata, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._promised = promised
        if promised.quarantine is not None:
            self.side_files += (promised.quarantine,)
        promised.metadata.check(self.spec)
        hidden = {mark_column(name) for name in promised.marked}
        fields = list(self._joined)
        if promised.notices is not None:
            # A notice has NULL in all other columns.
            fields = [T.StructField(f.name, f.dataType, True, f.metadata) for f in fields]
            fields.append(T.StructField(promised.notices, T.StringType()))
        visible = {name: inside for name, inside in self._final.items() if inside not in hidden}
        if promised.notices is not None:
            visible[promised.notices] = promised.notices
        self._set_output(T.StructType(fields), visible)

    @property
    def notices(self) -> str | None:
        return self._promised.notices

    @property
    def join_columns(self) -> list[str]:
        """Their names in the result."""
        attribute = self.spec.attributes[0]
        written = {inside: name for name, inside in self._final.items()}
        return [written[column] for column in attribute.columns[attribute.inputs[0]]]

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "kind": "metadata_join", "metadata": dict(self._promised.described)}

    def explanation(self) -> StepExplanation:
        """With the promises, and the paper's name of such a join."""
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
        """Punctuations that do not name the whole join key go to every shard."""
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
        """With the punctuations that functions return."""
        return {**super().decide(previous, clock), "punctuations": self._promised.given(self.spec, clock)}

    def needs_order(self, is_last: bool) -> bool:
        """Which row breaks a promise depends on the order."""
        return True

    def task(self, is_last: bool) -> MetadataJoinTask:
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
            trusted=self._promised.trusted,
            written=self._promised.written,
        )
