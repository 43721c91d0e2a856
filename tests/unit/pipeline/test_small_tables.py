"""Which tables a pipeline reads into its own process to build a relation."""

from pathlib import Path

import pytest
from pyspark.sql import types as T

from dovetail.pipeline.small_tables import _bytes_of, _survives_arrow


def test_local_files_are_counted(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.csv").write_bytes(b"x" * 100)
    assert _bytes_of(f"file://{tmp_path}/{number}.csv" for number in range(3)) == 300


@pytest.mark.parametrize("address", ["s3a://bucket/a.csv", "file:///tmp/none.csv", "file:///tmp/a%20b.csv"])
def test_size_of_other_files_is_unknown(address: str) -> None:
    assert _bytes_of([address]) is None


def test_compressed_text_may_be_anything(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(b"x")
    assert _bytes_of([f"file://{tmp_path}/a.csv.gz"]) is None


def test_types_that_arrow_has_survive() -> None:
    kinds = [T.LongType(), T.StringType(), T.DecimalType(10, 2), T.TimestampType(), T.DateType(), T.BinaryType()]
    assert _survives_arrow(T.StructType([T.StructField(f"c{n}", kind) for n, kind in enumerate(kinds)]))


@pytest.mark.parametrize("kind", [T.VarcharType(10), T.VariantType(), T.StringType("UTF8_LCASE")], ids=str)
def test_types_that_arrow_lacks_do_not(kind: T.DataType) -> None:
    assert not _survives_arrow(T.StructType([T.StructField("a", T.LongType()), T.StructField("b", kind)]))
