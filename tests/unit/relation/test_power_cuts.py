"""A relation on a simulated disk: situations that the machine has found, one by one."""

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "machine"))

from relation_machine import alone
from relation_world import ROOT, rows_of, table_of

from dovetail.relation import Relation
from dovetail.relation.local import ArrowSource
from dovetail.relation.pins import hold, pinned_versions
from dovetail.relation.version_log import VersionLog
from dovetail.storage.files import RelationFiles
from dovetail.storage.simulated import SimulatedStorage, every_choice
from dovetail.storage.simulated_disk import SimulatedDisk


class Crash(BaseException):
    """The process dies."""


@pytest.fixture
def disk() -> Iterator[SimulatedDisk]:
    """A relation with three versions, all flushed."""
    disk = SimulatedDisk()
    with alone(random.Random(0)):
        built = build(SimulatedStorage(disk))
        for value in (2, 3):
            built.upsert(table_of(((1, value),)))
        disk.power_cut(min)
        yield disk


def build(storage: SimulatedStorage) -> Relation:
    files = RelationFiles(ROOT, storage=storage)
    return Relation._build(files, ArrowSource(table_of(((1, 1),)), storage), ("k",), 1, mode="overwrite")


def opened(storage: SimulatedStorage, version: int | None = None) -> Relation:
    files = RelationFiles(ROOT, storage=storage)
    return Relation(files, VersionLog(files).read(version))


def doing_at(disk: SimulatedDisk, moment: str, act: Callable[[], object], nth: int = 1) -> SimulatedStorage:
    """A storage of a process, before whose n-th step of this name something else happens."""
    left = [nth]

    def before(step: str) -> None:
        if step == moment:
            left[0] -= 1
            if left[0] == 0:
                act()

    return SimulatedStorage(disk, before)


def crash() -> None:
    raise Crash


def test_version_that_is_pinned_during_a_vacuum_stays(disk: SimulatedDisk) -> None:
    def pin() -> None:
        assert hold(ROOT, "reader", [1], 60, {}, SimulatedStorage(disk))

    # The vacuum has looked at the pins, and is about to move the first manifest away.
    assert opened(SimulatedStorage(disk)).vacuum(keep=3).versions == ()
    report = opened(doing_at(disk, "rename", pin)).vacuum(keep=1)
    assert report.versions == (2,)
    assert rows_of(opened(SimulatedStorage(disk), 1)) == ((1, 1),)


def test_pinned_version_can_be_opened_when_a_vacuum_was_killed(disk: SimulatedDisk) -> None:
    def pin_and_crash() -> None:
        assert hold(ROOT, "reader", [1], 60, {}, SimulatedStorage(disk))
        crash()

    with pytest.raises(Crash):
        opened(doing_at(disk, "rename", pin_and_crash, nth=2)).vacuum(keep=1)
    disk.locks.clear()
    assert VersionLog(RelationFiles(ROOT, storage=SimulatedStorage(disk))).numbers() == [2, 3]
    assert rows_of(opened(SimulatedStorage(disk), 1)) == ((1, 1),)
    assert opened(SimulatedStorage(disk)).vacuum(keep=1).versions == (2,)
    assert [info.version for info in opened(SimulatedStorage(disk)).versions()] == [1, 3]


def test_power_cut_may_leave_both_names_of_a_version_that_was_to_go(disk: SimulatedDisk) -> None:
    versions = ROOT / "versions"
    with pytest.raises(Crash):
        opened(doing_at(disk, "rename", crash, nth=2)).vacuum(keep=1)
    assert disk.names(versions) == ["00000001.leaving", "00000002.json", "00000003.json"]
    # After a power cut, the new name is there, and so is the old one.
    disk.locks.clear()
    disk.rename(versions / "00000001.leaving", versions / "00000001.json")
    disk.link(versions / "00000001.json", versions / "00000001.leaving")
    storage = SimulatedStorage(disk)
    assert opened(storage).vacuum(keep=1).versions == (1, 2)
    assert disk.names(versions) == ["00000003.json"]


def test_pin_that_is_renewed_while_it_is_found_expired_counts(disk: SimulatedDisk) -> None:
    hold(ROOT, "reader", [1], 60, {}, SimulatedStorage(disk))
    disk.clock_s += 61

    def renew() -> None:
        hold(ROOT, "reader", [2], 60, {}, SimulatedStorage(disk))

    assert pinned_versions(ROOT, doing_at(disk, "rename", renew)) == {2}
    disk.clock_s += 61
    assert pinned_versions(ROOT, SimulatedStorage(disk)) == set()
    assert disk.names(ROOT / "pins") == []


def test_pinned_version_survives_even_if_its_writer_was_killed_before_it_was_durable(disk: SimulatedDisk) -> None:
    with pytest.raises(Crash):
        # The first one is of the probe.
        opened(doing_at(disk, "create.sync", crash, nth=2)).upsert(table_of(((1, 4),)))
    disk.locks.clear()
    assert rows_of(opened(SimulatedStorage(disk))) == ((1, 4),)
    hold(ROOT, "flow", [4], 60, {}, SimulatedStorage(disk))
    disk.power_cut(min)
    assert rows_of(opened(SimulatedStorage(disk), 4)) == ((1, 4),)


def test_newest_version_is_found_though_it_was_replaced_and_vacuumed_meanwhile(disk: SimulatedDisk) -> None:
    def replace() -> None:
        storage = SimulatedStorage(disk)
        opened(storage).upsert(table_of(((1, 4),))).vacuum(keep=1)

    assert rows_of(opened(doing_at(disk, "read", replace))) == ((1, 4),)


def test_build_goes_on_where_a_power_cut_ended_the_first_one() -> None:
    for moment in ("make_directory.sync", "create.draft", "create.sync", "sync"):
        with alone(random.Random(0)):
            disk = SimulatedDisk()
            with pytest.raises(Crash):
                build(doing_at(disk, moment, crash, nth=2))
            for choose in every_choice(16):
                after = disk.copy()
                after.power_cut(choose)
                assert rows_of(build(SimulatedStorage(after))) == ((1, 1),)
