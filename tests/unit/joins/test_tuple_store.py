"""The tuple store against a dict of rows, over random writes, removals, merges, moves and gathers."""

import numpy as np
import pyarrow as pa
import pytest

from dovetail.joins.window.tuple_store import TupleStore, copy_of, fixed_values, is_fixed_width

SCHEMA = pa.schema(
    {
        "number": pa.int64(),
        "flag": pa.bool_(),
        "short": pa.int16(),
        "wide": pa.decimal128(20, 2),
        "text": pa.string(),
        "items": pa.list_(pa.int32()),
    }
)
RING = 40


def random_batch(generator: np.random.Generator, rows: int) -> pa.RecordBatch:
    def maybe(value: object) -> object:
        return None if generator.random() < 0.2 else value

    values = [
        {
            "number": maybe(int(generator.integers(-100, 100))),
            "flag": maybe(bool(generator.integers(2))),
            "short": maybe(int(generator.integers(-5, 5))),
            "wide": maybe(int(generator.integers(0, 10**6))),
            "text": maybe("x" * int(generator.integers(0, 9))),
            "items": maybe(generator.integers(0, 9, int(generator.integers(0, 4))).tolist()),
        }
        for _ in range(rows)
    ]
    return pa.RecordBatch.from_pylist(values, schema=SCHEMA)


@pytest.mark.parametrize("seed", range(8))
def test_differential_store_and_dict_hold_the_same(seed: int) -> None:
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    store, twin = TupleStore(SCHEMA, RING), dict[int, dict[str, object]]()
    for _ in range(60):
        free = [position for position in range(RING) if position not in twin]
        action = generator.choice(["write", "release", "tidy", "reclaim", "gather"])
        if action == "write" and free:
            count = int(generator.integers(1, min(7, len(free)) + 1))
            is_run = generator.random() < 0.5
            positions = np.array(free[:count] if is_run else generator.choice(free, count, replace=False), np.int64)
            batch = random_batch(generator, count)
            store.write(positions, batch)
            twin.update(zip(positions.tolist(), batch.to_pylist(), strict=True))
        elif action == "release" and twin:
            gone = generator.choice(list(twin), int(generator.integers(1, len(twin) + 1)), replace=False)
            store.release(np.asarray(gone, np.int64))
            for position in gone.tolist():
                del twin[position]
        elif action == "tidy":
            store.tidy()
        elif action == "reclaim":
            store.reclaim(np.array(sorted(twin), np.int64))
            assert store.reclaimable_bytes == 0
        if twin:
            asked = generator.choice(list(twin), 15)
            columns = store.gather(np.asarray(asked, np.int64), range(len(SCHEMA)))
            rows = pa.RecordBatch.from_arrays(columns, schema=SCHEMA).to_pylist()
            assert rows == [twin[position] for position in asked.tolist()]


def test_pages_stay_few_however_many_batches_come() -> None:
    store = TupleStore(pa.schema({"text": pa.string()}), 1000)
    for number in range(1000):
        store.write(np.array([number]), pa.record_batch({"text": [str(number)]}))
        store.tidy()
        assert len(store._paged[0]._pages) <= 10
    assert store.gather(np.array([999, 0]), [0])[0].to_pylist() == ["999", "0"]


def test_page_goes_when_its_last_tuple_has_left() -> None:
    store = TupleStore(pa.schema({"text": pa.string()}), 10)
    empty_bytes = store.nbytes
    store.write(np.arange(3), pa.record_batch({"text": ["a" * 1000] * 3}))
    store.write(np.arange(3, 6), pa.record_batch({"text": ["b"] * 3}))
    store.release(np.array([0, 2]))
    assert store.reclaimable_bytes > 1500
    store.release(np.array([1]))
    assert store.nbytes < empty_bytes + 100
    assert store.gather(np.array([4]), [0])[0].to_pylist() == ["b"]


def test_copy_holds_its_own_memory_only() -> None:
    long = pa.array(["x" * 100] * 1000)
    assert copy_of(long.slice(5, 1)).get_total_buffer_size() < 300


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.int8(), True),
        (pa.bool_(), True),
        (pa.timestamp("us", "UTC"), True),
        (pa.decimal256(40), True),
        (pa.binary(3), True),
        (pa.string(), False),
        (pa.list_(pa.int8(), 2), False),
        (pa.dictionary(pa.int32(), pa.string()), False),
        (pa.null(), False),
        (pa.struct([]), False),
    ],
)
def test_fixed_width_types(kind: pa.DataType, expected: bool) -> None:
    assert is_fixed_width(kind) is expected


@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 1000])
def test_short_slice_of_truth_values_is_read_without_the_rest_of_its_batch(start: int) -> None:
    values = [number % 3 == 0 for number in range(5000)]
    column = pa.array(values)
    assert fixed_values(column.slice(start, 5)).astype(bool).tolist() == values[start : start + 5]
    # What is unpacked is what the view that is given back can be traced to.
    assert fixed_values(column.slice(start, 5)).base.size <= 16
