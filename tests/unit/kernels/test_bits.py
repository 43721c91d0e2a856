"""`set_bits` against numpy's own loop over single elements."""

import numpy as np
import pytest

from dovetail.kernels.bits import set_bits


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_differential_bits_are_set_where_asked_and_nowhere_else(dtype: type) -> None:
    generator = np.random.default_rng(5)
    print("seed 5")
    flags = generator.integers(0, 256, 50).astype(np.uint8)
    positions = generator.integers(0, 50, 80).astype(dtype)
    naive = flags.copy()
    for position in positions:
        naive[position] |= np.uint8(2)
    set_bits(flags, positions, np.uint8(2))
    assert flags.tolist() == naive.tolist()


@pytest.mark.parametrize("position", [-1, 3])
def test_position_outside_is_refused(position: int) -> None:
    flags = np.zeros(3, np.uint8)
    with pytest.raises(IndexError, match="out of range"):
        set_bits(flags, np.array([0, position]), np.uint8(1))
    assert flags.tolist() == [0, 0, 0]


def test_no_position_is_fine() -> None:
    set_bits(np.zeros(0, np.uint8), np.empty(0, np.int64), np.uint8(1))
