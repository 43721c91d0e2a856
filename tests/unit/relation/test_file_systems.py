"""A relation that was copied to another file system is read there, and is read-only there."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import fs

from dovetail import Relation
from dovetail.core.errors import RelationCorrupt, RelationNotFound, RelationReadOnly

TABLE = pa.table({"k": [f"{i % 70}" for i in range(100)] + [None], "n": list(range(101))})


class Handler(fs.FileSystemHandler):  # type: ignore[misc]
    """A file system written in Python, as somebody's object store may be: reads are handed on to the local one."""

    def __init__(self, root: Path) -> None:
        self._local = fs.SubTreeFileSystem(str(root), fs.LocalFileSystem())

    def get_type_name(self) -> str:
        return "bucket"

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return self._local.get_file_info(paths)  # type: ignore[no-any-return]

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        return self._local.get_file_info(selector)  # type: ignore[no-any-return]

    def open_input_stream(self, path: str) -> Any:
        return self._local.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self._local.open_input_file(path)

    def normalize_path(self, path: str) -> str:
        return path

    def _refuse(self, *arguments: Any, **named: Any) -> Any:
        raise AssertionError("a reader wrote")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _refuse
    move = copy_file = open_output_stream = open_append_stream = _refuse


@pytest.fixture(params=["subtree", "python"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> fs.FileSystem:
    if request.param == "subtree":
        return fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    return fs.PyFileSystem(Handler(tmp_path))


@pytest.fixture
def local(tmp_path: Path) -> Relation:
    relation = Relation.build(TABLE, tmp_path / "folder" / "r", on="k", shards=2)
    return relation.delete(pa.table({"k": ["3", "4"]}))


@pytest.mark.parametrize("path", ["folder/r", "folder/r/"])
def test_everything_can_be_read_there(local: Relation, elsewhere: fs.FileSystem, path: str) -> None:
    relation = Relation.open(path, filesystem=elsewhere)
    assert relation.to_arrow().equals(local.to_arrow())
    assert [v.version for v in relation.versions()] == [1, 2]
    assert Relation.open(path, version=1, filesystem=elsewhere).to_arrow().num_rows == 101
    for io in ("map", "buffered", "direct"):
        for number in range(2):
            here, there = local.shard(number, columns=["n"]), relation.shard(number, columns=["n"], io=io)
            codes = here.codes_at(np.arange(here.num_rows))
            for found, expected in zip(there.lookup(codes), here.lookup(codes), strict=True):
                assert found.tolist() == expected.tolist()
            positions = np.arange(here.num_rows)[::-3]
            assert there.gather(positions).equals(here.gather(positions))
            assert there.read_block(5, 20).rows.equals(here.read_block(5, 20).rows)


def test_nothing_can_be_written_there(local: Relation, elsewhere: fs.FileSystem) -> None:
    relation = Relation.open("folder/r", filesystem=elsewhere)
    kind = elsewhere.type_name
    for change in (relation.append, relation.upsert, relation.delete):
        with pytest.raises(RelationReadOnly, match=rf"folder/r is on a {kind} file system.*read-only there"):
            change(TABLE)
    with pytest.raises(RelationReadOnly, match="Build and change it on a local disk"):
        relation.vacuum()
    assert Relation.open(local.path).version == 2


def test_damage_is_found_there_too(local: Relation, elsewhere: fs.FileSystem) -> None:
    relation = Relation.open("folder/r", filesystem=elsewhere)
    relation.to_arrow()
    for kind in ("rows", "codes"):
        file = sorted(Path(local.path).glob(f"data/*/*.{kind}"))[0]
        whole = file.read_bytes()
        file.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
        with pytest.raises(RelationCorrupt, match=f"{kind} does not match its digest"):
            relation.to_arrow()
        file.write_bytes(whole)
    assert relation.to_arrow().num_rows == local.stats.rows


def test_wrong_paths_are_named_there_too(local: Relation, elsewhere: fs.FileSystem) -> None:
    with pytest.raises(RelationNotFound, match="nowhere does not exist"):
        Relation.open("nowhere", filesystem=elsewhere)
    with pytest.raises(RelationNotFound, match="folder is not a relation"):
        Relation.open("folder", filesystem=elsewhere)


def test_root_of_a_file_system_can_be_a_relation(local: Relation) -> None:
    for path in ("", "/"):
        relation = Relation.open(path, filesystem=fs.SubTreeFileSystem(local.path, fs.LocalFileSystem()))
        assert relation.to_arrow().num_rows == local.stats.rows


def test_uri_of_the_local_disk_is_the_local_disk(local: Relation) -> None:
    relation = Relation.open(Path(local.path).as_uri())
    assert relation.path == local.path
    assert relation.append(pa.table({"k": ["new"], "n": [1]})).version == 3


def test_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    relation = Relation.build(TABLE, "~/mine", on="k")
    assert relation.path == str(tmp_path / "mine")
