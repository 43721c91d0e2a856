"""Type 2 dimensions against a list of versions per key that is told the same changes one by one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.warehouse.history import FOREVER_US, History

Make = Callable[..., Any]
MOMENT = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [("k", pa.string()), ("city", pa.string()), ("valid_from", MOMENT), ("valid_to", MOMENT), ("row_hash", pa.int64())]
)
LOGIC = History((("k", "k"),), True, (), "ts", "h", (("city", "city"),), "valid_from", "valid_to", "row_hash", SCHEMA)


class Oracle:
    """The versions of each key, as (time, city) in order of time."""

    def __init__(self) -> None:
        self.versions: dict[str, list[tuple[int, str]]] = {}

    def tell(self, key: str, time: int, city: str) -> None:
        versions = self.versions.setdefault(key, [])
        at = [place for place, (begin, _) in enumerate(versions) if begin == time]
        if at:
            versions[at[0]] = (time, city)
            return
        earlier = [version for version in versions if version[0] < time]
        if not earlier or earlier[-1][1] != city:
            versions.append((time, city))
            versions.sort()

    def rows(self) -> set[tuple[str, str, int, int]]:
        found = set()
        for key, versions in self.versions.items():
            ends = [begin for begin, _ in versions[1:]] + [FOREVER_US]
            found |= {(key, city, begin, end) for (begin, city), end in zip(versions, ends, strict=True)}
        return found


def rows_of(events: list[tuple[str | None, int | None, str]]) -> pa.Table:
    keys, times, cities = zip(*events, strict=True)
    hashes = [hash_of(city) for city in cities]
    columns = {"k": pa.array(keys), "ts": pa.array(times, pa.int64()).cast(MOMENT), "city": pa.array(cities)}
    return pa.table({**columns, "h": pa.array(hashes, pa.int64())})


def hash_of(city: str) -> int:
    return int.from_bytes(city.encode(), "big")


def as_set(rows: list[dict[str, Any]]) -> set[tuple[str, str, int, int]]:
    return {(row["k"], row["city"], micros(row["valid_from"]), micros(row["valid_to"])) for row in rows}


def micros(moment: Any) -> int:
    return int(pa.scalar(moment, MOMENT).cast(pa.int64()).as_py())


def test_versions_follow_one_another_and_late_changes_go_between(plant: Make, chance: np.random.Generator) -> None:
    here = plant(SCHEMA, ["k"], LOGIC, ["ts", "city"])
    oracle = Oracle()
    target: dict[tuple[str, int], tuple[str, str, int, int]] = {}
    for number in range(14):
        # Times grow, with some that are late; two events of one key and time say the same.
        times = chance.integers(number * 10, number * 10 + 25, 30).tolist()
        keys = [f"key {n}" for n in chance.integers(0, 12, 30)]
        cities = [f"c{(time * 7 + len(key)) % 4}" for time, key in zip(times, keys, strict=True)]
        events = sorted(zip(keys, times, cities, strict=True))
        for event in events:
            oracle.tell(*event)
        shuffled = [events[place] for place in chance.permutation(len(events))]
        for row in as_set(here.run(rows_of(shuffled))):
            target[row[0], row[2]] = row
        # What came out, upserted by key and begin, is the dimension.
        assert set(target.values()) == oracle.rows()
        assert as_set(here.current()) == oracle.rows()
        if number in (4, 10):
            here.fold()
    assert max(len(versions) for versions in oracle.versions.values()) > 8


def test_correction_of_a_version_replaces_it_and_repetition_makes_none(plant: Make) -> None:
    here = plant(SCHEMA, ["k"], LOGIC, ["ts"])
    assert as_set(here.run(rows_of([("a", 10, "Rome")]))) == {("a", "Rome", 10, FOREVER_US)}
    assert here.run(rows_of([("a", 20, "Rome"), (None, 5, "Oslo"), ("a", None, "Oslo")])) == []
    assert as_set(here.run(rows_of([("a", 10, "Oslo")]))) == {("a", "Oslo", 10, FOREVER_US)}
    moved = as_set(here.run(rows_of([("a", 30, "Lima"), ("a", 5, "Bonn")])))
    assert moved == {("a", "Bonn", 5, 10), ("a", "Oslo", 10, 30), ("a", "Lima", 30, FOREVER_US)}
    assert as_set(here.current()) == moved
