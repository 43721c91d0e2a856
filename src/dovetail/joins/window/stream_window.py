"""The window: stream tuples that wait for the disk phase (the papers' hash table H_S with its queue Q).

A `MultiMap` holds the tuples by code in order of arrival; a `TupleStore` has their columns at the same ring positions.
So a step is one probe with the block's codes, which returns positions, and one gather at those positions.

Tuples enter in *chunks*. All tuples of a chunk have met the same part of the relation, so a chunk has one `deadline`:
the number of rows the scan has passed when the chunk has met every row once. Chunks with the same deadline are one.
Tuples may also leave from the middle; a chunk counts the remaining ones.
"""

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int32Array, Int64Array, UInt8Array
from dovetail.core.errors import InternalError
from dovetail.joins.window.chunks import Chunk, ChunkQueue
from dovetail.joins.window.tuple_store import Positions, TupleStore, spread
from dovetail.kernels.bits import set_bits
from dovetail.kernels.multimap import DENSE_LOAD, MultiMap, ProbeState

__all__ = ["StreamWindow"]

_MATCHED_BYTES = 1
_MATCHED, _DONE = np.uint8(1), np.uint8(2)
_TICKET_BYTES = 8
_ARROW_SLACK_BYTES = 1024  # padding and headers of small arrays, so that tiny budgets hold
_MANY_CHUNKS = 2**62
_RESIZE_BYTES = 4 + 8
_MOVED_TOGETHER = 256


class StreamWindow:
    """Waiting stream tuples: found by code, gathered by position, leaving by age or from the middle.

    `schema` has the stream's columns without the code. Tickets are arrival numbers, kept for ordered output.
    """

    def __init__(
        self, schema: pa.Schema, capacity: int, has_tickets: bool = False, max_chunks: int = _MANY_CHUNKS
    ) -> None:
        self.schema = schema
        self.has_tickets = has_tickets
        self.index = MultiMap(capacity, DENSE_LOAD)
        self.max_chunks = max_chunks
        self.chunks = ChunkQueue(min(capacity, max_chunks))
        self._store = TupleStore(schema, self.index.ring_size)
        self._is_matched = np.zeros(self.index.ring_size, np.uint8)
        self._tickets = np.zeros(self.index.ring_size if has_tickets else 0, np.int64)

    @classmethod
    def bytes_for(
        cls, schema: pa.Schema, capacity: int, has_tickets: bool = False, max_chunks: int = _MANY_CHUNKS
    ) -> int:
        """The size of an empty window of this capacity, for budgeting."""
        return _bytes_for(_bytes_per_position(schema, has_tickets), capacity, max_chunks)

    @classmethod
    def capacity_within(
        cls,
        schema: pa.Schema,
        size_bytes: int,
        paged_bytes: float,
        has_tickets: bool = False,
        max_chunks: int = _MANY_CHUNKS,
    ) -> int:
        """The largest capacity whose window fits if each tuple has this many paged bytes; 0 if none does."""
        per_position = _bytes_per_position(schema, has_tickets)
        low, high = 0, max(1, size_bytes // 16)
        while low < high:
            middle = (low + high + 1) // 2
            if _bytes_for(per_position, middle, max_chunks) + int(middle * paged_bytes) <= size_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def __len__(self) -> int:
        return len(self.index)

    @property
    def capacity(self) -> int:
        return self.index.capacity

    @property
    def nbytes(self) -> int:
        held = self.index.nbytes + self._store.nbytes + self._is_matched.nbytes + self._tickets.nbytes
        return held + self.chunks.nbytes + _ARROW_SLACK_BYTES

    def nbytes_at(self, capacity: int, max_chunks: int) -> int:
        """The size after `resize`."""
        max_chunks = max(max_chunks, len(self.chunks))
        paged_bytes = self.nbytes - self.chunks.nbytes - self.bytes_for(self.schema, self.capacity, self.has_tickets, 0)
        paged_bytes += ChunkQueue.BYTES_PER_CHUNK
        return paged_bytes + self.bytes_for(self.schema, capacity, self.has_tickets, max_chunks)

    @property
    def widest(self) -> int:
        """Upper bound of the bytes of a tuple."""
        return self._store.widest

    @property
    def widest_gathered(self) -> int:
        """Upper bound of the bytes a tuple takes while it is gathered."""
        return self._store.widest_gathered

    @property
    def reclaimable_bytes(self) -> int:
        """The approximate bytes of tuples that have left."""
        return self._store.reclaimable_bytes

    def paged_bytes_of(self, batch: pa.RecordBatch) -> int:
        """How much inserting this batch would add."""
        return self._store.paged_bytes_of(batch)

    # ---------------------------------------------------------------- entering

    def insert(
        self,
        codes: Int64Array,
        batch: pa.RecordBatch,
        arrival: int,
        deadline: int,
        tickets: Int64Array | None = None,
        is_matched: UInt8Array | None = None,
    ) -> None:
        """Add tuples; the caller has checked that there is room.

        `arrival` is how many tuples were offered before the first of them; `is_matched` are the flags of tuples of a
        snapshot.
        """
        if codes.size == 0:
            return
        seqs = self.index.insert(codes)
        positions = self._places_of(seqs)
        self._store.write(positions, batch)
        self._is_matched[positions] = 0 if is_matched is None else is_matched
        if tickets is not None:
            self._tickets[positions] = tickets
        if len(self.chunks) and self.chunks.newest.deadline == deadline:
            self.chunks.extend_newest(int(seqs[-1]), codes.size)
        else:
            self.chunks.append(Chunk(int(seqs[-1]), codes.size, arrival, deadline))

    def _places_of(self, seqs: Int64Array) -> Int64Array | slice:
        """The positions of tuples just numbered; a slice if they are consecutive: copying beats scattering."""
        start = int(seqs[0]) % self.index.ring_size
        is_dense = int(seqs[-1]) - int(seqs[0]) == seqs.size - 1
        if is_dense and start + seqs.size <= self.index.ring_size:
            return slice(start, start + seqs.size)
        return self.index.positions_of(seqs)

    # ---------------------------------------------------------------- reading

    def probe(
        self, codes: Int64Array, state: ProbeState | None, max_pairs: int
    ) -> tuple[Int32Array, Positions, ProbeState | None]:
        """The next pairs (row of ``codes``, position) of equal codes: by row, then the oldest tuple first."""
        rows, positions, state = self.index.probe_positions_limited(codes, state, max_pairs)
        # Several columns are gathered at these positions, and numpy would convert them each time.
        return rows, positions.astype(np.int64), state

    def gather(self, positions: Positions, columns: list[int]) -> list[pa.Array]:
        """Columns of the tuples at the positions, in that order."""
        return self._store.gather(positions, columns)

    def live_positions(self) -> Int64Array:
        """Positions of all waiting tuples, the oldest first."""
        return self.index.positions_of(self.index.live_seqs())

    def codes_at(self, positions: Positions) -> Int64Array:
        return self.index.codes_of(self.index.seqs_at(np.asarray(positions, np.int64)))

    def codes_left_at(self, positions: Positions) -> Int64Array:
        """The codes of tuples that have just left, until the next insertion."""
        return self.index.codes_left_at(np.asarray(positions, np.int64))

    def deadlines_at(self, positions: Positions) -> Int64Array:
        return self.chunks.deadlines_of(self.index.seqs_at(np.asarray(positions, np.int64)))

    def tickets_at(self, positions: Positions) -> Int64Array:
        """The arrival numbers of tuples."""
        return self._tickets[positions]

    def is_matched_at(self, positions: Positions) -> BoolArray:
        return np.asarray(self._is_matched[positions] & _MATCHED != 0, np.bool_)

    def mark_matched(self, positions: Positions) -> None:
        set_bits(self._is_matched, positions, _MATCHED)

    def is_done_at(self, positions: Positions) -> BoolArray:
        """Whether tuples have met all their rows and only wait for their turn."""
        return np.asarray(self._is_matched[positions] & _DONE != 0, np.bool_)

    def mark_done(self, positions: Positions) -> None:
        set_bits(self._is_matched, positions, _DONE)

    def clear_matches(self) -> None:
        """Clear all match flags, for joins in which matched tuples leave."""
        self._is_matched[:] = 0

    @property
    def oldest_ticket(self) -> int | None:
        """The arrival number of the oldest waiting tuple."""
        oldest = self.index.oldest
        return None if oldest is None else int(self._tickets[oldest[0] % self.index.ring_size])

    # ---------------------------------------------------------------- leaving
    # Removed tuples can no longer be found, but can be gathered until `forget`, which must precede the next insertion.

    def oldest_positions(self, count: int) -> Int64Array:
        """Positions of the ``count`` oldest tuples, or of all if there are fewer."""
        return self.index.positions_of(self.index.oldest_seqs(count))

    def take_oldest(self, count: int) -> Int64Array:
        """Remove the ``count`` oldest tuples, or all if there are fewer; returns their positions."""
        seqs = self.index.remove_oldest(count)
        self.chunks.count_out_oldest(seqs.size)
        return self.index.positions_of(seqs)

    def take(self, positions: Positions) -> None:
        """Remove tuples from the middle; no position twice."""
        if positions.size == 0:
            return
        seqs = self.index.seqs_at(np.asarray(positions, np.int64))
        removed = self.index.remove_seqs(seqs)
        if removed != positions.size:
            raise InternalError(f"{positions.size} tuples were to leave the window, {removed} did.")
        self.chunks.count_out(seqs)

    def take_codes(self, codes: Int64Array) -> Int64Array:
        """Remove all tuples of these codes; returns their positions."""
        seqs = self.index.remove_codes(codes)
        self.chunks.count_out(seqs)
        return self.index.positions_of(seqs)

    def forget(self, positions: Positions) -> None:
        """Free the memory of removed tuples at these positions."""
        self._store.release(positions)

    # ---------------------------------------------------------------- care

    def tidy(self, free_bytes: int) -> None:
        """Merge pages and drop data of removed tuples, as far as there is room to copy."""
        if self._store.merge_bytes() <= free_bytes:
            self._store.tidy()
        if self._store.reclaimable_bytes > self.nbytes // 8 and self._store.nbytes <= free_bytes:
            self._store.reclaim(self.live_positions())

    def restart_after(self, ticket: int, deadline: int) -> int:
        """Restart all tuples that arrived after ``ticket``: unmatched, with another deadline; returns how many."""
        seqs = self.index.live_seqs()
        positions = self.index.positions_of(seqs)
        younger = self._tickets[positions] > ticket
        count = int(np.count_nonzero(younger))
        if count == 0:
            return 0
        self._is_matched[positions[younger]] = 0
        arrival = int(self._tickets[positions[younger][0]])
        self.chunks.count_out(seqs[younger])
        if len(self.chunks):
            self.chunks.end_newest_at(int(seqs[~younger][-1]))
        self.chunks.append(Chunk(int(seqs[-1]), count, arrival, deadline))
        return count

    def resize(self, capacity: int, max_chunks: int | None = None) -> None:
        """Change the capacity, one column at a time: `resize_bytes` more are held for a moment."""
        seqs = self.index.live_seqs()
        np.remainder(seqs, self.index.ring_size, out=seqs)
        positions = seqs.astype(np.int32)
        del seqs
        codes = self.index.codes_left_at(positions)
        self.index = MultiMap(1, DENSE_LOAD)  # frees the old one before the new one is built
        self.index = MultiMap(capacity, DENSE_LOAD)
        for start in range(0, codes.size, _MOVED_TOGETHER):
            self.index.insert(codes[start : start + _MOVED_TOGETHER])
        del codes
        ring_size = self.index.ring_size
        self._store.move(positions, ring_size)
        self._is_matched = spread(self._is_matched[positions], ring_size)
        if self.has_tickets:
            self._tickets = spread(self._tickets[positions], ring_size)
        self.max_chunks = self.max_chunks if max_chunks is None else max_chunks
        self.chunks = self.chunks.renumbered(min(capacity, self.max_chunks))

    @property
    def resize_bytes(self) -> int:
        """Temporary bytes that `resize` needs: positions, and codes or a column."""
        return _RESIZE_BYTES * len(self) + 8 * _MOVED_TOGETHER

    @staticmethod
    def resizable_within(free_bytes: int) -> int:
        """How many tuples may wait for `resize` to need no more than this."""
        return max(0, free_bytes - 8 * _MOVED_TOGETHER) // _RESIZE_BYTES

    # ---------------------------------------------------------------- saving

    def to_table(self) -> pa.Table:
        """All waiting tuples, the oldest first: their columns, then ``__code``, ``__matched`` and ``__ticket``."""
        positions = self.live_positions()
        columns = self.gather(positions, list(range(len(self.schema))))
        extra = {
            "__code": pa.array(self.codes_at(positions), pa.int64()),
            "__matched": pa.array(self._is_matched[positions], pa.uint8()),
        }
        if self.has_tickets:
            extra["__ticket"] = pa.array(self._tickets[positions], pa.int64())
        return pa.Table.from_arrays([*columns, *extra.values()], names=[*self.schema.names, *extra])

    def fill_from_table(self, table: pa.Table, chunks: list[tuple[int, int, int]]) -> None:
        """The inverse of `to_table`, in chunks of (tuples, first arrival, deadline)."""
        start = 0
        for count, first_arrival, deadline in chunks:
            rows = table.slice(start, count).combine_chunks()
            start += count
            if rows.num_rows != count:
                raise InternalError("The chunks of a snapshot do not add up to its window.")
            batch = pa.RecordBatch.from_arrays(
                [flat(rows.column(name)) for name in self.schema.names], schema=self.schema
            )
            self.insert(
                flat(rows.column("__code")).to_numpy(),
                batch,
                first_arrival,
                deadline,
                flat(rows.column("__ticket")).to_numpy() if self.has_tickets else None,
                flat(rows.column("__matched")).to_numpy(),
            )


def _bytes_per_position(schema: pa.Schema, has_tickets: bool) -> int:
    return TupleStore.fixed_bytes_per_position(schema) + _MATCHED_BYTES + (_TICKET_BYTES if has_tickets else 0)


def _bytes_for(bytes_per_position: int, capacity: int, max_chunks: int) -> int:
    of_chunks = ChunkQueue.BYTES_PER_CHUNK * max(1, min(capacity, max_chunks))
    of_tuples = MultiMap.nbytes_of(capacity, DENSE_LOAD) + bytes_per_position * MultiMap.ring_size_of(capacity)
    return of_tuples + of_chunks + _ARROW_SLACK_BYTES


def flat(column: pa.ChunkedArray) -> pa.Array:
    """A chunked column as one array."""
    combined = column.combine_chunks()
    if not isinstance(combined, pa.ChunkedArray):
        return combined
    return combined.chunk(0) if combined.num_chunks else pa.array([], combined.type)
