"""A follower's shards, driven as a flow drives them, without Spark: random changes, folds, tombstones."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dovetail.core.errors import StateError
from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.relation import Relation
from dovetail.relation.change_set import ChangeSet
from dovetail.relation.format import CODE_COLUMN
from dovetail.relation.keys import code_kind, compute_codes
from dovetail.runtime.follow import FollowTask
from dovetail.runtime.kept import levels_of
from dovetail.runtime.shard_job import ShardInput
from dovetail.storage.state_files import ShardState, read_table, write_tables
from dovetail.warehouse.following import DELETE, UPSERT, FollowChanges
from dovetail.warehouse.kept_rows import merged_levels

Key = tuple[Any, ...]
SHARDS = 2


@dataclass
class Follower:
    """A relation with key columns ``k0``, ``k1``..., a text column and the sequence."""

    root: Path
    key_types: Sequence[pa.DataType]
    budget_bytes: int = 1 << 30
    keep_ms: int = 1_000_000
    states: list[ShardState | None] = field(default_factory=lambda: [None] * SHARDS)
    batch: int = 0
    reports: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key = [f"k{number}" for number in range(len(self.key_types))]
        columns = [*zip(self.key, self.key_types, strict=True), ("city", pa.string()), ("seq", pa.int64())]
        schema = pa.schema(columns)
        self.relation = Relation.build(schema.empty_table(), self.root / "relation", on=self.key, shards=SHARDS)
        self.is_hashed = code_kind(schema, self.key) == "xxhash64"
        for shard in range(SHARDS):
            (self.root / "state" / "1-follow" / f"{shard:05d}").mkdir(parents=True)

    def run(self, changes: Sequence[tuple[Key, str | None, int, int]], time_ms: int = 0) -> None:
        """One micro-batch of (key, city, sequence, action)."""
        columns = {name: [change[0][n] for change in changes] for n, name in enumerate(self.key)}
        typed = {name: pa.array(columns[name], kind) for name, kind in zip(self.key, self.key_types, strict=True)}
        rows = pa.table(
            {
                **typed,
                "city": pa.array([change[1] for change in changes], pa.string()),
                "seq": pa.array([change[2] for change in changes], pa.int64()),
                "action": pa.array([change[3] for change in changes], pa.int64()),
            }
        )
        codes = compute_codes(rows, tuple(self.key))
        coded = rows.add_column(0, CODE_COLUMN, codes)
        numbers = shard_of_codes(codes.fill_null(0).to_numpy(), SHARDS)
        pairs = tuple((name, name) for name in self.key)
        logic = FollowChanges(pairs, self.is_hashed, tuple(self.key), "action", "seq", None, "seq", (("city", "city"),))
        about = (self.relation.path, tuple(self.key), self.is_hashed, logic, coded.schema)
        task = FollowTask(*about, self.budget_bytes, self.keep_ms)
        self.reports = []
        for shard, state in enumerate(self.states):
            mine = coded.filter(pa.array(numbers == shard))
            order = [(name, "ascending") for name in (CODE_COLUMN, *self.key, "seq", "action")]
            mine = mine.take(pc.sort_indices(mine, sort_keys=order))
            intent = {"version": self.relation.version, "batch": self.batch, "time_ms": time_ms, "folded_ms": time_ms}
            work = task.run(
                ShardInput(shard, state, self.root / "state", iter(mine.to_batches(max_chunksize=9)), intent)
            )
            while True:
                try:
                    next(work)
                except StopIteration as end:
                    result = end.value
                    break
            filled = [(name, table) for name, table in result.tables if table.num_rows]
            written = write_tables(self.root / "state", "1-follow", shard, self.batch, filled)
            self.reports.append(result.report)
            self.states[shard] = ShardState(f"{self.batch}", (*result.kept, *written), result.values)
        self.batch += 1

    def fold(self) -> None:
        """Make a version of the changes, as the driver does."""
        parts = []
        for state in self.states:
            assert state is not None
            tables = [(file, read_table(self.root / "state", file)) for file in state.files]
            levels = levels_of(tables, tuple(self.key), self.is_hashed)
            if levels and state.values["version"] == self.relation.version:
                parts.append(merged_levels(levels, self.key, self.is_hashed))
        if parts:
            self.relation = self.relation.upsert(ChangeSet(pa.concat_tables(parts), self.relation.schema))

    def rows(self) -> dict[Key, str | None]:
        self.fold()
        found = self.relation.to_arrow().to_pylist()
        assert len({tuple(row[name] for name in self.key) for row in found}) == len(found)
        return {tuple(row[name] for name in self.key): row["city"] for row in found}

    def counted(self, name: str) -> int:
        return sum(report["counters"].get(name, 0) for report in self.reports)

    def tombstones(self) -> int:
        return sum(report["state_rows"]["tombstones"] for report in self.reports)


def replayed(changes: Sequence[tuple[Key, str | None, int, int]]) -> dict[Key, str | None]:
    found: dict[Key, str | None] = {}
    for key, city, _, action in sorted(changes, key=lambda change: change[2]):
        if action == DELETE:
            found.pop(key, None)
        else:
            found[key] = city
    return found


KEYS: list[tuple[str, list[pa.DataType], Any]] = [
    ("number", [pa.int64()], lambda n: (n,)),
    ("text", [pa.string()], lambda n: (f"key {n}",)),
    ("pair", [pa.int32(), pa.string()], lambda n: (n % 3, f"{n // 3}")),
]


@pytest.mark.parametrize(("name", "types", "key_of"), KEYS, ids=[row[0] for row in KEYS])
@pytest.mark.parametrize("budget_bytes", [1 << 30, 1_000])
def test_changes_in_any_order_with_any_folds_give_a_replay(
    tmp_path: Path, name: str, types: list[pa.DataType], key_of: Any, budget_bytes: int
) -> None:
    chosen = random.Random(f"{name} {budget_bytes}")
    print("seed", f"{name} {budget_bytes}")
    log = [
        (key_of(min(int(chosen.paretovariate(0.8)), 30)), chosen.choice(["Rome", None, "Oslo"]), number, action)
        for number, action in enumerate(chosen.choices([UPSERT, DELETE], [3, 1], k=400))
    ]
    every = [*log, *chosen.sample(log, 130)]
    chosen.shuffle(every)
    follower = Follower(tmp_path, types, budget_bytes)
    while every:
        count = chosen.choice([1, 5, 60])
        follower.run(every[:count])
        every = every[count:]
        if chosen.random() < 0.3:
            follower.fold()
    assert follower.rows() == replayed(log)
    counters = ("late", "superseded", "written", "deleted")
    assert sum(follower.counted(counter) for counter in counters) == 530
    assert (follower.counted("spilled_bytes") > 0) == (budget_bytes < 1 << 30)


def test_tombstones_go_when_they_are_older_than_they_are_kept(tmp_path: Path) -> None:
    follower = Follower(tmp_path, [pa.int64()], keep_ms=100)
    follower.run([((1,), "Rome", 1, UPSERT), ((2,), "Oslo", 2, UPSERT)], time_ms=0)
    follower.run([((1,), None, 10, DELETE)], time_ms=10)
    follower.fold()
    follower.run([((1,), "late", 5, UPSERT)], time_ms=50)
    assert (follower.tombstones(), follower.counted("late")) == (1, 1)
    assert follower.rows() == {(2,): "Oslo"}
    follower.run([((2,), "Bergen", 20, UPSERT)], time_ms=160)
    follower.fold()
    follower.run([((1,), "back", 6, UPSERT)], time_ms=170)
    assert follower.tombstones() == 0
    assert follower.rows() == {(1,): "back", (2,): "Bergen"}


def test_many_folds_leave_few_files_of_tombstones(tmp_path: Path) -> None:
    follower = Follower(tmp_path, [pa.int64()])
    for number in range(40):
        follower.run([((number,), None, number + 1, DELETE)], time_ms=number)
        follower.fold()
    follower.run([((number,), "late", 0, UPSERT) for number in range(40)])
    assert follower.counted("late") == 40
    assert follower.rows() == {}
    for state in follower.states:
        assert state is not None
        assert sum(file.table == "tombstones" for file in state.files) <= 9


@pytest.mark.parametrize(("action", "text"), [(2, "key has a NULL"), (3, "without a sequence"), (4, "cannot be read")])
def test_change_with_a_problem_is_an_error(tmp_path: Path, action: int, text: str) -> None:
    follower = Follower(tmp_path, [pa.int64()])
    with pytest.raises(StateError, match=text):
        follower.run([((1,), "Rome", 1, UPSERT), ((2,), "Oslo", 1, action)])


def test_deleted_rows_leave_their_values_out_of_the_state(tmp_path: Path) -> None:
    follower = Follower(tmp_path, [pa.int64()])
    follower.run([((1,), "secret", 3, DELETE)])
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert files
    assert not any(b"secret" in path.read_bytes() for path in files)
    assert np.all([report["state_rows"]["changes"] <= 1 for report in follower.reports])
