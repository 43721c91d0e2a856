"""The second and third stage: joins with tuples on disk, and the test that emits every result only once.

A result is redundant if and only if one single event has already joined all of its tuples:

- they were in memory together: the last one arrived, and probed, before the first one left;
- one logged disk-memory probe read the tuple of its own input from disk and found all others in memory;
- one complete join of their domain ran after the last of them had arrived.

Testing pairs, as in the paper, loses results: each pair of a triple can have met in a different event.

The disk-memory stage probes the memory of the other inputs with one input's tuples on disk, and logs that. A complete
join finds all missing results of a domain: each is found from its last tuple to arrive, which must be newer than the
previous complete join, by probing memory and disk. It enforces the delay bound while the inputs run, and is the
disk-disk stage after they have ended.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int32Array, Int64Array
from dovetail.joins.multiway.chunk import Chunk
from dovetail.joins.multiway.metrics import MJoinMetrics
from dovetail.joins.multiway.probing import Partial, Prober, SequenceChooser
from dovetail.joins.multiway.results import ResultWriter
from dovetail.joins.multiway.spill import Piece
from dovetail.joins.multiway.state import Domain, JoinState
from dovetail.kernels.bucket_index import (
    bucket_count_of,
    expand_piece,
    find_in_buckets,
    order_by_bucket,
    stretch_of_partition,
)

__all__ = ["DiskStages", "is_redundant"]

_MOST_RANGES = 256
_LOOKUP_COST = 4  # of a code in a piece on disk, in rows read


class DiskStages:
    """Joins a domain's tuples on disk with memory and with each other."""

    def __init__(
        self,
        state: JoinState,
        prober: Prober,
        chooser: SequenceChooser,
        writer: ResultWriter,
        metrics: MJoinMetrics,
        limit: int,
    ) -> None:
        self._state = state
        self._prober = prober
        self._chooser = chooser
        self._writer = writer
        self._metrics = metrics
        self._limit = limit

    def probe_memory(self, i: int, number: int) -> Iterator[pa.RecordBatch]:
        """The disk-memory stage: input i's tuples on disk probe the memory of the others."""
        state, domain = self._state, self._state.domains[number]
        stamp = state.next_stamp()
        sources = {j: state.memory[j] for j in range(len(state.memory)) if j != i}
        with self._memory_to_work_in():
            whole = [_Part(piece, 0, piece.rows) for piece in domain.pieces[i]]
            for group in self._groups(whole):
                with self._loaded(i, group) as chunks:
                    for chunk in chunks:
                        yield from self._join(i, chunk, _all_rows(chunk), sources, domain, only_earlier=False)
            for chunk in state.direct[i]:
                rows = self._rows_in(chunk, _Range(number, 0, 1))
                yield from self._join(i, chunk, rows, sources, domain, only_earlier=False)
        domain.log.append((i, stamp))
        self._metrics.disk_probes += 1

    def join_completely(self, number: int) -> Iterator[pa.RecordBatch]:
        """Emit every missing result of a domain.

        Of tuples on disk, those are read that have a join value of the new tuples. The domain is split into as many
        hash ranges as needed for those of one range to fit in memory. Rows on disk are in hash order, so each is read
        once per driving input.
        """
        state, domain = self._state, self._state.domains[number]
        stamp = state.next_stamp()
        with self._memory_to_work_in():
            new = self._new_codes(number)
            ranges = 1
            if new is not None:
                total = sum(self._needed_bytes(piece, new) for pieces in domain.pieces for piece in pieces)
                while ranges < _MOST_RANGES and total // ranges > state.limits.work // 4:
                    ranges *= 2
            for place in range(ranges):
                yield from self._join_range(domain, _Range(number, place, ranges), new)
        domain.joined_until = stamp
        domain.log.clear()
        domain.pending, domain.pending_since, domain.pending_low = 0, None, None
        self._metrics.catch_ups += 1

    def _new_codes(self, number: int) -> Int64Array | None:
        """The join values of a domain that have new tuples, in the order of their hash; None for all."""
        state, domain = self._state, self._state.domains[number]
        if not state.spec.is_star:
            return None
        found, since = [np.zeros(0, np.int64)], domain.joined_until
        for i, pieces in enumerate(domain.pieces):
            for chunk in (*state.memory[i], *state.direct[i]):
                if chunk.max_arrival >= since:
                    rows = self._rows_in(chunk, _Range(number, 0, 1))
                    found.append(chunk.codes[0][rows[chunk.arrivals[rows] >= since]])
            for piece in pieces:
                if piece.max_arrival >= since:
                    state.store.bytes_read += 8 * piece.rows
                    found.append(state.store.codes_of(piece)[state.store.arrivals_of(i, piece) >= since])
        codes = np.unique(np.concatenate(found))
        order, _ = order_by_bucket(codes, bucket_count_of(len(codes), 1))
        return codes[order]

    def _join_range(self, domain: Domain, where: "_Range", new: Int64Array | None) -> Iterator[pa.RecordBatch]:
        if new is not None:
            start, stop = self._stretch(new, where)
            new = new[start:stop]
        parts = [self._parts_in(pieces, where, new) for pieces in domain.pieces]
        since = domain.joined_until
        for i in range(len(parts)):
            resident = [c for c in (*self._state.memory[i], *self._state.direct[i]) if c.max_arrival >= since]
            drivers = [(chunk, self._rows_in(chunk, where)) for chunk in resident]
            yield from self._nested(i, drivers, {}, parts, domain)
            for group in self._groups([part for part in parts[i] if part.piece.max_arrival >= since]):
                with self._loaded(i, group) as chunks:
                    yield from self._nested(i, [(chunk, _all_rows(chunk)) for chunk in chunks], {}, parts, domain)

    def _nested(
        self,
        i: int,
        drivers: Sequence[tuple[Chunk, Int32Array]],
        sources: dict[int, list[Chunk]],
        parts: Sequence[Sequence["_Part"]],
        domain: Domain,
    ) -> Iterator[pa.RecordBatch]:
        """Load one group of parts per other input at a time, and join every combination of groups."""
        order = self._chooser.order(i)
        if len(sources) == len(order):
            for chunk, rows in drivers:
                new = rows[(chunk.arrivals[rows] >= domain.joined_until) & ~chunk.is_gone(rows)]
                yield from self._join(i, chunk, new, sources, domain, only_earlier=True)
            return
        if not any(len(rows) for _, rows in drivers):
            return
        j = order[len(sources)]
        resident = [*self._state.memory[j], *self._state.direct[j]]
        for place, group in enumerate(list(self._groups(parts[j])) or [[]]):
            with self._loaded(j, group) as chunks:
                found = resident + chunks if place == 0 else chunks
                if found:
                    yield from self._nested(i, drivers, {**sources, j: found}, parts, domain)

    def _join(
        self,
        i: int,
        chunk: Chunk,
        rows: Int32Array,
        sources: dict[int, list[Chunk]],
        domain: Domain,
        only_earlier: bool,
    ) -> Iterator[pa.RecordBatch]:
        order = self._chooser.order(i)
        for start in range(0, len(rows), self._limit):
            partial = self._prober.start(i, chunk, rows[start : start + self._limit], only_earlier)
            for result in self._prober.results(partial, order, sources, self._limit):
                redundant = is_redundant(result, domain.log, domain.joined_until)
                count = int(redundant.sum())
                self._metrics.redundant_rows += count
                if count < len(redundant):
                    yield from self._writer.matched(result.take(~redundant) if count else result)

    # ---------------------------------------------------------------- loading

    @contextmanager
    def _memory_to_work_in(self) -> Iterator[None]:
        self._state.work.resize(self._state.limits.work)
        try:
            yield
        finally:
            self._state.work.resize(0)
            store = self._state.store
            self._metrics.bytes_read += store.bytes_read
            store.bytes_read = 0

    def _groups(self, parts: Sequence["_Part"]) -> Iterator[list["_Part"]]:
        """Groups of parts that are loaded together: one input's share of the work memory."""
        limit = self._state.limits.work // (2 * len(self._state.memory))
        group: list[_Part] = []
        held = 0.0
        for part in parts:
            if group and held + part.bytes > limit:
                yield group
                group, held = [], 0.0
            group.append(part)
            held += part.bytes
        if group:
            yield group

    @contextmanager
    def _loaded(self, i: int, parts: Sequence["_Part"]) -> Iterator[list[Chunk]]:
        """Parts of pieces in memory; done bits set in the meantime are kept."""
        store = self._state.store
        chunks = [
            store.load(i, part.piece, part.start, part.stop)
            if part.rows is None
            else store.load_rows(i, part.piece, part.rows)
            for part in parts
        ]
        try:
            yield chunks
        finally:
            for part, chunk in zip(parts, chunks, strict=True):
                store.keep_done(part.piece, part.start, chunk, part.rows)

    def _parts_in(self, pieces: Sequence[Piece], where: "_Range", new: Int64Array | None) -> list["_Part"]:
        """The rows of each piece that lie in a hash range and, where that saves reading, have one of some codes."""
        parts = []
        for piece in pieces:
            if new is not None and _is_worth_looking_up(piece, len(new) * where.ranges):
                first, count, total = self._found(piece, new)
                if total:
                    _, rows, _ = expand_piece(first, count, (0, 0, total), total)
                    parts.append(_Part(piece, 0, piece.rows, rows))
                continue
            start, stop = 0, piece.rows
            if where.ranges > 1:
                start, stop = self._stretch(self._state.store.codes_of(piece), where)
            if start < stop:
                parts.append(_Part(piece, start, stop))
        return parts

    def _needed_bytes(self, piece: Piece, new: Int64Array) -> int:
        """About how much of a piece must be read for some codes."""
        if not _is_worth_looking_up(piece, len(new)):
            return piece.bytes
        return piece.bytes * self._found(piece, new)[2] // max(1, piece.rows)

    def _found(self, piece: Piece, codes: Int64Array) -> tuple[Int32Array, Int32Array, int]:
        """The places of codes in a piece, by binary searches in the mapped codes."""
        store = self._state.store
        store.bytes_read += 8 * min(piece.rows, len(codes) * piece.rows.bit_length())
        return find_in_buckets(np.array([0, piece.rows], np.int32), store.codes_of(piece), codes)

    def _rows_in(self, chunk: Chunk, where: "_Range") -> Int32Array:
        """The rows of a chunk in memory that lie in a hash range of a domain."""
        if not self._state.spec.is_star:
            return _all_rows(chunk)
        offsets = chunk.partition_offsets(self._state.spec.partitions)
        low, high = int(offsets[where.domain]), int(offsets[where.domain + 1])
        start, stop = self._stretch(chunk.codes[0][low:high], where)
        return np.arange(low + start, low + stop, dtype=np.int32)

    def _stretch(self, codes: Int64Array, where: "_Range") -> tuple[int, int]:
        if where.ranges == 1:
            return 0, len(codes)
        wanted = where.domain * where.ranges + where.place
        return stretch_of_partition(codes, self._state.spec.partitions * where.ranges, wanted)


class _Range(NamedTuple):
    """One of `count` equal hash ranges of a domain."""

    domain: int
    place: int
    ranges: int


class _Part(NamedTuple):
    """A range of a piece's rows, or those of them that are named."""

    piece: Piece
    start: int
    stop: int
    rows: Int32Array | None = None

    @property
    def bytes(self) -> float:
        """The approximate size in memory."""
        count = self.stop - self.start if self.rows is None else len(self.rows)
        return self.piece.bytes * count / max(1, self.piece.rows)


def _is_worth_looking_up(piece: Piece, codes: int) -> bool:
    """Whether looking up this many codes one by one costs less than reading the piece."""
    return _LOOKUP_COST * codes < piece.rows


def is_redundant(result: Partial, log: Sequence[tuple[int, int]], joined_until: int) -> BoolArray:
    """Which complete results one single event has already joined.

    `log` has the disk-memory probes of the domain, (input, stamp), since its last complete join at `joined_until`.
    """
    arrivals, departures = {}, {}
    for i, refs in result.refs.items():
        arrivals[i] = refs.values([chunk.arrivals for chunk in refs.chunks])
        stamps = np.array([chunk.departure for chunk in refs.chunks], np.int64)
        departures[i] = np.full(len(refs.rows), stamps[0]) if refs.source is None else stamps[refs.source]
    latest = np.maximum.reduce(list(arrivals.values()))
    redundant: BoolArray = latest < joined_until
    redundant |= latest < np.minimum.reduce(list(departures.values()))
    for i, stamp in log:
        was_there = (latest < stamp) & (departures[i] <= stamp)
        for j, departure in departures.items():
            if j != i:
                was_there &= departure > stamp
        redundant |= was_there
    return redundant


def _all_rows(chunk: Chunk) -> Int32Array:
    return np.arange(len(chunk), dtype=np.int32)
