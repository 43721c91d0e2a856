"""Results held for their turn, against a sorted list."""

import numpy as np
import pyarrow as pa
import pytest

from dovetail.joins.output.ordering import HeldResults


def rows_of(batch: pa.RecordBatch | None) -> list[int]:
    return [] if batch is None else batch.column(0).to_pylist()  # type: ignore[no-any-return]


def release(held: HeldResults, up_to: int | None, max_rows: int, max_bytes: int = 2**63 - 1) -> pa.RecordBatch | None:
    """Take out the next rows whose turn it is."""
    ready = held.next_ready(up_to, max_rows, max_bytes)
    if ready is None:
        return None
    held.let_go(ready)
    return ready.batch


@pytest.mark.parametrize("seed", range(5))
def test_differential_rows_come_out_by_ticket(seed: int) -> None:
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    held, twin, released = HeldResults(), list[int](), list[int]()
    boundary = 0
    for _ in range(40):
        # A row's value is its ticket, so that order can be seen; nothing may come below the boundary any more.
        tickets = generator.integers(boundary + 1, boundary + 30, int(generator.integers(0, 8)))
        held.add(pa.record_batch({"v": tickets}), tickets)
        twin.extend(tickets.tolist())
        if generator.random() < 0.3:
            held.compact()
        boundary += int(generator.integers(0, 6))
        max_rows = int(generator.integers(1, 6))
        while (batch := release(held, boundary, max_rows)) is not None:
            assert 1 <= batch.num_rows <= max_rows
            released += rows_of(batch)
        assert not held.has_ready(boundary)
        twin.sort()
        ready = sum(ticket <= boundary for ticket in twin)
        assert held.num_rows == len(twin) - ready
        twin, expected = twin[ready:], twin[:ready]
        assert released == expected
        released.clear()


def test_rows_that_would_take_too_many_bytes_come_one_by_one() -> None:
    held = HeldResults()
    held.add(pa.record_batch({"v": ["x" * 1000] * 3}), np.array([1, 2, 3]))
    batch = release(held, None, max_rows=10, max_bytes=1500)
    assert batch is not None
    assert batch.num_rows == 1
    batch = release(held, None, max_rows=10, max_bytes=10)
    assert batch is not None
    assert (batch.num_rows, held.num_rows) == (1, 1)


def test_what_was_released_is_freed_by_compacting() -> None:
    held = HeldResults()
    held.add(pa.record_batch({"v": ["x" * 1000] * 10}), np.arange(10))
    release(held, up_to=8, max_rows=100)
    assert held.nbytes > 9_000
    held.compact()
    assert held.nbytes < 1_200
    assert held.num_rows == 1


def test_pinned_rows_are_not_discarded() -> None:
    held = HeldResults()
    held.add(pa.record_batch({"v": [1, 5, 9]}), np.array([1, 5, 9]))
    held.add(pa.record_batch({"v": [6, 8]}), np.array([6, 8]), is_pinned=True)
    assert held.middle_ticket() == 5
    held.discard_after(4)
    assert rows_of(release(held, None, 10)) == [1, 6, 8]
    assert held.middle_ticket() is None


def test_saved_and_restored() -> None:
    held = HeldResults()
    schema = pa.schema({"v": pa.int64()})
    assert HeldResults.from_table(held.to_table(schema)).num_rows == 0
    held.add(pa.record_batch({"v": [3, 1]}), np.array([3, 1]))
    held.add(pa.record_batch({"v": [2]}), np.array([2]), is_pinned=True)
    release(held, up_to=1, max_rows=1)
    restored = HeldResults.from_table(held.to_table(schema))
    restored.discard_after(0)
    assert rows_of(release(restored, None, 10)) == [2]
    assert rows_of(release(held, None, 10)) == [2, 3]
