"""Surrogate keys, duplicates and changes, each against a dictionary that is told the same rows one by one."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.warehouse.transformations import ChangeDetection, Deduplication, SurrogateKeys

Make = Callable[..., Any]
SOURCES = ["web", "shop", "phone"]


def composite_rows(chance: np.random.Generator, count: int, first: int) -> pa.Table:
    """Rows with a key of two columns, some of them NULL, many repeated."""
    ids = [None if chance.random() < 0.05 else int(chance.integers(0, 60)) for _ in range(count)]
    return pa.table(
        {
            "source": pa.array([SOURCES[int(n)] for n in chance.integers(0, 3, count)]),
            "id": pa.array(ids, pa.int64()),
            "n": pa.array(range(first, first + count), pa.int64()),
        }
    )


def test_surrogate_key_is_one_number_per_key_whatever_is_folded_in_between(
    plant: Make, chance: np.random.Generator
) -> None:
    schema = pa.schema([("source", pa.string()), ("id", pa.int64()), ("sk", pa.int64())])
    keys = SurrogateKeys((("source", "source"), ("id", "id")), True, ("source", "id", "n"), "sk")
    here = plant(schema, ["source", "id"], keys, ["n"])
    seen: dict[tuple[str, int], int] = {}
    for number in range(14):
        rows = composite_rows(chance, 50, number * 50)
        found = here.run(rows)
        assert Counter(row["n"] for row in found) == Counter(rows.column("n").to_pylist())
        for row in found:
            if row["id"] is None:
                assert row["__number"] is None
            else:
                assert seen.setdefault((row["source"], row["id"]), row["__number"]) == row["__number"]
        assert len(set(seen.values())) == len(seen), "a number was given twice"
        if number in (3, 9):
            here.fold()
    assert len(seen) > 100
    assert {(row["source"], row["id"]): row["sk"] for row in here.current()} == seen
    by_shard = Counter(number % here.relation.num_shards for number in seen.values())
    assert len(by_shard) == 3, "each shard numbers its own"


def test_surrogate_key_of_an_integer_and_thousands_of_new_ones_in_a_batch(plant: Make) -> None:
    schema = pa.schema([("id", pa.int64()), ("sk", pa.int64())])
    here = plant(schema, ["id"], SurrogateKeys((("id", "id"),), False, ("id",), "sk"))
    rows = pa.table({"id": pa.array([*range(5000), *range(5000)], pa.int64())})
    found = here.run(rows, chunk_rows=900)
    assert len({row["__number"] for row in found}) == 5000
    assert {row["id"]: row["__number"] for row in found} == {row["id"]: row["__number"] for row in here.run(rows)}


@pytest.mark.parametrize("is_marking", [False, True])
def test_only_the_first_row_of_a_key_passes(plant: Make, chance: np.random.Generator, is_marking: bool) -> None:
    schema = pa.schema([("source", pa.string()), ("id", pa.int64())])
    logic = Deduplication((("source", "source"), ("id", "id")), True, ("source", "id", "n"), is_marking)
    here = plant(schema, ["source", "id"], logic, ["n"])
    seen: set[tuple[str, int]] = set()
    for number in range(12):
        rows = composite_rows(chance, 40, number * 40)
        expected = {}
        for row in rows.to_pylist():
            key = (row["source"], row["id"])
            expected[row["n"]] = row["id"] is not None and key in seen
            if row["id"] is not None:
                seen.add(key)
        found = here.run(rows)
        if is_marking:
            assert {row["n"]: row["__duplicate"] for row in found} == expected
        else:
            assert sorted(row["n"] for row in found) == sorted(n for n, repeats in expected.items() if not repeats)
        if number == 5:
            here.fold()
    assert {(row["source"], row["id"]) for row in here.current()} == seen


def test_change_is_told_against_the_row_before(plant: Make, chance: np.random.Generator) -> None:
    schema = pa.schema([("k", pa.string()), ("v", pa.int64()), ("row_hash", pa.int64())])
    logic = ChangeDetection(
        (("k", "k"),), True, ("k", "v", "n"), "h", "row_hash", (("v", "v"),), ("inserted", "changed", "unchanged")
    )
    here = plant(schema, ["k"], logic, ["n"])
    last: dict[str, int] = {}
    for number in range(12):
        keys = [f"key {n}" for n in chance.integers(0, 25, 40)]
        values = chance.integers(0, 3, 40)
        numbers = list(range(number * 40, number * 40 + 40))
        rows = pa.table({"k": keys, "v": pa.array(values), "n": numbers, "h": pa.array(values * 7 + 1)})
        expected = {}
        for key, value, n in zip(keys, values.tolist(), numbers, strict=True):
            expected[n] = "inserted" if key not in last else "unchanged" if last[key] == value else "changed"
            last[key] = value
        assert {row["n"]: row["__change"] for row in here.run(rows)} == expected
        if number in (2, 7):
            here.fold()
    assert {row["k"]: row["v"] for row in here.current()} == last


def test_state_is_merged_before_it_is_many_files(plant: Make) -> None:
    schema = pa.schema([("id", pa.int64()), ("sk", pa.int64())])
    here = plant(schema, ["id"], SurrogateKeys((("id", "id"),), False, ("id",), "sk"), shards=1)
    numbers = {}
    for number in range(30):
        for row in here.run(pa.table({"id": pa.array([number, number // 2], pa.int64())})):
            assert numbers.setdefault(row["id"], row["__number"]) == row["__number"]
        assert len(here.states[0].files) <= 8
    assert len(numbers) == 30
