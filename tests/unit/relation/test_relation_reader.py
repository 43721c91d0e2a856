"""All shards behind one reader: the same rows as a plain dictionary of the table gives, whatever the versions did."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError
from dovetail.relation import Relation, SimulatedDisk
from dovetail.relation.relation_reader import RelationReader

SEED = 5


@pytest.fixture(params=[1, 5], ids=["one shard", "five shards"])
def relation(tmp_path: Path, request: pytest.FixtureRequest) -> Relation:
    """Three versions: duplicates, deleted and replaced keys, several segments per shard."""
    keys = np.random.default_rng(SEED).integers(0, 300, 1_000)
    built = Relation.build(table(keys, 0), tmp_path / "r", on="k", shards=request.param)
    changed = built.upsert(table(np.arange(0, 40, dtype=np.int64), 5_000))
    return changed.delete(pa.table({"k": pa.array(range(100, 140), pa.int64())})).append(
        table(np.arange(290, 310, dtype=np.int64), 9_000)
    )


def table(keys: npt.NDArray[np.int64], first: int) -> pa.Table:
    return pa.table({"k": keys, "row": pa.array(range(first, first + keys.size)), "text": [f"é{k}" for k in keys]})


def rows_by_key(relation: Relation) -> dict[int, list[int]]:
    """The oracle: every row of the relation, by a scan of its shards."""
    found = defaultdict(list)
    for row in relation.to_arrow().select(["k", "row"]).to_pylist():
        found[row["k"]].append(row["row"])
    return found


@pytest.mark.parametrize("in_order", [True, False])
def test_lookup_finds_every_row_of_every_key(relation: Relation, in_order: bool) -> None:
    expected = rows_by_key(relation)
    codes = np.random.default_rng(SEED).permutation(np.arange(-5, 320)).astype(np.int64)
    reader = relation.reader(["row"])
    queries, positions = reader.lookup(codes, in_order=in_order)
    rows = reader.gather(positions).column("row").to_pylist()
    found = defaultdict(list)
    for query, row in zip(queries.tolist(), rows, strict=True):
        found[int(codes[query])].append(row)
    assert {k: sorted(v) for k, v in found.items()} == {k: sorted(v) for k, v in expected.items()}
    if in_order:
        assert (np.diff(queries) >= 0).all()
    assert len(np.flatnonzero(np.diff(queries, prepend=-1))) == len(expected), "the rows of a key follow one another"
    assert reader.count(codes).tolist() == [len(expected.get(code, [])) for code in codes.tolist()]
    assert reader.codes_at(positions).tolist() == codes[queries].tolist()


def test_ranges_from_the_resident_index_hold_every_row(relation: Relation) -> None:
    reader = relation.reader(["row"])
    codes = np.arange(-5, 320, dtype=np.int64)
    queries, positions = reader.lookup(codes)
    ranges = defaultdict(list)
    for query, start, stop in zip(*(part.tolist() for part in reader.locate(codes)), strict=True):
        ranges[query].append((start, stop))
    for query, position in zip(queries.tolist(), positions.tolist(), strict=True):
        assert any(start <= position < stop for start, stop in ranges[query])


def test_blocks_hold_every_live_row_once(relation: Relation) -> None:
    reader = relation.reader(["k", "row"])
    position, rows = 0, []
    while position < reader.num_rows:
        block = reader.read_block(position, 97)
        assert block.codes.tolist() == block.rows.column("k").to_pylist()
        rows += block.rows.column("row").to_pylist()
        position = block.stop
    assert sorted(rows) == sorted(relation.to_arrow().column("row").to_pylist())
    assert len(rows) == reader.live_rows == relation.stats.rows
    with pytest.raises(PlanError, match="is not in a relation"):
        reader.read_block(reader.num_rows + 1, 5)


def test_gather_gives_rows_in_the_order_asked_for(relation: Relation) -> None:
    reader = relation.reader(["text", "row"])
    positions = np.random.default_rng(SEED).integers(0, reader.num_rows, 500)
    one_by_one = [reader.gather(np.array([position])).to_pylist()[0] for position in positions.tolist()]
    assert reader.gather(positions).to_pylist() == one_by_one
    assert reader.gather(positions[:0]).num_rows == 0
    assert reader.gather(positions).schema.names == ["text", "row"]
    with pytest.raises(PlanError, match="A position is not in a relation"):
        reader.gather(np.array([reader.num_rows]))


@pytest.mark.parametrize("io", ["buffered", "direct", "disk"])
def test_every_way_to_read_gives_the_same_rows(relation: Relation, io: str) -> None:
    disk = SimulatedDisk(bandwidth_bytes_per_s=1e9, seek_s=1e-6, virtual=True)
    mapped = relation.reader(["row"])
    reader: RelationReader = relation.reader(["row"], disk if io == "disk" else io)  # type: ignore[arg-type]
    positions = np.arange(0, reader.num_rows, 3)
    assert reader.gather(positions).equals(mapped.gather(positions))
    assert (reader.disk is disk) == (io == "disk")
    assert (disk.bytes > 0) == (io == "disk")
    assert reader.io_mode == ("map" if io == "disk" else io)


def test_sizes_are_those_of_the_shards_together(relation: Relation) -> None:
    reader = relation.reader()
    shards = [relation.shard(number) for number in range(relation.num_shards)]
    assert reader.index_bytes == sum(shard.index_bytes for shard in shards)
    assert reader.num_segments == sum(shard.num_segments for shard in shards) > relation.num_shards
    assert reader.row_bytes == pytest.approx(sum(s.row_bytes * s.num_rows for s in shards) / reader.num_rows)
    assert reader.stats.max_multiplicity == relation.stats.max_multiplicity
    assert reader.version == relation.version


def test_changed_codes_are_those_whose_rows_differ_between_versions(relation: Relation) -> None:
    codes = np.arange(-5, 320, dtype=np.int64)
    for earlier in (Relation.open(relation.path, number) for number in (1, 2, 3)):
        before, after = rows_by_key(earlier), rows_by_key(relation)
        changed = relation.changed_codes(earlier, codes)
        really = np.array([sorted(before.get(code, [])) != sorted(after.get(code, [])) for code in codes.tolist()])
        assert not (really & ~changed).any(), "a changed key was taken for unchanged"
        assert changed.mean() < 0.5, "what did not change was taken for changed"
        assert not relation.changed_codes(relation, codes).any()
