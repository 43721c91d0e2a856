"""Transformations driven shard by shard, as a flow drives them, without Spark: state in files, folds, restarts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.relation import Relation
from dovetail.relation.format import CODE_COLUMN
from dovetail.relation.keys import code_kind, compute_codes
from dovetail.runtime.kept import KeptTask, levels_of
from dovetail.runtime.shard_job import ShardInput
from dovetail.storage.state_files import ShardState, read_table, write_tables
from dovetail.warehouse.kept_rows import merged_levels
from dovetail.warehouse.transformations import Transformation

Row = dict[str, Any]


@dataclass
class Plant:
    """One transformation with its relation and the state of its shards."""

    root: Path
    relation: Relation
    transformation: Transformation
    sort_by: Sequence[str]
    states: list[ShardState | None] = field(default_factory=list)
    batch: int = 0
    version: int = 1
    budget_bytes: int = 1 << 30
    reports: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = [None] * self.relation.num_shards
        for shard in range(self.relation.num_shards):
            (self.root / "state" / "1-kept" / f"{shard:05d}").mkdir(parents=True)

    def run(self, rows: pa.Table, chunk_rows: int = 7) -> list[Row]:
        """One micro-batch; gives all rows that come out, and moves on to the new state."""
        key = list(self.relation.key)
        is_hashed = code_kind(self.relation.schema, key) == "xxhash64"
        codes = compute_codes(rows, key)
        numbers = shard_of_codes(codes.fill_null(0).to_numpy(), self.relation.num_shards)
        numbers[codes.is_null().to_numpy(zero_copy_only=False)] = 0
        coded = rows.add_column(0, CODE_COLUMN, codes)
        task = KeptTask(
            self.relation.path, self.relation.key, is_hashed, self.transformation, coded.schema, self.budget_bytes
        )
        found: list[Row] = []
        self.reports = []
        for shard, state in enumerate(self.states):
            mine = coded.filter(pa.array(numbers == shard))
            order = [(name, "ascending") for name in dict.fromkeys([CODE_COLUMN, *key, *self.sort_by])]
            mine = mine.take(pc.sort_indices(mine, sort_keys=order))
            intent = {"version": self.version, "first_counter": 1}
            batches = iter(mine.to_batches(max_chunksize=chunk_rows))
            work = task.run(ShardInput(shard, state, self.root / "state", batches, intent))
            while True:
                try:
                    found += next(work).to_pylist()
                except StopIteration as end:
                    result = end.value
                    break
            filled = [(name, table) for name, table in result.tables if table.num_rows]
            written = write_tables(self.root / "state", "1-kept", shard, self.batch, filled)
            self.reports.append(result.report)
            self.states[shard] = ShardState(f"{self.batch}", (*result.kept, *written), result.values)
        self.batch += 1
        return found

    def changes(self) -> pa.Table:
        """What is in no version of the relation yet."""
        key, parts = self.relation.key, []
        is_hashed = code_kind(self.relation.schema, list(key)) == "xxhash64"
        for state in self.states:
            assert state is not None
            levels = levels_of([(f, read_table(self.root / "state", f)) for f in state.files], key, is_hashed)
            if levels and state.values["version"] == self.version:
                parts.append(merged_levels(levels, key, is_hashed).drop_columns([CODE_COLUMN]))
        schema = self.relation.schema
        return pa.concat_tables([schema.empty_table(), *(part.select(schema.names).cast(schema) for part in parts)])

    def fold(self) -> None:
        """Fold all changes into a new version, which the next micro-batch uses."""
        self.version = self.relation.upsert(self.changes()).version

    def current(self) -> list[Row]:
        """The relation as it is after the last micro-batch."""
        newest = Relation.open(self.relation.path, self.version)
        path = str(self.root / f"copy-{self.batch}")
        copy = Relation.build(newest.to_arrow(), path, on=newest.key, shards=1)
        return copy.upsert(self.changes()).to_arrow().to_pylist()


@pytest.fixture
def plant(tmp_path: Path) -> Callable[..., Plant]:
    def make(
        schema: pa.Schema,
        key: Sequence[str],
        transformation: Transformation,
        sort_by: Sequence[str] = (),
        shards: int = 3,
    ) -> Plant:
        relation = Relation.build(schema.empty_table(), tmp_path / "relation", on=list(key), shards=shards)
        return Plant(tmp_path, relation, transformation, sort_by)

    return make


@pytest.fixture
def chance() -> np.random.Generator:
    """Numbers that are the same in every run."""
    print("seed", 20_877)
    return np.random.default_rng(20_877)
