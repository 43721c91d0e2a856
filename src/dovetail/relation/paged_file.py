"""A mapped file whose pages are read many at a time and verified one by one.

Whoever is about to touch pages calls `PagedFile.need` with all of them. If the file's pages were lately not in memory,
they are asked for together, and waited for in a way that reports a page that cannot be read (the file was truncated, or
the device failed) as an error; touching such a page is a SIGBUS, which ends the process. While pages are in memory,
asking costs more than it gains, so it stops when the device has nothing to read, and starts again with page faults that
wait for the device. A new reader begins by asking.

Pages are compared with their checksums once per host, see `dovetail.storage.verified`.
"""

import resource
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array, UInt8Array, UInt32Array
from dovetail.core.errors import RelationCorrupt
from dovetail.kernels.pages import (
    PAGE_BYTES,
    Pages,
    ask_for_pages,
    check_pages,
    is_readable,
    populate_pages,
    read_around_faults,
)

__all__ = ["PagedFile", "ReadAhead", "pages_of_bytes", "pages_read_ahead"]

_PAGE_BLOCKS = PAGE_BYTES // 512  # ru_inblock counts blocks of 512 bytes
_PAGES_TO_START = 256  # touched, before faults are judged
_PAGES_TO_STOP = 8_192  # asked for, before that is judged: some are asked for twice, and then are in memory
_WAITING_SHARE = 0.01  # of the pages, from which on asking pays

_read_ahead = 0


def pages_read_ahead() -> int:
    """The pages that this process has asked for and that a device had to read."""
    return _read_ahead


def pages_of_bytes(start: int, stop: int) -> Pages:
    """The pages of bytes ``[start, stop)``, of which there is at least one."""
    return np.array([start // PAGE_BYTES]), np.array([(stop - 1) // PAGE_BYTES])


class ReadAhead:
    """Whether to ask for pages before they are touched, judged by what the device had to read."""

    def __init__(self) -> None:
        self.is_on = True
        self._pages = self._waited = 0
        self._faults_before: int | None = None

    def begin(self, pages: int) -> None:
        """Before pages are touched: judge the faults since the last time."""
        if not self.is_on:
            faults = _usage().ru_majflt
            if self._faults_before is not None:
                self._waited += faults - self._faults_before
                self._judge(_PAGES_TO_START)
            self._faults_before = None if self.is_on else faults
            self._pages += 0 if self.is_on else pages

    def asked(self, pages: int, read: int) -> None:
        """After pages were asked for, of which a device had to read some."""
        self._pages += pages
        self._waited += read
        self._judge(_PAGES_TO_STOP)

    def _judge(self, least_pages: int) -> None:
        if self._pages >= least_pages:
            self.is_on = self._waited >= _WAITING_SHARE * self._pages
            self._pages = self._waited = 0


class PagedFile:
    """One mapped file; `content` are the bytes that its checksums cover, `sums` None if it has none."""

    def __init__(
        self,
        path: str,
        data: pa.Buffer,
        content: tuple[int, int],
        sums: UInt32Array | None = None,
        marks: UInt8Array | None = None,
    ) -> None:
        self.path, self.data = path, data
        self._words = np.frombuffer(data, np.dtype("<u8"), count=data.size // 8)
        self._content = content[0] // 8, content[1] // 8
        self._sums = sums
        # The checksums are pages of the index's file, which can be truncated as well.
        self._last_sum_address: int | None = None
        if sums is not None and sums.size:
            self._last_sum_address = (sums.ctypes.data + sums.nbytes - 1) // PAGE_BYTES * PAGE_BYTES
        self._marks = np.zeros(-(-data.size // PAGE_BYTES), np.uint8) if marks is None else marks
        self._last_address = data.address + (self.pages - 1) * PAGE_BYTES
        # Data of a simulated disk is in memory, anywhere.
        self._is_mapped = data.size > 0 and data.address % PAGE_BYTES == 0
        self._is_verified = False
        self._reads_around = True
        self.ahead = ReadAhead()

    @property
    def pages(self) -> int:
        """The number of pages."""
        return int(self._marks.size)

    @property
    def has_sums(self) -> bool:
        """Whether pages can be verified one by one."""
        return self._sums is not None

    def is_verified(self, start: int, stop: int) -> bool:
        """Whether all pages of bytes ``[start, stop)`` are verified."""
        return bool(self._marks[start // PAGE_BYTES : (stop - 1) // PAGE_BYTES + 1].all())

    def must_prepare(self, pages: int) -> bool:
        """Whether `need` has to be called before pages are touched, about this many; to be asked every time."""
        if not self._is_verified and self._sums is not None:
            self._is_verified = bool(self._marks.all())
        is_verified = self._is_verified or self._sums is None
        self.ahead.begin(pages)
        return not is_verified or (self._is_mapped and self.ahead.is_on)

    def need(self, pages: Pages) -> None:
        """Read and verify pages before they are touched; raises `RelationCorrupt` if that is not possible."""
        count = int((pages[1] - pages[0]).sum()) + pages[0].size
        if self._is_mapped and count and self.ahead.is_on:
            self._read_around(False)
            self._read(pages, count)
        self._check(pages)

    def verify(self, pages: Pages) -> None:
        """Verify pages, reading them as they are touched: for long ranges, which the kernel reads ahead itself."""
        self._check(pages)

    def begin_scan(self) -> None:
        """Before a range is read in one piece: the file must be whole, and faults read around them again."""
        self.require_whole()
        self._read_around(True)

    def _check(self, pages: Pages) -> None:
        if self._sums is None or self._is_verified:
            return
        if self._last_sum_address is not None and not is_readable(self._last_sum_address):
            raise RelationCorrupt(
                f"The index of {self.path} was truncated while it was open. Restore the file from a copy, or build the "
                "relation again."
            )
        damaged = check_pages(self._words, self._content, self._sums, self._marks, pages)
        if damaged >= 0:
            start = damaged * PAGE_BYTES
            raise RelationCorrupt(
                f"{self.path} does not match its digest in the page from byte {start}: the file was damaged after it "
                "was written. Restore the file from a copy, or build the relation again."
            )

    def require_whole(self) -> None:
        """Refuse a file that was truncated after it was mapped, before it is touched; `need` and `verify` do not."""
        if self._is_mapped and not is_readable(self._last_address):
            raise self._unreadable(self.pages - 1)

    def _read_around(self, reads_around: bool) -> None:
        """Whether a fault reads the pages around it: good for scans, and megabytes for nothing in lookups."""
        if self._is_mapped and reads_around != self._reads_around:
            self._reads_around = reads_around
            read_around_faults(self.data.address, self.data.size, reads_around)

    def _read(self, pages: Pages, count: int) -> None:
        global _read_ahead
        before = _usage().ru_inblock
        ask_for_pages(self.data.address, pages)
        failed = populate_pages(self.data.address, pages)
        read = min(count, (_usage().ru_inblock - before) // _PAGE_BLOCKS)
        _read_ahead += read
        self.ahead.asked(count, read)
        if failed >= 0:
            raise self._unreadable(int(pages[0][failed]))

    def _unreadable(self, page: int) -> RelationCorrupt:
        return RelationCorrupt(
            f"{self.path} cannot be read at byte {page * PAGE_BYTES}: the file was truncated while it was open, or the "
            "disk reports an error. Check the disk, and restore the file from a copy or build the relation again."
        )


def chunks(offsets: Int64Array, most_rows: int) -> Iterator[tuple[int, int]]:
    """Cut groups with these row offsets into runs of at most that many rows, or of one group: pairs (first, stop)."""
    first, groups = 0, offsets.size - 1
    while first < groups:
        stop = int(np.searchsorted(offsets, offsets[first] + most_rows, side="right")) - 1
        stop = min(groups, max(first + 1, stop))
        yield first, stop
        first = stop


def _usage() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_THREAD)
