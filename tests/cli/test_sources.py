"""Which files are read, and as what."""

from pathlib import Path

import pytest

from dovetail.cli.failures import SourceError
from dovetail.cli.sources import Source, find_source


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.parquet", "parquet"),
        ("part-0.snappy.parquet", "parquet"),
        ("a.PQ", "parquet"),
        ("a.csv", "csv"),
        ("a.tsv", "csv"),
        ("a.csv.gz", "csv"),
        ("a.json", "json"),
        ("a.jsonl.zst", "json"),
        ("a.ndjson", "json"),
        ("a.orc", "orc"),
        ("a.xml", "xml"),
    ],
)
def test_format_is_told_from_the_name(tmp_path: Path, name: str, format: str) -> None:
    touch(tmp_path / name)
    assert find_source([str(tmp_path / name)]).format == format
    assert find_source([f"s3a://bucket/{name}"]).format == format


def test_directory_has_the_format_of_its_files_as_spark_sees_them(tmp_path: Path) -> None:
    touch(tmp_path / "day=1" / "part-0.parquet", tmp_path / "_SUCCESS", tmp_path / "_temporary" / "x.csv")
    touch(tmp_path / ".part-0.parquet.crc")
    assert find_source([str(tmp_path)]).format == "parquet"


@pytest.mark.parametrize(
    ("log", "table"), [("_delta_log/00000000000000000000.json", "Delta"), ("metadata/v1.metadata.json", "Iceberg")]
)
@pytest.mark.parametrize("format", [None, "parquet"])
def test_directory_of_a_table_format_is_not_read_as_plain_parquet(
    tmp_path: Path, log: str, table: str, format: str | None
) -> None:
    touch(tmp_path / "part-0.parquet", tmp_path / log)
    with pytest.raises(SourceError, match=f"is a {table} table: .* deleted or replaced"):
        find_source([str(tmp_path)], format)
    assert find_source([str(tmp_path)], table.lower()).format == table.lower()


def test_given_format_is_not_doubted(tmp_path: Path) -> None:
    touch(tmp_path / "a.parquet")
    assert find_source([str(tmp_path)], "CSV").format == "csv"


def test_patterns_are_expanded_and_what_is_left_is_taken_literally(tmp_path: Path) -> None:
    touch(tmp_path / "a[1].csv", tmp_path / "a[2].csv", tmp_path / "b.csv")
    found = find_source([str(tmp_path / "a*.csv")])
    assert found.paths == (str(tmp_path / r"a\[1\].csv"), str(tmp_path / r"a\[2\].csv"))
    assert find_source([str(tmp_path / "a[1].csv")]).paths == (str(tmp_path / r"a\[1\].csv"),)


@pytest.mark.parametrize("pattern", ["nowhere.csv", "nowhere-*.csv"])
def test_missing_path_is_refused_and_reminds_of_the_order(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(SourceError, match=r"does not exist\. The relation's path comes first"):
        find_source([str(tmp_path / pattern)])


def test_path_on_another_machine_is_left_to_spark() -> None:
    assert find_source(["data/orders.csv"], is_local=False).paths == ("data/orders.csv",)
    assert find_source(["hdfs://host/orders"], "orc").paths == ("hdfs://host/orders",)


def test_mixed_formats_are_refused(tmp_path: Path) -> None:
    touch(tmp_path / "a.csv", tmp_path / "b.json")
    with pytest.raises(SourceError, match="several formats: csv, json"):
        find_source([str(tmp_path)])


def test_unknown_format_asks_for_it(tmp_path: Path) -> None:
    touch(tmp_path / "rows.dat")
    with pytest.raises(SourceError, match="--format: parquet"):
        find_source([str(tmp_path / "rows.dat")])


def test_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="has no data files"):
        find_source([str(tmp_path)])


def test_bad_rows_stop_the_reader_unless_the_user_says_otherwise() -> None:
    assert Source(("a.csv",), "csv").reader_options()["mode"] == "FAILFAST"
    assert Source(("a.csv",), "csv", {"Mode": "PERMISSIVE"}).reader_options() == {
        "Mode": "PERMISSIVE",
        "enforceSchema": "false",
    }
    assert Source(("a.parquet",), "parquet").reader_options() == {}


def test_tab_separated_files_are_csv_with_tabs() -> None:
    assert Source(("a.tsv",), "csv").reader_options()["sep"] == "\t"
