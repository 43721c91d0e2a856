"""Calibration: what is measured, kept, and measured again."""

import json
import os
import stat
from datetime import UTC, datetime, timedelta

import pytest

from dovetail.core.errors import PlanError
from dovetail.costs import CostFactors
from dovetail.costs.profile import JoinProfile
from dovetail.costs.tune import tune
from dovetail.joins.calibration import calibrate, disk
from dovetail.joins.calibration import calibrate as calibrate_function
from dovetail.joins.calibration.calibrate import default_path, fingerprint, measure

SMALL = {"table_entries": (64, 512), "scratch_bytes": 1 << 23, "repeats": 3}


@pytest.fixture
def measurements(monkeypatch):
    """Counts measurements, and makes them instant and all different."""
    import sys

    made = []

    def fake(directory=None):
        made.append(directory)
        return {
            "direct": CostFactors(seek_s=float(len(made)), bandwidth_bytes_per_s=1.0),
            "cached": CostFactors(seek_s=0.0, bandwidth_bytes_per_s=float(len(made))),
        }

    monkeypatch.setattr(sys.modules["dovetail.joins.calibration.calibrate"], "measure", fake)
    return made


def test_every_factor_is_measured(tmp_path):
    measured = measure(tmp_path, **SMALL)
    assert list(tmp_path.iterdir()) == [], "the scratch file is gone"
    for factors in measured.values():
        assert factors.bandwidth_bytes_per_s > 1e6
        for name in ("probe_s", "cache_probe_s", "append_s", "expire_s"):
            curve = getattr(factors, name)
            assert [size for size, _ in curve.points] == [64, 512]
            assert all(0 < cost < 1e-2 for _, cost in curve.points)
        for name in ("output_s", "stream_read_s", "switch_s", "lookup_s", "gather_s", "step_s"):
            assert 0 < getattr(factors, name) < 1.0
        # Differences of two times: on a busy machine the clock may see none.
        assert all(0 <= cost < 1e-2 for _, cost in factors.remove_s.points)
        assert 0 <= factors.index_step_s < 1.0
        plan = tune("auto", profile=JoinProfile.declared(relation_rows=10_000), factors=factors, budget="200kB")
        assert plan.service_rate > 0


def test_kept_factors_are_used_again(tmp_path, measurements):
    path = tmp_path / "deep" / "factors.json"
    first = calibrate_function(path, directory=tmp_path)
    assert calibrate_function(path, directory=tmp_path) == first
    assert calibrate_function(path, directory=tmp_path, disk="cached").bandwidth_bytes_per_s == 1.0
    assert len(measurements) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["factors.json"]


def test_force_measures_again(tmp_path, measurements):
    path = tmp_path / "factors.json"
    assert calibrate_function(path, directory=tmp_path).seek_s == 1.0
    assert calibrate_function(path, force=True, directory=tmp_path).seek_s == 2.0
    assert calibrate_function(path, directory=tmp_path).seek_s == 2.0


@pytest.mark.parametrize(
    "change",
    [
        {"processor": "another one"},
        {"cores": 999},
        {"versions": {"numba": "0.1"}},
        {"device": -1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_machine_measures_again(tmp_path, measurements, change):
    path = tmp_path / "factors.json"
    calibrate_function(path, directory=tmp_path)
    data = json.loads(path.read_text())
    data["machine"] |= change
    path.write_text(json.dumps(data))
    assert calibrate_function(path, directory=tmp_path).seek_s == 2.0


@pytest.mark.parametrize(("age_days", "expected"), [(29, 1.0), (31, 2.0), (-1, 2.0)])
def test_old_factors_are_measured_again(tmp_path, measurements, age_days, expected):
    path = tmp_path / "factors.json"
    calibrate_function(path, directory=tmp_path)
    data = json.loads(path.read_text())
    data["measured_at"] = (datetime.now(UTC) - timedelta(days=age_days)).isoformat()
    path.write_text(json.dumps(data))
    assert calibrate_function(path, directory=tmp_path).seek_s == expected


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1}', '{"format": 99}'], ids=["empty", "cut", "list", "bare", "future"]
)
def test_files_without_a_valid_machine_are_measured_again(tmp_path, measurements, content):
    path = tmp_path / "factors.json"
    path.write_text(content)
    if content in ("", "{"):
        with pytest.warns(RuntimeWarning, match="cannot be read"):
            assert calibrate_function(path, directory=tmp_path).seek_s == 1.0
    else:
        assert calibrate_function(path, directory=tmp_path).seek_s == 1.0
    assert calibrate_function(path, directory=tmp_path).seek_s == 1.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("measured_at"),
        lambda data: data.update(measured_at="yesterday"),
        lambda data: data["factors"].pop("cached"),
        lambda data: data["factors"]["direct"].update(seek_s=-1.0),
    ],
    ids=["no date", "no such date", "half", "negative"],
)
def test_damaged_files_are_reported_and_measured_again(tmp_path, measurements, damage):
    path = tmp_path / "factors.json"
    calibrate_function(path, directory=tmp_path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert calibrate_function(path, directory=tmp_path).seek_s == 2.0


def test_factors_that_cannot_be_kept_are_given_with_a_warning(tmp_path, measurements):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.warns(RuntimeWarning, match="could not be stored"):
        assert calibrate_function(blocked / "factors.json", directory=tmp_path).seek_s == 1.0


def test_kept_file_is_json_for_this_user_only(tmp_path, measurements):
    path = tmp_path / "factors.json"
    calibrate_function(path, directory=tmp_path)
    assert json.loads(path.read_text())["machine"] == fingerprint(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_default_path_follows_the_user_s_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "dovetail" / "calibration.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "dovetail" / "calibration.json"


def test_unknown_way_to_read_is_refused():
    with pytest.raises(PlanError, match="disk='tape'"):
        calibrate(disk="tape")


def test_disk_without_direct_reads_is_measured_by_dropping_pages(tmp_path, monkeypatch):
    real_open = os.open

    def refuse_direct(path, flags, *arguments, **keywords):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *arguments, **keywords)

    monkeypatch.setattr(disk.os, "open", refuse_direct)
    times = disk.measure_disk(tmp_path, 1 << 23, bypass_page_cache=True, reads=4)
    assert not times.is_direct
    assert times.bandwidth_bytes_per_s > 0
    assert [depth for depth, _ in times.page_read_s] == [1, 2, 4, 8, 16, 32, 64]
    assert all(read_s > 0 for _, read_s in times.page_read_s)


def test_disk_that_fails_is_not_taken_for_one_without_direct_reads(tmp_path, monkeypatch):
    real_open = os.open

    def fail_direct(path, flags, *arguments, **keywords):
        if flags & os.O_DIRECT:
            raise OSError(5, "Input/output error")
        return real_open(path, flags, *arguments, **keywords)

    monkeypatch.setattr(disk.os, "open", fail_direct)
    with pytest.raises(OSError, match="Input/output error"):
        disk.measure_disk(tmp_path, 1 << 23, bypass_page_cache=True, reads=4)
    assert list(tmp_path.iterdir()) == []
