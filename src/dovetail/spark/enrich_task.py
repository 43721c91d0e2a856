"""What runs inside the tasks of `enrich`: Arrow batches in, Arrow batches out, whole when the task ends.

Two routes. `LookupTask` needs no shuffle: it maps every shard and looks tuples up. `OperatorTask` gets the tuples of
one shard, or of none, offers them to a semi-stream operator and drains it.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from dovetail.errors import InternalError
from dovetail.memory import Budget
from dovetail.metrics import OperatorMetrics
from dovetail.model.explain import Objective, Strategy
from dovetail.operators import OPERATORS, SemiStreamOperator
from dovetail.operators.spec import JoinSpec
from dovetail.relation import Relation
from dovetail.relation.format import SHARD_COLUMN
from dovetail.relation.relation_reader import RelationReader
from dovetail.relation.shard_reader import ShardReader
from dovetail.spark.cache_front import attached, shared_cache
from dovetail.spark.join_recipe import JoinRecipe
from dovetail.spark.lookup_join import MAX_ROWS, LookupJoin
from dovetail.spark.metrics_row import metrics_row, without_metrics
from dovetail.spark.pins import pinned_version

__all__ = ["EnrichTask", "LookupTask", "OperatorTask", "Refresh", "make_operator"]

Refresh = Literal["query", "batch"]
_MOST_READERS = 4
CACHED_STRATEGIES = ("balanced", "auto")


@dataclass
class EnrichTask:
    """What both routes share. An instance is what ``mapInArrow`` calls once per task.

    Parameters
    ----------
    recipe
        The join.
    refresh
        Whether the version is the planned one or the micro-batch's.
    name
        What Spark shows in plans; `dovetail.explain` finds its way back by it.
    reports_metrics
        Whether results have one more column, and one more row per task, for `dovetail.spark.observed`.
    """

    recipe: JoinRecipe
    refresh: Refresh
    name: str
    reports_metrics: bool = field(default=False, kw_only=True)

    @property
    def __name__(self) -> str:
        return self.name

    def open(self) -> Relation:
        """The relation at the version that this task is to see."""
        return self.recipe.open(self.recipe.version if self.refresh == "query" else pinned_version(self.recipe))

    def put_out(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of results as Spark expects it."""
        given = self.recipe.output_batch(batch)
        return without_metrics(given) if self.reports_metrics else given

    def put_out_metrics(
        self, first: pa.RecordBatch, schema: pa.Schema, metrics: OperatorMetrics, version: int
    ) -> Iterator[pa.RecordBatch]:
        """At the end of a task, the row that tells what it did; made of a row of the stream, so that its types fit."""
        if self.reports_metrics:
            stream = self.recipe.stream_batch(first.slice(0, 1))
            columns = [
                stream.column(name) if name in stream.schema.names else pa.nulls(1, schema.field(name).type)
                for name in self.recipe.emitted
            ]
            yield metrics_row(pa.RecordBatch.from_arrays(columns, names=list(self.recipe.emitted)), metrics, version)


@dataclass
class LookupTask(EnrichTask):
    """Join the tuples of a partition, whatever their shards, by index.

    Parameters
    ----------
    budget
        What the shared cache may take, if there is one.
    """

    budget: Budget

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        relation = self.open()
        merged_batches = merged(batches, MAX_ROWS)
        first = next(merged_batches, None)
        if first is None:
            return
        reader = _READERS.get(self.recipe, relation)
        schema = self.recipe.stream_batch(first).schema
        spec = self.recipe.spec(reader, schema, Budget(1))
        cache = shared_cache(self.recipe, reader, self.budget, None)
        with attached(cache, relation) as front:
            join = LookupJoin(spec, front.before(reader), relation.stats.max_multiplicity, front.observe)
            for batch in itertools.chain([first], merged_batches):
                for result in join.join(self.recipe.stream_batch(batch)):
                    yield self.put_out(result)
            front.publish_if_due(reader, relation)
            join.metrics.merge(front.metrics)
            yield from self.put_out_metrics(first, join.plan.schema, join.metrics, relation.version)


@dataclass
class OperatorTask(EnrichTask):
    """Join the tuples of one shard with an operator, those that a shared cache knows with its rows.

    Parameters
    ----------
    strategy, objective
        Which operator, and what it is to optimise.
    shard_budget
        The bytes that it and its shard's cache may hold.
    """

    strategy: Strategy
    objective: Objective
    shard_budget: Budget

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return
        relation = self.open()
        number = first.column(SHARD_COLUMN)[0].as_py()
        shard = self.open_shard(relation, number)
        schema = self.recipe.stream_batch(first.drop_columns([SHARD_COLUMN])).schema
        identity = {"version": relation.version, "shard": number}
        cache = None
        if self.strategy in CACHED_STRATEGIES:
            cache = shared_cache(self.recipe, shard, Budget(self.shard_budget.total_bytes // 2), number)
        # What a cache may take, the operator may not.
        budget = self.shard_budget if cache is None else Budget(self.shard_budget.total_bytes // 2)
        spec = self.recipe.spec(shard, schema, budget, identity)
        operator = make_operator(self.strategy, spec, self.objective)
        with attached(cache, relation) as front:
            known = front.known_only(spec, relation)
            for batch in itertools.chain([first], filled):
                shards = batch.column(SHARD_COLUMN)
                if pc.min_max(shards).as_py() != {"min": number, "max": number}:
                    raise InternalError(f"rows of several shards reached the task of shard {number}.")
                stream = self.recipe.stream_batch(batch.drop_columns([SHARD_COLUMN]))
                if known is not None:
                    hits, stream = known.split(stream)
                    for result in known.join.join(hits):
                        yield self.put_out(result)
                elif cache is not None:
                    front.count(stream)
                for result in operator.offer(stream):
                    yield self.put_out(result)
            for result in operator.drain():
                yield self.put_out(result)
            front.publish_if_due(shard, relation)
            metrics = operator.metrics.copy()
            metrics.merge(front.metrics)
            if known is not None:
                metrics.merge(known.join.metrics)
            yield from self.put_out_metrics(
                first.drop_columns([SHARD_COLUMN]), operator.output_schema, metrics, relation.version
            )

    def open_shard(self, relation: Relation, number: int) -> ShardReader:
        """A shard with what the join needs of it."""
        return relation.shard(number, self.recipe.relation_columns, self.recipe.io, not self.recipe.on)


def make_operator(strategy: Strategy, spec: JoinSpec, objective: Objective) -> SemiStreamOperator:
    """The operator of a strategy; those without a cache have one way to use their memory, whatever the objective."""
    options: dict[str, Any] = {"objective": objective} if strategy in ("balanced", "auto") else {}
    return OPERATORS[strategy](spec, **options)


def merged(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of exactly so many, the last one shorter: Spark's are far smaller than is best.

    Examples
    --------
    >>> batches = [pa.record_batch({"a": [1, 2]}), pa.record_batch({"a": [3]}), pa.record_batch({"a": [4, 5]})]
    >>> [batch.column(0).to_pylist() for batch in merged(iter(batches), 3)]
    [[1, 2, 3], [4, 5]]
    """
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        while batch.num_rows:
            taken = batch.slice(0, rows - count)
            batch = batch.slice(taken.num_rows)
            waiting.append(taken)
            count += taken.num_rows
            if count == rows:
                yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
                waiting, count = [], 0
    if waiting:
        yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)


class _OpenReaders:
    """The relations that this worker has open, so that the next task need not open them again."""

    def __init__(self) -> None:
        self._readers: OrderedDict[Any, RelationReader] = OrderedDict()

    def get(self, recipe: JoinRecipe, relation: Relation) -> RelationReader:
        """All shards of a relation, opened with the columns that a join needs."""
        if not isinstance(recipe.io, str):
            # A simulated disk counts for whoever gave it.
            return relation.reader(recipe.relation_columns, recipe.io)
        key = relation.relation_id, relation.path, relation.version, recipe.relation_columns, recipe.io
        if key not in self._readers:
            self._readers[key] = relation.reader(recipe.relation_columns, recipe.io)
        self._readers.move_to_end(key)
        while len(self._readers) > _MOST_READERS:
            self._readers.popitem(last=False)
        return self._readers[key]


_READERS = _OpenReaders()
