"""A few rows of a relation, and the rows of some keys."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import RelationNotFound, SchemaError
from dovetail.relation import Relation

SEED = 811


@pytest.mark.parametrize("kind", ["int", "text", "two"])
def test_lookup_returns_all_rows_of_the_keys_in_their_order(tmp_path: Path, kind: str) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    rows: list[dict[str, Any]] = []
    for n in range(300):
        key = chance.randrange(60)
        rows.append({"a": key if kind != "text" else f"k{key}", "b": f"b{key % 3}", "n": n})
    on = ["a", "b"] if kind == "two" else ["a"]
    relation = Relation.build(pa.Table.from_pylist(rows), tmp_path / "r", on=on, shards=3)
    asked = [tuple(chance.choice(rows)[name] for name in on) for _ in range(20)]
    asked.append((-1, "b0") if kind == "two" else ("nobody",) if kind == "text" else (-1,))
    found = relation.lookup(asked if kind == "two" else [key for (key,) in asked]).to_pylist()
    expected = [row for key in asked for row in rows if tuple(row[name] for name in on) == key]
    assert [tuple(row[name] for name in on) for row in found] == [tuple(row[name] for name in on) for row in expected]
    assert sorted(row["n"] for row in found) == sorted(row["n"] for row in expected)
    table = pa.Table.from_pylist([dict(zip(on, key, strict=True)) for key in asked])
    assert relation.lookup(table).to_pylist() == found


def test_key_that_is_null_has_no_rows_and_keys_of_another_type_are_refused(tmp_path: Path) -> None:
    relation = Relation.build(pa.table({"k": pa.array([1, None]), "v": ["x", "y"]}), tmp_path / "r", on="k", shards=2)
    assert relation.lookup([None, 1]).to_pylist() == [{"k": 1, "v": "x"}]
    assert relation.lookup([]).num_rows == 0
    with pytest.raises(SchemaError, match=r"not of the key's type, which is \(k int64\)"):
        relation.lookup(["one"])
    with pytest.raises(SchemaError, match=r"\(1, 2\) is not a key; the key is \(k\)"):
        relation.lookup([(1, 2)])
    with pytest.raises(SchemaError, match="The keys have no column 'k'"):
        relation.lookup(pa.table({"other": [1]}))


@pytest.mark.parametrize(("rows", "count"), [(0, 0), (3, 3), (100, 7)])
def test_head_has_at_most_that_number_of_rows(tmp_path: Path, rows: int, count: int) -> None:
    table = pa.table({"k": pa.array([1, 2, 3, 4, 5, 6, None]), "v": list("abcdefg")})
    found = Relation.build(table, tmp_path / "r", on="k", shards=3).head(rows)
    assert found.num_rows == count
    assert set(map(str, found.to_pylist())) <= set(map(str, table.to_pylist()))


def test_file_and_empty_directory_are_not_relations(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RelationNotFound, match="is empty"):
        Relation.open(tmp_path / "empty")
    (tmp_path / "x.parquet").write_text("rows")
    with pytest.raises(RelationNotFound, match="is a file, not a relation"):
        Relation.open(tmp_path / "x.parquet")
