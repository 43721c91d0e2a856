"""What a task needs to know of a join: picklable, made by `dovetail.spark.join_plan` on the driver.

On their way through a task, the stream's columns have names of ours (``s0``, ``s1``, ...), so that no name of the
user's can clash with a column of the relation or be syntax to Spark.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import fs

from dovetail.errors import RelationError
from dovetail.memory import Budget
from dovetail.operators.conditions import Condition
from dovetail.operators.protocol import CODE_COLUMN, RelationShard
from dovetail.operators.spec import JoinSpec, JoinType
from dovetail.relation import Disk, IoMode, Relation, compute_codes
from dovetail.relation.format import CodeKind

__all__ = ["JoinRecipe", "RenamedCondition"]


@dataclass(frozen=True)
class RenamedCondition:
    """A condition that speaks of the stream's columns by the user's names, asked about batches that have ours.

    Parameters
    ----------
    condition
        The user's.
    names
        The user's name of each of our names that has one; names that the user has twice are left out.
    """

    condition: Condition
    names: tuple[tuple[str, str], ...]

    def columns(self, stream: pa.Schema, relation: pa.Schema) -> tuple[list[str], list[str]]:
        """See `Condition.columns`."""
        ours = {users: name for name, users in self.names}
        of_user = pa.schema([stream.field(name).with_name(users) for name, users in self.names])
        of_stream, of_relation = self.condition.columns(of_user, relation)
        return [ours[users] for users in of_stream], of_relation

    def mask(self, stream: pa.RecordBatch, relation: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """See `Condition.mask`."""
        users = dict(self.names)
        return self.condition.mask(stream.rename_columns([users[name] for name in stream.schema.names]), relation)

    def describe(self) -> str:
        """See `Condition.describe`."""
        return self.condition.describe()


@dataclass(frozen=True)
class JoinRecipe:
    """A join as a task sees it.

    Parameters
    ----------
    path, filesystem, relation_id, version
        The relation; the version that the query was planned with.
    relation_columns
        The columns to open it with: those that are put out, rechecked, or asked for by the condition.
    relation_schema
        These columns and the key, as they were when the query was planned.
    key, code_kind, num_shards
        The relation's.
    on
        Pairs (our name of the aligned stream column, relation column) of the key, in the key's order.
    code_from
        The column whose values are the codes, or None if the batches have a column ``__code``.
    how, select, condition, io
        See `JoinSpec`.
    emitted
        The columns of the operators' output, in the order in which the task puts them out.
    """

    path: str
    filesystem: fs.FileSystem | None
    relation_id: str
    version: int
    relation_columns: tuple[str, ...]
    relation_schema: pa.Schema
    key: tuple[str, ...]
    code_kind: CodeKind
    num_shards: int
    on: tuple[tuple[str, str], ...]
    code_from: str | None
    how: JoinType
    select: tuple[str, ...]
    condition: Condition | None
    io: IoMode | Disk
    emitted: tuple[str, ...]

    def open(self, version: int | None = None) -> Relation:
        """Open the relation at a version, by default the planned one; refuse it if it is not the one planned for.

        Raises
        ------
        RelationError
            If it is gone, or was rebuilt with another key, other columns or another number of shards.
        """
        relation = Relation.open(self.path, self.version if version is None else version, self.filesystem)
        self.check(relation)
        return relation

    def check(self, relation: Relation) -> None:
        """Refuse a version of the relation that this join was not planned for."""
        where = f"version {relation.version} of {self.path}"
        if relation.key != self.key:
            raise RelationError(
                f"{where} has the key {', '.join(relation.key)}; this query was planned for {', '.join(self.key)}.",
                hint="Stop the query and start it again with the new relation.",
            )
        if relation.num_shards != self.num_shards:
            raise RelationError(
                f"{where} has {relation.num_shards} shards; this query was planned for {self.num_shards}.",
                hint="Stop the query and start it again with the new relation.",
            )
        for column in self.relation_schema:
            number = relation.schema.get_field_index(column.name)
            found = None if number < 0 else relation.schema.field(number).type
            if found != column.type:
                has = "no such column" if found is None else str(found)
                raise RelationError(
                    f"column {column.name!r} was {column.type} when this query was planned; {where} has {has}.",
                    hint="Stop the query and start it again with the new relation.",
                )

    def stream_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of the stream as the operators want it: with its codes, keys typed as the relation's."""
        names, columns = list(batch.schema.names), list(batch.columns)
        for ours, theirs in self.on if self.code_kind == "xxhash64" else ():
            place = names.index(ours)
            wanted = self.relation_schema.field(theirs).type
            if columns[place].type != wanted:
                # The same values in another form, such as strings with offsets of 64 bits.
                columns[place] = columns[place].cast(wanted)
        if self.code_from is not None:
            codes = compute_codes(batch, [self.code_from])
            names, columns = [CODE_COLUMN, *names], [codes, *columns]
        return pa.RecordBatch.from_arrays(columns, names=names)

    def spec(
        self,
        shard: RelationShard,
        stream_schema: pa.Schema,
        budget: Budget,
        identity: Mapping[str, Any] = MappingProxyType({}),
    ) -> JoinSpec:
        """The join of batches of this schema with an open shard.

        Parameters
        ----------
        shard
            Opened with `relation_columns`, and with the rows whose key has a NULL where `on` is empty.
        stream_schema
            Of what `stream_batch` gives.
        budget
            This shard's part.
        identity
            What a snapshot must agree on besides the join: version, shard.
        """
        return JoinSpec(
            shard=shard,
            stream_schema=stream_schema,
            on=self.on,
            how=self.how,
            budget=budget,
            select=self.select,
            condition=self.condition,
            code_kind=self.code_kind,
            identity={"relation": self.relation_id, **identity},
        )

    def output_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of an operator's output as the task puts it out."""
        if not self.emitted:
            return batch
        return batch.select(list(self.emitted))
