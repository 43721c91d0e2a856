"""What is held is found wherever it hides, and counted once."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.testing.held import held_array_bytes


@dataclass(slots=True)
class Slotted:
    codes: Any


class Plain:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def method(self) -> None: ...


@pytest.mark.parametrize(
    "wrap",
    [
        lambda array: array,
        lambda array: [array],
        lambda array: {"a": (array,)},
        lambda array: deque([{7: array}]),
        Slotted,
        Plain,
        lambda array: Plain(Slotted([array])),
        lambda array: Plain(array).method,
        lambda array: [array, array[:5], array[::2].view(np.uint64)],
        lambda array: array[3:4],
        lambda array: memoryview(array),
        lambda array: pa.array(array),
        lambda array: [pa.array(array), array],
        lambda array: pa.table({"x": array, "y": array}),
    ],
)
def test_array_is_found_and_counted_once(wrap: Any) -> None:
    assert held_array_bytes(wrap(np.arange(100, dtype=np.int64))) == 800


def test_cycles_end() -> None:
    plain = Plain(None)
    plain.inner = [plain, np.zeros(4)]
    assert held_array_bytes(plain) == 32


def test_excluded_objects_are_not_entered() -> None:
    shard = Plain(np.zeros(100))
    assert held_array_bytes(Plain([shard, np.zeros(1)]), exclude=[shard]) == 8


def test_slice_counts_with_all_that_it_keeps_alive() -> None:
    batch = pa.record_batch({"s": ["x" * 100] * 10})
    assert held_array_bytes(batch.slice(0, 1)) == held_array_bytes(batch) >= 1000


def test_arrow_children_and_dictionaries_are_counted() -> None:
    lists = pa.array([[1, 2, 3]] * 10, pa.list_(pa.int64()))
    assert held_array_bytes(lists) >= 240
    words = pa.array(["w" * 1000, "v" * 1000] * 5).dictionary_encode()
    assert held_array_bytes(words) >= 2000


def test_what_is_no_array_holds_nothing() -> None:
    assert held_array_bytes([1, "text", None, len, np, Plain, 2.5, {1, 2}]) == 0
    assert held_array_bytes(bytearray(10)) == 10
