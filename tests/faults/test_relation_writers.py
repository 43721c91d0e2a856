"""Two writers at once, and disks that are full: a clear error, nothing mixed, and it works again afterwards."""

import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from dovetail import Relation
from dovetail.core.errors import RelationError


def test_writers_that_race_win_one_after_the_other_or_conflict(
    tale: Any, victims: ModuleType, fault_rounds: int
) -> None:
    """Each version is one writer's work on the version before; a writer that was not first changed nothing."""
    tale.do("build", 1)
    conflicts = 0
    for round_number in range(fault_rounds):
        start_at = time.time() + 0.05
        seeds = [100 + 2 * round_number, 101 + 2 * round_number]
        children = [tale.nursery.start(tale.root, "upsert", seed, start_at=start_at) for seed in seeds]
        codes = [child.wait() for child in children]
        assert set(codes) <= {victims.DONE, victims.CONFLICT}, [child.report for child in children]
        assert victims.DONE in codes
        conflicts += codes.count(victims.CONFLICT)
        for child, code in zip(children, codes, strict=True):
            if code == victims.CONFLICT:
                assert "Another writer" in child.report
        newest = max(tale.versions)
        winners = [seed for seed, code in zip(seeds, codes, strict=True) if code == victims.DONE]
        assert Relation.open(tale.root).version == newest + len(winners)
        for version in range(newest + 1, newest + 1 + len(winners)):
            mine = Relation.open(tale.root, version=version).to_arrow().column("n").to_pylist()
            # Which of two winners was first is theirs to tell.
            (seed,) = [seed for seed in winners if mine.count(seed) == len(victims.rows_of("upsert", seed))][-1:]
            winners.remove(seed)
            tale.versions[version] = victims.after(tale.versions[version - 1], "upsert", seed)
        tale.check_whole()
        if round_number % 5 == 4:
            tale.check_vacuum_leaves_only_what_is_named(keep=2)
    print(f"{conflicts} conflicts in {fault_rounds} races")
    tale.check_vacuum_leaves_only_what_is_named()


def test_writer_inside_keeps_every_other_out(tale: Any, victims: ModuleType, tmp_path: Path) -> None:
    tale.do("build", 1)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    first = tale.nursery.start(tale.root, "upsert", 2, meet=str(meeting))
    while not os.listdir(meeting):
        time.sleep(0.005)
    for operation in ("upsert", "append", "delete", "build", "vacuum"):
        other = tale.nursery.start(tale.root, operation, 3)
        assert other.wait() == victims.CONFLICT, other.report
        assert f"Another writer is changing {tale.root} (process {first.pid})" in other.report
    (meeting / "somebody").touch()
    assert first.wait() == victims.DONE, first.report
    tale.learn("upsert", 2, must_have_happened=True)
    tale.do("upsert", 3)


@pytest.mark.parametrize("operation", ["upsert", "append", "build"])
def test_writers_on_two_hosts_are_told_apart_by_the_manifest(
    tale: Any, victims: ModuleType, tmp_path: Path, operation: str, fault_rounds: int
) -> None:
    """Both have written all their files and stand before the commit; no lock is between them."""
    tale.do("build", 1)
    for round_number in range(min(fault_rounds, 10)):
        meeting = tmp_path / f"meeting-{round_number}"
        meeting.mkdir()
        seeds = [20 + 2 * round_number, 21 + 2 * round_number]
        children = [tale.nursery.start(tale.root, operation, seed, meet=str(meeting), no_lock=True) for seed in seeds]
        codes = [child.wait() for child in children]
        assert sorted(codes) == [victims.DONE, victims.CONFLICT], [child.report for child in children]
        (loser,) = [child for child, code in zip(children, codes, strict=True) if code == victims.CONFLICT]
        assert f"Another writer committed version {max(tale.versions) + 1}" in loser.report
        tale.learn(operation, seeds[codes.index(victims.DONE)], must_have_happened=True)
    tale.check_vacuum_leaves_only_what_is_named()


def test_two_first_builds_on_two_hosts_give_one_relation(tale: Any, victims: ModuleType, tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    children = [tale.nursery.start(tale.root, "build", seed, meet=str(meeting), no_lock=True) for seed in (1, 2)]
    codes = [child.wait() for child in children]
    assert sorted(codes) == [victims.DONE, victims.CONFLICT], [child.report for child in children]
    tale.learn("build", 1 + codes.index(victims.DONE), must_have_happened=True)
    tale.check_vacuum_leaves_only_what_is_named()


# -------------------------------------------------------------------- full disks


@pytest.mark.parametrize("operation", ["upsert", "append", "build"])
def test_file_that_may_not_grow_is_a_clear_error(tale: Any, victims: ModuleType, operation: str) -> None:
    tale.do("build", 1)
    files = {path for path in tale.root.rglob("*") if path.is_file()}
    for file_bytes in (200, 700, 3_000):
        child = tale.nursery.start(tale.root, operation, 2, file_bytes=file_bytes)
        assert child.wait() == victims.REFUSED, child.report
        assert f"{tale.root} cannot be written: File too large. The last version is unchanged" in child.report
        tale.check_whole()
        assert {path for path in tale.root.rglob("*") if path.is_file()} == files
    tale.do(operation, 2)
    tale.check_vacuum_leaves_only_what_is_named()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A disk of 1 MiB, where this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "dovetail-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(mounting, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


TABLE = pa.table({"k": list(range(200)), "text": ["x" * 100] * 200})
TOO_MUCH = pa.table({"k": list(range(20_000)), "text": [f"{i}" * 30 for i in range(20_000)]})


def test_full_disk_is_a_clear_error_and_room_is_made_by_a_vacuum(small_disk: Path | None, tmp_path: Path) -> None:
    """On a small disk of its own if one can be mounted, else with a limit on the size of files."""
    root = (small_disk or tmp_path) / "r"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    relation = Relation.build(TABLE, root, on="k", shards=2)
    for operation in ("upsert", "append", "build"):
        if small_disk is None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
        change = partial(Relation.build, path=root, on="k", shards=1, mode="overwrite")
        if operation != "build":
            change = getattr(relation, operation)
        try:
            with pytest.raises(RelationError, match=r"cannot be written: (No space left on device|File too large)"):
                change(TOO_MUCH)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        newest = Relation.open(root)
        assert newest.version == relation.version
        assert newest.to_arrow().num_rows == 200
        # What did not fit was removed again, so that smaller changes still do.
        relation = relation.upsert(TABLE.slice(0, 10))
    if small_disk is not None:
        _fill(small_disk)
        with pytest.raises(RelationError, match="cannot be written: No space left on device"):
            relation.upsert(TABLE)
        report = relation.vacuum(keep=1)
        assert report.files > 0
    assert relation.upsert(TABLE.slice(0, 5)).stats.rows == 200
    assert Relation.open(root).to_arrow().num_rows == 200


def test_full_temporary_directory_costs_a_second_check_not_the_process(
    tale: Any, small_disk: Path | None, tmp_path: Path, victims: ModuleType
) -> None:
    """What was checked is noted in mapped files: on a full disk the first note must not be a bus error."""
    tale.do("build", 1)
    full = small_disk or tmp_path
    if small_disk is not None:
        marks = small_disk / f"dovetail-{os.getuid()}" / "verified"
        marks.mkdir(parents=True, mode=0o700)
        _fill(small_disk)
    child = tale.nursery.start(tale.root, "read", 0, temp=str(full), file_bytes=0 if small_disk else 1)
    assert child.wait() == victims.DONE, child.report


def _fill(disk: Path) -> None:
    with open(disk / "ballast", "wb", buffering=0) as ballast:
        for size in (65_536, 4_096, 1):
            try:
                while True:
                    ballast.write(b"\1" * size)
            except OSError:
                continue
    assert tempfile.gettempdir() != str(disk)
