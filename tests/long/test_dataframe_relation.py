"""A flow whose relation is a DataFrame, started again by another process on another number of cores."""

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dovetail.relation import Relation
from dovetail.testing.faults import run_unharmed
from dovetail.testing.flows import Feed, published_rows
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows

PROGRAM = Path(__file__).with_name("dataframe_flow.py")
KEYS = 3_000


def orders(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table({"n": list(numbers), "k": pa.array([n * 7919 % KEYS for n in numbers], pa.int64())})


def write_table(root: Path, name: str) -> list[dict[str, Any]]:
    rows = [{"k": key, "city": f"{name} {key % 17}"} for key in range(0, KEYS, 2)]
    (root / "table").mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), root / "table" / "part.parquet")
    return rows


def run(root: Path, cores: int, kind: str, end: str) -> str:
    return run_unharmed([sys.executable, str(PROGRAM), str(root), str(cores), kind, end]).stdout


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_rows_wait_for_the_table_that_they_arrived_with(tmp_path: Path, kind: str) -> None:
    feed, copies = Feed(tmp_path / "feed"), tmp_path / "checkpoint" / "dovetail" / "relations" / "1-enrich"
    early, expected = orders(0, 500), []
    feed.add(early)
    old = write_table(tmp_path, "old")
    assert int(run(tmp_path, 1, kind, "stop").split()[-1]) > 0, "nothing waits: the test would see no old version"
    expected += join_oracle(early.to_pylist(), old, on=["k"], how="left")
    first = Relation.open(copies)
    # The same table again: on other cores it would be cut into other shards.
    run(tmp_path, 2, kind, "stop")
    assert [info.version for info in Relation.open(copies).versions()] == [first.version]
    late = orders(500, 500)
    new = write_table(tmp_path, "new")
    feed.add(late)
    run(tmp_path, 3, kind, "run")
    expected += join_oracle(late.to_pylist(), new, on=["k"], how="left")
    assert_same_rows(published_rows(tmp_path / "out"), expected, kind)
    last = Relation.open(copies)
    assert (last.relation_id, last.num_shards) == (first.relation_id, first.num_shards)
    assert last.version == first.version + 1
