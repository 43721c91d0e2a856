"""Results that wait for their turn if ``ordered=True``.

Every offered tuple has a *ticket*, its number in the stream. Results are held with their tuple's ticket, and released
up to and including the ticket of the oldest waiting tuple: nothing can come before them any more.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import Int64Array

__all__ = ["HeldResults", "Ready"]


@dataclass
class _Piece:
    """Results in ticket order; the first ``start`` were released, but not their memory."""

    batch: pa.RecordBatch
    tickets: Int64Array
    is_pinned: bool
    start: int = 0
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.nbytes = int(self.batch.nbytes) + self.tickets.nbytes

    @property
    def waiting(self) -> Int64Array:
        return self.tickets[self.start :]


class Ready(NamedTuple):
    """Rows whose turn has come, in order, and how many of each piece they are."""

    batch: pa.RecordBatch
    counts: list[int]


class HeldResults:
    """Output rows held back until everything before them has been emitted."""

    def __init__(self) -> None:
        self._pieces: list[_Piece] = []

    @property
    def num_rows(self) -> int:
        return sum(piece.waiting.size for piece in self._pieces)

    @property
    def nbytes(self) -> int:
        """Bytes held; released rows count until their piece is dropped or compacted."""
        return sum(piece.nbytes for piece in self._pieces)

    def add(self, batch: pa.RecordBatch, tickets: Int64Array, is_pinned: bool = False) -> None:
        """Hold rows. Pinned rows belong to tuples that no longer wait, and cannot be discarded."""
        if batch.num_rows == 0:
            return
        if tickets.size > 1 and bool((np.diff(tickets) < 0).any()):
            order = np.argsort(tickets, kind="stable")
            batch, tickets = batch.take(pa.array(order)), tickets[order]
        self._pieces.append(_Piece(batch, tickets, is_pinned))

    def has_ready(self, up_to: int | None) -> bool:
        """Whether a row has a ticket of at most ``up_to`` (None: any)."""
        return any(up_to is None or int(piece.waiting[0]) <= up_to for piece in self._pieces)

    def next_ready(self, up_to: int | None, max_rows: int, max_bytes: int = 2**63 - 1) -> Ready | None:
        """The next rows with a ticket of at most ``up_to`` (None: any), in order; None if there are none.

        At most ``max_rows``, and at most ``max_bytes`` unless a single row has more. They stay until `let_go`.
        """
        ready = [
            piece.waiting.size if up_to is None else int(np.searchsorted(piece.waiting, up_to, side="right"))
            for piece in self._pieces
        ]
        if sum(ready) == 0:
            return None
        while True:
            counts = self._first_rows(ready, max_rows) if sum(ready) > max_rows else ready
            rows = self._rows_in_order(counts)
            if rows.nbytes <= max_bytes or rows.num_rows == 1:
                return Ready(rows, counts)
            max_rows = rows.num_rows // 2

    def let_go(self, ready: Ready) -> None:
        """Remove rows returned by `next_ready`; nothing may have been added or removed since."""
        for piece, count in zip(self._pieces, ready.counts, strict=True):
            piece.start += count
        self._pieces = [piece for piece in self._pieces if piece.waiting.size]

    def first_ticket(self) -> int | None:
        """The lowest ticket of all rows; None if there are none."""
        return min((int(piece.waiting[0]) for piece in self._pieces), default=None)

    def _rows_in_order(self, counts: list[int]) -> pa.RecordBatch:
        """The first rows of each piece, as many as given, in ticket order."""
        batches, tickets = [], []
        for piece, count in zip(self._pieces, counts, strict=True):
            if count:
                batches.append(piece.batch.slice(piece.start, count))
                tickets.append(piece.waiting[:count])
        if len(batches) == 1:
            # Already in order; and if there is room for only one row, it needs no copy.
            return batches[0]
        order = np.argsort(np.concatenate(tickets), kind="stable")
        return pa.concat_batches(batches).take(pa.array(order))

    def _first_rows(self, ready: list[int], max_rows: int) -> list[int]:
        """How many rows of each piece belong to the ``max_rows`` with the lowest tickets."""
        tickets = [piece.waiting[:count] for piece, count in zip(self._pieces, ready, strict=True)]
        last = np.partition(np.concatenate(tickets), max_rows - 1)[max_rows - 1]
        counts = [int(np.searchsorted(mine, last, side="left")) for mine in tickets]
        left = max_rows - sum(counts)
        for number, mine in enumerate(tickets):
            equal = min(left, int(np.searchsorted(mine, last, side="right")) - counts[number])
            counts[number] += equal
            left -= equal
        return counts

    def compact(self) -> None:
        """Free the memory of released rows by copying the others."""
        for number, piece in enumerate(self._pieces):
            if piece.start:
                kept = pa.array(np.arange(piece.start, piece.tickets.size))
                self._pieces[number] = _Piece(piece.batch.take(kept), piece.waiting.copy(), piece.is_pinned)

    def middle_ticket(self) -> int | None:
        """The median ticket of the rows that may be discarded; None if there are none."""
        tickets = [piece.waiting for piece in self._pieces if not piece.is_pinned]
        return int(np.median(np.concatenate(tickets))) if tickets else None

    def discard_after(self, ticket: int) -> None:
        """Drop all rows that are not pinned and have a higher ticket."""
        kept: list[_Piece] = []
        for piece in self._pieces:
            stop = int(np.searchsorted(piece.tickets, ticket, side="right"))
            if piece.is_pinned or stop == piece.tickets.size:
                kept.append(piece)
            elif stop > piece.start:
                rows = pa.array(np.arange(piece.start, stop))
                kept.append(_Piece(piece.batch.take(rows), piece.tickets[piece.start : stop].copy(), False))
        self._pieces = kept

    def to_table(self, schema: pa.Schema) -> pa.Table:
        """All rows held, with ``__ticket`` and ``__pinned``, for a snapshot."""
        batches = [piece.batch.slice(piece.start) for piece in self._pieces]
        rows = pa.Table.from_batches(batches, schema)
        tickets = [piece.waiting for piece in self._pieces]
        pinned = [np.full(piece.waiting.size, piece.is_pinned) for piece in self._pieces]
        rows = rows.append_column("__ticket", pa.array(np.concatenate(tickets) if tickets else [], pa.int64()))
        return rows.append_column("__pinned", pa.array(np.concatenate(pinned) if pinned else [], pa.bool_()))

    @classmethod
    def from_table(cls, table: pa.Table) -> "HeldResults":
        """The inverse of `to_table`."""
        held = cls()
        for is_pinned in (True, False):
            rows = table.filter(table.column("__pinned") if is_pinned else pc.invert(table.column("__pinned")))
            tickets = rows.column("__ticket").combine_chunks().to_numpy()
            for batch in rows.drop_columns(["__ticket", "__pinned"]).combine_chunks().to_batches():
                held.add(batch, np.asarray(tickets, np.int64), is_pinned)
        return held
