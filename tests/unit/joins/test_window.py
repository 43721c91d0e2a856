"""The window: chunks, leaving by age and from the middle, beginning again, changing size."""

import numpy as np
import pyarrow as pa
import pytest

from dovetail.joins.window.stream_window import StreamWindow

SCHEMA = pa.schema({"v": pa.int64(), "s": pa.string()})


def batch_of(*values: int) -> pa.RecordBatch:
    return pa.record_batch([list(values), [f"s{value}" for value in values]], schema=SCHEMA)


def window_of(*codes: int, capacity: int = 16) -> StreamWindow:
    """Tuple i has value i and ticket 10 i; every two tuples are a chunk with the next deadline."""
    window = StreamWindow(SCHEMA, capacity, has_tickets=True)
    for start in range(0, len(codes), 2):
        part = codes[start : start + 2]
        numbers = list(range(start, start + len(part)))
        window.insert(np.array(part), batch_of(*numbers), arrival=start, deadline=start, tickets=np.array(numbers) * 10)
    return window


def values(window: StreamWindow) -> list[int]:
    return window.gather(window.live_positions(), [0])[0].to_pylist()  # type: ignore[no-any-return]


def chunks(window: StreamWindow) -> list[tuple[int, int]]:
    return [(chunk.live, chunk.deadline) for chunk in window.chunks.to_list()]


def test_chunks_with_one_deadline_are_one() -> None:
    window = StreamWindow(SCHEMA, 8)
    window.insert(np.array([1]), batch_of(1), arrival=0, deadline=5)
    window.insert(np.array([2]), batch_of(2), arrival=1, deadline=5)
    window.insert(np.array([3]), batch_of(3), arrival=2, deadline=6)
    assert chunks(window) == [(2, 5), (1, 6)]


def test_chunks_count_what_leaves_by_age_and_from_the_middle() -> None:
    window = window_of(7, 8, 7, 9, 8, 7)
    gone = window.take_codes(np.array([8]))
    assert window.gather(gone, [0, 1])[1].to_pylist() == ["s1", "s4"]
    window.forget(gone)
    assert (values(window), chunks(window)) == ([0, 2, 3, 5], [(1, 0), (2, 2), (1, 4)])
    window.forget(window.take_oldest(2))
    assert (values(window), chunks(window)) == ([3, 5], [(1, 2), (1, 4)])
    rest = window.live_positions()[1:]
    window.take(rest)
    window.forget(rest)
    assert (values(window), chunks(window), window.oldest_ticket) == ([3], [(1, 2)], 30)


def test_young_tuples_begin_again() -> None:
    window = window_of(7, 8, 7, 9, 8, 7)
    window.mark_matched(window.live_positions())
    assert window.restart_after(ticket=20, deadline=99) == 3
    assert chunks(window) == [(2, 0), (1, 2), (3, 99)]
    assert window.is_matched_at(window.live_positions()).tolist() == [True] * 3 + [False] * 3
    window.insert(np.array([1]), batch_of(6), arrival=6, deadline=99, tickets=np.array([60]))
    assert chunks(window)[-1] == (4, 99)
    window.forget(window.take_oldest(3))
    assert (values(window), chunks(window)) == ([3, 4, 5, 6], [(4, 99)])


@pytest.mark.parametrize("capacity", [5, 6, 100])
def test_another_capacity_keeps_tuples_flags_tickets_and_chunks(capacity: int) -> None:
    window = window_of(7, 8, 7, 9, 8, 7, capacity=9)
    window.forget(window.take_oldest(1))
    window.mark_matched(window.live_positions()[:1])
    expected_bytes = window.nbytes_at(capacity, window.max_chunks)
    window.resize(capacity)
    assert (values(window), chunks(window)) == ([1, 2, 3, 4, 5], [(1, 0), (2, 2), (2, 4)])
    assert window.tickets_at(window.live_positions()).tolist() == [10, 20, 30, 40, 50]
    assert window.is_matched_at(window.live_positions()).tolist() == [True, False, False, False, False]
    assert (window.capacity, window.nbytes) == (capacity, expected_bytes)
    rows, positions, _ = window.probe(np.array([8]), None, 10)
    assert window.gather(positions, [0])[0].to_pylist() == [1, 4]
    assert rows.tolist() == [0, 0]


def test_saved_and_filled_again() -> None:
    window = window_of(7, 8, 7)
    window.mark_matched(window.live_positions()[1:2])
    other = StreamWindow(SCHEMA, 5, has_tickets=True)
    other.fill_from_table(window.to_table(), [(c.live, c.first_arrival, c.deadline) for c in window.chunks.to_list()])
    assert other.to_table().equals(window.to_table())
    assert chunks(other) == chunks(window)


def test_capacity_is_the_most_that_fits() -> None:
    for size_bytes in (2_000, 10_000, 123_456):
        capacity = StreamWindow.capacity_within(SCHEMA, size_bytes, paged_bytes=10.0)
        assert StreamWindow.bytes_for(SCHEMA, capacity) + capacity * 10 <= size_bytes
        assert StreamWindow.bytes_for(SCHEMA, capacity + 1) + (capacity + 1) * 10 > size_bytes
        assert StreamWindow(SCHEMA, capacity).nbytes == StreamWindow.bytes_for(SCHEMA, capacity)
    assert StreamWindow.capacity_within(SCHEMA, 10, paged_bytes=0.0) == 0
