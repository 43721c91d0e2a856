"""The cache shared by the workers of a host: relation rows of the most requested join values.

Python workers have no affinity to shards and die when idle, so what one worker learns does not last. The cache is a
sequence of immutable *generations*, files in the directory that Spark deletes with the application. A task maps the
newest one while it runs, and counts its requests privately. A task that ends and has counted enough becomes the
publisher, if no other worker is: it writes the next generation. A killed worker leaves a draft, which the next
publisher removes, and locks, which the kernel releases.

Memory
    The budget covers the files of the newest generation and the one before, which tasks may still have mapped, and
    the counters of all workers. A publisher that finds an older one still mapped does not publish.
Restart
    The files go with the application. The codes that were asked for most stay on the host, and the first task of the
    next application fills the cache with their rows.
Version
    A generation belongs to one version of the relation. When a task sees another version, values whose rows did not
    change are carried over to a new generation; until there is one, the task does without.
"""

import fcntl
import os
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.core.errors import RelationError
from dovetail.kernels.value_table import MAX_COUNT, ValueTable
from dovetail.relation import Relation
from dovetail.runtime.cache_file import FOOTER_BYTES, Generation, GenerationWriter
from dovetail.runtime.hot_values import load_hot_values, store_hot_values
from dovetail.storage.local import LOCAL, make_private_directory

__all__ = ["CachedReader", "RowIndex", "SharedCache"]

GENERATION_SHARE = 3 / 8  # of the budget, for each of two generations
_COUNTER_SHARE = 1 / 8  # for the counters of all workers; the rest is for publishing
_BATCH_ROWS = 65_536
_FEWEST_BATCHES = 16  # in a full generation, so that little space stays unused at its end
_LEAST_TUPLES = 20_000
_WORTHWHILE_GAIN = 1.05
_FEWEST_VALUES = 64
_MOST_COUNTERS = 8


class RowIndex(Protocol):
    """What an index join needs from a relation, a shard, or a cache."""

    schema: pa.Schema

    def lookup(self, codes: Int64Array, *, in_order: bool = True) -> tuple[Int64Array, Int64Array]: ...
    def count(self, codes: Int64Array) -> Int64Array: ...
    def gather_ascending(self, positions: Int64Array) -> Iterator[tuple[int, pa.RecordBatch]]: ...


class _Counter:
    """How often this worker was asked for each code: a bounded table that drops the rarer half when full."""

    def __init__(self, size_bytes: int) -> None:
        self._table = ValueTable(max(_FEWEST_VALUES, ValueTable.capacity_within(size_bytes)))
        self.tuples = 0
        self.due_at = _LEAST_TUPLES

    def add(self, codes: Int64Array, counts: Int64Array) -> None:
        """Count distinct codes, each `counts` times."""
        self.tuples += int(counts.sum())
        found = self._table.find(codes)
        known = found >= 0
        before = self._table.frequencies_at(found[known])
        self._table.put(codes[known], frequencies=before + counts[known])
        codes, counts = codes[~known], counts[~known]
        while codes.size:
            room = self._table.capacity - len(self._table)
            self._table.put(codes[:room], frequencies=counts[:room])
            codes, counts = codes[room:], counts[room:]
            if codes.size:
                self._halve()

    def items(self) -> tuple[Int64Array, Int64Array]:
        """The codes in random order, and how often they were requested.

        Random, because the table is in hash order: choosing among equally frequent codes in that order would choose by
        hash, and overfill part of the next table.
        """
        values = self._table.items()
        order = np.random.default_rng(len(self._table)).permutation(values.codes.size)
        return values.codes[order], values.frequencies[order]

    def begin_anew(self) -> None:
        """Reset the counts, and count for twice as long as before, up to a limit."""
        self.due_at = min(2 * max(self.due_at, _LEAST_TUPLES), 64 * self._table.capacity)
        self._table = ValueTable(self._table.capacity)
        self.tuples = 0

    def _halve(self) -> None:
        codes, frequencies = self.items()
        kept = np.argsort(frequencies)[codes.size // 2 + 1 :]
        self._table = ValueTable(self._table.capacity)
        self._table.put(codes[kept], frequencies=frequencies[kept])


_COUNTERS: OrderedDict[str, _Counter] = OrderedDict()


@dataclass
class SharedCache:
    """The cache of one relation, or one of its shards, as one task sees it.

    Each relation, set of columns and shard has its own directory. The budget covers its files and counters, for all
    `workers` together.
    """

    directory: Path
    budget_bytes: int
    workers: int

    def __post_init__(self) -> None:
        self.generation: Generation | None = None
        for directory in (self.directory.parent, self.directory):
            # It holds rows: nobody else on this host may read them.
            make_private_directory(directory)
        key = str(self.directory)
        if key not in _COUNTERS:
            _COUNTERS[key] = _Counter(int(_COUNTER_SHARE * self.budget_bytes / max(1, self.workers)))
        _COUNTERS.move_to_end(key)
        while len(_COUNTERS) > _MOST_COUNTERS:
            _COUNTERS.popitem(last=False)
        self._counter = _COUNTERS[key]

    @property
    def generation_bytes(self) -> int:
        """The maximum size of one generation."""
        return int(self.budget_bytes * GENERATION_SHARE)

    @contextmanager
    def attached(self, relation: Relation) -> Iterator["SharedCache"]:
        """Map the newest generation of this version, if any, for the duration of a task."""
        self.generation = self._attach(relation)
        try:
            yield self
        finally:
            self._detach()

    def _attach(self, relation: Relation) -> Generation | None:
        for path in reversed(self._generations()):
            generation = Generation.attach(path)
            if generation is None:
                continue
            if generation.version == relation.version:
                return generation
            is_older = generation.version < relation.version
            generation.close()
            if is_older and self._carry_over(relation):
                return self._attach(relation)
            return None
        return None

    def begin_with_last(self, reader: RowIndex, relation: Relation) -> bool:
        """Fill an empty cache with the values that were asked for most before the application was restarted."""
        if self._generations():
            return False
        codes, tuples = load_hot_values(self.directory.name)
        if codes.size == 0:
            return False
        row_bytes = relation.stats.bytes / max(1, relation.stats.rows)
        with self._publishing() as is_publisher:
            if not is_publisher or self._generations():
                return False
            order = self._best(codes, tuples, reader, row_bytes, relation)
            return self._write(codes[order], tuples[order], reader, relation, row_bytes, None)

    def _detach(self) -> None:
        if self.generation is not None:
            self.generation.close()
            self.generation = None

    # ---------------------------------------------------------------- learning

    def learn(self, codes: Int64Array, counts: Int64Array) -> None:
        """Count distinct codes of the stream, each `counts` times."""
        self._counter.add(codes, counts)

    def publish_if_due(self, reader: RowIndex, relation: Relation, row_bytes: float) -> bool:
        """At the end of a task: write the next generation if it would serve clearly more requests."""
        counter = self._counter
        if counter.tuples < counter.due_at:
            return False
        codes, frequencies = self._wanted(reader, row_bytes, relation)
        counter.begin_anew()
        if codes.size == 0:
            return False
        with self._publishing() as is_publisher:
            if not is_publisher:
                return False
            known, self.generation = self.generation, None
            try:
                is_written = self._write(codes, frequencies, reader, relation, row_bytes, known)
                if is_written:
                    store_hot_values(self.directory.name, codes, frequencies)
                return is_written
            finally:
                if known is not None:
                    known.close()

    def _wanted(self, reader: RowIndex, row_bytes: float, relation: Relation) -> tuple[Int64Array, Int64Array]:
        """The values of the next generation, most valuable first; none if the current one is good enough.

        A value is worth the tuples it answers per byte: the order in which SSBJ's inequality, n v_S > m v_R, admits
        values.
        """
        codes, frequencies = self._counter.items()
        if self.generation is None:
            order = self._best(codes, frequencies, reader, row_bytes, relation)
            return codes[order], frequencies[order]
        old = self.generation.values.items()
        served_now = int(frequencies[self.generation.find(codes) >= 0].sum())
        # Earlier observations count half.
        everything = np.concatenate([codes, old.codes])
        all_codes, numbers = np.unique(everything, return_inverse=True)
        weights = np.bincount(numbers, np.concatenate([frequencies, old.frequencies / 2]))
        order = self._best(all_codes, weights, reader, row_bytes, relation)
        chosen = np.isin(codes, all_codes[order])
        if frequencies[chosen].sum() < _WORTHWHILE_GAIN * served_now:
            return codes[:0], frequencies[:0]
        return all_codes[order], weights[order].astype(np.int64)

    def _best(
        self, codes: Int64Array, weights: npt.NDArray[Any], reader: RowIndex, row_bytes: float, relation: Relation
    ) -> Int64Array:
        """The values that fit a generation, those that answer most tuples per byte first."""
        if relation.stats.max_multiplicity > 1:
            counts = CachedReader(reader, self.generation).count(codes) if self.generation else reader.count(codes)
        else:
            counts = np.ones(codes.size, np.int64)
        value_bytes = np.asarray(GenerationWriter.value_bytes(row_bytes, 1.0) + (counts - 1) * row_bytes, np.float64)
        order = np.argsort(-weights / value_bytes, kind="stable")
        fitting = int(np.searchsorted(np.cumsum(value_bytes[order]), self.generation_bytes - FOOTER_BYTES))
        return order[:fitting]

    # ---------------------------------------------------------------- publishing

    def _generations(self) -> list[Path]:
        """The generations, oldest first."""
        with suppress(FileNotFoundError):
            return sorted(self.directory.glob("generation-*"))
        return []

    @contextmanager
    def _publishing(self) -> Iterator[bool]:
        """Become the only publisher, if possible; makes room for one more generation."""
        with ExitStack() as held:
            try:
                held.enter_context(LOCAL.lock(self.directory / "publisher.lock", 0o600))
            except OSError:
                # Another task publishes, the application is ending, or its disk is full: the cache must not make a
                # task fail.
                yield False
                return
            for draft in self.directory.glob("draft-*"):
                draft.unlink(missing_ok=True)
            older = self._generations()[:-1]
            removed = [self._remove(path) for path in older]
            yield all(removed)

    @staticmethod
    def _remove(path: Path) -> bool:
        """Remove a generation unless a task has it mapped."""
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                return False
            finally:
                os.close(lock)
        return True

    def _write(
        self,
        codes: Int64Array,
        frequencies: Int64Array,
        reader: RowIndex,
        relation: Relation,
        row_bytes: float,
        known: Generation | None,
    ) -> bool:
        """Write a generation of these values, as far as they fit, and make it the newest."""
        draft = self.directory / f"draft-{uuid.uuid4().hex}"
        try:
            writer = GenerationWriter(draft, self.generation_bytes, codes.size, reader.schema, relation.version)
            try:
                self._add_values(writer, codes, frequencies, reader, row_bytes, known)
                writer.finish()
            finally:
                writer.give_up()
            number = int(self._generations()[-1].name.partition("-")[2]) + 1 if self._generations() else 1
            os.rename(draft, self.directory / f"generation-{number:08d}")
        except OSError:
            # The disk is full or gone: the current generations stay.
            draft.unlink(missing_ok=True)
            return False
        return True

    def _add_values(
        self,
        writer: GenerationWriter,
        codes: Int64Array,
        frequencies: Int64Array,
        reader: RowIndex,
        row_bytes: float,
        known: Generation | None,
    ) -> None:
        order = np.argsort(codes)
        codes, frequencies = codes[order], frequencies[order]
        source: RowIndex = reader if known is None else CachedReader(reader, known)
        counts = source.count(codes)
        kept = counts <= MAX_COUNT - 1
        codes, frequencies, counts = codes[kept], frequencies[kept], counts[kept]
        ends = np.cumsum(np.maximum(counts, 1))
        batch_rows = min(_BATCH_ROWS, max(1, int(self.generation_bytes / _FEWEST_BATCHES / max(1.0, row_bytes))))
        start = 0
        while start < codes.size:
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + batch_rows, side="right")))
            part = slice(start, stop)
            rows = rows_in_order(source, codes[part])
            if not writer.add(codes[part], counts[part], frequencies[part], rows):
                return
            start = stop

    def _carry_over(self, relation: Relation) -> bool:
        """Turn a generation of another version into one of this version, without values whose rows have changed."""
        with self._publishing() as is_publisher:
            newest = self._generations()
            generation = Generation.attach(newest[-1]) if is_publisher and newest else None
            if generation is None:
                return False
            try:
                if generation.version == relation.version:
                    return True
                codes, _, _, frequencies = generation.values.items()
                try:
                    earlier = Relation.open(relation.path, generation.version, relation.filesystem)
                    same = ~relation.changed_codes(earlier, codes)
                except RelationError:
                    same = np.zeros(codes.size, np.bool_)
                row_bytes = generation.nbytes / max(1, generation.num_rows)
                return self._write(codes[same], frequencies[same], generation, relation, row_bytes, None)
            finally:
                generation.close()


class CachedReader:
    """A relation's reader with a cache generation in front.

    Positions of the generation come first, then those of the relation.
    """

    def __init__(self, reader: RowIndex, generation: Generation) -> None:
        self._reader, self._generation = reader, generation
        self.schema: pa.Schema = reader.schema

    def lookup(self, codes: Int64Array, *, in_order: bool = True) -> tuple[Int64Array, Int64Array]:
        """Pairs (index into ``codes``, position); pairs of one query are together, but not in query order."""
        found = self._generation.find(codes)
        hits, misses = np.flatnonzero(found >= 0), np.flatnonzero(found < 0)
        queries, positions = self._generation.lookup(codes[hits])
        if not misses.size:
            return hits[queries], positions
        missed, places = self._reader.lookup(codes[misses], in_order=False)
        return (
            np.concatenate([hits[queries], misses[missed]]),
            np.concatenate([positions, places + self._generation.num_rows]),
        )

    def count(self, codes: Int64Array) -> Int64Array:
        """The number of rows per code."""
        found = self._generation.find(codes)
        misses = np.flatnonzero(found < 0)
        counts = self._generation.count(codes)
        counts[misses] = self._reader.count(codes[misses])
        return counts

    def gather_ascending(self, positions: Int64Array) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows at ascending positions, in pieces."""
        split = int(np.searchsorted(positions, self._generation.num_rows))
        yield from self._generation.gather_ascending(positions[:split])
        for first, batch in self._reader.gather_ascending(positions[split:] - self._generation.num_rows):
            yield first + split, batch


def rows_in_order(source: RowIndex, codes: Int64Array) -> pa.RecordBatch:
    """All rows of codes, in the order of the codes."""
    queries, positions = source.lookup(codes)
    by_query = np.argsort(queries, kind="stable")
    positions = positions[by_query]
    order = np.argsort(positions, kind="stable")
    pieces = [batch for _, batch in source.gather_ascending(positions[order])]
    if not pieces:
        return pa.RecordBatch.from_pylist([], schema=source.schema)
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    return pa.concat_batches(pieces).take(pa.array(back))
