"""Flows into Delta and Iceberg tables: appended and upserted rows, partitions, new columns, and what is refused."""

import datetime as dt
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dovetail
from dovetail.core.errors import BudgetError, DovetailError, PlanError, StateError
from dovetail.pipeline.checks import check_pipeline
from dovetail.pipeline.loading import parse_pipeline
from dovetail.pipeline.runner import plan_pipeline
from dovetail.testing.faults import load_program
from dovetail.testing.flows import Feed, commits_of
from dovetail.testing.rows import assert_same_rows

TARGETS = load_program(Path(__file__).parents[1] / "drills" / "lake_targets.py")


class Place:
    """A table of one format in a directory of its own."""

    def __init__(self, kind: str, root: Path) -> None:
        self.kind, self.path = kind, root / "table"
        self.target = {"delta": TARGETS.DeltaTarget, "iceberg": TARGETS.IcebergTarget}[kind](self.path)

    def sink(self, **options: Any) -> Any:
        if self.kind == "delta":
            return dovetail.sinks.delta(self.path, **options)
        return dovetail.sinks.iceberg("shop.orders", properties=self.target.properties, **options)

    def rows(self) -> list[dict[str, Any]]:
        """What Polars reads."""
        if self.kind == "delta":
            return pl.read_delta(str(self.path)).to_dicts()
        return pl.scan_iceberg(self.target.table().metadata_location, reader_override="native").collect().to_dicts()

    def logged_rows(self) -> list[dict[str, Any]]:
        """What a reader of the log finds that shares no code with the writer."""
        if self.kind == "delta":
            return TARGETS.delta_rows(self.path)
        return TARGETS.iceberg_rows(Path(self.target.table().metadata_location.removeprefix("file://")))

    def appended_elsewhere(self, rows: pa.Table) -> None:
        if self.kind == "delta":
            deltalake.write_deltalake(str(self.path), rows, mode="append")
        else:
            self.target.table().append(rows)


@pytest.fixture(params=["delta", "iceberg"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    return Place(request.param, tmp_path)


@pytest.fixture
def run(spark: SparkSession, tmp_path: Path) -> Callable[..., None]:
    """Send tables through a flow without steps, one micro-batch each."""

    def send(sink: Any, *tables: pa.Table, name: str = "checkpoint", feed: str = "feed") -> None:
        given = Feed(tmp_path / feed)
        for table in tables:
            given.add(table)
        schema = spark.read.parquet(str(tmp_path / feed)).schema
        source = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / feed))
        flow = dovetail.stream(source, name)
        flow.write(sink, checkpoint=tmp_path / name, trigger="available-now").awaitTermination()

    return send


def table_of(*rows: tuple[Any, ...], names: tuple[str, ...] = ("k", "city")) -> pa.Table:
    return pa.table({name: [row[number] for row in rows] for number, name in enumerate(names)})


def test_rows_of_every_type_are_read_back_by_others(place: Place, run: Callable[..., None]) -> None:
    moment = dt.datetime(2026, 3, 1, 12, 30, 0, 123456, tzinfo=dt.UTC)
    rows = pa.table(
        {
            "n": pa.array([1, None], pa.int64()),
            "i": pa.array([-5, None], pa.int32()),
            "x": pa.array([0.5, None], pa.float64()),
            "f": pa.array([0.25, None], pa.float32()),
            "ok": [True, None],
            "name": ["ä", None],
            "raw": pa.array([b"\x00\xff", None], pa.binary()),
            "day": pa.array([dt.date(1969, 12, 31), None], pa.date32()),
            "at": pa.array([moment, None], pa.timestamp("us", tz="UTC")),
            "local": pa.array([moment.replace(tzinfo=None), None], pa.timestamp("us")),
            "price": pa.array([Decimal("12.34"), None], pa.decimal128(10, 2)),
            "tags": pa.array([["a", None], None], pa.list_(pa.string())),
            "one": pa.array([{"a": 1, "b": "x"}, None], pa.struct([("a", pa.int64()), ("b", pa.string())])),
        }
    )
    run(place.sink(), rows)
    assert_same_rows(place.logged_rows(), rows.to_pylist(), "the log")
    shown = pa.Table.from_pylist(place.rows()).to_pylist()
    assert_same_rows(shown, rows.to_pylist(), "Polars")


def test_partitions_keep_empty_text_null_and_odd_letters_apart(place: Place, run: Callable[..., None]) -> None:
    regions = ["north", "", None, "a/b=c %41", "n", "ä ö", "North"]
    rows = table_of(*((n, regions[n % len(regions)], n % 2 == 0) for n in range(21)), names=("k", "region", "ok"))
    run(place.sink(partition_by=["region", "ok"]), rows.slice(0, 10), rows.slice(10))
    expected = rows.to_pylist()
    if place.kind == "delta":  # has no empty text in a partition column
        expected = [{**row, "region": row["region"] or None} for row in expected]
    assert_same_rows(
        [{name: row[name] for name in ("k", "region", "ok")} for row in place.rows()], expected, "partitioned"
    )
    if place.kind == "delta":
        found = deltalake.DeltaTable(str(place.path)).to_pyarrow_table(filters=[("region", "=", "a/b=c %41")])
        assert sorted(found["k"].to_pylist()) == [3, 10, 17]
    else:
        assert sorted(place.target.table().scan(row_filter="region = 'n'").to_arrow()["k"].to_pylist()) == [4, 11, 18]


def test_upserts_keep_the_greatest_row_of_each_key(place: Place, run: Callable[..., None]) -> None:
    names = ("k", "seq", "city")
    first = table_of((1, 1, "Rome"), (2, 1, "Oslo"), (1, 3, "Pisa"), (1, 2, "Bari"), names=names)
    second = table_of((2, 5, "Bergen"), (3, 1, None), (3, None, "?"), names=names)
    sink = place.sink(key="k", order_by="seq")
    run(sink, first, second)
    expected = [
        {"k": 1, "seq": 3, "city": "Pisa"},
        {"k": 2, "seq": 5, "city": "Bergen"},
        {"k": 3, "seq": 1, "city": None},
    ]
    assert_same_rows(sorted(place.rows(), key=lambda row: row["k"]), expected, "upserted")
    run(sink, second)  # changes no row, and is a micro-batch all the same
    assert_same_rows(sorted(place.rows(), key=lambda row: row["k"]), expected, "again")


def test_new_column_is_refused_unless_it_may_be_added(place: Place, run: Callable[..., None]) -> None:
    run(place.sink(), table_of((1, "Rome")))
    wider = table_of((2, "Oslo", 7.5), names=("k", "city", "area"))
    with pytest.raises(PlanError, match="no column 'area'"):
        run(place.sink(), wider, name="second", feed="other")
    run(place.sink(add_columns=True), name="second", feed="other")
    run(place.sink(), table_of((3,), names=("k",)), name="third", feed="narrow")
    expected = [(1, "Rome", None), (2, "Oslo", 7.5), (3, None, None)]
    assert sorted((row["k"], row["city"], row["area"]) for row in place.rows()) == expected


def test_empty_micro_batches_leave_no_trace(place: Place, run: Callable[..., None], spark: SparkSession) -> None:
    run(place.sink(), table_of((1, "Rome")), table_of((2, "Oslo")).slice(0, 0), table_of((3, "Pisa")))
    assert len(place.rows()) == 2
    if place.kind == "delta":
        assert deltalake.DeltaTable(str(place.path)).version() == 2
    else:
        assert len(place.target.table().snapshots()) == 2


def test_other_writers_commits_between_ours_are_kept(place: Place, run: Callable[..., None]) -> None:
    run(place.sink(), table_of((1, "Rome")))
    place.appended_elsewhere(table_of((2, "Oslo")))
    run(place.sink(), table_of((3, "Pisa")))
    run(place.sink(), table_of((4, "Bari")), name="second", feed="other")
    assert sorted(row["k"] for row in place.rows()) == [1, 2, 3, 4]


@pytest.mark.parametrize("options", [{}, {"key": "k"}])
def test_writer_that_is_faster_each_time_loses_nothing(
    place: Place, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    run(place.sink(**options), table_of((1, "Rome")))
    sink, load, others = place.sink(**options), type(place.sink()).load, []

    def load_and_be_overtaken(self: Any) -> Any:
        table = load(self)
        # Twice, between the look at the mark and the commit.
        if len(others) < 2 and hasattr(self, "_staged_root"):
            others.append(100 + len(others))
            place.appended_elsewhere(table_of((others[-1], "elsewhere")))
        return table

    monkeypatch.setattr(type(sink), "load", load_and_be_overtaken)
    run(sink, table_of((2, "Oslo")))
    assert sorted(row["k"] for row in place.rows()) == [1, 2, 100, 101]


def test_commit_says_who_made_it(run: Callable[..., None], tmp_path: Path) -> None:
    run(dovetail.sinks.delta(tmp_path / "table"), table_of((1, "Rome")))
    (identity,) = [json.loads((tmp_path / "checkpoint" / "dovetail" / "identity.json").read_text())["id"]]
    newest = deltalake.DeltaTable(str(tmp_path / "table")).history(1)[0]
    assert (newest["dovetail.flow"], newest["dovetail.batch"], newest["dovetail.epoch"]) == (identity, 0, 1)
    assert len(commits_of(tmp_path / "checkpoint")) >= 1


REFUSED: list[tuple[str, dict[str, Any], type[DovetailError], str]] = [
    ("a key that is not there", {"key": "id"}, PlanError, "'id' is not in the output"),
    ("an order without a key", {"order_by": "k"}, PlanError, "order_by= is for upserts"),
    ("another partitioning", {"partition_by": "city"}, PlanError, "is not partitioned"),
    ("a partition column that is not there", {"partition_by": "x"}, PlanError, "'x', which is not in the output"),
    ("a budget that is too small", {"key": "k", "budget": 10}, BudgetError, "the driver may hold 10"),
]


def test_bad_options_are_refused_before_rows_are_written(place: Place, run: Callable[..., None]) -> None:
    run(place.sink(), table_of((1, "Rome")))
    for number, (what, options, error, text) in enumerate(REFUSED):
        with pytest.raises(error, match=text):
            run(place.sink(**options), table_of((2, "Oslo")), name=f"bad-{number}", feed=f"bad-feed-{number}")
        assert len(place.rows()) == 1, what


def test_null_key_is_refused_before_the_commit(place: Place, run: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(StateError, match="whose key column 'k' is NULL"):
        run(place.sink(key="k"), table_of((None, "Rome"), (1, "Oslo")))
    assert commits_of(tmp_path / "checkpoint") == []


def test_column_of_another_type_is_refused(place: Place, run: Callable[..., None]) -> None:
    run(place.sink(), table_of((1, "Rome")))
    with pytest.raises(PlanError, match="Column 'k' is string in the output and long"):
        run(place.sink(), table_of(("1", "Rome")), name="second", feed="other")


def test_delta_table_that_checks_its_rows_is_refused_for_appends(run: Callable[..., None], tmp_path: Path) -> None:
    deltalake.write_deltalake(str(tmp_path / "table"), table_of((1, "Rome")))
    deltalake.DeltaTable(str(tmp_path / "table")).alter.add_constraint({"positive": "k > 0"})
    with pytest.raises(PlanError, match=r"delta.constraints.positive"):
        run(dovetail.sinks.delta(tmp_path / "table"), table_of((-1, "Oslo")))
    run(dovetail.sinks.delta(tmp_path / "table", key="k"), table_of((1, "Pisa")), name="second", feed="other")
    assert pl.read_delta(str(tmp_path / "table")).to_dicts() == [{"k": 1, "city": "Pisa"}]


def test_directory_of_other_files_is_no_delta_table(run: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "notes.txt").write_text("mine")
    with pytest.raises(PlanError, match="is no Delta table"):
        run(dovetail.sinks.delta(tmp_path / "table"), table_of((1, "Rome")))


def test_dataframe_of_a_tables_files_is_no_source_of_a_relation(spark: SparkSession, tmp_path: Path) -> None:
    deltalake.write_deltalake(str(tmp_path / "table"), table_of((1, "Rome"), (2, "Oslo")), partition_by="city")
    deltalake.DeltaTable(str(tmp_path / "table")).delete("k = 1")
    for path in (tmp_path / "table", tmp_path / "table" / "city=Rome"):
        files = spark.read.parquet(str(path))
        with pytest.raises(PlanError, match="belongs to the Delta table"):
            dovetail.Relation.build(files.where("k > 0"), tmp_path / "relation", on="k")


def test_pipeline_file_names_a_table(place: Place, spark: SparkSession, tmp_path: Path) -> None:
    Feed(tmp_path / "feed").add(table_of((1, "Rome"), (2, "Oslo"), (1, "Pisa")))
    sink: dict[str, Any] = {"format": place.kind, "key": "k", "order_by": "city", "budget": "1MB"}
    if place.kind == "delta":
        sink["path"] = "table"
    else:
        sink |= {"table": "shop.orders", "properties": place.target.properties}
    document = {
        "name": "loading",
        "checkpoint": "checkpoint",
        "trigger": "available-now",
        "sources": {"orders": {"format": "parquet", "path": "feed"}},
        "sink": sink,
    }
    (tmp_path / "p.yaml").write_text(json.dumps(document))
    planned = plan_pipeline(spark, check_pipeline(*parse_pipeline(tmp_path / "p.yaml")))
    planned.start().awaitTermination()
    assert sorted((row["k"], row["city"]) for row in place.rows()) == [(1, "Rome"), (2, "Oslo")]
