"""One tuple that is emitted in several batches, because it has more matches than one batch holds.

Lookups answer tuples at once, so nothing waits. The exception is a tuple with more matches than fit a batch: if the
iterator is abandoned in between, the next call continues with it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.core.memory import Reservation
from dovetail.joins.output.columns import BatchRows, record_batch
from dovetail.joins.phases.admission import Offered
from dovetail.joins.state import JoinState
from dovetail.joins.window.tuple_store import copy_of
from dovetail.relation.widths import widest_row

__all__ = ["Alone"]

Candidates = Callable[[int], Iterator[pa.RecordBatch]]


@dataclass
class _Tuple:
    row: pa.RecordBatch  # a copy
    code: int
    arrival: int  # tuples accepted before it
    done: int = 0  # matches emitted


class Alone:
    """The tuple that is being emitted in several batches, if any.

    `candidates` returns the relation rows of a code in pieces that fit the budget, the same ones every time.
    """

    def __init__(self, state: JoinState, candidates: Candidates, account: Reservation) -> None:
        self.state, self._candidates, self._account = state, candidates, account
        self._tuple: _Tuple | None = None

    @property
    def pending(self) -> int:
        """1 if a tuple is partly emitted, else 0."""
        return int(self._tuple is not None)

    @property
    def oldest(self) -> int | None:
        """How many tuples were accepted before it."""
        return None if self._tuple is None else self._tuple.arrival

    @property
    def nbytes(self) -> int:
        return 0 if self._tuple is None else int(self._tuple.row.nbytes)

    def emit(self, part: Offered, row: int, count_in: Callable[[Offered, bool], None]) -> Iterator[pa.RecordBatch]:
        """Emit one row of a part, piece by piece; `count_in` counts it as accepted, matched or not."""
        state, how = self.state, self.state.spec.how
        one, code = part.part(row, row + 1), int(part.codes[row])
        side = BatchRows(one.rows)
        # The condition may raise, so it is evaluated completely before anything is emitted.
        matches = sum(self._verified(side, piece).size for piece in self._candidates(code))
        if how in ("inner", "left") and matches:
            columns = [copy_of(column) for column in one.rows.columns]
            alone = _Tuple(record_batch(columns, one.rows.schema, 1), code, state.arrivals)
            self._account.resize(int(alone.row.nbytes))
            self._tuple = alone
            state.arrivals += 1
            state.metrics.stream_tuples_in += 1
            yield from self.finish()
            return
        if (how == "semi" and matches) or (how in ("left", "anti") and not matches):
            batch = state.results.plan.unmatched(side, np.zeros(1, np.int64))
            size_bytes = state.results.bytes_of(batch)
            state.results.reserve(size_bytes)
            count_in(one, matches > 0)
            yield from state.results.hand_out(batch, size_bytes)
            return
        count_in(one, matches > 0)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Emit the rest of the tuple."""
        alone = self._tuple
        if alone is None:
            return
        side, seen = BatchRows(alone.row), 0
        for piece in self._candidates(alone.code):
            rows = self._verified(side, piece)
            first, seen = max(0, alone.done - seen), seen + rows.size
            if first >= rows.size:
                continue
            before = seen - rows.size

            def note(done: int, start: int = before + first) -> None:
                alone.done = start + done

            owners = np.zeros(rows.size - first, np.int64)
            tickets = owners + alone.arrival
            widest = widest_row(piece) + int(alone.row.nbytes)
            yield from self.state.results.give_pairs(side, owners, piece, rows[first:], tickets, note, widest)
        self.state.metrics.matched_tuples += 1
        self._tuple = None
        self._account.resize(0)

    def _verified(self, side: BatchRows, candidates: pa.RecordBatch) -> Int64Array:
        """Which candidates match the row."""
        rows, plan = np.arange(candidates.num_rows), self.state.results.plan
        if not plan.verifies:
            return rows
        return np.flatnonzero(plan.verify(side, np.zeros(rows.size, np.int64), candidates, rows))

    def save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        """Its part of a snapshot."""
        alone = self._tuple
        if alone is None:
            return {}, {"alone": None}
        values = {"code": alone.code, "arrival": alone.arrival, "done": alone.done}
        return {"alone": pa.Table.from_batches([alone.row])}, {"alone": values}

    def load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        """Continue from what `save` returned; an error changes nothing."""
        saved, alone = values["alone"], None
        if saved is not None:
            (row,) = tables["alone"].combine_chunks().to_batches()
            names = self.state.stream_columns.names
            alone = _Tuple(row.select(names), saved["code"], saved["arrival"], saved["done"])
        self._account.resize(0 if alone is None else int(alone.row.nbytes))
        self._tuple = alone
