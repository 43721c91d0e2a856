"""Groups of a join that are put out when they are closed, micro-batch by micro-batch, from state files alone."""

import random
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import SchemaError
from dovetail.runtime.aggregate_closed import Aggregate, ClosedGroupsTask
from dovetail.runtime.shard_job import ShardInput
from dovetail.storage.state_files import ShardState, write_tables

Row = tuple[str | None, str | None, int | None, float | None]
TASK = ClosedGroupsTask(
    keys=(pa.string(),),
    aggregates=(
        Aggregate("count", None, pa.int64()),
        Aggregate("count", 0, pa.int64()),
        Aggregate("sum", 0, pa.int64()),
        Aggregate("min", 1, pa.float64()),
        Aggregate("max", 1, pa.float64()),
    ),
    output_names=("c0", "c1", "c2", "c3", "c4", "c5"),
)


class Shard:
    """One shard, its state stored and read again with every micro-batch."""

    def __init__(self, root: Path) -> None:
        self.root, self.batch = root, 0
        self.state: ShardState | None = None
        self.report: Any = None
        (root / "2-groups" / "00000").mkdir(parents=True)

    def run(self, rows: list[Row], rows_per_batch: int = 7) -> list[tuple[Any, ...]]:
        """One micro-batch of (notice, key, integer, real); gives the groups that came out."""
        given = ShardInput(0, self.state, self.root, iter(self._batches(rows, rows_per_batch)), {})
        work = TASK.run(given)
        out: list[tuple[Any, ...]] = []
        while True:
            try:
                out += [tuple(row.values()) for row in next(work).to_pylist()]
            except StopIteration as end:
                result = end.value
                break
        tables = [(name, table) for name, table in result.tables if table.num_rows]
        written = write_tables(self.root, "2-groups", 0, self.batch, tables)
        self.state = ShardState(uuid.uuid4().hex, (*result.kept, *written), result.values)
        self.report = result.report
        self.batch += 1
        return out

    def _batches(self, rows: list[Row], size: int) -> Iterator[pa.RecordBatch]:
        kinds = [pa.string(), pa.string(), pa.int32(), pa.float64()]
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            columns = [pa.array([row[n] for row in part], kind) for n, kind in enumerate(kinds)]
            yield pa.record_batch([pa.array([0] * len(part)), *columns], names=["__code", "n", "k", "v0", "v1"])


def test_group_comes_out_once_when_it_is_closed_whatever_the_order_within_a_micro_batch(tmp_path: Path) -> None:
    print("seed", seed := 6)
    chance = random.Random(seed)
    shard = Shard(tmp_path)
    told: dict[str, tuple[Any, ...]] = {}
    expected: dict[str, list[tuple[int | None, float | None]]] = {f"g{n}": [] for n in range(40)}
    for batch in range(8):
        rows: list[Row] = []
        for n in range(batch * 5, 40):
            for _ in range(chance.randrange(4)):
                values = (chance.choice([None, n]), chance.choice([None, chance.random()]))
                expected[f"g{n}"].append(values)
                rows.append((None, f"g{n}", *values))
        closing = [f"g{n}" for n in range(batch * 5, batch * 5 + 5)]
        rows += [("closed", key, None, None) for key in closing]
        rows += [("it broke a promise", "g39", 1, 1.0), (None, None, 5, 5.0)]
        chance.shuffle(rows)
        found = shard.run(rows)
        assert sorted(row[0] for row in found) == sorted(closing)
        told.update({row[0]: row[1:] for row in found})
    for key, values in expected.items():
        integers = [i for i, _ in values if i is not None]
        reals = [r for _, r in values if r is not None]
        ends = (min(reals), max(reals)) if reals else (None, None)
        assert told[key] == (len(values), len(integers), sum(integers) if integers else None, *ends), key
    assert shard.report["state_rows"] == {"open": 0}
    assert shard.run([]) == []


def test_group_without_a_row_has_a_count_of_none_and_open_ones_stay(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    # What stands in a row that closes its group adds nothing to it: it is there where a join column is aggregated.
    assert shard.run([("closed", "empty", 7, 7.0), (None, "open", 1, 1.0)]) == [("empty", 0, 0, None, None, None)]
    assert shard.report["state_rows"] == {"open": 1}
    assert shard.run([("closed", "open", None, None)]) == [("open", 1, 1, 1, 1.0, 1.0)]
    assert shard.report["metrics"]["output_rows"] == 2


def test_sum_that_does_not_fit_is_an_error_and_not_another_number() -> None:
    total = Aggregate("sum", 0, pa.int64())
    most = pa.chunked_array([pa.array([2**63 - 1]).cast(pa.decimal128(19, 0)).cast(total.partial)])
    assert total.finished(most).to_pylist() == [2**63 - 1]
    with pytest.raises(SchemaError, match="beyond int64"):
        total.finished(pa.chunked_array([pa.array([Decimal(2**64)], total.partial)]))
