"""Every way to read gives the rows that a naive reading gives, and never one that was deleted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail import Relation
from dovetail.relation import ShardReader, SimulatedDisk, compute_codes
from dovetail.relation.format import FENCE_STRIDE
from dovetail.testing.rows import assert_same_rows

SEED = 20_240_117
pytestmark = pytest.mark.usefixtures("without_fsync")

Row = dict[str, Any]
UPSERTED: list[Row] = [
    {"k": 1, "text": "x", "flag": True, "number": 1},
    {"k": 199, "text": "y", "flag": None, "number": 2},
]
IO: dict[str, Callable[[], Any]] = {
    "map": lambda: "map",
    "buffered": lambda: "buffered",
    "direct": lambda: "direct",
    "disk": lambda: SimulatedDisk(1e9, 0.001, virtual=True),
}


def made_rows(count: int, seed: int, mark: str) -> pa.Table:
    """Rows with many duplicate keys, one of them so frequent that it spans several fences, and some NULL keys."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-50, 200, count)
    keys[rng.random(count) < 0.4] = 77
    return pa.table(
        {
            "k": pa.array(keys, mask=rng.random(count) < 0.05),
            "text": [None if i % 11 == 0 else f"{mark}{i}" * (i % 4) for i in range(count)],
            "flag": pa.array([None if i % 7 == 0 else i % 2 == 0 for i in range(count)], pa.bool_()),
            "number": pa.array(range(count), pa.int32()),
        }
    )


@pytest.fixture(scope="module")
def relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    """Several segments a shard, each with deletions, and rows whose key is NULL."""
    print("seed", SEED)
    path = tmp_path_factory.mktemp("readers") / "r"
    built = Relation.build(made_rows(3_000, SEED, "a"), path, on="k", shards=2)
    changed = built.append(made_rows(900, SEED + 1, "b"))
    changed = changed.delete(pa.table({"k": list(range(0, 40, 3))}))
    changed = changed.append(made_rows(300, SEED + 2, "c"))
    return changed.upsert(
        pa.table({"k": [1, 199], "text": ["x", "y"], "flag": [True, None], "number": pa.array([1, 2], pa.int32())})
    )


def naive(shard: ShardReader) -> list[tuple[int, int, Row]]:
    """(position, code, row) of every live row with a key, read one block of one row at a time."""
    found = []
    for position in range(shard.num_rows):
        block = shard.read_block(position, 1)
        if len(block.codes):
            found.append((position, int(block.codes[0]), block.rows.to_pylist()[0]))
    return found


@pytest.fixture(scope="module")
def twin(relation: Relation) -> list[list[tuple[int, int, Row]]]:
    return [naive(relation.shard(number)) for number in range(relation.num_shards)]


def test_the_relation_under_test_is_worth_reading(relation: Relation) -> None:
    for number in range(2):
        shard = relation.shard(number)
        assert 0 < shard.live_rows < shard.num_rows
        assert len(relation._manifest.shards[number].segments) >= 4
    assert relation.stats.null_key_rows > 0
    assert relation.stats.max_multiplicity > 4 * FENCE_STRIDE


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("block_rows", [13, 64, 500, 10_000])
def test_scan_gives_every_live_row_once_with_its_code(
    relation: Relation, twin: list[list[tuple[int, int, Row]]], io: str, block_rows: int
) -> None:
    for number in range(relation.num_shards):
        shard = relation.shard(number, io=IO[io]())
        found: list[tuple[int, Row]] = []
        stop = 0
        for block in shard.blocks(block_rows):
            assert block.start == stop
            assert block.stop == min(block.start + block_rows, shard.num_rows)
            assert block.nbytes == block.rows.nbytes + 8 * block.rows.num_rows
            stop = block.stop
            # Before the next block is read: it may use the same buffer.
            found.extend(zip(block.codes.tolist(), block.rows.to_pylist(), strict=True))
        assert stop == shard.num_rows
        assert found == [(code, row) for _, code, row in twin[number]]
        assert shard.live_rows == len(found)


def test_scan_with_null_keys_gives_them_last_and_all_together_the_model(relation: Relation) -> None:
    rows: list[Row] = []
    for number in range(2):
        shard = relation.shard(number, include_null_keys=True)
        mine = [row for block in shard.blocks(100) for row in block.rows.to_pylist()]
        has_key = [row["k"] is not None for row in mine]
        assert has_key == sorted(has_key, reverse=True)
        assert len(mine) == shard.live_rows == shard.stats.rows
        rows.extend(mine)
    tables = [made_rows(3_000, SEED, "a"), made_rows(900, SEED + 1, "b")]
    expected = [row for table in tables for row in table.to_pylist() if row["k"] not in set(range(0, 40, 3))]
    expected += made_rows(300, SEED + 2, "c").to_pylist()
    expected = [row for row in expected if row["k"] not in (1, 199)]
    expected += UPSERTED
    assert_same_rows(rows, expected, f"seed={SEED}")
    assert_same_rows(relation.to_arrow().to_pylist(), expected, f"seed={SEED}")


@pytest.mark.parametrize("io", IO)
def test_index_gives_all_live_positions_of_a_code_and_no_other(
    relation: Relation, twin: list[list[tuple[int, int, Row]]], io: str
) -> None:
    rng = np.random.default_rng(SEED)
    queries = np.concatenate([np.arange(-60, 210), rng.choice([77, 1, 5], 20), [-(2**63), 2**63 - 1]])
    rng.shuffle(queries)
    for number in range(relation.num_shards):
        shard = relation.shard(number, io=IO[io]())
        expected = [
            (query, position)
            for query, code in enumerate(queries.tolist())
            for position, held, _ in twin[number]
            if held == code
        ]
        found_queries, positions = shard.lookup(queries)
        assert list(zip(found_queries.tolist(), positions.tolist(), strict=True)) == expected
        held = [code for _, code, _ in twin[number]]
        assert shard.count(queries).tolist() == [held.count(code) for code in queries.tolist()]
        assert shard.codes_at(positions).tolist() == queries[found_queries].tolist()


def test_locate_covers_every_row_of_a_code_from_the_resident_index_alone(
    relation: Relation, twin: list[list[tuple[int, int, Row]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dovetail.relation.segment_reader import SegmentReader

    queries = np.arange(-60, 210)
    for number in range(relation.num_shards):
        shard = relation.shard(number)
        with monkeypatch.context() as patch:
            patch.setattr(SegmentReader, "all_codes", lambda self: pytest.fail("touched the codes"))
            found, starts, stops = shard.locate(queries)
        assert found.tolist() == sorted(found.tolist())
        assert (starts < stops).all()
        assert stops.max() <= shard.num_rows
        covered: dict[int, set[int]] = {}
        for query, start, stop in zip(found.tolist(), starts.tolist(), stops.tolist(), strict=True):
            covered.setdefault(int(queries[query]), set()).update(range(start, stop))
        for position, code, _ in twin[number]:
            assert position in covered[code]
        # What is not frequent is narrowed down to a stride or two per segment.
        segments = len(shard._segments)
        rare = [len(positions) for code, positions in covered.items() if code != 77]
        assert max(rare) <= 3 * FENCE_STRIDE * segments


@pytest.mark.parametrize("io", IO)
def test_gather_gives_rows_in_the_order_asked_for(
    relation: Relation, twin: list[list[tuple[int, int, Row]]], io: str
) -> None:
    rng = np.random.default_rng(SEED)
    for number in range(relation.num_shards):
        shard = relation.shard(number, io=IO[io]())
        live = {position: row for position, _, row in twin[number]}
        positions = rng.choice(np.array(list(live)), 400)
        expected = [live[position] for position in positions.tolist()]
        assert shard.gather(positions).to_pylist() == expected
        assert shard.gather(np.sort(positions)).to_pylist() == [live[p] for p in sorted(positions.tolist())]
        assert shard.gather(positions[:0]).to_pylist() == []
        grouped: dict[int, Row] = {}
        for which, rows in shard.gather_grouped(positions):
            grouped.update(zip(which.tolist(), rows.to_pylist(), strict=True))
        assert [grouped[i] for i in range(len(positions))] == expected


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("columns", [["number"], ["text", "k"], ["flag", "number", "k"], []])
def test_projection_gives_these_columns_in_this_order(relation: Relation, io: str, columns: list[str]) -> None:
    whole, shard = relation.shard(0), relation.shard(0, columns=columns, io=IO[io]())
    assert shard.schema.names == columns
    for block, full in zip(shard.blocks(300), whole.blocks(300), strict=True):
        assert block.rows.schema.names == columns
        assert block.rows.num_rows == full.rows.num_rows
        assert block.codes.tolist() == full.codes.tolist()
        assert block.rows.to_pylist() == [{name: row[name] for name in columns} for row in full.rows.to_pylist()]
    gathered = shard.gather(np.array([5, 2, 900]))
    assert (gathered.num_rows, gathered.schema.names) == (3, columns)


def test_codes_on_disk_are_those_of_the_rows(relation: Relation) -> None:
    for number in range(relation.num_shards):
        for block in relation.shard(number).blocks(1_000):
            assert compute_codes(block.rows, ["k"]).to_pylist() == block.codes.tolist()


def test_codes_at_null_keys_are_zero(relation: Relation) -> None:
    shard = relation.shard(0, include_null_keys=True)
    null_positions = np.arange(relation.shard(0).num_rows, shard.num_rows)
    assert len(null_positions)
    assert not shard.codes_at(null_positions).any()
    assert shard.gather(null_positions).column("k").null_count == len(null_positions)


def test_resident_index_is_a_small_part(tmp_path: Path) -> None:
    rows = 200_000
    table = pa.table({"k": np.arange(rows), "payload": pa.array(["x" * 108] * rows)})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=2)
    assert relation.stats.bytes > rows * 112
    assert relation.index_bytes < 0.005 * relation.stats.bytes
    shard = relation.shard(0)
    assert shard.row_bytes == pytest.approx(120, rel=0.02)
    assert relation.shard(0, columns=["k"]).row_bytes == pytest.approx(8, rel=0.1)


def test_block_stays_valid_while_mapped_and_until_the_next_when_buffered(relation: Relation) -> None:
    mapped = relation.shard(0)
    first = mapped.read_block(0, 50)
    rows = first.rows.to_pylist()
    mapped.read_block(500, 50)
    assert first.rows.to_pylist() == rows
    buffered = relation.shard(0, io="buffered")
    again = buffered.read_block(0, 50)
    copied = again.rows.take(pa.array(range(again.rows.num_rows)))
    assert copied.to_pylist() == rows
    buffered.read_block(500, 50)
    assert copied.to_pylist() == rows
