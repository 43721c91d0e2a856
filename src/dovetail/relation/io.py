"""How a reader gets bytes: mapped, read through the page cache, read past it, or at the speed of a declared disk.

``map`` is for production: the operating system's page cache is shared by every worker of a host. ``buffered`` and
``direct`` copy into a block buffer of the reader's own; ``direct`` goes past the page cache, so that a measurement on a
machine with much memory is about the disk. :class:`SimulatedDisk` charges every access to a disk of declared bandwidth
and seek time: today's disks hide the effects that the papers measured.
"""

import mmap
import os
import time
from typing import Literal, Protocol

import pyarrow as pa

from dovetail.errors import PlanError, RelationCorrupt

PAGE_BYTES = 4096
# One read past the page cache of twice as much takes a third longer per byte here: its pages are pinned all at once.
_MAX_READ_BYTES = 4 * 2**20

IoMode = Literal["map", "buffered", "direct"]


class Disk(Protocol):
    """Something that is told about every access and may make it take time."""

    def access(self, file: str, offset: int, length: int) -> None:
        """Account for reading ``length`` bytes of ``file`` at ``offset``."""


class SimulatedDisk:
    """A disk of declared bandwidth and seek time: a token bucket that every access must pass.

    An access that continues where the last one ended pays for its bytes only; any other pays a seek as well.

    Parameters
    ----------
    bandwidth_bytes_per_s
        Sequential bandwidth.
    seek_s
        Time to move to another place.
    virtual
        Do not sleep: only add the time to ``elapsed_s``. A measurement then adds it to its own clock.

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
                f"a disk of {bandwidth_bytes_per_s} bytes/s and {seek_s} s per seek cannot be: the bandwidth must be "
                "above zero and the seek time not below it."
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
        """Account for a read, and wait until the declared disk would have delivered it."""
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
        # The bucket holds no burst: time not used is lost, time owed is carried over, so that the many sleeps that
        # are shorter than the clock's resolution still add up.
        now = time.monotonic()
        self._free_at = max(self._free_at, now - 0.001) + cost
        if self._free_at > now:
            time.sleep(self._free_at - now)


class Arena:
    """A reusable, page-aligned block buffer: fresh pages for every block would cost more than the copy."""

    def __init__(self) -> None:
        self._chunks: list[mmap.mmap] = []
        self._used = 0

    def reset(self) -> None:
        """Forget what was handed out; one chunk is kept for the next block."""
        if len(self._chunks) > 1:
            total = sum(len(chunk) for chunk in self._chunks)
            self._chunks = [mmap.mmap(-1, total)]
        self._used = 0

    def take(self, length: int) -> memoryview:
        """The next ``length`` bytes, page-aligned, valid until :meth:`reset`."""
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
    """Reads ranges of one file into an arena, through the page cache or past it."""

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
        self._arena = arena
        self._align = PAGE_BYTES if direct else 1

    def read(self, offset: int, length: int) -> pa.Buffer:
        """Bytes ``[offset, offset + length)`` of the file."""
        start = offset // self._align * self._align
        room = self._arena.take(offset + length - start)
        stop = -(-(offset + length) // self._align) * self._align
        at = start
        while at < offset + length:
            piece = min(stop, at + _MAX_READ_BYTES)
            got = os.preadv(self._fd, [room[at - start : piece - start]], at)
            if got == 0:
                raise RelationCorrupt(f"{self._path} ends before byte {offset + length}: it was cut short.")
            at += got
        return pa.py_buffer(room)[offset - start : offset - start + length]

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)
