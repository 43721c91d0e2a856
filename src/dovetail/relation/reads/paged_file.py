"""A mapped file whose pages are read many at a time and verified one by one.

Whoever is about to touch pages calls `PagedFile.need` with all of them. If the file's pages were lately not in memory,
they are asked for together, and waited for in a way that reports a page that cannot be read (the file was truncated, or
the device failed) as an error; touching such a page is a SIGBUS, which ends the process. While pages are in memory,
asking costs more than it gains, so it stops when the device has nothing to read, and starts again with page faults that
wait for the device. A new reader begins by asking.

Ranges with a gap that is cheaper to read than to leave out are asked for as one (`ReadCosts`), up to one pass over the
file. Long ranges are dropped behind, if the caller wants that: what they brought into memory goes when it was used.

Pages are compared with their checksums once per host, see `dovetail.storage.verified`.
"""

import os
import resource
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.arrays import Int64Array, UInt8Array, UInt32Array
from dovetail.core.errors import RelationCorrupt
from dovetail.core.waiting import seconds_ready
from dovetail.kernels.pages import (
    PAGE_BYTES,
    Pages,
    absent_pages,
    ask_for_pages,
    check_pages,
    drop_pages,
    is_readable,
    merge_ranges,
    populate_pages,
    read_around_faults,
)
from dovetail.relation.reads.read_costs import ReadCosts, read_costs_of

__all__ = ["Asked", "PagedFile", "ReadAhead", "count_read_ahead", "pages_of_bytes", "pages_read_ahead"]

_PAGE_BLOCKS = PAGE_BYTES // 512  # ru_inblock counts blocks of 512 bytes
_PAGES_TO_START = 256  # touched, before faults are judged
_PAGES_TO_STOP = 8_192  # asked for, before that is judged: some are asked for twice, and then are in memory
_WAITING_SHARE = 0.01  # of the pages, from which on asking pays
_LONG_RANGE = 16  # pages, from which on a range counts as part of a scan
_SAMPLED_PAGES = 32  # to find out how much of a file is in memory

_read_ahead = 0


def pages_read_ahead() -> int:
    """The pages that this process has asked for and that a device had to read."""
    return _read_ahead


def count_read_ahead(pages: int) -> None:
    """Count pages that a device was asked for in another way."""
    global _read_ahead
    _read_ahead += pages


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


@dataclass(frozen=True)
class Asked:
    """Pages that were asked for and not yet waited for."""

    pages: Pages
    count: int
    ranges: int  # the reads that they were asked for with
    range_pages: int
    read: int  # of the pages asked for, those that the device had to read
    at_s: float
    new: Pages | None  # those that are to be dropped after use; None: none


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
        self.costs = read_costs_of(path) if self._is_mapped else ReadCosts()
        self._free_at_s = 0.0  # when the device had answered all that this file asked for before
        self._descriptor: int | None = None
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
        self.wait(self.ask(pages))

    def ask(self, pages: Pages, *, drops_behind: bool = False) -> Asked | None:
        """Ask for pages without waiting; `wait` must be called before they are touched, with what this returns.

        With `drops_behind`, `drop` removes what long ranges bring into memory. Pages that were there before stay.
        """
        count = int((pages[1] - pages[0]).sum()) + pages[0].size
        if not (self._is_mapped and count and self.ahead.is_on):
            return Asked(pages, 0, 0, 0, 0, 0.0, None) if count else None
        self._read_around(False)
        ranges = merge_ranges(pages, self.costs.next_gap_pages())
        lengths = ranges[1] - ranges[0] + 1
        new = None
        if drops_behind:
            is_long = lengths >= _LONG_RANGE
            if is_long.any():
                new = absent_pages(self.data.address, (ranges[0][is_long], ranges[1][is_long]))
        began_s, before = _clock(), _usage().ru_inblock
        ask_for_pages(self.data.address, ranges)
        read = (_usage().ru_inblock - before) // _PAGE_BLOCKS
        return Asked(pages, count, lengths.size, int(lengths.sum()), read, began_s, new)

    def wait(self, asked: Asked | None) -> None:
        """Wait for pages and verify them; raises `RelationCorrupt` if one cannot be read."""
        if asked is None:
            return
        if asked.count:
            self._wait(asked)
        self._check(asked.pages)

    def drop(self, asked: Asked | None) -> None:
        """Remove from memory what was read for long ranges and is used."""
        if asked is not None and asked.new is not None and asked.new[0].size:
            self.drop_pages(asked.new)

    def drop_pages(self, pages: Pages) -> None:
        """Remove pages from memory, except those that other processes have mapped."""
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY)
            except OSError:
                return  # vacuumed: its pages go with the last reader
            weakref.finalize(self, os.close, self._descriptor)
        drop_pages(self._descriptor, self.data.address, pages)

    def absent(self, pages: Pages) -> Pages:
        """Which of these pages are not in memory."""
        none = np.empty(0, np.int64), np.empty(0, np.int64)
        return absent_pages(self.data.address, pages) if self._is_mapped else none

    def absent_share(self) -> float:
        """The share of the file that is not in memory, from a sample of its pages."""
        if not self._is_mapped:
            return 0.0
        sample = np.unique(np.linspace(0, self.pages - 1, _SAMPLED_PAGES).astype(np.int64))
        first, last = self.absent((sample, sample))
        return float((last - first + 1).sum()) / sample.size

    def verify(self, pages: Pages) -> None:
        """Verify pages, reading them as they are touched: for long ranges, which the kernel reads ahead itself."""
        self._check(pages)

    def begin_scan(self) -> None:
        """Before a range is read in one piece: the file must be whole, and faults read around them again."""
        self.require_whole()
        self._read_around(True)

    def verify_copy(self, copy: pa.Buffer, start: int) -> None:
        """Verify a copy of the bytes from `start` on, which is the beginning of a page, page by page."""
        first = start // PAGE_BYTES
        words = np.frombuffer(copy, np.dtype("<u8"), count=copy.size // 8)
        self._check(pages_of_bytes(0, copy.size), words, first)

    def _check(self, pages: Pages, words: npt.NDArray[np.uint64] | None = None, first: int = 0) -> None:
        """Verify pages of the mapping, or of `words`, which begin with the page `first`."""
        if self._sums is None or self._is_verified:
            return
        if self._last_sum_address is not None and not is_readable(self._last_sum_address):
            raise RelationCorrupt(
                f"The index of {self.path} was truncated while it was open. Restore the file from a copy, or build the "
                "relation again."
            )
        begin = first * PAGE_BYTES // 8
        content = self._content[0] - begin, self._content[1] - begin
        data = self._words if words is None else words
        damaged = check_pages(data, content, self._sums[first:], self._marks[first:], pages)
        if damaged >= 0:
            start = (first + damaged) * PAGE_BYTES
            raise RelationCorrupt(
                f"{self.path} does not match its digest in the page from byte {start}: the file was damaged after it "
                "was written. Restore the file from a copy, or build the relation again."
            )

    def require_whole(self) -> None:
        """Refuse a file that was truncated after it was mapped, before it is touched; `need` and `verify` do not."""
        if self._is_mapped and not is_readable(self._last_address):
            raise self.unreadable(self.pages - 1)

    def _read_around(self, reads_around: bool) -> None:
        """Whether a fault reads the pages around it: good for scans, and megabytes for nothing in lookups."""
        if self._is_mapped and reads_around != self._reads_around:
            self._reads_around = reads_around
            read_around_faults(self.data.address, self.data.size, reads_around)

    def _wait(self, asked: Asked) -> None:
        waiting_s, before = _clock(), _usage().ru_inblock
        failed = populate_pages(self.data.address, asked.pages)
        done_s = _clock()
        # Some may have left memory again, and were read by the call itself.
        read = asked.read + (_usage().ru_inblock - before) // _PAGE_BLOCKS
        wanted = min(asked.count, read)
        count_read_ahead(wanted)
        self.ahead.asked(asked.count, wanted)
        if failed >= 0:
            raise self.unreadable(int(asked.pages[0][failed]))
        # While this one waited the device was busy; if there was nothing to wait for, it was faster than can be told.
        since_s = max(asked.at_s, self._free_at_s)
        has_waited = done_s - waiting_s > _WAITING_SHARE * (done_s - since_s)
        if has_waited:
            share = min(1.0, read / asked.range_pages)
            self.costs.note(asked.ranges * share, read, done_s - since_s)
        self._free_at_s = done_s

    def unreadable(self, page: int) -> RelationCorrupt:
        """The error for a page that cannot be read."""
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


def _clock() -> float:
    """Seconds without those in which the thread waited for a processor: they say nothing about the device."""
    return time.perf_counter() - seconds_ready()


def _usage() -> resource.struct_rusage:
    return resource.getrusage(resource.RUSAGE_THREAD)
