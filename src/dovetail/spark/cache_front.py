"""The shared cache in front of a task's join: whether there is one, what it answers, and what it is told.

Looking into a cache costs a probe and the counting of what is asked for. Where the relation's pages are in the page
cache, a lookup costs little more than that, and the operating system keeps the hot pages by itself: there is no cache.
Where every row read is a read of a disk or of a remote file, there is one.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.kernels.distinct import distinct_codes
from dovetail.memory import Budget
from dovetail.metrics import OperatorMetrics
from dovetail.operators.protocol import CODE_COLUMN, RelationShard
from dovetail.operators.spec import JoinSpec
from dovetail.relation import Relation
from dovetail.relation.shard_reader import ShardReader
from dovetail.spark.join_recipe import JoinRecipe
from dovetail.spark.local_directory import local_directory
from dovetail.spark.lookup_join import LookupJoin
from dovetail.spark.shared_cache import CachedReader, RowIndex, SharedCache

__all__ = ["CacheFront", "attached", "pays", "shared_cache"]

Int64Array = npt.NDArray[np.int64]
LEAST_BUDGET_BYTES = 100_000
_BATCHES_PER_COUNT = 2  # once a generation serves, only every second batch is counted


def pays(recipe: JoinRecipe, reader: RelationShard) -> bool:
    """Whether reading a row costs so much more than finding it in a cache that keeping one pays."""
    return recipe.filesystem is not None or reader.disk is not None or reader.io_mode != "map"


def shared_cache(
    recipe: JoinRecipe, reader: RelationShard, budget: Budget, shard: int | None, directory: Path | None = None
) -> SharedCache | None:
    """The cache of a relation, or of one shard of it, on this host; None where none pays or can be kept."""
    local = local_directory()
    where = local / "dovetail-cache" if local is not None and directory is None else directory
    if where is None or not recipe.on or budget.total_bytes < LEAST_BUDGET_BYTES or not pays(recipe, reader):
        return None
    identity = recipe.relation_id, recipe.path, recipe.relation_columns, shard
    name = hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()
    return SharedCache(where / name, budget.total_bytes, os.cpu_count() or 1)


@contextmanager
def attached(cache: SharedCache | None, relation: Relation) -> Iterator["CacheFront"]:
    """What stands before a join for the time of a task; without a cache, nothing."""
    if cache is None:
        yield CacheFront(None)
        return
    with cache.attached(relation):
        yield CacheFront(cache)


@dataclass
class KnownOnly:
    """The join with what a generation knows, and nothing else."""

    join: LookupJoin
    front: "CacheFront"

    def split(self, stream: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """The tuples that the generation answers, and the others."""
        self.front.count(stream)
        cache = self.front.cache
        assert cache is not None
        assert cache.generation is not None
        codes, is_null = _codes(stream)
        is_known = (cache.generation.find(codes) >= 0) & ~is_null
        rows = (pa.array(np.flatnonzero(mask)) for mask in (is_known, ~is_known))
        known, others = (stream.take(numbers) for numbers in rows)
        return known, others


class CacheFront:
    """The cache as a task's join sees it."""

    def __init__(self, cache: SharedCache | None) -> None:
        self.cache = cache
        self.metrics = OperatorMetrics()
        self._batches = 0

    def before(self, reader: RowIndex) -> RowIndex:
        """A reader that asks the cache first."""
        generation = None if self.cache is None else self.cache.generation
        return reader if generation is None else CachedReader(reader, generation)

    def known_only(self, spec: JoinSpec, relation: Relation) -> KnownOnly | None:
        """The join with what the cache knows, None if it knows nothing."""
        if self.cache is None or self.cache.generation is None:
            return None
        return KnownOnly(LookupJoin(spec, self.cache.generation, relation.stats.max_multiplicity), self)

    def count(self, stream: pa.RecordBatch) -> None:
        """Count the codes of a stream batch."""
        codes, is_null = _codes(stream)
        distinct, numbers = distinct_codes(codes[~is_null])
        self.observe(distinct, np.bincount(numbers, minlength=distinct.size))

    def observe(self, distinct: Int64Array, counts: Int64Array) -> None:
        """Be told of the different codes of a batch, and how many tuples have each."""
        if self.cache is None:
            return
        self._batches += 1
        generation = self.cache.generation
        if generation is not None:
            found = generation.find(distinct)
            known = np.flatnonzero(found >= 0)
            has_rows = generation.values.counts_at(found[known]) > 0
            self.metrics.cache_hits += int(counts[known][has_rows].sum())
            self.metrics.negative_hits += int(counts[known][~has_rows].sum())
        if generation is None or self._batches % _BATCHES_PER_COUNT == 1:
            self.cache.learn(distinct, counts)

    def publish_if_due(self, reader: ShardReader | RowIndex, relation: Relation) -> None:
        """At the end of a task, let the cache renew itself."""
        if self.cache is not None:
            self.cache.publish_if_due(reader, relation, relation.stats.bytes / max(1, relation.stats.rows))


def _codes(stream: pa.RecordBatch) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
    column = stream.column(CODE_COLUMN)
    codes = np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    return codes, np.asarray(column.is_null().to_numpy(zero_copy_only=False), np.bool_)
