"""A set of integers in stored tables: what commits write, and what a restart finds, against a set of Python."""

import random

import pyarrow as pa
import pytest

from dovetail.joins.promises.intervals import IntervalSet
from dovetail.joins.promises.set_log import SetLog


@pytest.mark.parametrize("seed", range(6))
def test_tables_hold_the_set_whatever_was_added_removed_and_restarted(seed: int) -> None:
    chance = random.Random(seed)
    log, whole, stored = SetLog("s", 2_000), IntervalSet.empty(), dict[str, pa.Table]()
    expected: set[int] = set()
    most = 0
    for _ in range(150):
        for _ in range(chance.randrange(4)):
            values = [chance.randrange(3_000) for _ in range(chance.choice([1, 5, 200]))]
            part = IntervalSet.of(values)
            whole, expected = whole.union(part), expected | set(values)
            log.add(part)
        if chance.random() < 0.05:
            kept = IntervalSet.between(chance.randrange(500), 2_500)
            whole = whole.intersection(kept)
            expected = {value for value in expected if kept.lows[0] <= value <= 2_500}
            log.write_anew()
        new, names = log.tables(whole, frozenset(stored), stored.__getitem__ if stored else None)
        assert not new.keys() & stored.keys(), "a stored table never changes"
        stored = {name: {**stored, **new}[name] for name in names}
        most = max(most, len(names))
        if chance.random() < 0.5:
            log.mark_stored(new, names)
        else:
            log = SetLog("s", 2_000)
            whole = log.restored(stored, are_stored=chance.random() < 0.8)
        held = {value for low, high in whole.pairs() for value in range(low, high + 1)}
        assert held == expected
        again = SetLog("s", 2_000).restored(stored, are_stored=True)
        assert again.pairs() == whole.pairs()
    assert most <= 12


def test_commit_writes_what_was_added() -> None:
    chance, log, whole = random.Random(18), SetLog("s", 1 << 20), IntervalSet.empty()
    stored: dict[str, pa.Table] = {}
    sizes = []
    for number in range(60):
        part = IntervalSet.of([chance.randrange(1 << 40) for _ in range(20_000 if number == 0 else 100)])
        whole = whole.union(part)
        log.add(part)
        new, names = log.tables(whole, frozenset(stored), stored.__getitem__ if stored else None)
        stored = {name: {**stored, **new}[name] for name in names}
        log.mark_stored(new, names)
        sizes.append(sum(table.num_rows for table in new.values()))
    assert sizes[0] >= 19_990
    assert max(sizes[1:]) < 20_000 / 4
    assert sum(sizes[1:]) < 5 * 59 * 100
