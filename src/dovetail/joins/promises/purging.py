"""Decides which tuples no later result can need, and removes them from memory and disk.

A tuple of input i can be purged if one of these holds for its join value:

1. every other input has closed it (punctuated, or unique there and held, or the input has ended), and all results of
what has arrived have been emitted;

2. some other input is punctuated for it, or has ended, and holds no match, also not on disk: it is in no result,
whatever the others send.

For a one-to-many join of two inputs these are the rules of the paper's 1-NP algorithm. A pass decides on all tuples
before it removes the first, because a held unique tuple is what closes its value.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int32Array, Int64Array
from dovetail.joins.multiway.chunk import IN_MEMORY, Chunk, get_bits
from dovetail.joins.multiway.results import ResultWriter
from dovetail.joins.multiway.spill import Piece, tuples_of
from dovetail.joins.multiway.state import JoinState
from dovetail.joins.promises.collection import Held, PunctuationCollection, Unread
from dovetail.joins.promises.keys import Keys
from dovetail.joins.promises.metrics import MetadataMetrics
from dovetail.kernels.bucket_index import expand_piece, find_in_buckets, partitions_of

__all__ = ["Purger"]


class _Found(NamedTuple):
    """Rows of a chunk or piece that can be purged."""

    i: int
    item: Chunk | Piece
    mask: BoolArray


class Purger:
    """Decides and purges; the operator decides when."""

    def __init__(
        self,
        state: JoinState,
        collection: PunctuationCollection,
        unique: Sequence[bool],
        writer: ResultWriter,
        metrics: MetadataMetrics,
    ) -> None:
        self._state = state
        self._spec = state.spec
        self._collection = collection
        self._unique = list(unique)
        self._writer = writer
        self._metrics = metrics
        self.ended: set[int] = set()

    @property
    def knows_something(self) -> bool:
        """Whether any tuple could be droppable at all."""
        return bool(self.ended) or any(self._unique) or not self._collection.is_empty

    # ---------------------------------------------------------------- verdicts

    def droppable(self, i: int, keys: Keys, is_arriving: bool = False, reads_disk: bool = False) -> BoolArray:
        """Which tuples of input i with these keys can be dropped.

        With `is_arriving`, they have met only the tuples in memory; otherwise everything that arrived before the last
        complete join. `reads_disk` allows looking up codes on disk.
        """
        partitions = partitions_of(keys.codes, self._spec.partitions)
        closed: BoolArray = np.ones(len(keys.codes), np.bool_)
        hopeless: BoolArray = np.zeros(len(keys.codes), np.bool_)
        others = [j for j in range(len(self._spec.names)) if j != i]
        for j in others:
            promised = np.full(len(closed), True) if j in self.ended else self._collection.ranges[j].contains(keys)
            if self._unique[j] and not promised.all():
                closed &= promised | self.holds(j, keys, reads_disk)
            else:
                closed &= promised
            if promised.any():
                held = self._holds_code(j, keys.codes) | self.on_disk(j)[partitions]
                hopeless |= promised & ~held
        settled = ~np.logical_or.reduce([self.on_disk(j) for j in others])
        if not is_arriving:
            settled = settled | self._state.is_settled()
        verdict: BoolArray = hopeless | (closed & settled[partitions])
        return verdict

    def on_disk(self, j: int) -> BoolArray:
        """Whether an input has tuples of each partition on disk or on their way there."""
        flags: BoolArray = np.array([bool(domain.pieces[j]) for domain in self._state.domains], np.bool_)
        if self._state.is_coordinated:
            flags |= self._state.spilled
        return flags

    def _holds_code(self, j: int, codes: Int64Array) -> BoolArray:
        found: BoolArray = np.zeros(len(codes), np.bool_)
        for chunk in (*self._state.memory[j], *self._state.direct[j]):
            found |= chunk.count(codes) > 0
        return found

    def holds(self, j: int, keys: Keys, reads_disk: bool = False) -> BoolArray:
        """Which keys an input holds in memory and, with `reads_disk`, on disk."""
        found: BoolArray = np.zeros(len(keys.codes), np.bool_)
        for chunk in (*self._state.memory[j], *self._state.direct[j]):
            if not keys.columns:
                found |= chunk.count(keys.codes) > 0
                continue
            first, count, total = chunk.find(0, keys.codes)
            found |= self._same(j, keys, first, count, total, chunk.rows, chunk)
        if reads_disk:
            partitions = partitions_of(keys.codes, self._spec.partitions)
            for number in np.unique(partitions).tolist():
                for piece in self._state.domains[number].pieces[j]:
                    rows = np.flatnonzero((partitions == number) & ~found)
                    found[rows] = self._in_piece(j, keys.take(rows), piece)
            self._state.store.release()
        return found

    def _in_piece(self, j: int, keys: Keys, piece: Piece) -> BoolArray:
        """Which keys a piece has; rows are in hash order, so a binary search reads little of it."""
        if not len(keys.codes):
            return np.zeros(0, np.bool_)
        tuples = tuples_of(self._spec, j, self._state.store.mapped(piece))
        bounds = np.array([0, piece.rows], np.int32)
        first, count, total = find_in_buckets(bounds, tuples.codes[0], keys.codes)
        return self._same(j, keys, first, count, total, tuples.rows)

    def _same(
        self,
        j: int,
        keys: Keys,
        first: Int32Array,
        count: Int32Array,
        total: int,
        rows: pa.RecordBatch,
        chunk: Chunk | None = None,
    ) -> BoolArray:
        if not keys.columns or total == 0:
            return count > 0
        found: BoolArray = np.zeros(len(keys.codes), np.bool_)
        theirs = self._collection.readers[j].of_rows(np.zeros(0, np.int64), rows)
        state = (0, 0, total)
        while state[2]:
            queries, places, state = expand_piece(first, count, state, 65_536)
            same = keys.equal(queries.astype(np.int64), theirs, places.astype(np.int64))
            if chunk is not None and chunk.gone_count:
                same = same & ~chunk.is_gone(places)
            found[queries[same]] = True
        return found

    def has_match(self, i: int, codes: Int64Array) -> BoolArray:
        """Which codes some input other than i has in memory."""
        found: BoolArray = np.zeros(len(codes), np.bool_)
        for j, chunks in enumerate(self._state.memory):
            for chunk in chunks if j != i else ():
                found |= chunk.count(codes) > 0
        return found

    def divided(self, i: int, chunk: Chunk) -> tuple[Chunk | None, Chunk]:
        """A chunk of arrivals, split into tuples to drop once joined and tuples to store."""
        if not len(chunk) or not self.knows_something:
            return None, chunk
        drop = self.droppable(i, self._collection.readers[i].of_chunk(chunk), is_arriving=True)
        if self._unique[i] and drop.any():
            # While it alone closes other held tuples, it stays until they are purged together.
            for j in range(len(self._spec.names)):
                if j != i:
                    drop &= ~self._holds_code(j, chunk.codes[0])
        if not drop.any():
            return None, chunk
        if drop.all():
            return chunk, self._state.part_of(chunk, ~drop)
        return self._state.part_of(chunk, drop), self._state.part_of(chunk, ~drop)

    def held(self, horizons: Sequence[int | None], i: int, codes: Int64Array | None) -> Iterator[Held | Unread]:
        """Tuples of an input that may still be in a result; given codes, those with one of them."""
        reader = self._collection.readers[i]
        for chunk in (*self._state.memory[i], *self._state.direct[i]):
            rows = np.arange(len(chunk), dtype=np.int32) if codes is None else chunk.rows_of(codes)
            expired = self._state.droppable(chunk, horizons[i]) if horizons[i] is not None or chunk.gone_count else None
            if expired is not None:
                rows = rows[~expired[rows]]
            if len(rows) == len(chunk):
                yield Held(reader.of_chunk(chunk), chunk.rows)
            elif len(rows):
                yield Held(reader.of_chunk(chunk).take(rows), chunk.rows.take(pa.array(rows)))
        for domain in self._state.domains:
            for piece in domain.pieces[i]:
                yield Unread(piece.partition, piece.min_code, piece.max_code)

    # ---------------------------------------------------------------- memory

    def purge_memory(self, codes: Int64Array | None) -> Iterator[pa.RecordBatch]:
        """Purge tuples in memory; given codes, only those with one of them."""
        self._metrics.purges += 1
        self._metrics.purges_by_index += codes is not None
        found = []
        for i, chunks in enumerate(self._state.memory):
            for chunk in chunks:
                mask = self._droppable_rows(i, chunk, codes)
                if mask is not None:
                    found.append(_Found(i, chunk, mask))
        yield from self._take_out(found)

    def _droppable_rows(self, i: int, chunk: Chunk, codes: Int64Array | None) -> BoolArray | None:
        keys = self._collection.readers[i].of_chunk(chunk)
        if codes is None:
            mask = self.droppable(i, keys) & ~chunk.is_gone()
            return mask if mask.any() else None
        rows = chunk.rows_of(codes)
        rows = rows[self.droppable(i, keys.take(rows))]
        if not rows.size:
            return None
        mask = np.zeros(len(chunk), np.bool_)
        mask[rows] = True
        return mask

    def _take_out(self, found: Sequence[_Found]) -> Iterator[pa.RecordBatch]:
        """Emit unmatched rows that are purged, then drop the rows from chunks in memory."""
        if not found:
            return
        self._remember_unique(found)
        for i, chunk, mask in found:
            assert isinstance(chunk, Chunk)
            yield from self._unmatched(i, chunk, mask)
            count = int(mask.sum())
            self._metrics.closed_rows += count
            self._metrics.saved_bytes += chunk.nbytes * count // max(1, len(chunk))
            in_memory = chunk.departure == IN_MEMORY
            if in_memory and 2 * (chunk.gone_count + count) < len(chunk):
                # The others are copied once most of the chunk was purged.
                chunk.mark_gone(mask)
                continue
            # One copy at a time: each old chunk is freed before the next is copied.
            self._state.work.resize(min(chunk.nbytes, self._state.limits.work))
            self._replace(
                i, chunk, None if count + chunk.gone_count == len(chunk) else self._state.part_of(chunk, ~mask)
            )
            self._state.work.resize(0)
        self._state.account()

    def _replace(self, i: int, chunk: Chunk, part: Chunk | None) -> None:
        for side in (self._state.memory, self._state.direct):
            side[i] = [
                replaced for held in side[i] if (replaced := part if held.serial == chunk.serial else held) is not None
            ]

    def _remember_unique(self, found: Sequence[_Found]) -> None:
        """Close the values of purged unique tuples, which closed them so far, if other inputs have tuples on disk."""
        for i, item, mask in found:
            if not self._unique[i] or isinstance(item, Piece):
                continue
            keys = self._collection.readers[i].of_chunk(item).take(np.flatnonzero(mask))
            others = [self.on_disk(j) for j in range(len(self._spec.names)) if j != i]
            there = np.logical_or.reduce(others)[partitions_of(keys.codes, self._spec.partitions)]
            if there.any():
                self._collection.ranges[i].add_keys(keys.take(np.flatnonzero(there)))

    def _unmatched(self, i: int, chunk: Chunk, mask: BoolArray) -> Iterator[pa.RecordBatch]:
        if self._spec.preserved[i] and self._spec.gives_unmatched:
            yield from self._writer.unmatched_of(i, chunk, mask)

    # ---------------------------------------------------------------- disk

    def purge_unread(self) -> Iterator[pa.RecordBatch]:
        """Drop pieces on disk whose join values are all closed, without reading them."""
        for number, domain in enumerate(self._state.domains):
            if domain.pending or not any(domain.pieces):
                continue
            for i, pieces in enumerate(domain.pieces):
                gone = [piece for piece in pieces if self._is_covered(i, number, piece)]
                for piece in gone:
                    if self._has_unmatched(i, piece):
                        chunk = self._state.store.load(i, piece)
                        yield from self._unmatched(i, chunk, np.ones(len(chunk), np.bool_))
                        self._state.store.release()
                    else:
                        self._metrics.unread_pieces += 1
                    self._drop(piece)
                if gone:
                    serials = {piece.serial for piece in gone}
                    domain.pieces[i] = [piece for piece in pieces if piece.serial not in serials]
        self._state.close_empty_domains()

    def _is_covered(self, i: int, number: int, piece: Piece) -> bool:
        others = [j for j in range(len(self._spec.names)) if j != i]
        promised = [
            j for j in others if j in self.ended or self._collection.ranges[j].covers(piece.min_code, piece.max_code)
        ]
        if len(promised) == len(others):
            return True
        return any(not self.on_disk(j)[number] and not self._in_partition(j, number) for j in promised)

    def _in_partition(self, j: int, number: int) -> bool:
        for chunk in self._state.memory[j]:
            offsets = chunk.partition_offsets(self._spec.partitions)
            if offsets[number] < offsets[number + 1]:
                return True
        return False

    def _has_unmatched(self, i: int, piece: Piece) -> bool:
        if not (self._spec.preserved[i] and self._spec.gives_unmatched) or piece.done is None:
            return False
        return not get_bits(piece.done, None, piece.rows).all()

    def _drop(self, piece: Piece) -> None:
        self._metrics.closed_rows += piece.rows
        self._metrics.saved_bytes += piece.bytes
        self._state.drop_piece(piece)

    def purge_domain(self, number: int) -> Iterator[pa.RecordBatch]:
        """Purge a domain whose results have all been emitted, on disk and on its way there, reading the codes of its
        pieces.

        A piece is rewritten if at least half of it can be dropped.
        """
        state, domain = self._state, self._state.domains[number]
        if domain.pending or not domain.is_open:
            return
        on_disk, resident = [], []
        for i in range(len(self._spec.names)):
            reader = self._collection.readers[i]
            for piece in domain.pieces[i]:
                tuples = tuples_of(self._spec, i, state.store.mapped(piece))
                mask = self.droppable(i, reader.of_rows(tuples.codes[0], tuples.rows), reads_disk=True)
                if 2 * int(mask.sum()) >= piece.rows:
                    on_disk.append(_Found(i, piece, mask))
            for chunk in (*state.memory[i], *state.direct[i]):
                offsets = chunk.partition_offsets(self._spec.partitions)
                rows = np.arange(offsets[number], offsets[number + 1])
                rows = rows[~chunk.is_gone(rows)]
                rows = rows[self.droppable(i, reader.of_chunk(chunk).take(rows), reads_disk=True)]
                if rows.size:
                    mask = np.zeros(len(chunk), np.bool_)
                    mask[rows] = True
                    resident.append(_Found(i, chunk, mask))
        state.store.release()
        self._count_direct(-1)
        yield from self._take_out(resident)
        self._count_direct(1)
        for i, stored, mask in on_disk:
            assert isinstance(stored, Piece)
            yield from self._rewrite(i, number, stored, mask)
        state.close_empty_domains()

    def _count_direct(self, sign: int) -> None:
        for chunks in self._state.direct:
            for chunk in chunks:
                self._state.count_direct(chunk, sign)

    def _rewrite(self, i: int, number: int, piece: Piece, mask: BoolArray) -> Iterator[pa.RecordBatch]:
        state, domain = self._state, self._state.domains[number]
        state.work.resize(state.limits.work // 2)
        chunk = state.store.load(i, piece)
        state.store.release()
        yield from self._unmatched(i, chunk, mask)
        if self._unique[i]:
            gone = self._collection.readers[i].of_chunk(chunk).take(np.flatnonzero(mask))
            self._collection.ranges[i].add_keys(gone)
        part = None if mask.all() else state.part_of(chunk, ~mask)
        state.work.resize(0)
        kept_rows = 0 if part is None else len(part)
        if part is not None:
            # Written before the piece is dropped, so that a full disk changes nothing.
            state.file_pieces(i, state.write(i, [part], piece.departure))
        domain.pieces[i] = [held for held in domain.pieces[i] if held is not piece]
        self._metrics.closed_rows += piece.rows - kept_rows
        self._metrics.saved_bytes += piece.bytes * (piece.rows - kept_rows) // piece.rows
        state.drop_piece(piece)
