"""Relations that follow Delta and Iceberg tables, which their own libraries change: random writes, in steps."""

import datetime
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.relation import Relation

Row = dict[str, Any]
SCHEMA = pa.schema([("id", pa.int64()), ("city", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])
KEYS = 60


def some_rows(chosen: random.Random, keys: list[int]) -> pa.Table:
    moment = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    rows = [
        {"id": key, "city": chosen.choice(["Rome", None, "Oslo", "ä"]), "at": moment + datetime.timedelta(seconds=key)}
        for key in keys
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


class DeltaTable:
    """A Delta table, changed by `deltalake`."""

    def __init__(self, root: Path, has_feed: bool) -> None:
        self.path = str(root / "table")
        settings = {"delta.enableChangeDataFeed": "true"} if has_feed else {}
        deltalake.DeltaTable.create(self.path, SCHEMA, configuration=settings)

    def source(self, spark: SparkSession) -> Any:
        return dt.sources.delta(self.path, spark=spark)

    def _table(self) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(self.path)

    def append(self, rows: pa.Table) -> None:
        deltalake.write_deltalake(self.path, rows, mode="append")

    def upsert(self, rows: pa.Table) -> None:
        merge = self._table().merge(rows, "t.id = s.id", source_alias="s", target_alias="t")
        merge.when_matched_update_all().when_not_matched_insert_all().execute()

    def delete(self, keys: list[int]) -> None:
        self._table().delete(f"id IN ({', '.join(map(str, keys))})")

    def overwrite(self, rows: pa.Table) -> None:
        deltalake.write_deltalake(self.path, rows, mode="overwrite")

    def tidy(self) -> None:
        self._table().optimize.compact()

    def rows(self) -> list[Row]:
        return self._table().to_pyarrow_table().to_pylist()


class IcebergTable:
    """An Iceberg table, changed by `pyiceberg`."""

    def __init__(self, root: Path) -> None:
        (root / "lake").mkdir()
        self.properties = {
            "type": "sql",
            "uri": f"sqlite:///{root}/lake/catalog.db",
            "warehouse": f"file://{root}/lake",
        }
        self._catalog = load_catalog("default", **self.properties)
        self._catalog.create_namespace("shop")
        self._catalog.create_table("shop.cities", SCHEMA)

    def source(self, spark: SparkSession) -> Any:
        return dt.sources.iceberg("shop.cities", properties=self.properties, spark=spark)

    def table(self) -> Any:
        return self._catalog.load_table("shop.cities")

    def append(self, rows: pa.Table) -> None:
        self.table().append(rows)

    def upsert(self, rows: pa.Table) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.table().upsert(rows, join_cols=["id"])

    def delete(self, keys: list[int]) -> None:
        from pyiceberg.expressions import In

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.table().delete(In("id", keys))

    def overwrite(self, rows: pa.Table) -> None:
        self.table().overwrite(rows)

    def tidy(self) -> None:
        """One file of all rows."""
        self.table().overwrite(self.table().scan().to_arrow())

    def rows(self) -> list[Row]:
        return self.table().scan().to_arrow().to_pylist()

    def close(self) -> None:
        self._catalog.close()


@pytest.fixture(params=["delta with feed", "delta", "iceberg"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "iceberg":
        found = IcebergTable(tmp_path)
        yield found
        found.close()
    else:
        yield DeltaTable(tmp_path, request.param == "delta with feed")


def change(table: Any, chosen: random.Random, expected: dict[int, Row]) -> None:
    """Change the table at random, and what is expected of it."""
    kind = chosen.choice(["append", "upsert", "upsert", "delete", "tidy", "overwrite"])
    present, absent = sorted(expected), sorted(set(range(KEYS)) - set(expected))
    if kind == "append" and absent:
        rows = some_rows(chosen, chosen.sample(absent, min(8, len(absent))))
        table.append(rows)
    elif kind == "delete" and present:
        keys = chosen.sample(present, min(5, len(present)))
        table.delete(keys)
        for key in keys:
            del expected[key]
        return
    elif kind == "overwrite" and chosen.random() < 0.5:
        rows = some_rows(chosen, chosen.sample(range(KEYS), 20))
        table.overwrite(rows)
        expected.clear()
    elif kind == "tidy" and present:
        table.tidy()
        return
    else:
        rows = some_rows(chosen, chosen.sample(range(KEYS), 10))
        table.upsert(rows)
    expected.update({row["id"]: row for row in rows.to_pylist()})


def follow(spark: SparkSession, table: Any, root: Path, **options: Any) -> None:
    query = dt.follow(
        root / "relation", table.source(spark), keys="id", checkpoint=root / "checkpoint", trigger="available-now",
        shards=2, **options,
    )  # fmt: skip
    query.awaitTermination()


def in_relation(root: Path) -> dict[int, Row]:
    rows = Relation.open(root / "relation").to_arrow().select(SCHEMA.names).to_pylist()
    assert len({row["id"] for row in rows}) == len(rows), "a key has two rows"
    return {row["id"]: row for row in rows}


def test_relation_is_the_table_after_random_changes(spark: SparkSession, tmp_path: Path, table: Any) -> None:
    chosen, expected = random.Random(19), dict[int, Row]()
    print("seed 19")
    first = some_rows(chosen, list(range(0, KEYS, 3)))
    table.append(first)
    expected.update({row["id"]: row for row in first.to_pylist()})
    for step in range(4):
        follow(spark, table, tmp_path)
        assert in_relation(tmp_path) == expected, f"step {step}"
        for _ in range(chosen.randrange(1, 5)):
            change(table, chosen, expected)
    assert {row["id"]: row for row in table.rows()} == expected, "the test itself"
    follow(spark, table, tmp_path)
    assert in_relation(tmp_path) == expected


def test_table_without_changes_gives_an_empty_micro_batch(spark: SparkSession, tmp_path: Path, table: Any) -> None:
    follow(spark, table, tmp_path)
    assert in_relation(tmp_path) == {}
    table.append(some_rows(random.Random(1), [1, 2]))
    follow(spark, table, tmp_path)
    follow(spark, table, tmp_path)
    assert sorted(in_relation(tmp_path)) == [1, 2]


def end_retention(root: Path) -> None:
    deltalake.DeltaTable(str(root / "table")).create_checkpoint()
    for version in range(4):
        (root / "table" / "_delta_log" / f"{version:020d}.json").unlink()


def change_type(root: Path) -> None:
    wider = SCHEMA.set(1, pa.field("city", pa.int64()))
    deltalake.write_deltalake(str(root / "table"), wider.empty_table(), mode="overwrite", schema_mode="overwrite")


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (end_retention, "Version 2 of .* cannot be read.*follow the table with a new checkpoint"),
    (change_type, "Column 'city' of .* is bigint in version 5; it was string"),
]


@pytest.mark.parametrize(("damage", "text"), DAMAGE, ids=["retention over", "another type"])
def test_delta_feed_that_cannot_go_on_says_why(
    spark: SparkSession, tmp_path: Path, damage: Callable[[Path], None], text: str
) -> None:
    table = DeltaTable(tmp_path, has_feed=True)
    table.append(some_rows(random.Random(2), [1, 2, 3]))
    source = table.source(spark)
    follow(spark, table, tmp_path)
    for key in (4, 5, 6):
        table.append(some_rows(random.Random(3), [key]))
    damage(tmp_path)
    query = dt.follow(
        tmp_path / "relation", source, keys="id", checkpoint=tmp_path / "checkpoint", trigger="available-now"
    )
    with pytest.raises(Exception, match=f"(?s){text}"):
        query.awaitTermination()
    assert sorted(in_relation(tmp_path)) == [1, 2, 3]


def test_expired_snapshot_of_iceberg_is_named(spark: SparkSession, tmp_path: Path) -> None:
    table = IcebergTable(tmp_path)
    table.append(some_rows(random.Random(2), [1, 2, 3]))
    follow(spark, table, tmp_path)
    seen = table.table().current_snapshot().snapshot_id
    table.append(some_rows(random.Random(3), [4]))
    table.table().maintenance.expire_snapshots().by_id(seen).commit()
    with pytest.raises(Exception, match=f"Snapshot {seen} of shop.cities has expired"):
        follow(spark, table, tmp_path)
    table.close()
