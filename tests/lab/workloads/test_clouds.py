"""Cloud reports: their bytes, their longitudes, and the archive's files."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError, SchemaError
from dovetail.testing.statistics import follows
from dovetail_lab.workloads import Zipf, cloud_reports, load_cloud_reports
from dovetail_lab.workloads.clouds import LONGITUDES, write_cloud_file


@pytest.mark.parametrize("row_bytes", [32, 128])
def test_reports_take_the_declared_bytes(row_bytes: int) -> None:
    batches = list(cloud_reports(70_000, row_bytes))
    assert [batch.num_rows for batch in batches] == [65_536, 4464]
    assert sum(batch.nbytes for batch in batches) == 70_000 * row_bytes


def test_longitudes_follow_zipf() -> None:
    rows = 200_000
    longitudes = pa.concat_batches(list(cloud_reports(rows, 32)))["longitude"].to_numpy()
    assert longitudes.min() >= 0
    assert longitudes.max() < LONGITUDES
    places = Zipf(LONGITUDES, 1.0, order="shuffled", seed=26)
    rank_of = np.empty(LONGITUDES, dtype=np.int64)
    rank_of[places.codes_of(np.arange(1, LONGITUDES + 1)) - 1] = np.arange(LONGITUDES)
    edges = np.array([1, 2, 5, 10, 50, 100, 500, 1000, 5000, 20_000, LONGITUDES])
    expected = np.diff([0.0, *(places.hit_ratio(edge) for edge in edges)]) * rows
    assert follows(np.bincount(np.searchsorted(edges, rank_of[longitudes], side="right"), minlength=11), expected)


def test_relation_and_stream_share_their_frequent_longitudes() -> None:
    frequent = []
    for seed in (1, 2):
        longitudes = pa.concat_batches(list(cloud_reports(60_000, 32, seed=seed)))["longitude"].to_numpy()
        frequent.append(set(np.bincount(longitudes).argsort()[-5:].tolist()))
    assert len(frequent[0] & frequent[1]) >= 4


@pytest.mark.parametrize("width", [56, 80])
def test_files_of_both_widths_are_read_back(tmp_path: Path, width: int) -> None:
    made = pa.Table.from_batches(list(cloud_reports(3000, months=(12,), seed=3)))
    whole = tmp_path / "whole"
    assert write_cloud_file(iter(made.to_batches()), whole) == 3000
    lines = [line[:width] for line in whole.read_text().splitlines()]
    assert {len(line) for line in lines} == {width}
    (tmp_path / "DEC91").write_text("\n".join(lines))
    read = pa.Table.from_batches(list(load_cloud_reports(tmp_path / "DEC91")))
    assert read.drop_columns("report").equals(made.drop_columns("report"))
    assert [text[:width] for text in read["report"].to_pylist()] == lines
    assert {batch.nbytes for batch in load_cloud_reports([tmp_path / "DEC91"], 32)} == {3000 * 32}


def test_line_of_the_archive_is_read_by_its_columns(tmp_path: Path) -> None:
    line = "91123121" + "1" + "-4512" + "35999" + "94300" + "1" + "61" + "8" + " 5" + " 3" + " 7" + "-1" + "-1"
    line += "900" + "900" + "9" + "9" + " 0" + " 123" + "  10"
    (tmp_path / "DEC91").write_text(line + "\n")
    (report,) = next(load_cloud_reports(tmp_path / "DEC91")).to_pylist()
    del report["report"]
    assert report == {
        "longitude": 35_999,
        "id": 0,
        "latitude": -4512,
        "station": 94_300,
        "time": 91_123_121,
        "total_cover": 8,
        "present_weather": 61,
        "low_type": 7,
        "solar_altitude": 123,
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("abc\n", "3 characters"),
        ("0" * 56 + "\n" + "0" * 40 + "\n", "line 2"),
        ("0" * 56 + "\n" + "x" * 56 + "\n", "not a number"),
        ("0" * 14 + "99999" + "0" * 37 + "\n", "longitude 99999"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(SchemaError, match=reason):
        list(load_cloud_reports(tmp_path / "file"))


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(PlanError, match="row_bytes=64"):
        cloud_reports(10, 64)
    with pytest.raises(PlanError, match="months"):
        cloud_reports(10, months=(13,))
    with pytest.raises(PlanError, match="row_bytes=64"):
        load_cloud_reports("nowhere", 64)
