"""Punctuations that came as a stream of their own, and wait for the data's watermark to pass their time.

Such a stream has no order relative to the data: a punctuation of some moment may be there before rows of that moment.
It takes effect once the watermark has passed it, when rows of up to that moment are late.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.operators.metadata.keys import KeyReader

__all__ = ["DeferredRows"]

_TIME = "__at"


class DeferredRows:
    """Join values of each input that are closed at a moment to come."""

    def __init__(self, readers: Sequence[KeyReader]) -> None:
        self._readers = readers
        self._waiting: list[pa.RecordBatch | None] = [None] * len(readers)

    @property
    def nbytes(self) -> int:
        """Bytes of all that waits."""
        return sum(int(batch.get_total_buffer_size()) for batch in self._waiting if batch is not None)

    def add(self, i: int, rows: pa.RecordBatch, times: npt.NDArray[np.int64]) -> None:
        """Let join values wait until the watermark has passed a time each."""
        batch = rows.select(list(self._readers[i].columns)).append_column(_TIME, pa.array(times))
        held = self._waiting[i]
        # A copy: a slice would keep the whole of what it was cut from.
        self._waiting[i] = pa.concat_batches([batch.slice(0, 0), batch] if held is None else [held, batch])

    def due(self, watermark: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The join values whose time the watermark has passed, by input; they no longer wait."""
        for i, batch in enumerate(self._waiting):
            if batch is None:
                continue
            is_due = pc.less(batch.column(_TIME), watermark)
            if pc.any(is_due).as_py():
                rest = batch.filter(pc.invert(is_due))
                self._waiting[i] = rest if rest.num_rows else None
                yield i, batch.filter(is_due).select(list(self._readers[i].columns))

    def forget(self, limit_bytes: int) -> int:
        """Give up the latest until so many bytes are left; gives how many."""
        forgotten = 0
        for i, batch in enumerate(self._waiting):
            if batch is not None and int(batch.get_total_buffer_size()) > limit_bytes // len(self._waiting):
                kept = batch.num_rows // 2
                order = pc.sort_indices(batch, sort_keys=[(_TIME, "ascending")]).slice(0, kept)
                forgotten += batch.num_rows - kept
                self._waiting[i] = batch.take(order) if kept else None
        return forgotten

    def tables(self) -> dict[str, pa.Table]:
        """What waits, to be stored."""
        return {
            f"deferred-{i}": pa.Table.from_batches([batch])
            for i, batch in enumerate(self._waiting)
            if batch is not None
        }

    def restore(self, tables: dict[str, pa.Table]) -> None:
        """Take over what `tables` gave."""
        for i in range(len(self._waiting)):
            table = tables.get(f"deferred-{i}")
            self._waiting[i] = None if table is None else table.combine_chunks().to_batches()[0]
