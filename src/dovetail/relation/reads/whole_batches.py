"""Reading whole record batches past the page cache, ahead of the caller.

Where many pages of a record batch are wanted, reading it in one piece is cheaper than asking for pages: the device
works at full speed, no page has to be found room for and mapped, and nothing that others have in memory is replaced.
"""

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.core.errors import PlanError
from dovetail.core.waiting import seconds_ready
from dovetail.kernels.pages import PAGE_BYTES
from dovetail.relation.io import Arena, PreadFile
from dovetail.relation.reads.paged_file import PagedFile

__all__ = ["BUFFERS", "WholeBatches"]

BUFFERS = 3  # one is used while the others are read

_THREADS: dict[int, ThreadPoolExecutor] = {}  # per process: a forked one does not inherit threads


class WholeBatches:
    """Reads record batches of one segment into a few buffers in turn.

    `offsets` are where the batches begin, and where the last one ends, in a file of `file_bytes`.
    """

    def __init__(
        self, file: PagedFile, offsets: Int64Array, file_bytes: int, schema: pa.Schema, columns: Sequence[int]
    ) -> None:
        self._file, self._offsets, self._file_bytes = file, offsets, file_bytes
        self._schema, self._columns = schema, list(columns)
        self._buffers: list[PreadFile] | None = None
        self._free_at_s = 0.0  # when the read before was there

    @property
    def held_bytes(self) -> int:
        """The bytes of the buffers."""
        return BUFFERS * (int(np.diff(self._offsets).max(initial=0)) + 2 * PAGE_BYTES)

    def pays(self, numbers: Int64Array, rows: int) -> bool:
        """Whether these record batches are better read whole, for so many rows that are spread over them."""
        if not self._file.ahead.is_on:
            return False
        pages = float((self._offsets[numbers + 1] - self._offsets[numbers]).sum()) / PAGE_BYTES
        wanted = -pages * math.expm1(-rows / max(1.0, pages))
        absent = self._file.absent_share()
        return absent > 0.0 and self._file.costs.prefers_pass(absent * wanted, pages) and self._open()

    def read(self, numbers: Int64Array) -> Iterator[pa.RecordBatch]:
        """The record batches with these numbers, verified; each is valid until the next is taken."""
        starts = self._offsets[numbers] // PAGE_BYTES * PAGE_BYTES
        stops = np.minimum(-(-self._offsets[numbers + 1] // PAGE_BYTES) * PAGE_BYTES, self._file_bytes)
        copies = self._read_stretches(list(zip(starts.tolist(), (stops - starts).tolist(), strict=True)))
        for number, copy in zip(numbers.tolist(), copies, strict=True):
            begin, end = int(self._offsets[number]), int(self._offsets[number + 1])
            message = pa.ipc.read_message(copy.slice(begin % PAGE_BYTES, end - begin))
            yield pa.ipc.read_record_batch(message, self._schema).select(self._columns)

    def _open(self) -> bool:
        """Whether the file can be read past the page cache: not all file systems do, and it may have been vacuumed."""
        if self._buffers is None:
            try:
                self._buffers = [PreadFile(self._file.path, Arena(), direct=True) for _ in range(BUFFERS)]
            except (PlanError, OSError):
                self._buffers = []
        return bool(self._buffers)

    def _read_stretches(self, stretches: Sequence[tuple[int, int]]) -> Iterator[pa.Buffer]:
        """The bytes ``[offset, offset + length)`` of each stretch of whole pages, verified."""
        threads = _THREADS.setdefault(os.getpid(), ThreadPoolExecutor(BUFFERS - 1, "dovetail-read"))
        under_way: deque[Future[pa.Buffer]] = deque()
        waiting = iter(enumerate(stretches))

        def submit() -> None:
            for number, (offset, length) in itertools.islice(waiting, 1):
                under_way.append(threads.submit(self._read, number, offset, length))

        try:
            for _ in range(BUFFERS - 1):
                submit()
            for offset, _ in stretches:
                data = under_way.popleft().result()
                submit()
                self._file.verify_copy(data, offset)
                yield data
        finally:
            for read in under_way:
                read.exception()  # it writes to a buffer that the next pass uses

    def _read(self, number: int, offset: int, length: int) -> pa.Buffer:
        """In a reading thread: whole pages, as they are on the device."""
        assert self._buffers
        buffer = self._buffers[number % BUFFERS]
        buffer.arena.reset()
        began_s, ready_s = time.perf_counter(), seconds_ready()
        try:
            data = buffer.read(offset, length)
        except OSError as error:
            raise self._file.unreadable(offset // PAGE_BYTES) from error
        # The device works on several reads: this one has it to itself only since the one before was there.
        done_s = time.perf_counter()
        since_s, self._free_at_s = max(began_s, self._free_at_s), done_s
        self._file.costs.note_pass(length / PAGE_BYTES, done_s - since_s - (seconds_ready() - ready_s))
        return data
