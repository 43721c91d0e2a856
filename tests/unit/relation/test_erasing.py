"""Erasing keys: nothing of them is left in any file of the relation, and every other row of every version is."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core import faultpoints
from dovetail.core.errors import RelationConflict, SchemaError
from dovetail.relation import Relation
from dovetail.storage.files import RelationFiles

Row = dict[str, Any]
SECRET = "forget-me-7f3a9c"
NUMBER = 0x1122334455667788


def files_with(root: Path, pattern: bytes) -> list[str]:
    """The files below a directory that hold these bytes; also hidden ones."""
    return [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and pattern in path.read_bytes()]


def sorted_rows(relation: Relation) -> list[Row]:
    return sorted(relation.to_arrow().to_pylist(), key=lambda row: repr(sorted(row.items(), key=lambda item: item[0])))


def history(path: Path, key: list[str], rows_of: Callable[[list[int], int], pa.Table], seed: int) -> Relation:
    """A relation with versions that share segments, rows that are marked as deleted, and merged segments."""
    chosen = random.Random(seed)
    relation = Relation.build(rows_of(list(range(300)), 0), path, on=key, shards=2)
    for number in range(1, 13):
        some = chosen.sample(range(320), 25)
        if number % 4 == 3:
            relation = relation.delete(rows_of(some, 0).select(key))
        elif number % 4 == 2:
            relation = relation.append(rows_of(some, number))
        else:
            relation = relation.upsert(rows_of([*some, 7], number))
    return relation


def text_rows(numbers: list[int], tag: int) -> pa.Table:
    keys = [SECRET if n == 7 else f"key {n}" for n in numbers]
    return pa.table({"k": keys, "n": pa.array(numbers, pa.int64()), "tag": pa.array([tag] * len(keys), pa.int32())})


def number_rows(numbers: list[int], tag: int) -> pa.Table:
    keys = [NUMBER if n == 7 else n for n in numbers]
    return pa.table({"k": pa.array(keys, pa.int64()), "text": [f"{tag}/{n}" for n in numbers]})


def pair_rows(numbers: list[int], tag: int) -> pa.Table:
    keys = [SECRET if n == 7 else f"key {n}" for n in numbers]
    return pa.table({"a": keys, "b": pa.array([n % 3 for n in numbers], pa.int64()), "tag": [tag] * len(keys)})


CASES: list[tuple[list[str], Any, list[Any], bytes]] = [
    (["k"], text_rows, [SECRET], SECRET.encode()),
    (["k"], number_rows, [NUMBER], NUMBER.to_bytes(8, "little")),
    (["a", "b"], pair_rows, [(SECRET, 1)], SECRET.encode()),
]


@pytest.mark.parametrize(("key", "rows_of", "erased", "pattern"), CASES, ids=["text", "number", "pair"])
def test_no_file_holds_an_erased_key_and_every_other_row_stays(
    tmp_path: Path, key: list[str], rows_of: Any, erased: list[Any], pattern: bytes
) -> None:
    relation = history(tmp_path / "r", key, rows_of, seed=5)
    print("seed 5")
    numbers = [info.version for info in relation.versions()]
    before = {number: sorted_rows(Relation.open(tmp_path / "r", number)) for number in numbers}
    infos = {info.version: (info.operation, info.created_at) for info in relation.versions()}
    assert files_with(tmp_path / "r", pattern), "the test would show nothing"
    report = relation.erase(erased)
    assert files_with(tmp_path / "r", pattern) == []
    values = [value if isinstance(value, tuple) else (value,) for value in erased]
    for number in numbers:
        opened = Relation.open(tmp_path / "r", number)
        expected = [row for row in before[number] if tuple(row[name] for name in key) not in values]
        assert sorted_rows(opened) == expected, f"version {number}"
        assert opened.stats.rows == len(expected)
        assert infos[number] == (opened.version_info.operation, opened.version_info.created_at)
    assert report.segments > 1
    assert report.rows > 1
    assert report.versions == tuple(numbers)
    # Writers go on.
    after = Relation.open(tmp_path / "r").upsert(rows_of([7, 8], 99))
    assert after.lookup(erased).num_rows == 1


def test_keys_that_are_not_there_change_nothing(tmp_path: Path) -> None:
    relation = history(tmp_path / "r", ["k"], text_rows, seed=6)
    names = set((tmp_path / "r").rglob("*"))
    report = relation.erase(["nobody", "key 9999"])
    assert (report.keys, report.rows, report.versions, report.segments) == (2, 0, (), 0)
    assert set((tmp_path / "r").rglob("*")) == names


def test_only_key_leaves_an_empty_relation(tmp_path: Path) -> None:
    relation = Relation.build(pa.table({"k": [SECRET], "n": [1]}), tmp_path / "r", on="k", shards=1)
    relation.append(pa.table({"k": pa.array([None], pa.string()), "n": [2]}))
    relation.erase([SECRET])
    assert files_with(tmp_path / "r", SECRET.encode()) == []
    assert [Relation.open(tmp_path / "r", n).to_arrow().to_pylist() for n in (1, 2)] == [[], [{"k": None, "n": 2}]]


@pytest.mark.parametrize("point", ["relation.erase.written", "relation.erase.manifest", "relation.vacuum.file"])
def test_killed_erasure_is_completed_by_the_next(tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relation = history(tmp_path / "r", ["k"], text_rows, seed=7)
    numbers = [info.version for info in relation.versions()]

    class Killed(BaseException):
        pass

    class Hook:
        left = 2

        def passed(self, name: str) -> None:
            if name == point:
                self.left -= 1
                if self.left == 0 or point == "relation.erase.written":
                    raise Killed

    monkeypatch.setattr(faultpoints, "_ARMED", Hook())
    with pytest.raises(Killed):
        relation.erase([SECRET])
    monkeypatch.setattr(faultpoints, "_ARMED", None)
    for number in numbers:  # every version can be read in between
        Relation.open(tmp_path / "r", number).to_arrow()
    Relation.open(tmp_path / "r").erase([SECRET])
    assert files_with(tmp_path / "r", SECRET.encode()) == []


def test_pinned_versions_stay_and_their_holder_is_named(tmp_path: Path) -> None:
    from dovetail.relation import pins

    relation = history(tmp_path / "r", ["k"], text_rows, seed=8)
    pins.hold(tmp_path / "r", "flow-x", [1], 600, {"checkpoint": "/somewhere/checkpoint"})
    report = relation.erase([SECRET])
    assert Relation.open(tmp_path / "r", 1).lookup([SECRET]).num_rows == 0
    assert "the state of the flow with the checkpoint /somewhere/checkpoint" in report.not_erased


def test_another_writer_and_bad_keys_are_refused(tmp_path: Path) -> None:
    relation = Relation.build(text_rows([1, 7], 0), tmp_path / "r", on="k")
    with pytest.raises(SchemaError, match="not of the key's type"):
        relation.erase([1])
    with pytest.raises(SchemaError, match="A key with a NULL"):
        relation.erase([None])
    with RelationFiles(tmp_path / "r").writing(), pytest.raises(RelationConflict):
        relation.erase([SECRET])
