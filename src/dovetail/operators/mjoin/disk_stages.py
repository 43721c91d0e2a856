"""The second and the third stage: joins that involve tuples on disk, and the test that no result comes twice.

A result is redundant if and only if one single event has already joined all of its tuples:

- they were all in memory together: the last one to arrive did so before the first one to leave, and probed;
- one logged disk-memory probe found the tuple of its own input on disk and all the others in memory;
- one complete join of their domain came after the last of them had arrived.

Testing pairs, as the paper writes it, loses results: each pair of a triple can have met in another event.

The disk-memory stage probes what the other inputs have in memory with one input's tuples on disk, and logs it. A
complete join finds everything that is still missing of a domain: each result is made from its tuple that arrived last,
which must have arrived since the previous complete join, and probes memory and disk. It serves the delay bound while
the inputs go on, and as the disk-disk stage when they have ended.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from dovetail.operators.mjoin.chunk import BoolArray, Chunk, Int32Array
from dovetail.operators.mjoin.metrics import MJoinMetrics
from dovetail.operators.mjoin.probing import Partial, Prober, SequenceChooser
from dovetail.operators.mjoin.results import ResultWriter
from dovetail.operators.mjoin.spill import Piece
from dovetail.operators.mjoin.state import Domain, JoinState

__all__ = ["DiskStages", "is_redundant"]


class DiskStages:
    """Joins a domain's tuples on disk, with memory and with each other."""

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
        """The disk-memory stage: what input i has on disk of a domain probes the others' memory."""
        state, domain = self._state, self._state.domains[number]
        stamp = state.next_stamp()
        sources = {j: state.memory[j] for j in range(len(state.memory)) if j != i}
        state.work.resize(state.limits.work)
        try:
            for group in self._groups(domain.pieces[i]):
                drivers = [(chunk, _all_rows(chunk)) for chunk in self._load(i, group)]
                yield from self._probed(i, drivers, sources, domain)
            drivers = [(chunk, self._rows_in(chunk, number)) for chunk in state.direct[i]]
            yield from self._probed(i, drivers, sources, domain)
        finally:
            state.work.resize(0)
        domain.log.append((i, stamp))
        self._metrics.disk_probes += 1
        self._count_reads()

    def _probed(
        self, i: int, drivers: Sequence[tuple[Chunk, Int32Array]], sources: dict[int, list[Chunk]], domain: Domain
    ) -> Iterator[pa.RecordBatch]:
        for chunk, rows in drivers:
            yield from self._join(i, chunk, rows, sources, domain, only_earlier=False)

    def join_completely(self, number: int) -> Iterator[pa.RecordBatch]:
        """Give out every result of a domain that is still missing."""
        state, domain = self._state, self._state.domains[number]
        stamp = state.next_stamp()
        inputs = range(len(state.memory))
        state.work.resize(state.limits.work)
        try:
            for i in inputs:
                others = [j for j in self._chooser.order(i) if j != i]
                for drivers in self._drivers(i, number, domain):
                    yield from self._nested(i, drivers, others, {}, domain)
        finally:
            state.work.resize(0)
        domain.joined_until = stamp
        domain.log.clear()
        domain.pending, domain.pending_since, domain.pending_low = 0, None, None
        self._metrics.catch_ups += 1
        self._count_reads()

    def _drivers(self, i: int, number: int, domain: Domain) -> Iterator[list[tuple[Chunk, Int32Array]]]:
        """Rows of input i that arrived since the last complete join, as much at a time as memory allows."""
        since = domain.joined_until
        resident = [
            (chunk, self._rows_in(chunk, number))
            for chunk in (*self._state.memory[i], *self._state.direct[i])
            if chunk.max_arrival >= since
        ]
        yield [(chunk, rows[chunk.arrivals[rows] >= since]) for chunk, rows in resident]
        for group in self._groups([piece for piece in domain.pieces[i] if piece.max_arrival >= since]):
            chunks = self._load(i, group)
            yield [(chunk, np.flatnonzero(chunk.arrivals >= since).astype(np.int32)) for chunk in chunks]

    def _nested(
        self,
        i: int,
        drivers: Sequence[tuple[Chunk, Int32Array]],
        others: Sequence[int],
        sources: dict[int, list[Chunk]],
        domain: Domain,
    ) -> Iterator[pa.RecordBatch]:
        """Load the other inputs' pieces, a group of each at a time, and join every combination of groups."""
        if not any(len(rows) for _, rows in drivers):
            return
        if len(sources) == len(others):
            for chunk, rows in drivers:
                yield from self._join(i, chunk, rows, sources, domain, only_earlier=True)
            return
        j = others[len(sources)]
        resident = [*self._state.memory[j], *self._state.direct[j]]
        groups = list(self._groups(domain.pieces[j])) or [[]]
        for place, group in enumerate(groups):
            chunks = self._load(j, group)
            if place == 0:
                chunks = resident + chunks
            if chunks:
                yield from self._nested(i, drivers, others, {**sources, j: chunks}, domain)

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

    def _groups(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """Pieces that are loaded together: one input's part of the memory to work in."""
        limit = self._state.limits.work // (2 * len(self._state.memory))
        group: list[Piece] = []
        held = 0
        for piece in pieces:
            if group and held + piece.bytes > limit:
                yield group
                group, held = [], 0
            group.append(piece)
            held += piece.bytes
        if group:
            yield group

    def _load(self, i: int, pieces: Sequence[Piece]) -> list[Chunk]:
        return [self._state.store.load(i, piece) for piece in pieces]

    def _rows_in(self, chunk: Chunk, number: int) -> Int32Array:
        """The rows of a chunk that belong to a domain."""
        if not self._state.spec.is_star:
            return _all_rows(chunk)
        offsets = chunk.partition_offsets(self._state.spec.partitions)
        return np.arange(offsets[number], offsets[number + 1], dtype=np.int32)

    def _count_reads(self) -> None:
        self._metrics.bytes_read += self._state.store.bytes_read
        self._state.store.bytes_read = 0


def is_redundant(result: Partial, log: Sequence[tuple[int, int]], joined_until: int) -> BoolArray:
    """Which results one single event has already joined.

    Parameters
    ----------
    result
        Complete results.
    log
        The disk-memory probes of the domain since it was last joined completely: (input, stamp).
    joined_until
        The stamp of that complete join.
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
