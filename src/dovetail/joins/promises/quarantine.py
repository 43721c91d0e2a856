"""Rows that broke a promise, until they are fetched."""

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from dovetail.core.errors import BudgetError
from dovetail.core.memory import Reservation

__all__ = ["REASON_COLUMN", "Quarantine"]

REASON_COLUMN = "__reason"
"""The column with the reason why a quarantined row was not joined."""


class Quarantine:
    """Rows of all inputs with the reason for their quarantine, within a part of the budget."""

    def __init__(self, reservation: Reservation, limit_bytes: int) -> None:
        self._reservation = reservation
        self._limit_bytes = limit_bytes
        self._held: list[tuple[str, pa.RecordBatch]] = []

    def require_room(self, size: int) -> None:
        """Raise if more rows might not fit beside the waiting ones."""
        if self._held and self._reservation.held_bytes + 2 * size > self._limit_bytes:
            raise BudgetError(
                f"{self._reservation.held_bytes} bytes of quarantined tuples wait to be fetched.",
                hint="Call take_quarantined after each offer.",
            )

    def put(
        self, name: str, rows: pa.RecordBatch, reason: str, give: Callable[[str, pa.RecordBatch], None] | None
    ) -> None:
        """Quarantine rows of an input, or pass them to `give` if set."""
        batch = rows.append_column(REASON_COLUMN, pa.repeat(pa.scalar(reason), rows.num_rows))
        if give is not None:
            give(name, batch)
            return
        self._reservation.grow(int(batch.get_total_buffer_size()))
        self._held.append((name, batch))

    def take(self) -> list[tuple[str, pa.RecordBatch]]:
        """Remove and return all rows, by input."""
        held, self._held = self._held, []
        self._reservation.resize(0)
        return held

    def as_state(self) -> tuple[list[str], dict[str, pa.Table]]:
        tables = {f"quarantined-{n}": pa.Table.from_batches([batch]) for n, (_, batch) in enumerate(self._held)}
        return [name for name, _ in self._held], tables

    def restore(self, names: Sequence[str], tables: Mapping[str, pa.Table]) -> None:
        self._held = [
            (name, tables[f"quarantined-{n}"].combine_chunks().to_batches()[0]) for n, name in enumerate(names)
        ]
        self._reservation.resize(sum(int(batch.get_total_buffer_size()) for _, batch in self._held))
