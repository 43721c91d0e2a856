"""The shard in memory answers as the real reader does, and punishes who keeps a block."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dovetail import SimulatedDisk
from dovetail.core.errors import PlanError
from dovetail.relation import Relation
from dovetail.testing.batches import colliding_code
from dovetail.testing.shard import MemoryShard

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])


def _rows(seed: int) -> list[dict[str, object]]:
    chance = random.Random(seed)
    return [{"k": chance.randrange(-20, 20) * 3, "v": f"v{number}"} for number in range(chance.randrange(1, 200))]


@pytest.mark.parametrize("seed", range(5))
def test_differential_memory_shard_and_reader_agree(seed: int, tmp_path: Path) -> None:
    print(f"seed={seed}")
    rows = _rows(seed)
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    real = Relation.build(table, str(tmp_path / "r"), on="k", shards=1).shard(0)
    fake = MemoryShard.of_rows(rows, SCHEMA, lambda row: row["k"])
    codes = np.array([*range(-70, 70), 0, 3], np.int64)

    assert (fake.num_rows, fake.live_rows, fake.schema) == (real.num_rows, real.live_rows, real.schema)
    np.testing.assert_array_equal(fake.count(codes), real.count(codes))
    for mine, theirs in zip(fake.lookup(codes), real.lookup(codes), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for start in range(0, fake.num_rows, 7):
        mine_block, real_block = fake.read_block(start, 7), real.read_block(start, 7)
        np.testing.assert_array_equal(mine_block.codes, real_block.codes)
        assert (mine_block.start, mine_block.stop) == (real_block.start, real_block.stop)
        # Rows of one code may come in any order: only their codes are sorted.
        assert sorted(mine_block.rows.column("k").to_pylist()) == sorted(real_block.rows.column("k").to_pylist())
    positions = np.array([*range(fake.num_rows)][::-2], np.int64)
    np.testing.assert_array_equal(fake.codes_at(positions), real.codes_at(positions))
    assert fake.gather(positions).column("k").to_pylist() == fake.codes_at(positions).tolist()


@pytest.mark.parametrize("stride", [1, 2, 5, 1000])
def test_located_ranges_hold_every_row_of_their_code(stride: int) -> None:
    rows = _rows(3)
    shard = MemoryShard(
        pa.Table.from_pylist(rows, schema=SCHEMA), [int(str(r["k"])) for r in rows], fence_stride=stride
    )
    codes = np.arange(-70, 70, dtype=np.int64)
    queries, starts, stops = shard.locate(codes)
    ranges = {q: (a, b) for q, a, b in zip(queries.tolist(), starts.tolist(), stops.tolist(), strict=True)}
    for query, position in zip(*(part.tolist() for part in shard.lookup(codes)), strict=True):
        assert ranges[query][0] <= position < ranges[query][1]
    assert all(0 <= start < stop <= shard.num_rows for start, stop in ranges.values())


def test_block_is_wiped_by_the_next_read_but_gathered_rows_are_not() -> None:
    shard = MemoryShard.of_rows([{"k": k, "v": f"v{k}"} for k in range(1, 5)], SCHEMA, lambda row: row["k"])
    gathered = shard.gather(np.array([0, 1]))
    first = shard.read_block(0, 2)
    assert first.rows.to_pylist() == gathered.to_pylist() == [{"k": 1, "v": "v1"}, {"k": 2, "v": "v2"}]
    second = shard.read_block(2, 2)
    assert first.rows.to_pylist() == [{"k": 0, "v": ""}, {"k": 0, "v": ""}]
    assert first.codes.tolist() == [1, 2]
    assert second.rows.column("v").to_pylist() == ["v3", "v4"]
    assert gathered.column("v").to_pylist() == ["v1", "v2"]
    assert shard.block_reads == [(0, 2), (2, 4)]


def test_deleted_rows_keep_positions_and_are_never_given() -> None:
    table = pa.table({"k": [1, 2, 2, 3]})
    shard = MemoryShard(table, [1, 2, 2, 3], deleted=[1, 3])
    assert (shard.num_rows, shard.live_rows) == (4, 2)
    assert shard.read_block(0, 4).codes.tolist() == [1, 2]
    assert shard.read_block(1, 1).rows.num_rows == 0
    assert [part.tolist() for part in shard.lookup(np.array([2, 3]))] == [[0], [2]]
    assert shard.count(np.array([1, 2, 3])).tolist() == [1, 1, 0]


def test_rows_without_a_code_are_left_out_unless_asked_for() -> None:
    table = pa.table({"k": [None, 0, 5]})
    assert MemoryShard(table, [None, 0, 5]).num_rows == 2
    shard = MemoryShard(table, [None, 0, 5], include_null_keys=True)
    assert shard.read_block(0, 9).rows.column("k").to_pylist() == [0, 5, None]
    assert shard.lookup(np.array([0]))[1].tolist() == [0]


def test_codes_collide_as_told() -> None:
    rows = [{"k": k, "v": "x"} for k in range(50)]
    shard = MemoryShard.of_rows(rows, SCHEMA, colliding_code("k", distinct_codes=2))
    assert set(shard.read_block(0, 50).codes.tolist()) == {0, 1}
    assert shard.count(np.array([0, 1])).sum() == 50


def test_empty_shard_gives_nothing() -> None:
    shard = MemoryShard.of_rows([], SCHEMA, lambda row: None)
    assert shard.read_block(0, 5).rows.schema == SCHEMA
    assert [len(part) for part in (*shard.lookup(np.array([1])), *shard.locate(np.array([1])))] == [0] * 5
    assert (shard.num_rows, shard.row_bytes, shard.index_bytes) == (0, 0.0, 0)


def test_projection_gives_only_the_columns_asked_for() -> None:
    shard = MemoryShard(pa.table({"k": [1], "v": ["x"], "w": [2]}), [1], columns=["w", "v"])
    assert shard.schema.names == shard.read_block(0, 1).rows.schema.names == ["w", "v"]


@pytest.mark.parametrize(("start", "rows"), [(0, 0), (-1, 1), (2, 1)])
def test_block_outside_the_shard_is_refused(start: int, rows: int) -> None:
    with pytest.raises(PlanError, match="not in a shard"):
        MemoryShard(pa.table({"k": [1]}), [1]).read_block(start, rows)


def test_wrong_number_of_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="1 rows have 2 codes"):
        MemoryShard(pa.table({"k": [1]}), [1, 2])


def test_blocks_count_as_read_in_place_only_where_nothing_is_left_out() -> None:
    table = pa.table({"k": list(range(10))})
    shard = MemoryShard(table, list(range(10)), batch_rows=4)
    assert shard.reads_in_place
    assert [shard.rows_in_place(start) for start in (0, 3, 4, 9)] == [4, 1, 4, 3]
    assert not MemoryShard(table, list(range(10))).reads_in_place
    assert not MemoryShard(table, list(range(10)), deleted=[2], batch_rows=4).reads_in_place
    disk = SimulatedDisk(1e6, 0.0, virtual=True)
    assert not MemoryShard(table, list(range(10)), disk=disk, batch_rows=4).reads_in_place
