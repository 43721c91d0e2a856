"""Many rows of a table that is read from a device: pages with their gaps, or whole record batches."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dovetail import Relation
from dovetail.core.errors import PlanError, RelationCorrupt
from dovetail.kernels.pages import PAGE_BYTES
from dovetail.relation.reads import paged_file, whole_batches
from dovetail.relation.reads.drop_behind import DropBehind
from dovetail.relation.reads.paged_file import PagedFile
from dovetail.relation.reads.read_costs import ReadCosts

SEED = 5_501
ROWS = 150_000


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    random = np.random.default_rng(SEED)
    keys = np.concatenate([np.arange(ROWS), random.integers(0, ROWS, 5_000)])
    text = pa.array([None if n % 11 == 0 else f"row {n} " * (n % 5) for n in range(keys.size)])
    table = pa.table({"k": keys, "n": np.arange(keys.size), "text": text})
    return Relation.build(table, tmp_path_factory.mktemp("sweeps") / "r", on="k", shards=2)


@pytest.fixture
def as_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing counts as in memory, wherever the pages are."""
    monkeypatch.setattr(PagedFile, "absent_share", lambda file: 1.0)


@pytest.fixture
def always_whole(as_cold: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadCosts, "prefers_pass", lambda *_: True)


def rows_at(relation: Relation, positions: np.ndarray) -> list[dict[str, object]]:
    reader = Relation.open(relation.path).reader()
    pieces = [batch for _, batch in reader.gather_ascending(positions, in_pass=True)]
    return list(pa.Table.from_batches(pieces, schema=reader.schema).to_pylist())


def expected_at(relation: Relation, positions: np.ndarray) -> list[dict[str, object]]:
    everything = pa.concat_tables([pa.Table.from_batches([block.rows]) for block in blocks_of(relation)])
    return list(everything.take(pa.array(positions)).to_pylist())


def blocks_of(relation: Relation) -> list[object]:
    opened = Relation.open(relation.path)
    return [block for number in range(opened.num_shards) for block in opened.shard(number).blocks(40_000)]


def flip(file: Path, byte: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(byte)
        old = opened.read(1)
        opened.seek(byte)
        opened.write(bytes([old[0] ^ 16]))
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))


# -------------------------------------------------------------------- the same rows


@pytest.mark.parametrize("rows", [1, 700, 60_000, ROWS])
def test_oracle_whole_batches_give_the_rows_that_pages_give(built: Relation, always_whole: None, rows: int) -> None:
    print("seed", SEED)
    positions = np.sort(np.random.default_rng([SEED, rows]).permutation(ROWS)[:rows])
    assert rows_at(built, positions) == expected_at(built, positions)


def test_rows_of_a_pass_count_as_read_from_the_device(built: Relation, always_whole: None) -> None:
    """Else a worker would take the table to be in memory, and stop making passes."""
    before = paged_file.pages_read_ahead()
    rows_at(built, np.arange(0, ROWS, 3))
    assert paged_file.pages_read_ahead() - before >= ROWS // 3


def test_file_system_that_cannot_be_read_directly_is_read_by_page(
    built: Relation, always_whole: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PlanError("no direct reads here")

    monkeypatch.setattr(whole_batches, "PreadFile", refuse)
    positions = np.arange(0, ROWS, 3)
    assert rows_at(built, positions) == expected_at(built, positions)


def test_what_is_in_memory_is_not_read_whole(built: Relation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedFile, "absent_share", lambda file: 0.0)
    monkeypatch.setattr(whole_batches.WholeBatches, "read", None)  # calling it would fail
    positions = np.arange(0, ROWS, 2)
    assert rows_at(built, positions) == expected_at(built, positions)


def test_pass_that_is_given_up_does_not_disturb_the_next(built: Relation, always_whole: None) -> None:
    reader = Relation.open(built.path).reader()
    positions = np.arange(ROWS)
    for _ in range(3):
        pieces = reader.gather_ascending(positions, in_pass=True)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
    whole = [batch for _, batch in reader.gather_ascending(positions, in_pass=True)]
    assert pa.Table.from_batches(whole).to_pylist() == expected_at(built, positions)


# -------------------------------------------------------------------- faults


def test_damage_is_found_in_a_copy_too(built: Relation, always_whole: None) -> None:
    (file,) = Path(built.path).glob("data/1/*.rows")
    byte = file.stat().st_size * 2 // 3
    flip(file, byte)
    try:
        with pytest.raises(
            RelationCorrupt, match=f"does not match its digest in the page from byte {byte // 4096 * 4096}"
        ):
            rows_at(built, np.arange(ROWS))
    finally:
        flip(file, byte)
    assert rows_at(built, np.arange(ROWS)) == expected_at(built, np.arange(ROWS))


def test_read_that_fails_in_the_middle_of_a_pass_is_an_error(
    built: Relation, always_whole: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reads = os.preadv, []

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        if len(reads) == 2:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr("dovetail.relation.io.os.preadv", failing)
        with pytest.raises(RelationCorrupt, match="or the disk reports an error"):
            rows_at(built, np.arange(ROWS))
    assert len(reads) >= 2
    assert rows_at(built, np.arange(ROWS)) == expected_at(built, np.arange(ROWS)), "the next attempt reads everything"


_TRUNCATED = """
import os, sys, numpy as np
from pathlib import Path
from dovetail import Relation
from dovetail.core.errors import RelationCorrupt
from dovetail.relation.reads.paged_file import PagedFile
from dovetail.relation.reads.read_costs import ReadCosts
PagedFile.absent_share = lambda file: 1.0
if sys.argv[2] == "whole":
    ReadCosts.prefers_pass = lambda *_: True
reader = Relation.open(sys.argv[1]).reader()
pieces = reader.gather_ascending(np.arange(150_000), in_pass=True)
next(pieces)
for file in Path(sys.argv[1]).glob("data/*/*.rows"):
    os.truncate(file, 8192)
try:
    for _ in pieces:
        pass
except RelationCorrupt as error:
    assert "truncated" in str(error), error
    sys.exit(42)
"""


@pytest.mark.parametrize("way", ["whole", "pages"])
def test_file_truncated_in_mid_pass_is_an_error_and_no_signal(tmp_path: Path, way: str) -> None:
    keys = np.arange(ROWS)
    Relation.build(pa.table({"k": keys, "text": [f"row {n}" for n in keys]}), tmp_path / "r", on="k", shards=2)
    command = [sys.executable, "-c", _TRUNCATED, str(tmp_path / "r"), way]
    assert subprocess.run(command, check=False).returncode == 42


# -------------------------------------------------------------------- what is dropped behind


def paged(path: Path, pages: int) -> PagedFile:
    path.write_bytes(bytes(pages * PAGE_BYTES))
    with pa.memory_map(str(path)) as mapped:
        data = mapped.read_buffer()
    return PagedFile(str(path), data, (0, data.size))


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pages from 40 on are not in memory; collects the ranges that are dropped."""
    dropped: list[tuple[int, int]] = []

    def find(address: int, pages: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        firsts, lasts = np.maximum(pages[0], 40), pages[1]
        return firsts[firsts <= lasts], lasts[firsts <= lasts]

    def drop(descriptor: int, address: int, pages: tuple[np.ndarray, np.ndarray]) -> None:
        dropped.extend(zip(pages[0].tolist(), pages[1].tolist(), strict=True))

    monkeypatch.setattr(paged_file, "absent_pages", find)
    monkeypatch.setattr(paged_file, "drop_pages", drop)
    return dropped


def test_long_ranges_are_dropped_but_not_what_was_in_memory(tmp_path: Path, absent: list[tuple[int, int]]) -> None:
    file = paged(tmp_path / "file", 200)
    asked = file.ask((np.array([10, 120, 190]), np.array([80, 122, 190])), drops_behind=True)
    file.wait(asked)
    assert absent == []
    file.drop(asked)
    assert absent == [(40, 80)]


def test_nothing_is_dropped_unless_asked(tmp_path: Path, absent: list[tuple[int, int]]) -> None:
    file = paged(tmp_path / "file", 200)
    asked = file.ask((np.array([10]), np.array([180])))
    file.wait(asked)
    file.drop(asked)
    assert absent == []


def test_scan_drops_each_block_behind_the_next(
    built: Relation, absent: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drops = DropBehind(values=True)
    monkeypatch.setattr("dovetail.relation.shard_reader._what_to_drop", lambda *_: drops)
    shard = Relation.open(built.path).shard(0, columns=["n", "text"])
    rows, seen = shard.num_rows, []
    for start in range(0, rows, 20_000):
        block = shard.read_block(start, 20_000)
        seen += block.rows.column("n").to_pylist()
    assert sorted(seen) == sorted(row["n"] for row in whole(built, 0))
    assert absent, "values are long ranges"
    assert all(first >= 40 for first, _ in absent)
    pages = [page for first, last in absent for page in range(first, last + 1)]
    assert len(pages) <= len(set(pages)) * 1.2, "only pages at borders are dropped twice"


def whole(relation: Relation, shard: int) -> list[dict[str, object]]:
    rows = Relation.open(relation.path).shard(shard, columns=["n"]).read_block(0, ROWS).rows
    return list(rows.to_pylist())


def test_reads_between_rows_are_joined_where_a_gap_is_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[tuple[int, int]]] = []

    def ask(address: int, pages: tuple[np.ndarray, np.ndarray]) -> bool:
        asked.append(list(zip(pages[0].tolist(), pages[1].tolist(), strict=True)))
        return True

    monkeypatch.setattr(paged_file, "ask_for_pages", ask)
    file = paged(tmp_path / "file", 200)
    file.costs = ReadCosts(read_s=5e-6, page_s=1e-6)
    assert [file.costs.next_gap_pages() for _ in range(5)] == [2, 5, 10, 5, 2]
    pages = np.array([0, 4, 50, 56, 63])
    file.need((pages, pages))
    assert asked == [[(0, 4), (50, 56), (63, 63)]]
