"""Punctuations that came as a stream of their own, and wait for the data's watermark to pass their time.

Such a stream has no order relative to the data: a punctuation of some moment may be there before rows of that moment.
It takes effect once the watermark has passed it, when rows of up to that moment are late.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["DeferredRows"]

_TIME = "__at"
_PREFIX = "deferred-"


class DeferredRows:
    """Values of columns of each input that are closed at a moment to come."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, tuple[str, ...]], pa.RecordBatch] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all that waits."""
        return sum(int(batch.get_total_buffer_size()) for batch in self._waiting.values())

    def add(self, i: int, rows: pa.RecordBatch, times: npt.NDArray[np.int64]) -> None:
        """Let the values of rows wait until the watermark has passed a time each."""
        batch = rows.append_column(_TIME, pa.array(times))
        held = self._waiting.get((i, tuple(rows.schema.names)))
        # A copy: a slice would keep the whole of what it was cut from.
        parts = [batch.slice(0, 0), batch] if held is None else [held, batch]
        self._waiting[i, tuple(rows.schema.names)] = pa.concat_batches(parts)

    def due(self, watermark: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows whose time the watermark has passed, by input; they no longer wait."""
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
        """Give up the latest until so many bytes are left; gives how many."""
        forgotten = 0
        for (i, columns), batch in list(self._waiting.items()):
            if int(batch.get_total_buffer_size()) > limit_bytes // max(2, len(self._waiting)):
                kept = batch.num_rows // 2
                order = pc.sort_indices(batch, sort_keys=[(_TIME, "ascending")]).slice(0, kept)
                forgotten += batch.num_rows - kept
                self._keep(i, columns, batch.take(order))
        return forgotten

    def tables(self) -> dict[str, pa.Table]:
        """What waits, to be stored."""
        return {
            f"{_PREFIX}{i}-{number}": pa.Table.from_batches([batch])
            for number, ((i, _), batch) in enumerate(self._waiting.items())
        }

    def restore(self, tables: Mapping[str, pa.Table]) -> None:
        """Take over what `tables` gave."""
        self._waiting = {}
        for name, table in tables.items():
            if name.startswith(_PREFIX):
                i = int(name.removeprefix(_PREFIX).split("-")[0])
                columns = tuple(column for column in table.column_names if column != _TIME)
                self._waiting[i, columns] = table.combine_chunks().to_batches()[0]
