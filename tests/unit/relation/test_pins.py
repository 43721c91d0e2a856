"""Pins: what a vacuum keeps, for whom, and for how long."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from dovetail.core.errors import RelationCorrupt
from dovetail.relation import Relation
from dovetail.relation.pins import BATCH_LEASE_S, hold, pinned_versions, release
from dovetail.runtime.process_pins import LEASE_S

READER = """
import sys, time
from dovetail.relation import Relation
from dovetail.runtime.process_pins import pin_for_this_process

pin_for_this_process(Relation.open(sys.argv[1], int(sys.argv[2])))
print("pinned", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A relation with five versions."""
    relation = Relation.build(pa.table({"k": [1], "n": [1]}), tmp_path / "r", on="k", shards=1)
    for number in range(2, 6):
        relation = relation.upsert(pa.table({"k": [1], "n": [number]}))
    return tmp_path / "r"


def versions(root: Path) -> list[int]:
    return [info.version for info in Relation.open(root).versions()]


def make_older(path: Path, seconds: float) -> None:
    modified = path.stat().st_mtime - seconds
    os.utime(path, (modified, modified))


def test_vacuum_keeps_pinned_versions_and_their_rows(root: Path) -> None:
    assert hold(root, "a", [2], 60, {})
    assert hold(root, "b", [2, 4, 77], 60, {})
    assert Relation.open(root).vacuum(keep=1).versions == (1, 3)
    assert versions(root) == [2, 4, 5]
    assert [Relation.open(root, number).to_arrow()["n"].to_pylist() for number in (2, 4, 5)] == [[2], [4], [5]]
    assert hold(root, "b", [4], 60, {}), "a holder moves on"
    release(root, "a")
    release(root, "a")
    assert Relation.open(root).vacuum(keep=1).versions == (2,)


def test_pin_expires_when_nobody_renews_it(root: Path) -> None:
    hold(root, "dead", [1], 60, {})
    hold(root, "alive", [2], 60, {})
    for name in ("dead", "alive"):
        make_older(root / "pins" / f"{name}.json", 61)
    hold(root, "alive", [2], 60, {})
    assert pinned_versions(root) == {2}
    assert [path.name for path in (root / "pins").iterdir()] == ["alive.json"]


def test_clock_of_this_host_does_not_matter(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(root, "reader", [1], 60, {})
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert pinned_versions(root) == {1}


def test_last_micro_batches_of_a_query_are_kept_for_a_replay(root: Path) -> None:
    directory = root / "pins" / "11111111-2222"
    directory.mkdir(parents=True)
    for batch, body in enumerate([{"version": 1}, {"version": 2}, {"format": 1, "version": 3}], start=8):
        (directory / f"{batch}.json").write_text(json.dumps(body))
    assert pinned_versions(root) == {2, 3}
    for path in directory.iterdir():
        make_older(path, BATCH_LEASE_S + 1)
    assert Relation.open(root).vacuum(keep=1).versions == (1, 2, 3, 4)
    assert not directory.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2, "versions": [1], "lease_s": 9}', '{"versions": "x"}'])
def test_pin_that_cannot_be_understood_stops_the_vacuum(root: Path, text: str) -> None:
    (root / "pins").mkdir()
    (root / "pins" / "reader.json").write_text(text)
    with pytest.raises(RelationCorrupt, match="does not name a version"):
        Relation.open(root).vacuum(keep=1)
    assert versions(root) == [1, 2, 3, 4, 5]


def test_relation_that_was_removed_does_not_come_back(tmp_path: Path) -> None:
    assert not hold(tmp_path / "gone", "reader", [1], 60, {})
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("is_killed", [False, True])
def test_process_pins_until_it_ends(root: Path, is_killed: bool) -> None:
    command = [sys.executable, "-c", READER, str(root), "2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "pinned\n"
        assert Relation.open(root).vacuum(keep=1).versions == (1, 3, 4)
        if is_killed:
            reader.send_signal(signal.SIGKILL)
        else:
            reader.communicate("go on\n")
    pins = list((root / "pins").iterdir())
    assert len(pins) == is_killed, "whoever ends in order gives its pin back"
    for pin in pins:
        assert pinned_versions(root) == {2}, "a killed process still counts for a while"
        make_older(pin, LEASE_S + 1)
    assert Relation.open(root).vacuum(keep=1).versions == (2,)
    assert list((root / "pins").iterdir()) == []
