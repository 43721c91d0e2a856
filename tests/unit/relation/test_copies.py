"""Copies of relations that are made again and again."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.relation import Relation
from dovetail.relation.copies import copy_to


def built(path: Path, names: dict[int, str], **options: Any) -> Relation:
    rows = pa.table({"k": pa.array(list(names), pa.int64()), "name": list(names.values())})
    return Relation.build(rows, path, on="k", **{"shards": 2, **options})


def content(relation: Relation) -> dict[int, str]:
    return {row["k"]: row["name"] for row in relation.to_arrow().to_pylist()}


def test_same_rows_are_the_same_version_and_others_a_new_one(tmp_path: Path) -> None:
    first = copy_to(built(tmp_path / "a", {1: "x", 2: "y", None: "z"}), tmp_path / "copy")  # type: ignore[dict-item]
    again = copy_to(built(tmp_path / "b", {2: "y", 1: "x", None: "z"}), tmp_path / "copy")  # type: ignore[dict-item]
    assert (again.version, again.relation_id) == (first.version, first.relation_id) == (1, first.relation_id)
    other = copy_to(built(tmp_path / "c", {1: "x"}), tmp_path / "copy")
    assert (other.version, other.relation_id, content(other)) == (2, first.relation_id, {1: "x"})
    assert content(Relation.open(tmp_path / "copy", 1)) == {1: "x", 2: "y", None: "z"}
    changed = Relation.open(tmp_path / "c").upsert(pa.table({"k": [1], "name": ["w"]}))
    assert content(copy_to(changed, tmp_path / "copy")) == {1: "w"}


def test_other_shards_are_another_relation(tmp_path: Path) -> None:
    first = copy_to(built(tmp_path / "a", {1: "x"}), tmp_path / "copy")
    other = copy_to(built(tmp_path / "b", {1: "x"}, shards=3), tmp_path / "copy")
    assert (other.version, other.num_shards) == (2, 3)
    assert other.relation_id != first.relation_id


def test_copy_outlives_its_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("another file system")

    original = built(tmp_path / "a", {1: "x", 2: "y"})
    # Files of a copy that was killed before it was committed do not stand in the way.
    unfinished = tmp_path / "copy" / "data" / "0"
    copy_to(original, tmp_path / "copy")
    for manifest in (tmp_path / "copy" / "versions").iterdir():
        manifest.unlink()
    assert any(unfinished.iterdir())
    copy_to(original, tmp_path / "copy")
    with monkeypatch.context() as patch:
        link = os.link
        patch.setattr(os, "link", lambda a, b: link(a, b) if "versions" in str(b) else refuse())
        copy_to(original, tmp_path / "far")
    for file in (tmp_path / "a").rglob("*"):
        if file.is_file():
            file.unlink()
    for name in ("copy", "far"):
        assert content(Relation.open(tmp_path / name)) == {1: "x", 2: "y"}
