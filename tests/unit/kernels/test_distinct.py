"""The different codes of a batch."""

import numpy as np
import pytest

from dovetail.kernels.distinct import distinct_codes

SEED = 3


@pytest.mark.parametrize(("rows", "keys"), [(0, 1), (1, 1), (300, 1), (300, 7), (300, 10_000)])
def test_codes_are_numbered_in_the_order_of_their_first_occurrence(rows: int, keys: int) -> None:
    codes = np.random.default_rng(SEED).integers(-keys, keys, rows) * 0x0123_4567_89AB
    distinct, numbers = distinct_codes(codes)
    assert distinct.tolist() == list(dict.fromkeys(codes.tolist()))
    assert distinct[numbers].tolist() == codes.tolist()


def test_extreme_codes_are_told_apart() -> None:
    codes = np.array([np.iinfo(np.int64).min, -1, 0, np.iinfo(np.int64).max, -1])
    distinct, numbers = distinct_codes(codes)
    assert distinct.tolist() == codes[:4].tolist()
    assert numbers.tolist() == [0, 1, 2, 3, 1]
