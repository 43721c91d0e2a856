"""Pages are the unit of verification and of reading: damage, truncation and read-ahead, page by page."""

import decimal
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dovetail import Relation
from dovetail.core.errors import RelationCorrupt
from dovetail.relation.reads import paged_file
from dovetail.relation.reads.paged_file import PagedFile, ReadAhead, chunks
from dovetail.relation.segment_writer import SegmentWriter

SEED = 90_211
PAGE = 4096
ROWS = 6_000


def wide_table(rows: int) -> pa.Table:
    """Every layout that a relation stores: bits, fixed widths, strings, structs, lists, maps, NULLs."""
    numbers = range(rows)
    return pa.table(
        {
            "k": pa.array(numbers, pa.int64()),
            "flag": pa.array([i % 3 == 0 for i in numbers]),
            "text": pa.array([None if i % 7 == 0 else f"text {i} " * (i % 5) for i in numbers]),
            "price": pa.array([decimal.Decimal(i) / 4 for i in numbers], pa.decimal128(20, 2)),
            "pair": pa.array([None if i % 11 == 0 else {"a": i, "b": f"b{i}"} for i in numbers]),
            "tags": pa.array([[f"{i}-{j}" for j in range(i % 4)] for i in numbers]),
            "map": pa.array([[(f"m{i}", i)] for i in numbers], pa.map_(pa.string(), pa.int32())),
            "nothing": pa.nulls(rows),
        }
    )


@pytest.fixture
def relation(tmp_path: Path) -> Relation:
    return Relation.build(wide_table(ROWS), tmp_path / "r", on="k", shards=1)


def flip(file: Path, byte: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(byte)
        old = opened.read(1)
        opened.seek(byte)
        opened.write(bytes([old[0] ^ 16]))
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))


def rows_file(relation: Relation, ending: str = "rows") -> Path:
    (file,) = Path(relation.path).glob(f"data/0/*.{ending}")
    return file


def look_up(relation: Relation, keys: list[int]) -> list[dict[str, object]]:
    shard = Relation.open(relation.path).shard(0)
    _, positions = shard.lookup(np.array(keys))
    return list(shard.gather(positions).to_pylist())


# -------------------------------------------------------------------- damage


def test_damage_is_found_in_whatever_page_it_is(relation: Relation) -> None:
    """A gather of all rows verifies every page with a byte of a row, whatever the column's layout."""
    file = rows_file(relation)
    head = len(relation.schema.serialize())
    for page in range(-(-file.stat().st_size // PAGE)):
        byte = max(page * PAGE, head) + 9
        flip(file, byte)
        with pytest.raises(RelationCorrupt, match="does not match its digest in the page"):
            look_up(relation, list(range(ROWS)))
        flip(file, byte)
    assert look_up(relation, list(range(ROWS))) == wide_table(ROWS).to_pylist()


@pytest.mark.parametrize("ending", ["rows", "codes"])
def test_row_is_right_or_refused_and_others_are_not_concerned(relation: Relation, ending: str) -> None:
    print("seed", SEED)
    chance, expected = random.Random(SEED), wide_table(ROWS).drop_columns(["tags", "map"]).to_pylist()
    file = rows_file(relation, ending)
    head = len(relation.schema.serialize()) if ending == "rows" else 0
    names = [name for name in relation.schema.names if name not in ("tags", "map")]
    refused = right = 0
    for _ in range(12):
        byte = chance.randrange(head + PAGE, file.stat().st_size - 8)
        flip(file, byte)
        for key in chance.sample(range(ROWS), 12):
            shard = Relation.open(relation.path).shard(0, columns=names)
            try:
                _, positions = shard.lookup(np.array([key]))
                assert shard.gather(positions).to_pylist() == [expected[key]]
                right += 1
            except RelationCorrupt:
                refused += 1
        flip(file, byte)
    # A few pages of many are damaged: most rows are read without looking at them.
    assert right > 100
    print(refused, "refused")


def test_lookup_of_one_row_verifies_a_few_pages(relation: Relation, monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[int] = []
    real = paged_file.check_pages

    def counting(*arguments: object) -> int:
        before = int(arguments[3].sum())  # type: ignore[attr-defined]
        damaged = real(*arguments)  # type: ignore[arg-type]
        marked.append(int(arguments[3].sum()) - before)  # type: ignore[attr-defined]
        return damaged

    monkeypatch.setattr(paged_file, "check_pages", counting)
    shard = Relation.open(relation.path).shard(0, columns=["text", "price"])
    _, positions = shard.lookup(np.array([4_321]))
    assert shard.gather(positions).column("text").to_pylist() == wide_table(ROWS)["text"].to_pylist()[4_321:4_322]
    assert 0 < sum(marked) <= 8


@pytest.mark.parametrize("block_rows", [7, 500, 65_536])
def test_scan_in_blocks_of_any_size_finds_damage_before_the_row(relation: Relation, block_rows: int) -> None:
    file, expected = rows_file(relation), wide_table(ROWS).to_pylist()
    flip(file, file.stat().st_size // 2)
    seen: list[dict[str, object]] = []

    def scan() -> None:
        for block in Relation.open(relation.path).shard(0).blocks(block_rows):
            seen.extend(block.rows.to_pylist())

    with pytest.raises(RelationCorrupt, match="does not match its digest"):
        scan()
    assert seen == expected[: len(seen)]


# -------------------------------------------------------------------- segments of earlier releases


@pytest.fixture
def old_relation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Relation:
    """A relation whose index has no checksums of pages, as releases before them wrote it."""
    real = SegmentWriter._index_bytes

    def without_sums(writer: SegmentWriter) -> bytes:
        with pa.ipc.open_stream(real(writer)) as stream:
            old = stream.read_next_batch().drop_columns(["row_sums", "code_sums", "widest_values"])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, old.schema) as written:
            written.write_batch(old)
        return bytes(sink.getvalue())

    with monkeypatch.context() as patched:
        patched.setattr(SegmentWriter, "_index_bytes", without_sums)
        built = Relation.build(wide_table(ROWS), tmp_path / "old", on="k", shards=1)
    with pa.ipc.open_stream(rows_file(built, "index").read_bytes()) as stream:
        assert "row_sums" not in stream.schema.names, "the relation was not written as earlier releases did"
    return built


def test_segment_without_page_sums_is_read_and_verified_by_batch(old_relation: Relation) -> None:
    expected = wide_table(ROWS).to_pylist()
    assert look_up(old_relation, [5, 4_999]) == [expected[5], expected[4_999]]
    assert old_relation.to_arrow().sort_by("k").to_pylist() == expected
    for ending in ("rows", "codes"):
        file = rows_file(old_relation, ending)
        byte = file.stat().st_size // 2
        flip(file, byte)
        with pytest.raises(RelationCorrupt, match="does not match its digest in record batch 0"):
            look_up(old_relation, [5])
        flip(file, byte)


def test_segments_of_both_kinds_are_merged(old_relation: Relation) -> None:
    changed = old_relation.upsert(wide_table(10))
    assert changed.to_arrow().sort_by("k").to_pylist() == wide_table(ROWS).to_pylist()


# -------------------------------------------------------------------- truncated under a mapping

_TRUNCATED = """
import os, sys, numpy as np
from pathlib import Path
from dovetail import Relation
from dovetail.core.errors import RelationCorrupt
path, ending, action = sys.argv[1:]
shard = Relation.open(path).shard(0)
if ending != "index":  # checksums are read before pages are verified, not after
    _, positions = shard.lookup(np.arange(0, 6000, 50))
    shard.gather(positions)
(file,) = Path(path).glob(f"data/0/*.{ending}")
os.truncate(file, 0 if ending == "index" else 8192)
try:
    if action == "lookup":
        _, positions = shard.lookup(np.array([5999]))
        shard.gather(positions)
    else:
        list(shard.blocks(1000))
except RelationCorrupt as error:
    assert "truncated while it was open" in str(error), error
    assert str(file.with_suffix("")) in str(error), error
    sys.exit(42)
"""


@pytest.mark.parametrize("action", ["lookup", "scan"])
@pytest.mark.parametrize("ending", ["rows", "codes", "index"])
def test_file_truncated_under_an_open_reader_is_an_error_and_no_signal(
    relation: Relation, ending: str, action: str
) -> None:
    command = [sys.executable, "-c", _TRUNCATED, relation.path, ending, action]
    assert subprocess.run(command, check=False).returncode == 42


def test_page_that_cannot_be_read_in_the_middle_of_a_batch_is_an_error(tmp_path: Path) -> None:
    """The kernel reports a failed read of the device in the same way as a page behind the end of the file."""
    (tmp_path / "file").write_bytes(bytes(64 * PAGE))
    with pa.memory_map(str(tmp_path / "file")) as mapped:
        data = mapped.read_buffer()
    file = PagedFile(str(tmp_path / "file"), data, (0, data.size))
    file.need((np.array([0, 20]), np.array([3, 20])))
    os.truncate(tmp_path / "file", 16 * PAGE)
    with pytest.raises(RelationCorrupt, match=r"cannot be read at byte 81920: the file was truncated .* or the disk"):
        file.need((np.array([0, 20, 40]), np.array([3, 20, 40])))


# -------------------------------------------------------------------- when to ask


def test_asking_stops_when_the_device_has_nothing_to_read_and_starts_with_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = 0

    class Usage:
        @property
        def ru_majflt(self) -> int:
            return faults

    monkeypatch.setattr(paged_file, "_usage", Usage)
    ahead = ReadAhead()
    ahead.asked(5_000, 0)
    assert ahead.is_on, "too few to judge"
    ahead.asked(5_000, 99)
    assert not ahead.is_on
    ahead.begin(1_000)
    ahead.begin(1_000)
    assert not ahead.is_on
    faults += 100
    ahead.begin(1_000)
    assert ahead.is_on
    ahead.asked(9_000, 0)
    assert not ahead.is_on
    ahead = ReadAhead()
    for _ in range(10):
        # What is asked for twice is in memory the second time.
        ahead.asked(5_000, 5_000)
        ahead.asked(5_000, 0)
        assert ahead.is_on


def test_scan_after_a_lookup_reads_ahead_again(relation: Relation, monkeypatch: pytest.MonkeyPatch) -> None:
    advice: list[bool] = []
    monkeypatch.setattr(paged_file, "read_around_faults", lambda address, size, around: advice.append(around))
    shard = Relation.open(relation.path).shard(0)
    for _ in range(2):
        # The second time, everything is verified.
        _, positions = shard.lookup(np.array([17]))
        shard.gather(positions)
        assert advice == [False, False], "codes and rows"
        list(shard.blocks(2_000))
        assert advice == [False, False], "long blocks are asked for"
        list(shard.blocks(500))
        assert advice == [False, False, True, True]
        advice.clear()


def test_groups_are_cut_into_chunks_of_whole_groups() -> None:
    offsets = np.array([0, 3, 5, 30, 31, 32])
    assert list(chunks(offsets, 6)) == [(0, 2), (2, 3), (3, 5)]
    assert list(chunks(offsets, 1)) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert list(chunks(np.array([0]), 6)) == []


@pytest.mark.parametrize("io", ["map", "buffered", "direct"])
def test_rows_are_the_same_in_small_chunks(relation: Relation, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.relation.segment_reader._MOST_PAGES_AHEAD", 30)
    shard = Relation.open(relation.path).shard(0, io=io)  # type: ignore[arg-type]
    keys = np.random.default_rng(SEED).permutation(ROWS)[:900]
    _, positions = shard.lookup(keys)
    expected = wide_table(ROWS).take(pa.array(keys)).to_pylist()
    assert shard.gather(positions).to_pylist() == expected
