"""The tasks of `enrich`: Arrow batches in, Arrow batches out, complete when the task ends.

There are two routes over the same engine. `LookupTask` needs no shuffle: it maps every shard and looks tuples up.
`OperatorTask` gets the tuples of at most one shard, offers them to a semi-stream operator and drains it.

The budget is divided among the tasks that run at once. ``docs/sizing.md`` says what is not counted: the interpreter
with its libraries, mapped pages of the relation, and the batch passed by Spark.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.errors import InternalError
from dovetail.core.memory import Budget
from dovetail.core.metrics import OperatorMetrics
from dovetail.costs.explain import Objective, Strategy
from dovetail.joins import OPERATORS, LookupJoin, SemiStreamOperator
from dovetail.joins.explaining import expect_read_costs
from dovetail.joins.fitting import Fitted
from dovetail.joins.memory_plan import MAX_BATCH_ROWS
from dovetail.joins.protocol import CODE_COLUMN
from dovetail.joins.spec import JoinSpec
from dovetail.relation import Relation
from dovetail.relation.format import SHARD_COLUMN
from dovetail.relation.relation_reader import RelationReader
from dovetail.relation.shard_reader import ShardReader
from dovetail.runtime.budget_parts import part_of_budget
from dovetail.runtime.cache_front import DEVICE_READS, CacheFront, cache_in_front, reads_wait, shared_cache
from dovetail.runtime.join_recipe import JoinRecipe
from dovetail.runtime.merged_batches import merged_batches
from dovetail.runtime.metrics_row import metrics_row, without_metrics
from dovetail.runtime.pins import pin

__all__ = ["EnrichTask", "LookupTask", "OperatorTask", "Refresh", "make_operator"]

Refresh = Literal["query", "batch"]
_MOST_READERS = 4
MOST_SWEPT = 1 << 20  # tuples that are merged for one pass over a table that is read from a device
_MERGED_SHARE = 8  # merged batches may take one eighth of a task's budget
CACHED_STRATEGIES = ("balanced", "auto")
CACHE_SHARE = 3 / 4
"""The shared cache's share of a budget in the lookup route: lookups need little memory themselves."""


@dataclass
class EnrichTask:
    """What both routes share. ``mapInArrow`` calls an instance once per task."""

    recipe: JoinRecipe
    refresh: Refresh  # whether to use the planned version or that of the micro-batch
    name: str  # shown in Spark's plans; `dovetail.explain` finds the join by it
    # Returns the query id and micro-batch id; None outside a streaming query.
    micro_batch: Callable[[], tuple[str, int] | None]
    tasks: int = field(default=1, kw_only=True)  # how many tasks share the budget
    # Add a column, and a row per task, for `dovetail.spark.plan.observed`.
    reports_metrics: bool = field(default=False, kw_only=True)

    @property
    def __name__(self) -> str:
        return self.name

    def open(self) -> Relation:
        """The relation at the version for this task."""
        asked = self.micro_batch() if self.refresh == "batch" else None
        return self.recipe.open(self.recipe.version if asked is None else pin(self.recipe, *asked))

    def emitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of results as Spark expects it."""
        given = self.recipe.output_batch(batch)
        return without_metrics(given) if self.reports_metrics else given

    def emitted_metrics(
        self, first: pa.RecordBatch, schema: pa.Schema, metrics: OperatorMetrics, version: int
    ) -> Iterator[pa.RecordBatch]:
        """The last row of a task, which reports its metrics; made from a stream row so that its types fit."""
        if self.reports_metrics:
            stream = self.recipe.stream_batch(first.slice(0, 1))
            columns = [
                stream.column(name) if name in stream.schema.names else pa.nulls(1, schema.field(name).type)
                for name in self.recipe.emitted
            ]
            yield metrics_row(pa.RecordBatch.from_arrays(columns, names=list(self.recipe.emitted)), metrics, version)


@dataclass
class LookupTask(EnrichTask):
    """Joins the tuples of a partition by index, whatever their shards.

    The budget is for all tasks and the shared cache together.
    """

    budget: Budget

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        relation = self.open()
        rows = self.merged(batches, relation)
        first = next(rows, None)
        if first is None:
            return
        with self.running(relation, self.recipe.stream_batch(first).schema) as join:
            for batch in itertools.chain([first], rows):
                for result in join.offer(self.recipe.stream_batch(batch)):
                    yield self.emitted(result)
            yield from self.emitted_metrics(first, join.output_schema, join.metrics, relation.version)

    def merged(self, batches: Iterator[pa.RecordBatch], relation: Relation) -> Iterator[pa.RecordBatch]:
        """The rows of a partition in batches to look up together: large ones if reads wait for a device."""
        rows = MAX_BATCH_ROWS
        if self.recipe.io == "map" and reads_wait(self.recipe, _READERS.get(self.recipe, relation)):
            rows = MOST_SWEPT
        return merged_batches(batches, rows, max(1, self.task_budget().total_bytes // _MERGED_SHARE))

    @contextmanager
    def running(self, relation: Relation, schema: pa.Schema) -> Iterator[LookupJoin]:
        """The join of a task's batches, with the shared cache in front of it; a task without error publishes to it."""
        reader = _READERS.get(self.recipe, relation)
        expect_read_costs(reader, self.recipe.costs)
        cache = shared_cache(self.recipe, reader, Budget(max(1, int(CACHE_SHARE * self.budget.total_bytes))), None)
        if cache is not None:
            cache.begin_with_last(reader, relation)
        rows_read: list[int] = []
        parts = max(1, self.budget.total_bytes // self.task_budget(cache is not None).total_bytes)
        observed = DEVICE_READS.observed(self.recipe.relation_id, rows_read)
        with part_of_budget(parts), cache_in_front(cache, relation) as front, observed:
            sweeps = reads_wait(self.recipe, reader)
            join = self.join(reader, schema, front, has_cache=cache is not None, sweeps=sweeps)
            yield join
            front.publish_if_due(reader, relation)
            rows_read.append(join.metrics.relation_rows_read)
            DEVICE_READS.note_tuples(self.recipe.relation_id, front.tuples, front.distinct)

    def task_budget(self, has_cache: bool = False) -> Budget:
        """The budget of one task: its part of what the cache, if any, leaves."""
        left = self.budget.total_bytes * (1.0 - CACHE_SHARE if has_cache else 1.0)
        return Budget(max(1, int(left / max(1, self.tasks))))

    def join(
        self,
        reader: RelationReader,
        schema: pa.Schema,
        front: CacheFront | None = None,
        has_cache: bool = False,
        sweeps: bool = False,
    ) -> LookupJoin:
        """The join of batches with this schema."""
        spec = self.recipe.spec(reader, schema, self.task_budget(has_cache))
        if front is None:
            return LookupJoin(spec)
        return LookupJoin(spec, cache=front.rows, observe=front.observe, sweeps=sweeps)


@dataclass
class OperatorTask(EnrichTask):
    """Joins the tuples of one shard: those in the shared cache with its rows, the others with an operator."""

    strategy: Strategy
    objective: Objective
    shard_budget: Budget  # bytes for the operator and its shard's cache
    # The part of these that serves the requested rate; None: all.
    fitted: Fitted | None = field(default=None, kw_only=True)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return
        relation = self.open()
        number = first.column(SHARD_COLUMN)[0].as_py()
        shard = self.open_shard(relation, number)
        schema = self.recipe.stream_batch(first.drop_columns([SHARD_COLUMN])).schema
        cache, half = None, Budget(max(1, min(self.most_bytes, self.shard_budget.total_bytes // 2)))
        if self.strategy in CACHED_STRATEGIES:
            cache = shared_cache(self.recipe, shard, half, number)
        # The operator's budget excludes that of the cache.
        budget = Budget(self.most_bytes) if cache is None else half
        spec = self.spec(shard, schema, budget, {"version": relation.version, "shard": number})
        parts = self.recipe.num_shards if cache is None else 2 * self.recipe.num_shards
        with part_of_budget(parts):
            operator = self.operator(spec, has_shared_cache=cache is not None)
        rows_read: list[int] = []
        observed = DEVICE_READS.observed(self.recipe.relation_id, rows_read)
        if cache is not None:
            cache.begin_with_last(shard, relation)
        with part_of_budget(parts), cache_in_front(cache, relation) as front, observed:
            known = None if front.rows is None else LookupJoin(spec, cache=front.rows)
            for batch in itertools.chain([first], filled):
                if pc.min_max(batch.column(SHARD_COLUMN)).as_py() != {"min": number, "max": number}:
                    raise InternalError(f"rows of several shards reached the task of shard {number}.")
                stream = self.recipe.stream_batch(batch.drop_columns([SHARD_COLUMN]))
                front.count(stream.column(CODE_COLUMN) if self.recipe.on else None)
                if known is not None:
                    hits, stream = _split(front, stream)
                    for result in known.offer(hits):
                        yield self.emitted(result)
                for result in operator.offer(stream):
                    yield self.emitted(result)
            for result in operator.drain():
                yield self.emitted(result)
            front.publish_if_due(shard, relation)
            metrics = operator.metrics.copy()
            if known is not None:
                metrics.merge(known.metrics)
            rows_read.append(metrics.relation_rows_read)
            row = first.drop_columns([SHARD_COLUMN])
            yield from self.emitted_metrics(row, operator.output_schema, metrics, relation.version)

    @property
    def most_bytes(self) -> int:
        """The budget of the operator without a cache."""
        return self.shard_budget.total_bytes if self.fitted is None else self.fitted.budget_bytes

    def spec(
        self, shard: ShardReader, schema: pa.Schema, budget: Budget, identity: Mapping[str, Any] = MappingProxyType({})
    ) -> JoinSpec:
        """The join of one shard."""
        block_rows = None if self.fitted is None else self.fitted.block_rows
        return self.recipe.spec(shard, schema, budget, identity, block_rows=block_rows)

    def operator(self, spec: JoinSpec, has_shared_cache: bool = False) -> SemiStreamOperator:
        """The operator; behind a shared cache it has no cache of its own."""
        if has_shared_cache and self.strategy == "balanced":
            return OPERATORS["mesh"](spec)
        if has_shared_cache and self.strategy == "auto":
            return make_operator(self.strategy, spec, self.objective, self.recipe, learns=False)
        return make_operator(self.strategy, spec, self.objective, self.recipe)

    def open_shard(self, relation: Relation, number: int) -> ShardReader:
        """A shard with the columns that the join needs."""
        return relation.shard(number, self.recipe.relation_columns, self.recipe.io, not self.recipe.on)

    def open_largest_shard(self, relation: Relation) -> ShardReader:
        """The shard with the most rows, with the columns that the join needs."""
        sizes = [shard.rows for shard in relation.stats.shards]
        return self.open_shard(relation, sizes.index(max(sizes)))


def _split(front: CacheFront, stream: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """The tuples answered by the cache, and the others."""
    assert front.rows is not None
    column = stream.column(CODE_COLUMN)
    codes = np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    is_known, _, _ = front.rows.find_rows(codes)
    is_known &= np.asarray(column.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    return stream.filter(pa.array(is_known)), stream.filter(pa.array(~is_known))


def make_operator(
    strategy: Strategy, spec: JoinSpec, objective: Objective, recipe: JoinRecipe, **options: Any
) -> SemiStreamOperator:
    """The operator of a strategy, with the costs of this host if it uses them."""
    if strategy in CACHED_STRATEGIES:
        options["objective"] = objective
    if strategy == "auto":
        options["factors"] = recipe.factors(spec.shard)
    return OPERATORS[strategy](spec, **options)


class _OpenReaders:
    """The relations this worker has open, for reuse by the next task."""

    def __init__(self) -> None:
        self._readers: OrderedDict[Any, RelationReader] = OrderedDict()

    def get(self, recipe: JoinRecipe, relation: Relation) -> RelationReader:
        """All shards of a relation, opened with the columns that a join needs."""
        if not isinstance(recipe.io, str):
            # A simulated disk counts for its creator: it is not shared.
            return relation.reader(recipe.relation_columns, recipe.io)
        key = relation.relation_id, relation.path, relation.version, recipe.relation_columns, recipe.io
        if key not in self._readers:
            self._readers[key] = relation.reader(recipe.relation_columns, recipe.io)
        self._readers.move_to_end(key)
        while len(self._readers) > _MOST_READERS:
            self._readers.popitem(last=False)
        return self._readers[key]


_READERS = _OpenReaders()
