"""Pages of mapped files: their checksums, which of them a lookup needs, and asking the kernel for many at once.

A page fault waits for one read. A lookup knows all its pages before it touches the first, so it asks for all of them
(``madvise``): the device then works on as many reads at a time as it can. One call per range of pages is too much for
Python, hence the calls are made by compiled code.

A page's checksum is the lower half of its ``XXH64``. Parts of a file that belong to no page's content count as zeros.
"""

import ctypes
import errno
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from numba import config, njit, types

from dovetail.core.arrays import Int64Array, UInt8Array, UInt32Array
from dovetail.kernels._arrays import as_codes
from dovetail.kernels.sorted_codes import _BLOCK, _advance_to_lower_bounds, _upper_bound
from dovetail.kernels.spark_hash import _P1, _P2, _P4, _avalanche, _rotl, _round

__all__ = [
    "PAGE_BYTES",
    "absent_pages",
    "ask_for_pages",
    "check_pages",
    "drop_pages",
    "find_code_pages",
    "find_row_pages",
    "find_value_pages",
    "is_readable",
    "merge_ranges",
    "page_sums",
    "populate_pages",
    "read_around_faults",
]

PAGE_BYTES = 4096
_PAGE_WORDS = PAGE_BYTES // 8
_ASKED_PAGES = 32  # the kernel may cut a longer request to its read-ahead window, which is 128 KiB by default
_WILL_NEED = getattr(mmap, "MADV_WILLNEED", 3)
_UNMAP = getattr(mmap, "MADV_DONTNEED", 4)
_DROP = getattr(os, "POSIX_FADV_DONTNEED", 4)
_POPULATE_READ = 22  # Linux 5.14: like touching each page, but a failed read is an error and not a SIGBUS
_UNREADABLE = (errno.EFAULT, errno.EIO, 133)  # 133: EHWPOISON, which Python has no name for
_PAGE_BITS = 15  # of a bit's place in a file

_1, _7, _12, _18, _ZERO = (np.uint64(number) for number in (1, 7, 12, 18, 0))
_PAGE_LENGTH = np.uint64(PAGE_BYTES)

Pages = tuple[Int64Array, Int64Array]
"""Ranges of pages: the first and the last of each."""

_LIBRARY = ctypes.CDLL(None, use_errno=True)
_LIBRARY.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_LIBRARY.mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t]
_LIBRARY.posix_fadvise.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
if config.DISABLE_JIT:
    _madvise: Any = _LIBRARY.madvise
    _mincore: Any = _LIBRARY.mincore
    _fadvise: Any = _LIBRARY.posix_fadvise
else:
    # By name, not by address: compiled code that holds an address cannot be kept for the next process.
    _madvise = types.ExternalFunction("madvise", types.int32(types.uint64, types.uint64, types.int32))
    _mincore = types.ExternalFunction("mincore", types.int32(types.uint64, types.uint64, types.uint64))
    _fadvise = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))


# -------------------------------------------------------------------- checksums


@njit(cache=True)
def _sum_page(words: Any, low: Any, high: Any, page: Any) -> Any:
    """XXH64 of a page; words outside ``[low, high)`` count as zeros."""
    start = page * _PAGE_WORDS
    v1, v2, v3, v4 = _P1 + _P2, _P2, _ZERO, _ZERO - _P1
    if low <= start and start + _PAGE_WORDS <= high:
        for at in range(start, start + _PAGE_WORDS, 4):
            v1 = _round(v1, words[at])
            v2 = _round(v2, words[at + 1])
            v3 = _round(v3, words[at + 2])
            v4 = _round(v4, words[at + 3])
    else:
        four = np.zeros(4, np.uint64)
        for at in range(start, start + _PAGE_WORDS, 4):
            for i in range(4):
                four[i] = words[at + i] if low <= at + i < high else _ZERO
            v1, v2, v3, v4 = _round(v1, four[0]), _round(v2, four[1]), _round(v3, four[2]), _round(v4, four[3])
    h = _rotl(v1, _1) + _rotl(v2, _7) + _rotl(v3, _12) + _rotl(v4, _18)
    for v in (v1, v2, v3, v4):
        h = (h ^ _round(_ZERO, v)) * _P1 + _P4
    return _avalanche(h + _PAGE_LENGTH)


def _sum_page_slowly(words: npt.NDArray[np.uint64], low: int, high: int, page: int) -> int:
    """The same without compiled code, where its arithmetic would be a thousand times slower."""
    content = np.zeros(_PAGE_WORDS, "<u8")
    start, stop = max(low, page * _PAGE_WORDS), min(high, (page + 1) * _PAGE_WORDS)
    content[start - page * _PAGE_WORDS : max(start, stop) - page * _PAGE_WORDS] = words[start : max(start, stop)]
    return xxhash.xxh64_intdigest(content.tobytes())


if config.DISABLE_JIT:
    _sum_page = _sum_page_slowly


@njit(cache=True, nogil=True)
def _sum_pages(words: Any, low: Any, high: Any, out_sums: Any) -> None:
    for page in range(out_sums.size):
        out_sums[page] = np.uint32(_sum_page(words, low, high, page) & 0xFFFFFFFF)


@njit(cache=True, nogil=True)
def _check_pages(words: Any, low: Any, high: Any, sums: Any, marks: Any, firsts: Any, lasts: Any) -> Any:
    for i in range(firsts.size):
        for page in range(firsts[i], lasts[i] + 1):
            if marks[page] == 0:
                if np.uint32(_sum_page(words, low, high, page) & 0xFFFFFFFF) != sums[page]:
                    return page
                marks[page] = 1
    return -1


def page_sums(words: npt.NDArray[np.uint64]) -> UInt32Array:
    """The checksum of every page; a last page that is not whole is filled up with zeros.

    >>> page_sums(np.zeros(513, np.uint64)).tolist()
    [853064667, 853064667]
    """
    sums = np.empty(-(-words.size // _PAGE_WORDS), np.uint32)
    _sum_pages(_read_only(words), 0, words.size, sums)
    return sums


def check_pages(
    words: npt.NDArray[np.uint64], content: tuple[int, int], sums: UInt32Array, marks: UInt8Array, pages: Pages
) -> int:
    """Compare pages that are not marked with their checksums, and mark them. Returns the first that differs, or -1.

    `content` are the first word that counts and the one behind the last.
    """
    return int(_check_pages(_read_only(words), *content, _read_only(sums), marks, *pages))


def _read_only(array: Any) -> Any:
    # Arrays that Arrow owns are read-only; a kernel would be compiled a second time for writable ones.
    view = array.view()
    view.flags.writeable = False
    return view


# -------------------------------------------------------------------- asking


@njit(cache=True, nogil=True)
def _advise(address: Any, firsts: Any, lasts: Any, most_pages: Any, advice: Any) -> Any:
    """Returns the first range for which a call failed, or -1."""
    for i in range(firsts.size):
        first = firsts[i]
        while first <= lasts[i]:
            pages = min(most_pages, lasts[i] + 1 - first)
            if _madvise(address + first * PAGE_BYTES, pages * PAGE_BYTES, advice) != 0:
                return i
            first += pages
    return -1


def ask_for_pages(address: int, pages: Pages) -> bool:
    """Start reading pages of a mapping at this address, without waiting; returns whether the kernel agreed."""
    return int(_advise(address, *pages, _ASKED_PAGES, _WILL_NEED)) < 0


def read_around_faults(address: int, size: int, reads_around: bool) -> None:
    """Set whether a page fault in a mapping may read pages around its own; a kernel that refuses goes on as before."""
    _LIBRARY.madvise(address, size, mmap.MADV_NORMAL if reads_around else mmap.MADV_RANDOM)


def is_readable(address: int) -> bool:
    """Whether the page at this address can be read; it is in memory then."""
    if _LIBRARY.madvise(address, PAGE_BYTES, _POPULATE_READ) == 0:
        return True
    # Other reasons, such as a kernel that does not know the advice, say nothing about the page.
    return ctypes.get_errno() not in _UNREADABLE


def populate_pages(address: int, pages: Pages) -> int:
    """Wait for pages and map them. Returns the first range that cannot be read, or -1.

    A range cannot be read if the file ends before it, or if the device reports an error: touching it would be a SIGBUS.
    """
    start = 0
    while True:
        failed = int(_advise(address, pages[0][start:], pages[1][start:], 1 << 30, _POPULATE_READ))
        if failed < 0:
            return -1
        # Only now is the reason worth knowing, and compiled code cannot see it.
        at = start + failed
        first, count = int(pages[0][at]), int(pages[1][at] - pages[0][at]) + 1
        if _LIBRARY.madvise(address + first * PAGE_BYTES, count * PAGE_BYTES, _POPULATE_READ) != 0:
            return at if ctypes.get_errno() in _UNREADABLE else -1
        start = at + 1


# -------------------------------------------------------------------- what is in memory


@njit(cache=True, nogil=True)
def _absent_pages(address: Any, firsts: Any, lasts: Any, is_there: Any, out_first: Any, out_last: Any) -> Any:
    """Returns the number of ranges; if they do not fit, the rest counts as in memory."""
    count = 0
    for i in range(firsts.size):
        first = firsts[i]
        while first <= lasts[i]:
            pages = min(is_there.size, lasts[i] + 1 - first)
            if _mincore(address + first * PAGE_BYTES, pages * PAGE_BYTES, is_there.ctypes.data) != 0:
                return count
            for page in range(first, first + pages):
                if is_there[page - first] & 1:
                    continue
                if count and out_last[count - 1] == page - 1:
                    out_last[count - 1] = page
                elif count == out_first.size:
                    return count
                else:
                    out_first[count] = page
                    out_last[count] = page
                    count += 1
            first += pages
    return count


def absent_pages(address: int, pages: Pages) -> Pages:
    """Which pages of a mapping at this address are not in memory; none if the kernel does not say."""
    most = int((pages[1] - pages[0] + 1).sum())
    first, last = np.empty((2, most // 2 + pages[0].size + 1), np.int64)
    is_there = np.empty(1024, np.uint8)
    count = int(_absent_pages(address, *pages, is_there, first, last))
    return first[:count], last[:count]


@njit(cache=True, nogil=True)
def _drop_pages(descriptor: Any, address: Any, firsts: Any, lasts: Any) -> None:
    for i in range(firsts.size):
        start, size = firsts[i] * PAGE_BYTES, (lasts[i] + 1 - firsts[i]) * PAGE_BYTES
        # Pages that a process has mapped are not dropped, our own included.
        _madvise(address + start, size, _UNMAP)
        _fadvise(descriptor, start, size, _DROP)


def drop_pages(descriptor: int, address: int, pages: Pages) -> None:
    """Remove pages of a file, mapped at this address, from memory; those that other processes have mapped stay."""
    _drop_pages(descriptor, address, *pages)


# -------------------------------------------------------------------- which pages


@njit(cache=True)
def _merge_ranges(firsts: Any, lasts: Any, most_gap: Any, out_first: Any, out_last: Any) -> Any:
    count = 0
    for i in range(firsts.size):
        if count and out_first[count - 1] <= firsts[i] <= out_last[count - 1] + 1 + most_gap:
            out_last[count - 1] = max(lasts[i], out_last[count - 1])
        else:
            out_first[count] = firsts[i]
            out_last[count] = lasts[i]
            count += 1
    return count


def merge_ranges(pages: Pages, most_gap: int) -> Pages:
    """Join ranges that are at most n pages apart, so that one read serves both.

    >>> first, last = merge_ranges((np.array([0, 3, 9]), np.array([0, 4, 9])), 2)
    >>> first.tolist(), last.tolist()
    ([0, 9], [4, 9])
    """
    first, last = np.empty((2, pages[0].size), np.int64)
    count = int(_merge_ranges(*pages, most_gap, first, last))
    return first[:count], last[:count]


@njit(cache=True)
def _add_range(first: Any, last: Any, out_first: Any, out_last: Any, count: Any) -> Any:
    """Add a range, or extend the last one, and return the number of ranges."""
    if count and out_first[count - 1] <= first <= out_last[count - 1] + 1:
        out_last[count - 1] = max(last, out_last[count - 1])
        return count
    out_first[count] = first
    out_last[count] = last
    return count + 1


@njit(cache=True)
def _find_row_pages(
    numbers: Any, offsets: Any, rows: Any, places: Any, strides: Any, lengths: Any, out_first: Any, out_last: Any
) -> Any:
    count = 0
    for group in range(numbers.size):
        for leaf in range(strides.size):
            place = places[numbers[group], leaf]
            if place < 0:
                continue
            for i in range(offsets[group], offsets[group + 1]):
                start = place * 8 + rows[i] * strides[leaf]
                last = (start + lengths[leaf] - 1) >> _PAGE_BITS
                count = _add_range(start >> _PAGE_BITS, last, out_first, out_last, count)
    return count


def find_row_pages(
    groups: tuple[Int64Array, Int64Array],
    rows: Int64Array,
    places: Int64Array,
    strides: Int64Array,
    lengths: Int64Array,
) -> Pages:
    """The pages of elements of fixed length.

    Rows ``rows[offsets[g] : offsets[g + 1]]`` are of batch ``numbers[g]``, for `groups` (numbers, offsets). Buffer b of
    batch n begins at byte ``places[n, b]`` of the file (-1: there is none); its element r has ``lengths[b]`` bits from
    bit ``r * strides[b]``.

    >>> groups, places = (np.array([0]), np.array([0, 2])), np.array([[4096]])
    >>> first, last = find_row_pages(groups, np.array([0, 1024]), places, np.array([64]), np.array([64]))
    >>> first.tolist(), last.tolist()
    ([1, 3], [1, 3])
    """
    first, last = np.empty((2, rows.size * strides.size), np.int64)
    count = int(_find_row_pages(*groups, rows, places, strides, lengths, first, last))
    return first[:count], last[:count]


@njit(cache=True)
def _find_value_pages(
    numbers: Any, offsets: Any, rows: Any, bounds: Any, places: Any, values: Any, out_first: Any, out_last: Any
) -> Any:
    count = 0
    for group in range(numbers.size):
        for leaf in range(places.shape[1]):
            place = values[numbers[group], leaf]
            if place < 0:
                continue
            bound = places[numbers[group], leaf] >> 2
            for i in range(offsets[group], offsets[group + 1]):
                start, stop = np.int64(bounds[bound + rows[i]]), np.int64(bounds[bound + rows[i] + 1])
                if start < stop:
                    first, last = (place + start) // PAGE_BYTES, (place + stop - 1) // PAGE_BYTES
                    count = _add_range(first, last, out_first, out_last, count)
    return count


def find_value_pages(
    groups: tuple[Int64Array, Int64Array],
    rows: Int64Array,
    bounds: npt.NDArray[np.int32],
    places: Int64Array,
    values: Int64Array,
) -> Pages:
    """The pages of values of any length, as `find_row_pages`.

    `bounds` is the whole file; the bounds of buffer b of batch n begin at byte ``places[n, b]``, its values at byte
    ``values[n, b]``. The bounds must have been verified.
    """
    first, last = np.empty((2, rows.size * places.shape[1]), np.int64)
    count = int(_find_value_pages(*groups, rows, _read_only(bounds), places, values, first, last))
    return first[:count], last[:count]


@njit(cache=True)
def _find_code_pages(fences: Any, stride: Any, codes: Any, queries: Any, out_first: Any, out_last: Any) -> Any:
    window = min(stride - 1, codes)
    last_window = codes - window
    bases = np.empty(_BLOCK, dtype=np.int64)
    count = 0
    for start in range(0, queries.size, _BLOCK):
        block = queries[start : start + _BLOCK]
        bases[:] = 0
        _advance_to_lower_bounds(fences, fences.size, block, bases)
        for i in range(block.size):
            fence = bases[i]
            low = min(max(0, (fence - 1) * stride + 1), last_window)
            last = max(low, low + window - 1)
            count = _add_range(low * 8 // PAGE_BYTES, last * 8 // PAGE_BYTES, out_first, out_last, count)
            if fence < fences.size and fences[fence] == block[i]:
                # The code goes on behind one fence or several: it may begin and end there.
                for part in (fence, _upper_bound(fences, fence, fences.size, block[i]) - 1):
                    low, last = part * stride, min((part + 1) * stride, codes) - 1
                    count = _add_range(low * 8 // PAGE_BYTES, last * 8 // PAGE_BYTES, out_first, out_last, count)
    return count


def find_code_pages(fences: Int64Array, stride: int, codes: int, queries: Int64Array) -> Pages:
    """The pages of ascending codes in a file that `lookup_sorted` touches for these queries.

    `codes` is their number; see `lookup_sorted` for the fences.

    >>> codes = np.arange(2048)
    >>> first, last = find_code_pages(codes[::128], 128, codes.size, np.array([5, 1000]))
    >>> first.tolist(), last.tolist()
    ([0], [1])
    """
    first, last = np.empty((2, 3 * queries.size), np.int64)
    if codes == 0:
        return first[:0], last[:0]
    count = int(_find_code_pages(as_codes(fences), stride, codes, as_codes(queries, "Queries"), first, last))
    return first[:count], last[:count]
