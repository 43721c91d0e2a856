"""Relations built from Delta and Iceberg tables: their current rows, by path, object or name."""

from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from dovetail.core.errors import PlanError
from dovetail.relation import Relation

FIRST = pa.table({"k": pa.array([1, 2, 3], pa.int64()), "city": ["Rome", "Oslo", None]})
SECOND = pa.table({"k": pa.array([4], pa.int64()), "city": ["Lima"]})
CURRENT = [{"k": 1, "city": "Rome"}, {"k": 3, "city": None}, {"k": 4, "city": "Lima"}]


def rows_of(relation: Relation) -> list[dict[str, Any]]:
    return sorted(relation.to_arrow().to_pylist(), key=lambda row: row["k"])


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """A table with deleted rows, whose files still hold them."""
    path = tmp_path / "delta"
    deltalake.write_deltalake(str(path), FIRST)
    deltalake.DeltaTable(str(path)).delete("k = 2")
    deltalake.write_deltalake(str(path), SECOND, mode="append")
    return path


@pytest.fixture
def catalog(tmp_path: Path) -> Any:
    (tmp_path / "lake").mkdir()
    properties = {"uri": f"sqlite:///{tmp_path}/lake/catalog.db", "warehouse": f"file://{tmp_path}/lake"}
    catalog = load_catalog("default", type="sql", **properties)
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.cities", FIRST.schema)
    table.append(FIRST)
    table.delete("k == 2")
    table.append(SECOND)
    yield catalog
    catalog.close()


@pytest.mark.parametrize("form", ["text", "path", "object"])
def test_delta_table_gives_its_current_rows(delta: Path, tmp_path: Path, form: str) -> None:
    source = {"text": str(delta), "path": delta, "object": deltalake.DeltaTable(str(delta))}[form]
    assert rows_of(Relation.build(source, tmp_path / "r", on="k", shards=2)) == CURRENT


def test_delta_table_of_an_older_version_gives_the_rows_of_then(delta: Path, tmp_path: Path) -> None:
    old = deltalake.DeltaTable(str(delta), version=0)
    assert rows_of(Relation.build(old, tmp_path / "r", on="k", shards=2)) == FIRST.to_pylist()


def test_iceberg_table_gives_its_current_rows(catalog: Any, tmp_path: Path) -> None:
    table = catalog.load_table("shop.cities")
    assert rows_of(Relation.build(table, tmp_path / "r", on="k", shards=2)) == CURRENT
    directory = table.location().removeprefix("file://")
    assert rows_of(Relation.build(directory, tmp_path / "s", on="k", shards=2)) == CURRENT


def test_iceberg_table_is_found_by_its_name(catalog: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"type": "sql", "uri": catalog.properties["uri"]}.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__DEFAULT__{name.upper()}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", type(load_catalog.__globals__["_ENV_CONFIG"])())
    assert rows_of(Relation.build("shop.cities", tmp_path / "r", on="k", shards=2)) == CURRENT
    with pytest.raises(PlanError, match=r"has no table .shop\.towns."):
        Relation.build("shop.towns", tmp_path / "s", on="k")


def test_upsert_takes_a_table_too(delta: Path, tmp_path: Path) -> None:
    relation = Relation.build(FIRST, tmp_path / "r", on="k", shards=2)
    assert rows_of(relation.upsert(delta))[3] == {"k": 4, "city": "Lima"}


@pytest.mark.parametrize(
    ("name", "text"),
    [("nowhere/at/all", "There is no directory"), ("plain", "There is no directory"), ("s3://b/t", "not a local path")],
)
def test_name_of_nothing_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Relation.build(name, tmp_path / "r", on="k")


def test_directory_of_parquet_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    with pytest.raises(PlanError, match="neither a Delta nor an Iceberg table"):
        Relation.build(tmp_path / "files", tmp_path / "r", on="k")
