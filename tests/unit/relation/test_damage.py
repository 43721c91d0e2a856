"""Damaged files are found by size or digest before a wrong row is returned."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import fs

from dovetail import Relation
from dovetail.core.errors import RelationCorrupt, RelationNotFound
from dovetail.relation.reads import paged_file
from dovetail.storage import verified
from dovetail.storage.digests import digest_of

SEED = 7_041
KINDS = ["rows", "codes", "index", "deleted"]
DataFiles = Callable[[Path, str], list[Path]]


@pytest.fixture
def relation(tmp_path: Path) -> Relation:
    table = pa.table({"k": list(range(500)), "text": [f"value {i}" for i in range(500)], "n": list(range(500))})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=1)
    return relation.delete(pa.table({"k": [1, 2, 3]}))


def read_all(root: Path | str, io: Any = "map") -> list[dict[str, Any]]:
    """Everything that a reader can ask for."""
    shard = Relation.open(root).shard(0, io=io)
    rows = [row for block in shard.blocks(100) for row in block.rows.to_pylist()]
    queries, positions = shard.lookup(np.arange(500))
    assert [row["k"] for row in shard.gather(positions).to_pylist()] == queries.tolist()
    return rows


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@pytest.mark.parametrize("io", ["map", "buffered"])
@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bit_is_found_before_a_wrong_row_is_returned(
    relation: Relation, data_files: DataFiles, own_verification_marks: Path, kind: str, io: str
) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    expected = read_all(relation.path)
    file = data_files(Path(relation.path), kind)[0]
    whole = file.read_bytes()
    # The schema at the head of the rows and the mark at their end are for people who look at the file with Arrow's own
    # tools: the version has its own schema and sizes, so what is there cannot change a row.
    is_not_read = range(len(relation.schema.serialize())) if kind == "rows" else range(0)
    found = 0
    for _ in range(40):
        bit = chance.randrange(8 * len(whole))
        # Written to the byte at once, so what earlier rounds have checked is not remembered.
        shutil.rmtree(own_verification_marks / f"dovetail-{os.getuid()}", ignore_errors=True)
        flip(file, bit)
        if bit // 8 in is_not_read or (kind == "rows" and bit // 8 >= len(whole) - 8):
            assert read_all(relation.path, io) == expected, f"bit {bit}"
        else:
            with pytest.raises(RelationCorrupt, match="does not match its digest") as caught:
                read_all(relation.path, io)
            assert str(file) in str(caught.value), f"bit {bit}"
            found += 1
        file.write_bytes(whole)
    assert found > 20
    assert read_all(relation.path, io) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 0.5, 1.0])
def test_file_cut_short_is_found(relation: Relation, data_files: DataFiles, kind: str, cut: float) -> None:
    file = data_files(Path(relation.path), kind)[0]
    size = file.stat().st_size
    os.truncate(file, size - int(cut if isinstance(cut, int) else cut * size))
    with pytest.raises(RelationCorrupt, match=r"truncated or overwritten|does not match its digest") as caught:
        read_all(relation.path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_file_made_longer_is_found(relation: Relation, data_files: DataFiles, kind: str) -> None:
    file = data_files(Path(relation.path), kind)[0]
    with open(file, "ab") as end:
        end.write(b"\0")
    with pytest.raises(RelationCorrupt, match=r"truncated or overwritten|does not match its digest"):
        read_all(relation.path)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_file_is_named(relation: Relation, data_files: DataFiles, kind: str) -> None:
    file = data_files(Path(relation.path), kind)[0]
    file.unlink()
    with pytest.raises(RelationCorrupt, match=r"is missing: it was vacuumed or deleted") as caught:
        read_all(relation.path)
    assert str(file) in str(caught.value)


def test_older_version_that_does_not_use_the_damaged_file_still_opens(
    relation: Relation, data_files: DataFiles
) -> None:
    flip(data_files(Path(relation.path), "deleted")[0], 12)
    with pytest.raises(RelationCorrupt):
        Relation.open(relation.path).shard(0)
    assert Relation.open(relation.path, version=1).to_arrow().num_rows == 500


def test_damage_stops_a_change_that_would_read_it(relation: Relation, data_files: DataFiles) -> None:
    flip(data_files(Path(relation.path), "codes")[0], 800)
    with pytest.raises(RelationCorrupt, match="does not match its digest"):
        relation.upsert(pa.table({"k": [5], "text": ["x"], "n": [1]}))
    assert Relation.open(relation.path).version == 2


# -------------------------------------------------------------------- what was checked before


@pytest.mark.parametrize("kind", ["rows", "codes"])
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "rewritten in place"])
def test_file_changed_after_it_was_checked_is_checked_again(
    relation: Relation, data_files: DataFiles, kind: str, replaced: bool
) -> None:
    file = data_files(Path(relation.path), kind)[0]
    read_all(relation.path)
    before = file.stat()
    flip(file, 8 * (file.stat().st_size // 2))
    if replaced:
        shutil.copy(file, file.with_suffix(".copy"))
        os.rename(file.with_suffix(".copy"), file)
    # A clock may tick too slowly to tell the two writes apart; a user's editor or copy does not write that soon.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(RelationCorrupt, match="does not match its digest"):
        read_all(relation.path)


def test_damage_that_changes_neither_inode_nor_times_is_not_seen_again_after_the_first_check(
    relation: Relation, data_files: DataFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known limit: a bit that decays on the disk after this host has checked it, until the marks are gone."""
    monkeypatch.setattr(verified, "_identity", lambda file: "the same as ever")
    read_all(relation.path)
    codes = data_files(Path(relation.path), "codes")[0]
    flip(codes, 64 * 300)
    assert Relation.open(relation.path).shard(0).codes_at(np.array([300])).tolist() == [301]
    monkeypatch.undo()
    with pytest.raises(RelationCorrupt, match="does not match its digest"):
        read_all(relation.path)


def test_second_reader_trusts_what_the_first_has_checked(relation: Relation, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    real = paged_file.check_pages

    def counting(words: Any, content: Any, sums: Any, marks: Any, pages: Any) -> int:
        before = int(marks.sum())
        damaged = real(words, content, sums, marks, pages)
        checked.append(int(marks.sum()) - before)
        return damaged

    # Writing has checked the codes already: the counts of a shard are taken from what was written.
    monkeypatch.setattr(paged_file, "check_pages", counting)
    read_all(relation.path)
    assert sum(checked) == sum(-(-file.stat().st_size // 4096) for file in Path(relation.path).glob("data/*/*.rows"))
    checked.clear()
    read_all(relation.path)
    assert sum(checked) == 0


@pytest.mark.parametrize("obstacle", ["a file", "another user's"])
def test_unusable_temporary_directory_costs_a_second_check_and_nothing_else(
    relation: Relation,
    own_verification_marks: Path,
    data_files: DataFiles,
    obstacle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private = own_verification_marks / f"dovetail-{os.getuid()}"
    shutil.rmtree(private)
    if obstacle == "a file":
        private.write_text("in the way")
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12_345)
    assert len(read_all(relation.path)) == 497
    flip(data_files(Path(relation.path), "rows")[0], 8 * 3_000)
    with pytest.raises(RelationCorrupt):
        read_all(relation.path)


# -------------------------------------------------------------------- manifests


def manifest_of(relation: Relation) -> Path:
    return Path(relation.path) / "versions" / f"{relation.version:08d}.json"


def test_manifest_of_a_newer_format_asks_for_an_upgrade(relation: Relation) -> None:
    file = manifest_of(relation)
    document = json.loads(file.read_text())
    del document["digest"]
    document["format"] = 2
    document["surprise"] = {"from": "the future"}
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    file.write_text(json.dumps({**document, "digest": digest_of(canonical)}))
    with pytest.raises(RelationCorrupt, match=r"has format 2, this release of dovetail reads format 1\. Upgrade"):
        Relation.open(relation.path)
    assert Relation.open(relation.path, version=1).stats.rows == 500


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"rows": 500', '"rows": 400', 1),
        lambda text: text.replace('"operation": "delete"', '"operation": "upsert"'),
        lambda text: text.replace('"digest"', '"digist"'),
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "{}",
        lambda text: "\ufffd\x00",
    ],
)
def test_damaged_manifest_is_refused_and_earlier_versions_still_open(
    relation: Relation, damage: Callable[[str], str]
) -> None:
    file = manifest_of(relation)
    text = file.read_text()
    assert damage(text) != text
    file.write_text(damage(text))
    with pytest.raises(RelationCorrupt, match=r"00000002\.json (cannot be read|does not match its own digest)"):
        Relation.open(relation.path)
    assert Relation.open(relation.path, version=1).to_arrow().num_rows == 500
    with pytest.raises(RelationCorrupt):
        relation.append(pa.table({"k": [5], "text": ["x"], "n": [1]}))
    # The way out that needs no earlier version: build again over it.
    rebuilt = Relation.build(pa.table({"k": [1]}), relation.path, on="k", mode="overwrite")
    assert (rebuilt.version, Relation.open(relation.path).stats.rows) == (3, 1)


def test_flipped_bit_in_a_manifest_is_found_or_harmless(relation: Relation) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    file = manifest_of(relation)
    whole = file.read_bytes()
    original = Relation.open(relation.path)._manifest
    found = 0
    for _ in range(300):
        flip(file, chance.randrange(8 * len(whole)))
        try:
            opened = Relation.open(relation.path)._manifest
        except RelationCorrupt:
            found += 1
        else:
            # White space is not part of what a manifest says.
            assert opened == original
        file.write_bytes(whole)
    assert found > 200


def test_file_that_is_not_a_manifest_is_no_version(relation: Relation) -> None:
    versions = Path(relation.path) / "versions"
    (versions / "notes.txt").write_text("mine")
    (versions / "latest.json").write_text("{}")
    (versions / ".00000003.json-draft").write_text("{")
    assert [info.version for info in relation.versions()] == [1, 2]
    assert Relation.open(relation.path).version == 2
    with pytest.raises(RelationNotFound):
        Relation.open(relation.path, version=3)


def test_what_is_fetched_again_is_checked_again(tmp_path: Path) -> None:
    relation = Relation.build(pa.table({"k": [1], "name": ["row0"]}), tmp_path / "r", on="k", shards=1)
    remote = Relation.open("r", filesystem=fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()))
    shard = remote.shard(0)
    assert shard.read_block(0, 1).rows.column("name").to_pylist() == ["row0"]
    (rows,) = Path(relation.path, "data", "0").glob("*.rows")
    rows.write_bytes(rows.read_bytes().replace(b"row0", b"sow0"))
    with pytest.raises(RelationCorrupt, match="does not match its digest"):
        shard.read_block(0, 1)


def test_manifest_without_a_field_is_refused_by_its_name(tmp_path: Path) -> None:
    relation = Relation.build(pa.table({"k": [1]}), tmp_path / "r", on="k", shards=1)
    path = Path(relation.path, "versions", "00000001.json")
    document = json.loads(path.read_text())
    del document["relation"], document["digest"]
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({**document, "digest": digest_of(canonical)}))
    with pytest.raises(RelationCorrupt, match="'relation'"):
        Relation.open(relation.path)
