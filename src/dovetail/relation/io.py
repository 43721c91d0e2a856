"""I/O modes of a reader: memory-mapped, through the page cache, bypassing it, or at the speed of a declared disk.

``map`` is for production: the page cache of the operating system is shared by every worker on a host. ``buffered`` and
``direct`` copy into a block buffer owned by the reader. ``direct`` bypasses the page cache, so a benchmark on a machine
with much memory measures the disk. :class:`SimulatedDisk` charges every access to a disk of declared bandwidth and seek
time, because modern disks hide the effects that the papers measured.
"""

import mmap
import os
import time
from typing import Literal, Protocol

import pyarrow as pa

from dovetail.core.errors import PlanError, RelationCorrupt
from dovetail.kernels.pages import PAGE_BYTES

# Larger direct reads are slower: at twice this size, reading takes a third longer per byte, as all pages are pinned.
_MAX_READ_BYTES = 4 * 2**20

IoMode = Literal["map", "buffered", "direct"]


class Disk(Protocol):
    """Receives every access and may delay it."""

    def access(self, file: str, offset: int, length: int) -> None:
        """Account for reading ``length`` bytes of ``file`` at ``offset``."""


class SimulatedDisk:
    """A disk of declared bandwidth and seek time: a token bucket that every access passes through.

    An access that continues where the last one ended costs only its bytes; any other also costs a seek.

    Parameters
    ----------
    bandwidth_bytes_per_s
        Sequential bandwidth.
    seek_s
        Time of one seek.
    virtual
        Do not sleep; only add the time to ``elapsed_s``, for a benchmark to add to its own clock.

    Examples
    --------
    >>> disk = SimulatedDisk(bandwidth_bytes_per_s=60e6, seek_s=0.008, virtual=True)
    >>> disk.access("f", 0, 6_000_000)
    >>> disk.access("f", 6_000_000, 6_000_000)
    >>> round(disk.elapsed_s, 3), disk.reads, disk.seeks, disk.bytes
    (0.208, 2, 1, 12000000)
    """

    def __init__(self, bandwidth_bytes_per_s: float, seek_s: float, virtual: bool = False) -> None:
        if not bandwidth_bytes_per_s > 0 or not seek_s >= 0:
            raise PlanError(
                f"A disk of {bandwidth_bytes_per_s} bytes/s and {seek_s} s per seek is not possible: the bandwidth "
                "must be above zero and the seek time at least zero."
            )
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.seek_s = seek_s
        self.virtual = virtual
        self.elapsed_s = 0.0
        self.reads = 0
        self.seeks = 0
        self.bytes = 0
        self._head: tuple[str, int] | None = None
        self._free_at = 0.0

    def access(self, file: str, offset: int, length: int) -> None:
        """Account for a read, and wait until the declared disk would have completed it."""
        cost = length / self.bandwidth_bytes_per_s
        if self._head != (file, offset):
            cost += self.seek_s
            self.seeks += 1
        self._head = (file, offset + length)
        self.reads += 1
        self.bytes += length
        self.elapsed_s += cost
        if not self.virtual:
            self._wait(cost)

    def _wait(self, cost: float) -> None:
        # No bursts: unused time is lost. Time owed is carried over, so that sleeps shorter than the clock's resolution
        # add up.
        now = time.monotonic()
        self._free_at = max(self._free_at, now - 0.001) + cost
        if self._free_at > now:
            time.sleep(self._free_at - now)


class Arena:
    """A reusable, page-aligned block buffer: new pages for every block would cost more than the copy."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._used = 0

    def reset(self) -> None:
        """Invalidate everything handed out; one chunk is kept for the next block."""
        if len(self._chunks) > 1:
            total = sum(len(chunk) for chunk in self._chunks)
            self._chunks = [mmap.mmap(-1, total)]
        self._used = 0

    def take(self, length: int) -> memoryview:
        """Return the next ``length`` bytes, page-aligned, valid until :meth:`reset`."""
        length = max(PAGE_BYTES, -(-length // PAGE_BYTES) * PAGE_BYTES)
        if not self._chunks or self._used + length > len(self._chunks[-1]):
            self._chunks.append(mmap.mmap(-1, length))
            self._used = 0
        start, self._used = self._used, self._used + length
        return memoryview(self._chunks[-1])[start : self._used]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(len(chunk) for chunk in self._chunks)


class PreadFile:
    """Reads ranges of one file into an arena, through the page cache or bypassing it."""

    def __init__(self, path: str, arena: Arena, direct: bool) -> None:
        flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
        try:
            self._fd = os.open(path, flags)
        except OSError as error:
            if direct:
                raise PlanError(
                    f'io="direct" does not work for {path}: {error.strerror}. Use io="buffered", or a disk whose file '
                    "system supports O_DIRECT."
                ) from None
            raise
        self._path = path
        self.arena = arena
        self._align = PAGE_BYTES if direct else 1

    def read(self, offset: int, length: int) -> pa.Buffer:
        """Read bytes ``[offset, offset + length)`` of the file."""
        start = offset // self._align * self._align
        room = self.arena.take(offset + length - start)
        stop = -(-(offset + length) // self._align) * self._align
        at = start
        while at < offset + length:
            piece = min(stop, at + _MAX_READ_BYTES)
            got = os.preadv(self._fd, [room[at - start : piece - start]], at)
            if got == 0:
                raise RelationCorrupt(f"{self._path} ends before byte {offset + length}: it is truncated.")
            at += got
        return pa.py_buffer(room)[offset - start : offset - start + length]

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)
