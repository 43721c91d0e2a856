"""Times reads of a scratch file."""

import contextlib
import errno
import math
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dovetail.kernels.pages import PAGE_BYTES

_SMALL_BLOCK = 64 * 1024
_LARGE_BLOCK = 4 * 1024 * 1024
_DEPTHS = (1, 2, 4, 8, 16, 32, 64)
_MOST_READS_PER_DEPTH = 2_000
_ROUNDS = 3


@dataclass(frozen=True)
class DiskTimes:
    """The cost of a read: a call, a seek unless it continues the last read, and the transfer."""

    seek_s: float
    bandwidth_bytes_per_s: float
    read_call_s: float
    is_direct: bool
    # Seconds per random read of a page, by the number of reads that are under way together.
    page_read_s: tuple[tuple[float, float], ...] = ((1.0, 0.0),)


def measure_disk(directory: Path, size_bytes: int, *, bypass_page_cache: bool, reads: int) -> DiskTimes:
    """Time sequential reads in small and large blocks, random reads in small ones, and of pages at depths 1 to 64.

    The page cache is bypassed by direct I/O if the file system supports it; otherwise (memory file systems) the file's
    pages are dropped before each pass.
    """
    size_bytes = max(size_bytes // _LARGE_BLOCK, 2) * _LARGE_BLOCK
    with _scratch_file(directory, size_bytes) as path:
        descriptor, is_direct = _open(path, bypass_page_cache)
        try:
            drops_pages = bypass_page_cache and not is_direct
            # Direct reads need an aligned buffer, such as an anonymous mapping.
            with mmap.mmap(-1, _LARGE_BLOCK) as buffer:
                generator = np.random.Generator(np.random.PCG64(1))
                small_offsets = np.arange(0, size_bytes, _SMALL_BLOCK)[:reads]
                large_offsets = np.arange(0, size_bytes, _LARGE_BLOCK)[:reads]
                random_offsets = generator.permutation(np.arange(0, size_bytes, _SMALL_BLOCK))[:reads]
                times = [
                    _seconds_per_read(descriptor, buffer, block, offsets, drops_pages=drops_pages)
                    for block, offsets in (
                        (_SMALL_BLOCK, small_offsets),
                        (_LARGE_BLOCK, large_offsets),
                        (_SMALL_BLOCK, random_offsets),
                    )
                ]
            page_read_s = _page_reads(descriptor, size_bytes, 8 * reads, drops_pages=drops_pages)
        finally:
            os.close(descriptor)
    small_s, large_s, random_s = times
    # Two block sizes, two unknowns. On a loaded machine the times may be inconsistent; neither unknown may become
    # negative.
    bandwidth = max((_LARGE_BLOCK - _SMALL_BLOCK) / max(large_s - small_s, 1e-9), _LARGE_BLOCK / large_s)
    return DiskTimes(
        seek_s=max(0.0, random_s - small_s),
        bandwidth_bytes_per_s=bandwidth,
        read_call_s=max(0.0, small_s - _SMALL_BLOCK / bandwidth),
        is_direct=is_direct,
        page_read_s=page_read_s,
    )


@contextlib.contextmanager
def _scratch_file(directory: Path, size_bytes: int) -> Iterator[Path]:
    descriptor, name = tempfile.mkstemp(prefix="dovetail-calibration-", dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # Not zeros: some devices and file systems do not store them.
            block = np.random.Generator(np.random.PCG64(0)).bytes(_LARGE_BLOCK)
            for _ in range(size_bytes // _LARGE_BLOCK):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        os.unlink(name)


def _open(path: Path, bypass_page_cache: bool) -> tuple[int, bool]:
    if bypass_page_cache and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, os.O_RDONLY), False


def _page_reads(descriptor: int, size_bytes: int, reads: int, *, drops_pages: bool) -> tuple[tuple[float, float], ...]:
    """Random reads of pages by n threads, so that n reads are under way together."""
    taken = []
    for depth in _DEPTHS:
        count = min(_MOST_READS_PER_DEPTH, reads * min(depth, 8) // 8)
        offsets = np.random.default_rng(depth).integers(0, size_bytes // PAGE_BYTES, max(count, depth)) * PAGE_BYTES
        if drops_pages and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

        def read(part: list[int]) -> None:
            with mmap.mmap(-1, PAGE_BYTES) as buffer, memoryview(buffer) as target:
                for offset in part:
                    os.preadv(descriptor, [target], offset)

        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(read, [[0]] * depth))  # starts the threads
            best_s = math.inf  # of a few: on a loaded machine threads wait for a processor, not for the device
            for _ in range(_ROUNDS):
                started = time.perf_counter()
                list(pool.map(read, [offsets[number::depth].tolist() for number in range(depth)]))
                best_s = min(best_s, time.perf_counter() - started)
            taken.append((float(depth), best_s / offsets.size))
    return tuple(taken)


def _seconds_per_read(
    descriptor: int, buffer: mmap.mmap, block_bytes: int, offsets: np.ndarray, *, drops_pages: bool
) -> float:
    if drops_pages and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    target = memoryview(buffer)[:block_bytes]
    taken = []
    try:
        for offset in offsets.tolist():
            started = time.perf_counter()
            os.preadv(descriptor, [target], offset)
            taken.append(time.perf_counter() - started)
    finally:
        target.release()
    return statistics.median(taken)
