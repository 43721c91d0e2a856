"""Copies of column values against plain indexing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.kernels.gather import gather_bytes, gather_fixed, read_ring, write_ring

DTYPES = ["u1", "i2", "f4", "i8", "f8", "M8[us]", "?", "V16", "c16"]


def random_column(dtype, size, seed):
    width = np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "?" else 256, size * width, dtype=np.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_gather_copies_the_bits_of_every_width(dtype, index_dtype):
    source = random_column(dtype, 40, seed=31)
    indexes = np.random.default_rng(32).integers(0, 40, 100).astype(index_dtype)
    gathered = gather_fixed(source, indexes)
    assert gathered.dtype == source.dtype
    assert gathered.tobytes() == b"".join(source[i : i + 1].tobytes() for i in indexes)
    out = np.empty(100, dtype=source.dtype)
    assert gather_fixed(source, indexes, out) is out
    assert out.tobytes() == gathered.tobytes()


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_gather_refuses_rows_outside_the_column(index):
    with pytest.raises(IndexError, match=f"Row {index} lies outside a column of 3 rows"):
        gather_fixed(np.arange(3), np.array([0, index]))


def test_gather_refuses_columns_it_cannot_copy():
    indexes = np.array([0])
    for source in (np.zeros(2, dtype="V3"), np.zeros((2, 2)), np.arange(4)[::2], np.array([object()])):
        with pytest.raises(TypeError, match="1, 2, 4, 8 or 16 bytes"):
            gather_fixed(source, indexes)
    with pytest.raises(ValueError, match="output must be 1 values"):
        gather_fixed(np.arange(3), indexes, np.empty(2, dtype=np.int64))
    with pytest.raises(ValueError, match="output must be 1 values of type int64"):
        gather_fixed(np.arange(3), indexes, np.empty(1, dtype=np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ring_columns_are_written_and_read_modulo_their_length(dtype):
    column = random_column(dtype, 7, seed=33)
    twin = [column[i : i + 1].tobytes() for i in range(7)]
    values = random_column(dtype, 5, seed=34)
    seqs = np.array([10, 11, 13, 14, 15])
    write_ring(column, seqs, values)
    for i, seq in enumerate(seqs.tolist()):
        twin[seq % 7] = values[i : i + 1].tobytes()
    wanted = np.array([20, 0, 6, 7 * 2**40 + 3])
    assert read_ring(column, wanted).tobytes() == b"".join(twin[seq % 7] for seq in wanted.tolist())


def test_ring_columns_refuse_what_does_not_fit():
    column = np.zeros(4, dtype=np.int64)
    with pytest.raises(ValueError, match="2 values of type int64 are needed, not 1 of type int64"):
        write_ring(column, np.array([1, 2]), np.array([5]))
    with pytest.raises(ValueError, match="not 1 of type float64"):
        write_ring(column, np.array([1]), np.array([5.0]))
    for refused in (
        lambda: read_ring(column, np.array([-1])),
        lambda: write_ring(column, np.array([-1]), np.array([5])),
    ):
        with pytest.raises(IndexError, match="not negative"):
            refused()
    assert column.tolist() == [0, 0, 0, 0]


@given(st.binary(max_size=200), st.data())
def test_bytes_are_gathered_and_packed(arena, data):
    places = data.draw(
        st.lists(
            st.integers(0, len(arena)).flatmap(lambda a: st.tuples(st.just(a), st.integers(0, len(arena) - a))),
            max_size=20,
        )
    )
    packed, offsets = gather_bytes(
        np.frombuffer(arena, dtype=np.uint8),
        np.array([start for start, _ in places], dtype=np.int64),
        np.array([length for _, length in places], dtype=np.int32),
    )
    expected = [arena[start : start + length] for start, length in places]
    assert packed.tobytes() == b"".join(expected)
    assert offsets.tolist() == [sum(map(len, expected[:i])) for i in range(len(expected) + 1)]


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (3, 3), (0, -1), (2**40, 1)])
def test_bytes_outside_the_arena_are_refused(start, length):
    with pytest.raises(IndexError, match="outside an arena of 5 bytes"):
        gather_bytes(np.zeros(5, dtype=np.uint8), np.array([start]), np.array([length], dtype=np.int32))


def test_more_bytes_than_offsets_can_say_are_refused():
    arena = np.zeros(2**20, dtype=np.uint8)
    starts = np.zeros(2**11, dtype=np.int64)
    with pytest.raises(OverflowError, match="take fewer values"):
        gather_bytes(arena, starts, np.full(2**11, 2**20, dtype=np.int32))
    with pytest.raises(ValueError, match="do not belong together"):
        gather_bytes(arena, starts, np.zeros(3, dtype=np.int32))
