"""What a task needs to know about a join: picklable, made by `dovetail.spark.plan.join_plan` on the driver.

Inside a task the stream's columns have internal names (``s0``, ``s1``, ...), so that no user name can clash with a
column of the relation or with Spark's syntax.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from pyarrow import fs

from dovetail.core.arrays import BoolArray
from dovetail.core.errors import RelationError, RelationNotFound
from dovetail.core.memory import Budget
from dovetail.costs.costs import CostFactors
from dovetail.costs.host import HostCosts
from dovetail.joins.conditions import Condition, Range, band_of
from dovetail.joins.explaining import expect_read_costs, factors_for
from dovetail.joins.protocol import CODE_COLUMN, RelationShard
from dovetail.joins.shedding import SheddingPolicy
from dovetail.joins.spec import JoinSpec, JoinType
from dovetail.relation import Disk, IoMode, Relation, compute_codes
from dovetail.relation.format import CodeKind

__all__ = ["JoinRecipe", "RenamedCondition"]


@dataclass(frozen=True)
class RenamedCondition:
    """A condition on the user's column names, evaluated on batches with internal names.

    `names` maps internal names to the user's; names that the user has twice are left out.
    """

    condition: Condition
    names: tuple[tuple[str, str], ...]

    def columns(self, stream: pa.Schema, relation: pa.Schema) -> tuple[list[str], list[str]]:
        ours = {users: name for name, users in self.names}
        of_user = pa.schema([stream.field(name).with_name(users) for name, users in self.names])
        of_stream, of_relation = self.condition.columns(of_user, relation)
        return [ours[users] for users in of_stream], of_relation

    def mask(self, stream: pa.RecordBatch, relation: pa.RecordBatch) -> BoolArray:
        users = dict(self.names)
        return self.condition.mask(stream.rename_columns([users[name] for name in stream.schema.names]), relation)

    def describe(self) -> str:
        return self.condition.describe()

    def band(self) -> Range | None:
        """See `dovetail.joins.conditions.band_of`."""
        band = band_of(self.condition)
        ours = {users: name for name, users in self.names}
        return None if band is None else replace(band, stream_column=ours[band.stream_column])


@dataclass(frozen=True)
class JoinRecipe:
    """A join as a task sees it."""

    path: str
    filesystem: fs.FileSystem | None
    relation_id: str
    version: int  # that the query was planned with
    relation_columns: tuple[str, ...]  # to open it with: emitted, rechecked, or used by the condition
    relation_schema: pa.Schema  # of these columns and the key, when the query was planned
    key: tuple[str, ...]
    code_kind: CodeKind
    num_shards: int
    # Pairs (internal name of the aligned stream column, relation column), in the key's order.
    on: tuple[tuple[str, str], ...]
    code_from: str | None  # the column whose values are the codes; None if batches have a ``__code`` column
    how: JoinType
    select: tuple[str, ...]
    condition: Condition | None
    io: IoMode | Disk
    emitted: tuple[str, ...]  # the operators' output columns, in the order in which the task emits them
    costs: HostCosts | None = None  # of operations; None: those of a typical machine
    is_bound: bool = False  # whether a relation rebuilt in its place is refused

    def factors(self, shard: RelationShard) -> CostFactors:
        """The costs of operations on a shard, on the host where the query was planned."""
        expect_read_costs(shard, self.costs)
        return factors_for(shard, self.costs)

    def open(self, version: int | None = None) -> Relation:
        """Open the relation at a version, by default the planned one.

        Raises a `RelationError` if it is gone, or was rebuilt with another key, other columns or another number of
        shards.
        """
        try:
            relation = Relation.open(self.path, self.version if version is None else version, self.filesystem)
        except RelationNotFound as error:
            if not self.is_bound:
                raise
            hint = "Nothing was lost: put the relation back, and start the flow again."
            raise RelationNotFound(error.message, hint=hint) from None
        self.check(relation)
        return relation

    def check(self, relation: Relation) -> None:
        """Refuse a version of the relation that this join was not planned for."""
        if self.is_bound and relation.relation_id != self.relation_id:
            raise RelationError(
                f"The relation at {self.path} was removed and built anew while the flow was running.",
                hint="Nothing was lost: start the flow again with the new relation.",
            )
        difference = self._difference(relation, f"version {relation.version} of {self.path}")
        if difference is not None:
            raise RelationError(difference, hint="Stop the query and start it again with the new relation.")

    def _difference(self, relation: Relation, where: str) -> str | None:
        if relation.key != self.key:
            return f"{where} has the key {', '.join(relation.key)}; this query was planned for {', '.join(self.key)}."
        if relation.num_shards != self.num_shards:
            return f"{where} has {relation.num_shards} shards; this query was planned for {self.num_shards}."
        for column in self.relation_schema:
            number = relation.schema.get_field_index(column.name)
            found = None if number < 0 else relation.schema.field(number).type
            if found != column.type:
                has = "no such column" if found is None else str(found)
                return f"column {column.name!r} was {column.type} when this query was planned; {where} has {has}."
        return None

    def stream_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of the stream with codes, and with keys of the relation's types."""
        names, columns = list(batch.schema.names), list(batch.columns)
        for ours, theirs in self.on if self.code_kind == "xxhash64" else ():
            place = names.index(ours)
            wanted = self.relation_schema.field(theirs).type
            if columns[place].type != wanted:
                # The same values in another representation, such as strings with 64-bit offsets.
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
        shed: SheddingPolicy | None = None,
        block_rows: int | None = None,
    ) -> JoinSpec:
        """The join of batches of this schema with an open shard.

        The shard is opened with `relation_columns`, and with the rows whose key has a NULL if `on` is empty. `identity`
        is what a snapshot must agree on besides the join: version and shard.
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
            shed=shed,
            block_rows=block_rows,
        )

    def output_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of an operator's output as the task emits it."""
        if not self.emitted:
            return batch
        return batch.select(list(self.emitted))
