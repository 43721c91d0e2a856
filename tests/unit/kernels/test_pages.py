"""Pages of mapped files: checksums against the xxhash library, needed pages against what plain Python touches."""

import mmap
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from dovetail.kernels.pages import (
    PAGE_BYTES,
    Pages,
    absent_pages,
    ask_for_pages,
    check_pages,
    drop_pages,
    find_code_pages,
    find_row_pages,
    find_value_pages,
    merge_ranges,
    page_sums,
    populate_pages,
)
from dovetail.kernels.sorted_codes import lookup_sorted, make_fences

SEED = 31


def naive_sum(page: bytes) -> int:
    return xxhash.xxh64_intdigest(page.ljust(PAGE_BYTES, b"\0")) & 0xFFFFFFFF


def pages_in(ranges: tuple[np.ndarray, np.ndarray]) -> set[int]:
    return {page for first, last in zip(*ranges, strict=True) for page in range(first, last + 1)}


# -------------------------------------------------------------------- checksums


@pytest.mark.parametrize("words", [0, 1, 3, 511, 512, 513, 2_000])
def test_sums_are_those_of_the_library(words: int) -> None:
    data = np.random.default_rng(SEED).integers(0, 2**63, words).astype(np.uint64)
    raw = data.tobytes()
    expected = [naive_sum(raw[at : at + PAGE_BYTES]) for at in range(0, len(raw), PAGE_BYTES)]
    assert page_sums(data).tolist() == expected


def test_flipped_bit_is_found_in_its_page_and_pages_before_it_are_marked() -> None:
    data = np.random.default_rng(SEED).integers(0, 2**63, 4 * 512).astype(np.uint64)
    sums, marks = page_sums(data), np.zeros(4, np.uint8)
    data[2 * 512 + 7] ^= np.uint64(1 << 40)
    everything = np.array([0]), np.array([3])
    assert check_pages(data, (0, data.size), sums, marks, everything) == 2
    assert marks.tolist() == [1, 1, 0, 0]
    assert check_pages(data, (0, data.size), sums, marks, (np.array([3, 0]), np.array([3, 1]))) == -1
    assert marks.tolist() == [1, 1, 0, 1]


def test_page_that_is_marked_is_not_looked_at() -> None:
    sums = page_sums(np.zeros(512, np.uint64))
    other = np.ones(512, np.uint64)
    assert check_pages(other, (0, 512), sums, np.ones(1, np.uint8), (np.array([0]), np.array([0]))) == -1


def test_words_outside_of_the_content_count_as_zeros() -> None:
    whole = np.arange(1, 1025, dtype=np.uint64)
    content = whole.copy()
    content[:10] = 0
    content[1000:] = 0
    marks = np.zeros(2, np.uint8)
    assert check_pages(whole, (10, 1000), page_sums(content), marks, (np.array([0]), np.array([1]))) == -1


# -------------------------------------------------------------------- which pages


def test_pages_of_rows_are_those_of_their_bits() -> None:
    random = np.random.default_rng(SEED)
    places = np.array([[64, -1, 40_000], [90_000, 131_072, 200_000]])
    strides, lengths = np.array([1, 32, 64]), np.array([1, 64, 64])
    numbers, offsets = np.array([0, 1]), np.array([0, 50, 90])
    rows = np.concatenate([np.sort(random.integers(0, 4_000, 50)), np.sort(random.integers(0, 4_000, 40))])
    expected = {
        (places[number, leaf] * 8 + row * strides[leaf] + bit) // (8 * PAGE_BYTES)
        for number, low, high in ((0, 0, 50), (1, 50, 90))
        for row in rows[low:high].tolist()
        for leaf in range(3)
        if places[number, leaf] >= 0
        for bit in range(lengths[leaf])
    }
    assert pages_in(find_row_pages((numbers, offsets), rows, places, strides, lengths)) == expected


def test_neighbours_are_one_range() -> None:
    groups, rows = (np.array([0]), np.array([0, 1_024])), np.arange(1_024)
    first, last = find_row_pages(groups, rows, np.array([[0]]), np.array([64]), np.array([64]))
    assert (first.tolist(), last.tolist()) == ([0], [1])


def test_pages_of_values_are_those_between_their_bounds() -> None:
    random = np.random.default_rng(SEED)
    lengths = random.integers(0, 9_000, 100)
    lengths[random.random(100) < 0.3] = 0
    file = np.zeros(2_000, np.int32)
    file[500:601] = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.sort(random.choice(100, 30, replace=False))
    expected = {
        (70_001 + byte) // PAGE_BYTES for row in rows.tolist() for byte in range(file[500 + row], file[500 + row + 1])
    }
    groups = np.array([0]), np.array([0, 30])
    assert pages_in(find_value_pages(groups, rows, file, np.array([[2_000]]), np.array([[70_001]]))) == expected
    assert pages_in(find_value_pages(groups, rows, file, np.array([[2_000]]), np.array([[-1]]))) == set()


@pytest.mark.parametrize("stride", [128, 16])
@pytest.mark.parametrize("most_equal", [1, 3, 700])
@pytest.mark.parametrize("size", [1, 100, 128, 129, 2_000, 6_000])
def test_lookup_touches_only_the_pages_found_for_it(size: int, most_equal: int, stride: int) -> None:
    """All other pages are filled with nonsense: if a lookup touched one of them, it would find something else."""
    random = np.random.default_rng([SEED, size, most_equal])
    codes = np.sort(random.integers(0, 3 * max(1, size // most_equal), size))
    fences = make_fences(codes, stride)
    for query in {*codes[random.integers(0, size, 40)].tolist(), -1, int(codes[-1]) + 1, *fences[:20].tolist()}:
        queries = np.array([query])
        needed = pages_in(find_code_pages(fences, stride, size, queries))
        nonsense = codes.copy()
        for page in set(range(-(-size // 512))) - needed:
            nonsense[page * 512 : (page + 1) * 512] = query
        expected = int(np.searchsorted(codes, query)), int(np.count_nonzero(codes == query))
        first, count = lookup_sorted(fences, stride, nonsense, queries)
        assert (int(first[0]), int(count[0])) == expected, query


def test_pages_of_several_queries_are_those_of_each() -> None:
    codes = np.sort(np.random.default_rng(SEED).integers(0, 50_000, 20_000))
    fences, queries = make_fences(codes, 128), np.random.default_rng(1).integers(0, 50_000, 300)
    expected = set[int]().union(
        *(pages_in(find_code_pages(fences, 128, codes.size, q)) for q in np.split(queries, 300))
    )
    assert pages_in(find_code_pages(fences, 128, codes.size, queries)) == expected
    assert pages_in(find_code_pages(fences, 128, codes.size, queries[:0])) == set()


# -------------------------------------------------------------------- asking


@pytest.fixture
def mapped(tmp_path: Path) -> pa.Buffer:
    (tmp_path / "file").write_bytes(os.urandom(64 * PAGE_BYTES))
    with pa.memory_map(str(tmp_path / "file")) as file:
        return file.read_buffer()


def test_pages_that_are_asked_for_are_read(mapped: pa.Buffer, tmp_path: Path) -> None:
    pages = np.array([0, 40]), np.array([35, 63])
    assert ask_for_pages(mapped.address, pages)
    assert populate_pages(mapped.address, pages) == -1
    assert mapped.to_pybytes() == (tmp_path / "file").read_bytes()


def test_range_behind_the_end_of_a_truncated_file_is_told_and_not_touched(mapped: pa.Buffer, tmp_path: Path) -> None:
    os.truncate(tmp_path / "file", 10 * PAGE_BYTES)
    pages = np.array([0, 8, 9, 40]), np.array([3, 8, 12, 63])
    assert populate_pages(mapped.address, pages) == 2
    assert populate_pages(mapped.address, (pages[0][:2], pages[1][:2])) == -1


def test_kernel_that_cannot_read_ahead_is_no_error() -> None:
    """An address that is not that of a page: the kernel refuses the call, as an old one refuses the advice."""
    with mmap.mmap(-1, 4 * PAGE_BYTES) as memory:
        address = np.frombuffer(memory, np.uint8).ctypes.data
    pages = np.array([0]), np.array([0])
    assert not ask_for_pages(address + 1, pages)
    assert populate_pages(address + 1, pages) == -1


# -------------------------------------------------------------------- ranges, and what is in memory


@pytest.mark.parametrize("gap", [0, 1, 5, 1_000])
def test_merged_ranges_are_those_that_plain_python_merges(gap: int) -> None:
    random = np.random.default_rng([SEED, gap])
    for _ in range(20):
        firsts = np.sort(random.integers(0, 400, 40))
        lasts = firsts + random.integers(0, 4, 40)
        expected: list[list[int]] = []
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if expected and first <= expected[-1][1] + 1 + gap:
                expected[-1][1] = max(last, expected[-1][1])
            else:
                expected.append([first, last])
        merged = merge_ranges((firsts, lasts), gap)
        assert [list(pair) for pair in zip(*(part.tolist() for part in merged), strict=True)] == expected
    nothing = merge_ranges((firsts[:0], lasts[:0]), gap)
    assert nothing[0].size == nothing[1].size == 0


def test_a_range_that_begins_before_the_last_one_stays_on_its_own() -> None:
    """Pages come column by column, so they begin anew at the front."""
    merged = merge_ranges((np.array([10, 12, 3, 4]), np.array([10, 12, 3, 4])), 2)
    assert (merged[0].tolist(), merged[1].tolist()) == ([10, 3], [12, 4])


def test_absent_pages_are_those_that_the_kernel_reports_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3_000 * PAGE_BYTES))
    with pa.memory_map(str(path)) as mapped:
        data = mapped.read_buffer()
    descriptor = os.open(path, os.O_RDONLY)

    def one_by_one(pages: Pages) -> set[int]:
        found = (absent_pages(data.address, (np.array([page]), np.array([page]))) for page in pages_in(pages))
        return set().union(*map(pages_in, found))

    try:
        os.fsync(descriptor)
        everything = np.array([0]), np.array([2_999])
        drop_pages(descriptor, data.address, (np.array([100, 900]), np.array([600, 900])))
        for pages in (everything, (np.array([0, 590, 2_000]), np.array([95, 610, 2_999]))):
            # Nobody reads meanwhile, so pages can only go: the kernel may take some for itself.
            before, found, after = one_by_one(pages), pages_in(absent_pages(data.address, pages)), one_by_one(pages)
            assert before <= found <= after
        # A file system in memory keeps all pages; any other drops them, and not the thousands beside them.
        assert len(one_by_one(everything) - {*range(100, 601), 900}) < 100
        assert bytes(data[599 * PAGE_BYTES : 601 * PAGE_BYTES]) == bytes(2 * PAGE_BYTES), "they are read again"
    finally:
        os.close(descriptor)
