"""The shared cache in front of a task's join: whether to use one, and what it learns.

A cache costs a probe and the counting of requested codes. If the relation's pages are in the page cache, a lookup costs
little more, and the operating system keeps the hot pages anyway: there is no cache. If reading a row waits for a
device, there is one. That is known in advance for remote files and direct reads; for mapped files it is observed, by
the page faults that a worker's reads wait for and the pages that lookups had read ahead. A worker that has observed
nothing yet looks how much of the relation is in memory.

A cache also needs values that come again. If hardly any tuple of a large batch asks for a value that another one asks
for, the memory is better used for larger batches of lookups.
"""

import hashlib
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.core.memory import Budget
from dovetail.joins.phases.row_source import Found, RowCache
from dovetail.joins.protocol import RelationShard
from dovetail.kernels.distinct import distinct_codes
from dovetail.relation import Relation
from dovetail.relation.reads.paged_file import pages_read_ahead
from dovetail.runtime.join_recipe import JoinRecipe
from dovetail.runtime.local_directory import local_directory
from dovetail.runtime.shared_cache import RowIndex, SharedCache

__all__ = ["DEVICE_READS", "CacheFront", "DeviceReads", "cache_in_front", "reads_wait", "shared_cache"]

LEAST_BUDGET_BYTES = 100_000
_BATCHES_PER_COUNT = 2  # with a generation in use, only every second batch is counted
_WEIGHT = 0.3  # of the newest task's observation
_WAITING_SHARE = 0.02  # of the rows read that waited for a device
_ABSENT_SHARE = 0.1  # of a relation that is not in memory, from which on a worker without observations expects waits
_REPEATED_SHARE = 0.05  # of the tuples of a batch that ask for what others ask for, below which a cache does not pay
_TUPLES_TO_JUDGE = 20_000  # by how often values repeat


class DeviceReads:
    """What this worker's tasks observe per relation, as exponentially weighted means."""

    def __init__(self) -> None:
        self._share: dict[str, float] = {}  # of the rows read that wait for a device
        self._repeated: dict[str, float] = {}  # of the tuples that ask for what others in their batch ask for

    @contextmanager
    def observed(self, relation_id: str, rows_read: "list[int]") -> Iterator[None]:
        """Observe a task; the rows it read are known when it ends."""
        before = _pages_waited_for()
        yield
        waited, rows = _pages_waited_for() - before, sum(rows_read)
        if rows:
            _add(self._share, relation_id, min(1.0, waited / rows))

    def note_tuples(self, relation_id: str, tuples: int, distinct: int) -> None:
        """Record how many values the tuples of a task's batches asked for."""
        if tuples >= _TUPLES_TO_JUDGE:
            _add(self._repeated, relation_id, 1.0 - distinct / tuples)

    def are_waiting(self, relation_id: str) -> bool | None:
        """Whether reads of a relation wait for a device; None if none was observed."""
        share = self._share.get(relation_id)
        return None if share is None else share > _WAITING_SHARE

    def values_repeat(self, relation_id: str) -> bool:
        """Whether values come often enough for a cache; as long as nothing is known, they do."""
        return self._repeated.get(relation_id, 1.0) > _REPEATED_SHARE


def _add(means: dict[str, float], relation_id: str, observed: float) -> None:
    means[relation_id] = (1 - _WEIGHT) * means.get(relation_id, observed) + _WEIGHT * observed


def _pages_waited_for() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt + pages_read_ahead()


DEVICE_READS = DeviceReads()
"""The observations of this worker."""


def shared_cache(recipe: JoinRecipe, reader: RelationShard, budget: Budget, shard: int | None) -> SharedCache | None:
    """The cache of a relation or one of its shards on this host; None if it does not pay or cannot be kept."""
    local = local_directory()
    if local is None or not recipe.on or budget.total_bytes < LEAST_BUDGET_BYTES or not _pays(recipe, reader):
        return None
    identity = recipe.relation_id, recipe.path, recipe.relation_columns, shard
    name = hashlib.blake2b(repr(identity).encode(), digest_size=12).hexdigest()
    return SharedCache(local / "dovetail-cache" / name, budget.total_bytes, os.cpu_count() or 1)


def _pays(recipe: JoinRecipe, reader: RelationShard) -> bool:
    """Whether reading a row costs enough more than a cache hit for a cache to pay."""
    is_known_to_wait = recipe.filesystem is not None or reader.disk is not None or reader.io_mode != "map"
    return is_known_to_wait or (reads_wait(recipe, reader) and DEVICE_READS.values_repeat(recipe.relation_id))


def reads_wait(recipe: JoinRecipe, reader: RelationShard) -> bool:
    """Whether a relation is mapped and its reads wait for a device."""
    if reader.disk is not None or reader.io_mode != "map":
        return False
    observed = DEVICE_READS.are_waiting(recipe.relation_id)
    return reader.absent_share() > _ABSENT_SHARE if observed is None else observed


@contextmanager
def cache_in_front(cache: SharedCache | None, relation: Relation) -> Iterator["CacheFront"]:
    """The cache as a task's join sees it, for the duration of the task; it does nothing without a cache."""
    if cache is None:
        yield CacheFront(None)
        return
    with cache.attached(relation):
        yield CacheFront(cache)


class CacheFront:
    """The cache as a task's join sees it."""

    def __init__(self, cache: SharedCache | None) -> None:
        self._cache = cache
        self._batches = 0
        self.tuples = self.distinct = 0  # of the batches that were looked up

    @property
    def rows(self) -> RowCache | None:
        """The rows of the generation; None if there is none."""
        return None if self._cache is None else self._cache.generation

    def observe(self, distinct: Int64Array, tuples: Int64Array, found: Found) -> None:
        """Count the distinct codes of a batch, with the number of tuples of each."""
        self.tuples += int(tuples.sum())
        self.distinct += distinct.size
        if self._cache is not None:
            self._learn(distinct, tuples)

    def _learn(self, distinct: Int64Array, tuples: Int64Array) -> None:
        assert self._cache is not None
        self._batches += 1
        if self._cache.generation is None or self._batches % _BATCHES_PER_COUNT == 1:
            self._cache.learn(distinct, tuples)

    def count(self, codes: pa.Array | None) -> None:
        """Count the codes of a stream batch."""
        if self._cache is None or codes is None:
            return
        keyed = codes.drop_null().to_numpy(zero_copy_only=False)
        distinct, numbers = distinct_codes(np.asarray(keyed, np.int64))
        self._learn(distinct, np.bincount(numbers, minlength=distinct.size))

    def publish_if_due(self, reader: RowIndex, relation: Relation) -> None:
        """At the end of a task, publish a new generation if due."""
        if self._cache is not None:
            self._cache.publish_if_due(reader, relation, relation.stats.bytes / max(1, relation.stats.rows))
