"""A power cut at every step of a driver's life, and every state that it can leave of the disk."""

from dataclasses import dataclass, field
from pathlib import Path

from exploration import BoundedSource
from modelled_driver import PLAIN, Driver, published
from modelled_spark import SparkRefusal
from replay import frozen_clocks

from dovetail.storage.simulated import SimulatedStorage, every_choice
from dovetail.storage.simulated_disk import SimulatedDisk

__all__ = ["PowerCuts", "cut_everywhere"]

CHECKPOINT, TARGET = Path("/checkpoint"), Path("/target")


class Cut(BaseException):
    """The power is gone."""


@dataclass
class PowerCuts:
    """What was tried."""

    steps: int = 0
    disks: set[int] = field(default_factory=set)
    refused_before_the_first_intent: int = 0
    not_all_tried: int = 0  # steps with more states than were tried


def cut_everywhere(micro_batches: int, most_states: int) -> PowerCuts:
    """Cut the power before every step; from each state that is left a new driver must publish exactly all rows."""
    source, found = BoundedSource(total=micro_batches), PowerCuts()
    with frozen_clocks():
        while (disk := _cut_before(found.steps, source)) is not None:
            found.steps += 1
            tried = 0
            for choose in every_choice(most_states):
                tried += 1
                after = disk.copy()
                after.power_cut(choose)
                if after.fingerprint() not in found.disks:
                    found.disks.add(after.fingerprint())
                    found.refused_before_the_first_intent += not _recovers(after, source)
            found.not_all_tried += tried == most_states
    return found


def _cut_before(step: int, source: BoundedSource) -> SimulatedDisk | None:
    """The disk when a driver is about to take its n-th step; None: it has come to its end before."""
    left = [step]

    def before(name: str) -> None:
        if left[0] == 0:
            raise Cut
        left[0] -= 1

    disk = SimulatedDisk()
    SimulatedStorage(disk).make_directory(TARGET)
    try:
        _run(SimulatedStorage(disk, before), source)
    except Cut:
        return disk
    return None


def _recovers(disk: SimulatedDisk, source: BoundedSource) -> bool:
    try:
        _run(SimulatedStorage(disk), source)
    except SparkRefusal:
        # The first plan, torn at the end of a line, cannot be told from a whole one; Spark can, and nothing is done.
        if disk.names(CHECKPOINT / "dovetail" / "intents"):
            raise
        return False
    for place in (TARGET, PLAIN):
        rows = published(place, SimulatedStorage(disk))
        assert rows == [(row, row) for row in range(source.total)], f"{place} has {rows}"
    return True


def _run(storage: SimulatedStorage, source: BoundedSource) -> None:
    driver = Driver(CHECKPOINT, TARGET, source, storage)
    driver.start()
    while (plan := driver.next_plan()) is not None:
        driver.run(plan)
