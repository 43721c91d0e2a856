"""The state of a multi-way join: per input, chunks in memory, tuples on their way to disk, and pieces on disk.

Rows are partitioned by the hash of their first join attribute. If one attribute links all inputs, only equal partitions
join, and each is a *domain*; otherwise there is one domain. For every domain the state records up to which stamp all
results have been emitted (`Domain.joined_until`), which disk probes were made since (`Domain.log`), and how many
arrived tuples may still have results (`Domain.pending`).

Arrivals, flushes, probes and complete joins take their stamps from one sequence: no two events share a stamp.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dovetail.core.arrays import BoolArray, Int32Array
from dovetail.core.errors import BudgetError, SpillError
from dovetail.core.memory import Ledger
from dovetail.joins.multiway.chunk import DIRECT, Chunk, Tuples, concatenated, get_bits, merged
from dovetail.joins.multiway.metrics import MJoinMetrics
from dovetail.joins.multiway.spec import MJoinSpec
from dovetail.joins.multiway.spill import Piece, SpillStore, StoredTable

__all__ = ["Domain", "JoinState", "Limits"]

TIER = 4  # chunks of one level that are merged into one of the next
# More state adds chunks, not levels: what a commit writes does not grow with it.
_LARGEST_CHUNK_BYTES = 1 << 27


@dataclass
class Domain:
    """Tuples that can only join with each other, and the progress of their results."""

    pieces: list[list[Piece]]
    joined_until: int = 0
    log: list[tuple[int, int]] = field(default_factory=list)
    direct_rows: int = 0
    pending: int = 0
    pending_since: int | None = None
    pending_low: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether any of its tuples are on disk or on their way there."""
        return self.direct_rows > 0 or any(self.pieces)


@dataclass(frozen=True)
class Limits:
    """The parts of the budget, in bytes."""

    arrivals: int
    work: int
    output: int
    state: int

    @classmethod
    def of(cls, budget_bytes: int) -> "Limits":
        """An eighth each for arriving tuples and for output, a quarter for merging and loading, the rest for state."""
        eighth = budget_bytes // 8
        return cls(eighth, 2 * eighth, eighth, budget_bytes - 4 * eighth)


class JoinState:
    """Chunks, pieces and domains of all inputs, within their part of the budget."""

    def __init__(self, spec: MJoinSpec, ledger: Ledger, metrics: MJoinMetrics) -> None:
        self.spec = spec
        self.limits = Limits.of(spec.budget.total_bytes)
        self._metrics = metrics
        count = len(spec.names)
        self.memory: list[list[Chunk]] = [[] for _ in range(count)]
        self.direct: list[list[Chunk]] = [[] for _ in range(count)]
        self.domains = [Domain([[] for _ in range(count)]) for _ in range(spec.partitions if spec.is_star else 1)]
        self.is_coordinated = spec.flushing == "coordinated" and spec.is_star
        self.spilled: BoolArray = np.zeros(spec.partitions, np.bool_)
        self.store = SpillStore(spec)
        self.stored: dict[str, StoredTable] = {}
        """The stored tables that hold pieces, by name."""
        self.bit_logs: dict[str, dict[str, int]] = {}
        """By kind, the stored tables that hold bits of rows, oldest first, with their sizes."""
        self.stamp = 1
        self.serial = 1
        self._memory_bytes = ledger.reserve("state")
        self._direct_bytes = ledger.reserve("spill_buffer")
        self._done_bytes = ledger.reserve("done_bits")
        self.work = ledger.reserve("work")

    # ---------------------------------------------------------------- stamps and counts

    def next_stamp(self, count: int = 1) -> int:
        """Reserve `count` stamps and return the first."""
        first = self.stamp
        self.stamp += count
        return first

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial - 1

    @property
    def rows(self) -> list[int]:
        """Rows held per input, in memory and on disk."""
        held = [
            sum(len(chunk) - chunk.gone_count for chunk in (*self.memory[i], *self.direct[i]))
            for i in range(len(self.memory))
        ]
        for domain in self.domains:
            for i, pieces in enumerate(domain.pieces):
                held[i] += sum(piece.rows for piece in pieces)
        return held

    @property
    def held_bytes(self) -> int:
        """Bytes of state in memory."""
        return self._memory_bytes.held_bytes + self._direct_bytes.held_bytes + self._done_bytes.held_bytes

    @property
    def pending(self) -> int:
        """Tuples that arrived in an open domain since it was last joined completely."""
        return sum(domain.pending for domain in self.domains)

    @property
    def piece_limit_bytes(self) -> int:
        """The maximum size of a loaded piece, so that one piece per input fits in memory."""
        return self.limits.work // (4 * len(self.memory))

    def is_settled(self) -> BoolArray:
        """Whether all results of each partition have been emitted."""
        flags = np.array([domain.pending == 0 for domain in self.domains], np.bool_)
        return flags if self.spec.is_star else np.repeat(flags, self.spec.partitions)

    def account(self) -> None:
        """Update the memory ledger."""
        self._memory_bytes.resize(sum(chunk.nbytes for chunks in self.memory for chunk in chunks))
        self._direct_bytes.resize(sum(chunk.nbytes for chunks in self.direct for chunk in chunks))

    def clear(self) -> None:
        """Drop all tuples, also on disk."""
        for domain in self.domains:
            for pieces in domain.pieces:
                for piece in pieces:
                    self.drop_piece(piece)
                pieces.clear()
            domain.direct_rows, domain.pending, domain.pending_since, domain.pending_low = 0, 0, None, None
        self.memory = [[] for _ in self.memory]
        self.direct = [[] for _ in self.direct]
        self.account()
        self.close_empty_domains()

    def adopt(self, i: int, chunk: Chunk, is_direct: bool) -> None:
        """Add a chunk of a snapshot, in memory or on its way to disk."""
        if is_direct:
            self.direct[i].append(chunk)
            self.count_direct(chunk, 1)
        else:
            self.memory[i].append(chunk)
        self.account()

    def adopt_pieces(self, i: int, chunks: Iterable[Chunk], saved: Sequence[Piece]) -> None:
        """Write pieces of a snapshot that are not stored elsewhere to the spill directory."""
        pieces = self.write(i, chunks, DIRECT)
        for piece, before in zip(pieces, saved, strict=True):
            piece.departure, piece.bytes = before.departure, before.bytes
        self.file_pieces(i, pieces)

    # ---------------------------------------------------------------- arrivals

    def insert(self, i: int, chunk: Chunk, now: int | None) -> Chunk:
        """Add a chunk of arrivals; returns the part that stays in memory and may probe."""
        offsets = chunk.partition_offsets(self.spec.partitions)
        self._count_pending(chunk, np.diff(offsets), now)
        self._metrics.inserts += len(chunk)
        resident = chunk
        if self.is_coordinated and self.spilled.any():
            goes_to_disk = np.repeat(self.spilled, np.diff(offsets))
            if goes_to_disk.any():
                # The parts can be slightly larger than the whole, because of their indexes.
                direct = self.part_of(chunk, goes_to_disk)
                direct.departure = DIRECT
                resident = self.part_of(chunk, ~goes_to_disk)
                self.count_direct(direct, 1)
                self.direct[i].append(direct)
                self._metrics.flushed_rows += len(direct)
        if len(resident):
            self.memory[i].append(resident)
        self.account()
        return resident

    def tidy(self, i: int, horizon: int | None) -> None:
        """Merge the newest chunks of an input while enough of them have the same level."""
        chunks = self.memory[i]
        while len(chunks) >= TIER and len({chunk.level for chunk in chunks[-TIER:]}) == 1:
            group = chunks[-TIER:]
            total = sum(chunk.nbytes for chunk in group)
            if 2 * total > self.limits.work or total > _LARGEST_CHUNK_BYTES:
                return
            with_expired = [self.droppable(chunk, horizon) for chunk in group]
            self.work.resize(2 * total)
            keep = [None if mask is None else ~mask for mask in with_expired]
            self._metrics.purged_rows += sum(int(mask.sum()) for mask in with_expired if mask is not None)
            self._metrics.purged_rows -= sum(chunk.gone_count for chunk in group)  # counted when they were purged
            chunk = merged(self.next_serial(), group, keep, self.spec.partitions)
            self._metrics.merges += 1
            self._metrics.merged_rows += len(chunk)
            chunks[-TIER:] = [chunk] if len(chunk) else []
            self.account()
            self.work.resize(0)

    def part_of(self, chunk: Chunk, mask: BoolArray) -> Chunk:
        """Some rows of a chunk as a new chunk, without those that were purged."""
        return Chunk.of_ordered(
            self.next_serial(),
            chunk.tuples.filter(mask if chunk.gone is None else mask & ~chunk.is_gone()),
            self.spec.partitions,
            chunk.level,
            chunk.departure,
            is_timed=chunk.is_timed,
        )

    def _count_pending(self, chunk: Chunk, rows: Int32Array, now: int | None) -> None:
        per_domain = rows if self.spec.is_star else np.array([rows.sum()])
        offsets = np.concatenate([[0], np.cumsum(per_domain)])
        for number in np.flatnonzero(per_domain).tolist():
            domain = self.domains[number]
            if not (domain.is_open or (self.is_coordinated and self.spilled[number])):
                continue
            domain.pending += int(per_domain[number])
            if domain.pending_since is None:
                domain.pending_since = now
            if chunk.low is not None:
                low = int(chunk.low[offsets[number] : offsets[number + 1]].min())
                domain.pending_low = low if domain.pending_low is None else min(domain.pending_low, low)

    def count_direct(self, chunk: Chunk, sign: int) -> None:
        """Add (or subtract) a chunk's rows to those on their way to disk."""
        for partition, rows in enumerate(np.diff(chunk.partition_offsets(self.spec.partitions)).tolist()):
            self.domains[partition].direct_rows += sign * rows

    # ---------------------------------------------------------------- purging

    def droppable(self, chunk: Chunk, horizon: int | None) -> BoolArray | None:
        """Rows that no result can need any more, purged ones too; None if there are none."""
        drop = self._unneeded(chunk, horizon)
        if chunk.gone_count:
            return chunk.is_gone() if drop is None else drop | chunk.is_gone()
        return drop

    def _unneeded(self, chunk: Chunk, horizon: int | None) -> BoolArray | None:
        drop: BoolArray | None = None
        if horizon is not None:
            drop = chunk.expired_rows(horizon)
        # A semi or anti join needs a decided row no more, expired or not.
        if chunk.done is not None and (self.spec.how in ("semi", "anti") or drop is not None):
            done = get_bits(chunk.done, None, len(chunk))
            if self.spec.how == "semi":
                drop = done if drop is None else drop | done
            elif self.spec.how == "anti" or drop is None:
                drop = done
            else:
                # An outer join drops an expired row once it has been emitted.
                drop = drop & done
        if drop is None or not drop.any():
            return None
        settled = self.is_settled()
        if not settled.all():
            drop = drop & np.repeat(settled, np.diff(chunk.partition_offsets(self.spec.partitions)))
        return drop if drop.any() else None

    def purge(self, horizons: Sequence[int | None]) -> None:
        """Drop chunks and pieces outside every window, and expired rows where they are at least half of a chunk.

        No tuple of an input before its horizon can match a later arrival; None if there is no such bound.
        """
        for i, horizon in enumerate(horizons):
            self.memory[i] = list(self._unexpired(self.memory[i], horizon))
            if self.direct[i]:
                for chunk in self.direct[i]:
                    self.count_direct(chunk, -1)
                self.direct[i] = list(self._unexpired(self.direct[i], horizon))
                for chunk in self.direct[i]:
                    self.count_direct(chunk, 1)
        for domain in self.domains:
            if domain.pending == 0:
                self._purge_pieces(domain, horizons)
        self.account()
        self.close_empty_domains()

    def _unexpired(self, chunks: Iterable[Chunk], horizon: int | None) -> Iterator[Chunk]:
        """The chunks without expired ones, and without expired rows where they are at least half of a chunk."""
        for chunk in chunks:
            drop = self.droppable(chunk, horizon)
            count = 0 if drop is None else int(drop.sum())
            if drop is None or 2 * count < len(chunk):
                yield chunk
                continue
            self._metrics.purged_rows += count - chunk.gone_count
            if count < len(chunk):
                self.work.resize(min(chunk.nbytes, self.limits.work))
                yield self.part_of(chunk, ~drop)
                self.work.resize(0)

    def _purge_pieces(self, domain: Domain, horizons: Sequence[int | None]) -> None:
        for i, horizon in enumerate(horizons):
            if horizon is None:
                continue
            pieces = domain.pieces[i]
            for piece in pieces:
                if piece.max_low < horizon:
                    self._metrics.purged_rows += piece.rows
                    self.drop_piece(piece)
            domain.pieces[i] = [piece for piece in pieces if piece.max_low >= horizon]

    def drop_piece(self, piece: Piece) -> None:
        """Drop a piece on disk; the caller removes it from its domain."""
        self.store.drop(piece)
        self._done_bytes.shrink(piece.resident_bytes)

    def close_empty_domains(self) -> None:
        """Return partitions with nothing left on disk to memory: their arrivals probe again."""
        for number, domain in enumerate(self.domains):
            if not domain.is_open and domain.pending == 0:
                domain.log.clear()
                if self.is_coordinated:
                    self.spilled[number] = False

    # ---------------------------------------------------------------- flushing

    def make_room(self, needed_bytes: int) -> None:
        """Flush until `needed_bytes` fit. On a `BudgetError` or `SpillError` everything is still in memory."""
        share = self.limits.state // 8
        while self.held_bytes + needed_bytes > self.limits.state:
            if any(chunk.gone_count for chunks in self.memory for chunk in chunks):
                self._copy_out_gone(range(len(self.memory)))
                continue
            if self.spec.spill_directory is None:
                wanted = self.spec.budget.total_bytes * (self.held_bytes + needed_bytes) // self.limits.state + 1
                raise BudgetError(
                    f"The state of the join does not fit its budget of {self.spec.budget.total_bytes} bytes, and there "
                    "is no spill directory.",
                    hint=f"Raise the budget to at least {wanted} bytes, set a window, or pass spill_directory=.",
                    minimum_bytes=wanted,
                )
            # Tuples that wait to be written do not probe: they get a small part of the memory.
            if self._direct_bytes.held_bytes >= share // 4 or not any(self.memory):
                if self._direct_bytes.held_bytes == 0:
                    raise BudgetError(
                        f"{needed_bytes} bytes of tuples do not fit a budget of {self.spec.budget.total_bytes} bytes."
                    )
                self.flush_direct()
            else:
                self.flush(self._choose_victims(max(needed_bytes, share)))

    def flush(self, victims: dict[int, BoolArray]) -> None:
        """Move the tuples of some partitions, per input, from memory to disk; on an error nothing is moved."""
        self._copy_out_gone(victims)
        departure = self.next_stamp()
        written: list[tuple[int, list[Piece]]] = []
        try:
            for i, mask in victims.items():
                chunks = self._pieces_of(self.memory[i], mask)
                written.append((i, self.write(i, chunks, departure)))
        except SpillError:
            for _, pieces in written:
                for piece in pieces:
                    self.store.drop(piece)
            raise
        for i, mask in victims.items():
            self._take_out(i, mask)
        self.account()
        for number in range(len(self.domains)):
            if not self.domains[number].is_open and self.domains[number].pending == 0:
                # All of its tuples were in memory until now, so all their results have been emitted.
                self.domains[number].joined_until = departure
        for i, pieces in written:
            self.file_pieces(i, pieces)
            self._metrics.flushed_rows += sum(piece.rows for piece in pieces)
        if self.is_coordinated:
            for mask in victims.values():
                self.spilled |= mask
        self._metrics.flushes += 1

    def _copy_out_gone(self, victims: Iterable[int]) -> None:
        """Leave out what was purged of inputs that are about to be flushed."""
        for i in victims:
            for place, chunk in enumerate(self.memory[i]):
                if chunk.gone_count:
                    self.work.resize(min(chunk.nbytes, self.limits.work))
                    self.memory[i][place] = self.part_of(chunk, ~chunk.is_gone())
                    self.work.resize(0)
        self.account()

    def flush_direct(self) -> None:
        """Write the tuples that were waiting in memory to be written together."""
        everything = np.ones(self.spec.partitions, np.bool_)
        for i in range(len(self.direct)):
            if self.direct[i]:
                pieces = self.write(i, self._pieces_of(self.direct[i], everything), DIRECT)
                for chunk in self.direct[i]:
                    self.count_direct(chunk, -1)
                self.direct[i] = []
                self.account()
                self.file_pieces(i, pieces)
        self._metrics.flushes += 1

    def _choose_victims(self, wanted_bytes: int) -> dict[int, BoolArray]:
        """Partitions to flush: the same for all inputs in turn (coordinated), or any of any input (random)."""
        partitions, count = self.spec.partitions, len(self.memory)
        sizes = np.zeros((count, partitions))
        for i, chunks in enumerate(self.memory):
            for chunk in chunks:
                sizes[i] += np.diff(chunk.partition_offsets(partitions)) * (chunk.nbytes / max(1, len(chunk)))
        victims = np.zeros((count, partitions), np.bool_)
        if self.is_coordinated:
            order = np.flatnonzero(sizes.sum(axis=0))
            needed = int(np.searchsorted(np.cumsum(sizes.sum(axis=0)[order]), wanted_bytes)) + 1
            victims[:, order[:needed]] = True
        else:
            candidates = np.flatnonzero(sizes)
            # Depends only on the spec and the number of flushes: a replay makes the same choice.
            order = np.random.default_rng([self.spec.seed, self.stamp]).permutation(candidates)
            needed = int(np.searchsorted(np.cumsum(sizes.ravel()[order]), wanted_bytes)) + 1
            victims.ravel()[order[:needed]] = True
        return {i: victims[i] for i in range(count) if (victims[i] & (sizes[i] > 0)).any()}

    def _pieces_of(self, chunks: Sequence[Chunk], mask: BoolArray) -> Iterator[Chunk]:
        """The rows of some partitions, as pieces of one partition and bounded size."""
        limit = self.piece_limit_bytes
        offsets = [chunk.partition_offsets(self.spec.partitions) for chunk in chunks]
        for partition in np.flatnonzero(mask).tolist():
            parts: list[tuple[Tuples, bool]] = []
            held = 0.0
            for chunk, bounds in zip(chunks, offsets, strict=True):
                row_bytes = chunk.nbytes / max(1, len(chunk))
                step = max(1, int(limit / row_bytes))
                for start in range(int(bounds[partition]), int(bounds[partition + 1]), step):
                    part = _rows_of(chunk, start, min(start + step, int(bounds[partition + 1])))
                    size = len(part.arrivals) * row_bytes
                    if parts and held + size > limit:
                        yield self._piece(parts)
                        parts, held = [], 0.0
                    parts.append((part, chunk.is_timed))
                    held += size
            if parts:
                yield self._piece(parts)

    def _piece(self, parts: Sequence[tuple[Tuples, bool]]) -> Chunk:
        if len(parts) == 1:
            tuples, is_timed = parts[0]
            return Chunk.of_ordered(self.next_serial(), tuples, self.spec.partitions, is_timed=is_timed)
        return Chunk.build(self.next_serial(), concatenated([tuples for tuples, _ in parts]), self.spec.partitions)

    def write(self, i: int, chunks: Iterable[Chunk], departure: int) -> list[Piece]:
        """Write chunks, each of one partition, to the spill directory."""
        self.work.resize(self.limits.work // 2)
        try:
            pieces, size = self.store.write(i, chunks, departure)
        finally:
            self.work.resize(0)
        self._metrics.spilled_bytes += size
        return pieces

    def file_pieces(self, i: int, pieces: Iterable[Piece]) -> None:
        """Add pieces to their domains."""
        for piece in pieces:
            self.domains[piece.partition if self.spec.is_star else 0].pieces[i].append(piece)
            self._done_bytes.grow(piece.resident_bytes)

    def _take_out(self, i: int, mask: BoolArray) -> None:
        kept = []
        for chunk in self.memory[i]:
            stays = np.repeat(~mask, np.diff(chunk.partition_offsets(self.spec.partitions)))
            if stays.all():
                kept.append(chunk)
            elif stays.any():
                self.work.resize(min(chunk.nbytes, self.limits.work))
                kept.append(self.part_of(chunk, stays))
                self.work.resize(0)
        self.memory[i] = kept


def _rows_of(chunk: Chunk, start: int, stop: int) -> Tuples:
    """A range of a chunk's rows, without copying anything but the done bits."""
    tuples = chunk.tuples
    low = None if tuples.low is None else tuples.low[start:stop]
    high = low if tuples.high is tuples.low else None if tuples.high is None else tuples.high[start:stop]
    return Tuples(
        tuples.rows.slice(start, stop - start),
        tuple(codes[start:stop] for codes in tuples.codes),
        tuples.arrivals[start:stop],
        low,
        high,
        None if tuples.done is None else tuples.done[start:stop],
    )
