"""Punctuations from a separate stream, which wait for the data's watermark to pass their time.

Such a stream is not ordered relative to the data: a punctuation may arrive before rows of its own time. It takes effect
once the watermark has passed it, when rows up to that time are late.
"""

from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import Int64Array

__all__ = ["DeferredRows"]

_TIME = "__at"
_PREFIX = "deferred-"


class DeferredRows:
    """Column values per input that will be closed at a later event time."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, tuple[str, ...]], pa.RecordBatch] = {}

    @property
    def nbytes(self) -> int:
        return sum(int(batch.get_total_buffer_size()) for batch in self._waiting.values())

    def add(self, i: int, rows: pa.RecordBatch, times: Int64Array) -> None:
        """Defer the values of rows until the watermark has passed the time of each."""
        batch = rows.append_column(_TIME, pa.array(times))
        held = self._waiting.get((i, tuple(rows.schema.names)))
        # A copy: a slice would keep its whole batch alive.
        parts = [batch.slice(0, 0), batch] if held is None else [held, batch]
        self._waiting[i, tuple(rows.schema.names)] = pa.concat_batches(parts)

    def due(self, watermark: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Remove and return the rows whose time the watermark has passed, by input."""
        for (i, columns), batch in list(self._waiting.items()):
            is_due = pc.less(batch.column(_TIME), watermark)
            if pc.any(is_due).as_py():
                self._keep(i, columns, batch.filter(pc.invert(is_due)))
                yield i, batch.filter(is_due).select(list(columns))

    def _keep(self, i: int, columns: tuple[str, ...], rows: pa.RecordBatch) -> None:
        self._waiting.pop((i, columns))
        if rows.num_rows:
            self._waiting[i, columns] = rows

    def forget(self, limit_bytes: int) -> int:
        """Drop the latest rows until at most `limit_bytes` remain; returns how many were dropped."""
        forgotten = 0
        for (i, columns), batch in list(self._waiting.items()):
            if int(batch.get_total_buffer_size()) > limit_bytes // max(2, len(self._waiting)):
                kept = batch.num_rows // 2
                order = pc.sort_indices(batch, sort_keys=[(_TIME, "ascending")]).slice(0, kept)
                forgotten += batch.num_rows - kept
                self._keep(i, columns, batch.take(order))
        return forgotten

    def tables(self) -> dict[str, pa.Table]:
        """The deferred rows, for storage."""
        return {
            f"{_PREFIX}{i}-{number}": pa.Table.from_batches([batch])
            for number, ((i, _), batch) in enumerate(self._waiting.items())
        }

    def restore(self, tables: Mapping[str, pa.Table]) -> None:
        """The inverse of `tables`."""
        self._waiting = {}
        for name, table in tables.items():
            if name.startswith(_PREFIX):
                i = int(name.removeprefix(_PREFIX).split("-")[0])
                columns = tuple(column for column in table.column_names if column != _TIME)
                self._waiting[i, columns] = table.combine_chunks().to_batches()[0]
