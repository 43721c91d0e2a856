"""Versions: readers are not disturbed, vacuum removes what it must and nothing else, writers exclude each other."""

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail import Relation
from dovetail.core.errors import RelationConflict, RelationCorrupt, RelationError, RelationNotFound
from dovetail.relation import VacuumReport, segment_writer, shard_writer, version_log
from dovetail.storage import files, local

TABLE = pa.table({"k": [1, 2, 3, None], "name": ["a", "b", "c", "d"]})


@pytest.fixture
def relation(tmp_path: Path) -> Relation:
    return Relation.build(TABLE, tmp_path / "r", on="k", shards=2)


def files_in(root: str, directory: str) -> set[str]:
    return {str(path.relative_to(root)) for path in Path(root, directory).rglob("*") if path.is_file()}


def test_history_tells_what_was_done(relation: Relation) -> None:
    relation.append(pa.table({"k": [4], "name": ["e"]}))
    relation.upsert(pa.table({"k": [4, 5], "name": ["E", "f"]}))
    newest = relation.delete(pa.table({"k": [1, 2]}))
    replaced = Relation.build(pa.table({"id": ["x"]}), relation.path, on="id", shards=3, mode="overwrite")
    told = [(v.version, v.parent, v.operation, v.rows) for v in replaced.versions()]
    assert told == [
        (1, None, "build", 4),
        (2, 1, "append", 5),
        (3, 2, "upsert", 6),
        (4, 3, "delete", 4),
        (5, 4, "build", 1),
    ]
    moments = [v.created_at for v in replaced.versions()]
    assert moments == sorted(moments)
    assert all(moment.endswith("+00:00") for moment in moments)
    # A new build may have another key, other columns and other shards; the old versions are what they were.
    assert (replaced.key, replaced.num_shards, replaced.schema.names) == (("id",), 3, ["id"])
    assert Relation.open(relation.path, version=4).to_arrow().num_rows == newest.stats.rows == 4


def test_change_applies_to_the_newest_version_whichever_object_it_is_asked_of(relation: Relation) -> None:
    relation.append(pa.table({"k": [4], "name": ["e"]}))
    assert relation.version == 1
    assert relation.append(pa.table({"k": [5], "name": ["f"]})).stats.rows == 6


def test_change_leaves_every_file_of_older_versions_alone(relation: Relation) -> None:
    def contents() -> dict[str, bytes]:
        return {name: Path(relation.path, name).read_bytes() for name in files_in(relation.path, "data")}

    before = contents()
    relation.upsert(pa.table({"k": [1], "name": ["A"]}))
    after = contents()
    assert before.items() <= after.items()
    # Only the shard of the key that changed was written.
    touched = {name.split("/")[1] for name in after.keys() - before.keys()}
    assert len(touched) == 1


def test_vacuum_keeps_the_newest_and_removes_files_that_only_others_named(relation: Relation) -> None:
    for number in range(4, 9):
        relation = relation.upsert(pa.table({"k": [1, number], "name": ["x", "y"]}))
    assert relation.version == 6
    report = relation.vacuum(keep=2)
    assert report.versions == (1, 2, 3, 4)
    assert report.files > 0
    assert report.bytes > 0
    assert [v.version for v in relation.versions()] == [5, 6]
    manifests = [Relation.open(relation.path, version=v)._manifest for v in (5, 6)]
    assert files_in(relation.path, "data") == {
        f"data/{name}" for manifest in manifests for name in manifest.data_files()
    }
    assert relation.vacuum(keep=2) == VacuumReport((), 0, 0)
    assert relation.vacuum(keep=99) == VacuumReport((), 0, 0)
    assert Relation.open(relation.path).to_arrow().num_rows == 9


def test_vacuum_removes_what_killed_writers_left(relation: Relation) -> None:
    data = Path(relation.path) / "data" / "0"
    data.mkdir(exist_ok=True)
    (data / "deadbeef.rows").write_bytes(b"half a segment")
    (Path(relation.path) / "versions" / ".00000002.json-deadbeef").write_text("{")
    report = relation.vacuum()
    assert (report.versions, report.files, report.bytes) == ((), 1, 14)
    assert not (data / "deadbeef.rows").exists()
    assert files_in(relation.path, "versions") == {"versions/00000001.json"}


def test_open_reader_goes_on_while_its_version_is_vacuumed(relation: Relation) -> None:
    open_shards = [relation.shard(number, include_null_keys=True) for number in range(2)]
    for shard in open_shards:
        shard.read_block(0, 1)
        shard.count(np.array([1]))
    unopened = Relation.open(relation.path)
    newest = Relation.build(pa.table({"k": [9]}), relation.path, on="k", mode="overwrite")
    newest.vacuum(keep=1)
    rows = [row["name"] for shard in open_shards for block in shard.blocks(2) for row in block.rows.to_pylist()]
    assert sorted(rows) == ["a", "b", "c", "d"]
    with pytest.raises(RelationCorrupt, match=r"is missing: it was vacuumed or deleted.*Open the newest version"):
        unopened.to_arrow()
    with pytest.raises(RelationNotFound, match=r"has no version 1: it has 2\. A version that was vacuumed"):
        Relation.open(relation.path, version=1)


def test_vacuumed_deletions_are_reported_like_any_other_file(relation: Relation) -> None:
    deleted = relation.append(pa.table({"k": [4, 5, 6, 7], "name": list("efgh")})).delete(pa.table({"k": [4]}))
    for number in range(2):
        for file in Path(relation.path, "data", str(number)).glob("*.deleted"):
            file.unlink()
    with pytest.raises(RelationCorrupt, match="is missing: it was vacuumed or deleted"):
        deleted.to_arrow()


# -------------------------------------------------------------------- writers


def test_second_writer_of_the_host_is_told_who_the_first_is(relation: Relation) -> None:
    with relation._files.writing():
        for change in (relation.append, relation.upsert, relation.delete):
            with pytest.raises(RelationConflict, match=rf"Another writer is changing .* \(process {os.getpid()}\)"):
                change(TABLE.slice(0, 1))
        with pytest.raises(RelationConflict, match="try again when it has finished"):
            relation.vacuum()
        with pytest.raises(RelationConflict):
            Relation.build(TABLE, relation.path, on="k", mode="overwrite")
    assert relation.append(TABLE.slice(0, 1)).version == 2


def test_writer_on_another_host_that_commits_first_wins(relation: Relation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks do not reach other hosts: there the exclusive creation of the manifest decides."""
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)
    real, other = version_log.VersionLog.commit, []

    def overtaken(self: Any, root: Path, manifest: Any) -> None:
        if not other:
            other.append(None)
            Relation.open(root).append(pa.table({"k": [50], "name": ["theirs"]}))
        real(self, root, manifest)

    monkeypatch.setattr(version_log.VersionLog, "commit", overtaken)
    with pytest.raises(RelationConflict, match=r"Another writer committed version 2 .* first\. Nothing of this append"):
        relation.append(pa.table({"k": [60], "name": ["ours"]}))
    names = Relation.open(relation.path).to_arrow().column("name").to_pylist()
    assert sorted(names) == ["a", "b", "c", "d", "theirs"]
    # Nothing is left of the loser, so there is nothing to vacuum.
    assert relation.vacuum().files == 0
    assert relation.append(pa.table({"k": [60], "name": ["ours"]})).stats.rows == 6


def test_disk_that_fails_after_the_commit_does_not_cost_the_version_its_files(
    relation: Relation, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = local.sync_directory

    def failing(path: Path) -> None:
        if path.name == "versions":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    monkeypatch.setattr(local, "sync_directory", failing)
    with pytest.raises(RelationError, match="cannot be written: Input/output error"):
        relation.append(pa.table({"k": [60], "name": ["ours"]}))
    newest = Relation.open(relation.path)
    assert (newest.version, newest.to_arrow().num_rows) == (2, 5)


def test_two_first_builds_at_once_give_one_relation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)
    real, other = version_log.VersionLog.commit, []

    def overtaken(self: Any, root: Path, manifest: Any) -> None:
        if not other:
            other.append(None)
            Relation.build(pa.table({"id": ["theirs"]}), root, on="id", shards=5)
        real(self, root, manifest)

    monkeypatch.setattr(version_log.VersionLog, "commit", overtaken)
    with pytest.raises(RelationConflict, match="Another writer committed version 1"):
        Relation.build(TABLE, tmp_path / "r", on="k", shards=2)
    assert Relation.open(tmp_path / "r").to_arrow().to_pylist() == [{"id": "theirs"}]


def test_refused_change_leaves_no_file_behind(tmp_path: Path) -> None:
    """Also where some shards were written before another refused."""
    table = pa.table({"k": list(range(40))})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=4, unique=True)
    before = files_in(relation.path, "data")
    for key in range(100, 108):
        for change, rows in (
            (relation.upsert, [*range(50, 90), key, key]),
            (relation.append, [*range(50, 90), key - 70]),
        ):
            with pytest.raises(RelationError, match="was declared unique"):
                change(pa.table({"k": rows}))
    with pytest.raises(RelationError, match="have a NULL in the key"):
        relation.upsert(pa.table({"k": [*range(50, 90), None]}))
    assert files_in(relation.path, "data") == before


def test_what_a_change_merges_at_once_leaves_no_file_behind(tmp_path: Path, without_fsync: None) -> None:
    relation = Relation.build(pa.table({"k": [0]}), tmp_path / "r", on="k", shards=1)
    for number in range(20):
        relation = relation.upsert(pa.table({"k": [0, number, number + 1]}))
    named = set().union(*(Relation.open(relation.path, v.version)._manifest.data_files() for v in relation.versions()))
    assert files_in(relation.path, "data") == {f"data/{name}" for name in named}


def test_directory_of_a_build_that_died_early_can_be_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Died(BaseException):
        pass

    for step in ("lock", "create"):

        def die(*arguments: Any) -> None:
            raise Died

        with monkeypatch.context() as patch:
            patch.setattr(local.LocalStorage, step, die)
            with pytest.raises(Died):
                Relation.build(TABLE, tmp_path / step, on="k")
        with pytest.raises(RelationNotFound, match=r"first build did not finish\. Build it again"):
            Relation.open(tmp_path / step)
        assert Relation.build(TABLE, tmp_path / step, on="k").stats.rows == 4


def test_everything_a_version_names_is_durable_before_its_manifest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are flushed, and so is every directory that got a new name, before the manifest gets its own."""
    flushed: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    at_commit: list[set[str]] = []

    def link(source: Any, target: Any) -> None:
        real_link(source, target)
        if str(target).endswith(".json"):
            at_commit.append(set(flushed))
            flushed.clear()

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    root = tmp_path / "new" / "r"
    relation = Relation.build(TABLE, root, on="k", shards=2)
    (durable,) = at_commit
    data = {str(path) for path in (root / "data").rglob("*")}
    assert data | {str(root), str(root.parent), str(root / "data")} <= durable
    assert any(path.startswith(str(root / "versions" / ".00000001.json")) for path in durable)
    assert flushed == [str(root / "versions")]
    relation.append(pa.table({"k": list(range(10, 20)), "name": ["x"] * 10})).delete(pa.table({"k": [10]}))
    new = {str(path) for path in (root / "data").rglob("*") if path.is_file()} - data
    assert new <= set().union(*at_commit)


# -------------------------------------------------------------------- merging


def test_many_appends_are_merged_and_keep_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_fsync: None
) -> None:
    monkeypatch.setattr(segment_writer, "MAX_BATCH_ROWS", 7)
    rows = [{"k": f"{i % 13}", "n": i} for i in range(40)]
    schema = pa.schema([("k", pa.string()), ("n", pa.int64())])
    relation = Relation.build(pa.Table.from_pylist(rows, schema=schema), tmp_path / "r", on="k", shards=1)
    for round_number in range(30):
        more = [{"k": f"{(round_number * 3 + i) % 17}", "n": 1_000 * round_number + i} for i in range(3)]
        more.append({"k": None, "n": round_number})
        relation = relation.append(pa.Table.from_pylist(more, schema=schema))
        rows += more
        if round_number % 4 == 0:
            gone = {f"{round_number % 13}"}
            relation = relation.delete(pa.table({"k": list(gone)}))
            rows = [row for row in rows if row["k"] not in gone]
        segments = relation._manifest.shards[0].segments
        assert sum(segment.is_keyed for segment in segments) <= shard_writer.MAX_SEGMENTS
        assert sum(not segment.is_keyed for segment in segments) <= shard_writer.MAX_SEGMENTS
        assert sorted(map(str, relation.to_arrow().to_pylist())) == sorted(map(str, rows))
    assert relation.stats.null_key_rows == 30
    distinct = {row["k"] for row in rows} - {None}
    assert relation.stats.distinct_codes == len(distinct)
    assert Relation.open(relation.path, version=1).stats.rows == 40


def test_segment_mostly_deleted_is_rewritten_without_what_is_gone(tmp_path: Path) -> None:
    table = pa.table({"k": list(range(100)), "text": ["x" * 100] * 100})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=1)
    some = relation.delete(pa.table({"k": list(range(40))}))
    assert some.shard(0).num_rows == 100
    most = some.delete(pa.table({"k": list(range(40, 60))}))
    assert (most.shard(0).num_rows, most.shard(0).live_rows) == (40, 40)
    assert most.stats.bytes < 0.6 * some.stats.bytes
    none = most.delete(pa.table({"k": list(range(100))}))
    assert (none.stats.rows, none.shard(0).num_rows, none._manifest.shards[0].segments) == (0, 0, ())
    assert none.append(table).stats.rows == 100


def test_small_appends_do_not_rewrite_a_large_segment(tmp_path: Path, without_fsync: None) -> None:
    table = pa.table({"k": list(range(5_000))})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=1)
    (large,) = relation._manifest.shards[0].segments
    for number in range(20):
        relation = relation.append(pa.table({"k": [10_000 + number]}))
        assert large in relation._manifest.shards[0].segments
        assert len(relation._manifest.shards[0].segments) <= shard_writer.MAX_SEGMENTS
    assert relation.stats.rows == 5_020


def test_merge_holds_a_bounded_number_of_bytes_however_wide_the_rows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_fsync: None
) -> None:
    from dovetail.relation import merge

    monkeypatch.setattr(merge, "MERGE_BYTES", 50_000)
    held: list[int] = []
    real = segment_writer.SegmentWriter.write

    def write(self: Any, batch: pa.RecordBatch, codes: Any) -> None:
        held.append(batch.nbytes)
        real(self, batch, codes)

    relation = Relation.build(pa.table({"k": [0], "text": ["x"]}), tmp_path / "r", on="k", shards=1)
    for number in range(8):
        monkeypatch.setattr(segment_writer.SegmentWriter, "write", write if number == 7 else real)
        keys = list(range(number, 800, 8))
        relation = relation.append(pa.table({"k": keys, "text": ["x" * 5_000] * len(keys)}))
    assert len(relation._manifest.shards[0].segments) == 1
    assert relation.stats.rows == 801
    merged = held[1:]
    assert max(merged) < 100_000
    assert sum(merged) > 4_000_000


# -------------------------------------------------------------------- other hosts, failing disks


def test_open_reader_outlives_a_vacuum(relation: Relation) -> None:
    shards = [relation.shard(number) for number in range(2)]
    Relation.build(TABLE, relation.path, on="k", mode="overwrite").vacuum(keep=1)
    found = [code for shard in shards for block in shard.blocks(10) for code in block.codes.tolist()]
    assert sorted(found) == [1, 2, 3]
    assert sum(int(shard.count(np.array([2])).sum()) for shard in shards) == 1


def test_link_whose_answer_was_lost_is_recognised(relation: Relation, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_and_answer_as_if_repeated(source: Any, target: Any) -> None:
        link(source, target)
        if not str(source).endswith(".probe") and "probe" not in str(source):
            raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link_and_answer_as_if_repeated)
    newest = relation.append(pa.table({"k": [9], "name": ["z"]}))
    assert newest.version == 2
    assert Relation.open(relation.path).to_arrow().num_rows == 5


def test_vacuum_of_another_host_during_a_write_is_a_conflict(
    relation: Relation, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = version_log.VersionLog(files.RelationFiles(relation.path))
    commit = version_log.VersionLog.commit

    def commit_after_foreign_vacuum(self: Any, root: Path, manifest: Any) -> None:
        log.vacuum(root, keep=1)  # as on a host where the lock does not reach
        commit(self, root, manifest)

    monkeypatch.setattr(version_log.VersionLog, "commit", commit_after_foreign_vacuum)
    with pytest.raises(RelationConflict, match="a vacuum ran on another host"):
        relation.append(pa.table({"k": [9], "name": ["z"]}))
    monkeypatch.undo()
    assert Relation.open(relation.path).version == 1
    assert relation.append(pa.table({"k": [9], "name": ["z"]})).to_arrow().num_rows == 5


def test_disk_that_fails_after_the_manifest_has_its_name(relation: Relation, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = local.sync_directory

    def fail_in_versions(path: Path) -> None:
        if path.name == "versions":
            raise OSError(errno.EIO, "Input/output error")
        sync(path)

    monkeypatch.setattr(local, "sync_directory", fail_in_versions)
    with pytest.raises(RelationError, match=r"Version 2 of .* was written, but the disk failed"):
        relation.append(pa.table({"k": [9], "name": ["z"]}))
    monkeypatch.undo()
    assert Relation.open(relation.path).to_arrow().num_rows == 5


def test_history_leaves_out_what_a_vacuum_removes_meanwhile(
    relation: Relation, monkeypatch: pytest.MonkeyPatch
) -> None:
    relation.append(pa.table({"k": [9], "name": ["z"]}))
    monkeypatch.setattr(version_log.VersionLog, "numbers", lambda self: [1, 2])
    Path(relation.path, "versions", "00000001.json").unlink()
    assert [info.version for info in relation.versions()] == [2]


def test_vacuum_forgets_what_was_checked_of_segments_that_are_gone(
    relation: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    relation.to_arrow()
    marks = tmp_path / f"dovetail-{os.getuid()}" / "verified"
    before = len(list(marks.iterdir()))
    other = TABLE.set_column(1, "name", pa.array(["A", "B", "C", "D"]))
    replaced = Relation.build(other, relation.path, on="k", shards=2, mode="overwrite")
    replaced.to_arrow()
    assert len(list(marks.iterdir())) == 2 * before > 0
    replaced.vacuum(keep=1)
    assert len(list(marks.iterdir())) == before


def test_marks_of_segments_that_another_host_removed_are_swept(
    relation: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(here))
    relation.to_arrow()
    marks = here / f"dovetail-{os.getuid()}" / "verified"
    old = {path.name for path in marks.iterdir()}
    other = TABLE.set_column(1, "name", pa.array(["A", "B", "C", "D"]))
    replaced = Relation.build(other, relation.path, on="k", shards=2, mode="overwrite")
    # The vacuum runs on another host, whose temporary directory is another one.
    monkeypatch.setattr("tempfile.tempdir", str(there))
    replaced.vacuum(keep=1)
    monkeypatch.setattr("tempfile.tempdir", str(here))
    replaced.to_arrow()
    assert old < {path.name for path in marks.iterdir()}, "the last sweep was a moment ago"
    (marks / "of-an-earlier-version").write_bytes(b"\1\3\0")
    ago = time.time() - 8 * 86_400
    os.utime(marks / "of-an-earlier-version", (ago, ago))
    os.utime(marks.parent / "verified.swept", (ago, ago))
    changed = replaced.upsert(pa.table({"k": [1], "name": ["new"]}, schema=TABLE.schema))
    changed.to_arrow()
    found = {path.name for path in marks.iterdir()}
    assert not old & found
    assert "of-an-earlier-version" not in found
    assert found, "marks of segments that are there stay"
    checked = {path.name: path.read_bytes() for path in marks.iterdir()}
    Relation.open(relation.path).to_arrow()
    assert {path.name: path.read_bytes() for path in marks.iterdir()} == checked, "nothing was checked again"


def test_marks_are_never_kept_behind_a_planted_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o755)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"dovetail-{os.getuid()}").symlink_to(foreign)
    relation = Relation.build(TABLE, tmp_path / "r", on="k", shards=1)
    assert relation.to_arrow().num_rows == 4
    assert foreign.stat().st_mode & 0o777 == 0o755
    assert list(foreign.iterdir()) == []


# -------------------------------------------------------------------- merging and repeated keys


def test_small_appends_rewrite_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged_rows = 0
    merge = shard_writer.merge_segments

    def counted(*arguments: Any) -> Any:
        nonlocal merged_rows
        segments = merge(*arguments)
        merged_rows += sum(segment.rows for segment in segments)
        return segments

    monkeypatch.setattr(shard_writer, "merge_segments", counted)
    relation = Relation.build(pa.table({"k": np.arange(5_000)}), tmp_path / "r", on="k", shards=1)
    appends = 120
    for number in range(appends):
        relation = relation.append(pa.table({"k": [10_000 + number]}))
    assert relation.stats.rows == 5_000 + appends
    assert merged_rows <= 8 * appends
    assert len(relation._manifest.shards[0].segments) <= shard_writer.MAX_SEGMENTS


@pytest.mark.parametrize("key", [7, "seven"])
def test_delete_of_a_key_named_many_times_looks_it_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Any
) -> None:
    relation = Relation.build(pa.table({"k": [key] * 300}), tmp_path / "r", on="k", shards=1)
    pairs = []
    lookup = shard_writer.ShardReader.lookup

    def counted(self: Any, codes: Any) -> Any:
        found = lookup(self, codes)
        pairs.append(len(found[0]))
        return found

    monkeypatch.setattr(shard_writer.ShardReader, "lookup", counted)
    assert relation.delete(pa.table({"k": [key] * 200})).stats.rows == 0
    assert pairs == [300]
