"""Targets of the drills in table formats, read back without the code that wrote them.

Delta: a reader of the log in plain Python, as the protocol describes it. Iceberg: metadata and manifests are read as
the JSON and Avro that they are. The rows come from the data files that they name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import polars as pl
import pyarrow.parquet as pq

import dovetail as dt

Row = dict[str, Any]


def delta_rows(table: Path) -> list[Row]:
    """The rows of a Delta table without partitions: the files that its log adds and does not remove."""
    live: dict[str, Any] = {}
    for entry in sorted((table / "_delta_log").glob("*.json")):
        for line in entry.read_text().splitlines():
            action = json.loads(line)
            if "add" in action:
                live[action["add"]["path"]] = action["add"]
            if "remove" in action:
                live.pop(action["remove"]["path"], None)
    found = []
    for name, add in live.items():
        rows = pq.read_table(table / unquote(name), partitioning=None).to_pylist()
        if add.get("stats"):
            assert json.loads(add["stats"])["numRecords"] == len(rows)
        for column, value in add["partitionValues"].items():
            rows = [{**row, column: value} for row in rows]
        found += rows
    return found


def iceberg_rows(metadata: Path) -> list[Row]:
    """The rows of an Iceberg table without delete files, from a metadata file; Avro is read by Polars."""
    document = json.loads(metadata.read_text())
    snapshots = {one["snapshot-id"]: one for one in document.get("snapshots", [])}
    current = snapshots.get(document.get("current-snapshot-id"))
    rows: list[Row] = []
    for manifest in [] if current is None else _avro(current["manifest-list"]):
        assert manifest["content"] == 0, "a manifest of deletes"
        for entry in _avro(manifest["manifest_path"]):
            if entry["status"] != 2:
                file = entry["data_file"]
                found = pq.read_table(_plain(file["file_path"]), partitioning=None).to_pylist()
                assert file["record_count"] == len(found)
                rows += found
    return rows


def _avro(path: str) -> list[Any]:
    return pl.read_avro(_plain(path)).to_dicts()


def _plain(path: str) -> str:
    return path.removeprefix("file://")


@dataclass
class DeltaTarget:
    """A Delta table."""

    path: Path
    is_fenced = True

    def sink(self) -> Any:
        return dt.sinks.delta(self.path)

    def rows(self) -> list[Row]:
        return [{"k": row["k"], "n": row["n"], "city": row["city"]} for row in delta_rows(self.path)]

    def empty(self) -> None:
        import deltalake

        deltalake.DeltaTable(str(self.path)).delete()

    def described(self) -> dict[str, Any]:
        return {"kind": "delta", "path": str(self.path)}


@dataclass
class IcebergTarget:
    """A table of an Iceberg catalog in SQLite."""

    path: Path
    is_fenced = True

    @property
    def properties(self) -> dict[str, str]:
        self.path.mkdir(exist_ok=True)
        return {"type": "sql", "uri": f"sqlite:///{self.path}/catalog.db", "warehouse": f"file://{self.path}"}

    def sink(self) -> Any:
        return dt.sinks.iceberg("shop.orders", properties=self.properties)

    def table(self) -> Any:
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("default", **self.properties)
        try:
            return catalog.load_table("shop.orders")
        finally:
            catalog.close()

    def rows(self) -> list[Row]:
        metadata = Path(self.table().metadata_location.removeprefix("file://"))
        return [{"k": row["k"], "n": row["n"], "city": row["city"]} for row in iceberg_rows(metadata)]

    def empty(self) -> None:
        self.table().delete()

    def described(self) -> dict[str, Any]:
        return {"kind": "iceberg", "path": str(self.path)}
