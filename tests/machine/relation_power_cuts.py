"""A life of a relation and its copy, ended at every step by a crash or a power cut, and every state that is left."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from relation_machine import alone
from relation_world import ROOT, Rows, rows_of, table_of

from dovetail.core.errors import RelationNotFound
from dovetail.relation.copies import copy_to
from dovetail.relation.local import ArrowSource
from dovetail.relation.pins import BATCH_LEASE_S, hold
from dovetail.relation.relation import Relation
from dovetail.relation.version_log import VersionLog
from dovetail.storage.files import RelationFiles
from dovetail.storage.simulated import SimulatedStorage, at_random, every_choice
from dovetail.storage.simulated_disk import SimulatedDisk

__all__ = ["RelationCuts", "crash_everywhere", "cut_relation_everywhere"]

COPY = Path("/copies/r")


class Crash(BaseException):
    """The process, or the power, is gone."""


@dataclass
class RelationCuts:
    """What was tried."""

    steps: int = 0
    disks: set[int] = field(default_factory=set)
    not_all_tried: int = 0  # steps with more states than were tried


@dataclass
class Life:
    """A process that builds, changes, pins, copies and vacuums; and what it was told is done."""

    storage: SimulatedStorage
    done: dict[tuple[Path, int], Rows] = field(default_factory=dict)
    first: int | None = None  # its build, which it has pinned

    def run(self) -> None:
        files = RelationFiles(ROOT, storage=self.storage)
        source = ArrowSource(table_of(((1, 1), (2, 1))), self.storage)
        built = self._done(Relation._build(files, source, ("k",), 2, mode="overwrite"))
        if hold(ROOT, "flow", [built.version], BATCH_LEASE_S, {}, self.storage):
            self.first = built.version
        changed = self._done(built.upsert(table_of(((2, 2), (3, 2)))))
        copied = copy_to(changed, COPY, self.storage)
        self.done[COPY, copied.version] = rows_of(changed)
        changed = self._done(changed.append(table_of(((4, 3),))))
        self._done(changed.delete(table_of(((2, 0),)).select(["k"])))
        self.done = {key: rows for key, rows in self.done.items() if key[0] == COPY or key[1] == self.first}
        changed.vacuum(keep=1)

    def _done(self, relation: Relation) -> Relation:
        self.done[ROOT, relation.version] = rows_of(relation)
        return relation


def cut_relation_everywhere(most_states: int, every: int = 1) -> RelationCuts:
    """Cut the power before every step, or every few. What was done is there, and a new life succeeds."""
    found = RelationCuts()
    with alone(random.Random(0)):
        while (ended := _ended_before(SimulatedDisk(), found.steps * every)) is not None:
            found.steps += 1
            tried = 0
            for choose in every_choice(most_states):
                tried += 1
                after = ended.storage.disk.copy()
                after.power_cut(choose)
                if after.fingerprint() not in found.disks:
                    found.disks.add(after.fingerprint())
                    _goes_on(after, ended)
            found.not_all_tried += tried == most_states
    return found


def crash_everywhere(cuts: int, every: int = 1) -> int:
    """Kill the process before every step, or every few. Another one does it all again, and then the power goes."""
    steps = 0
    with alone(random.Random(0)):
        while (ended := _ended_before(SimulatedDisk(), steps * every)) is not None:
            steps += 1
            ended.storage.disk.locks.clear()
            again = Life(SimulatedStorage(ended.storage.disk))
            again.run()
            generator = random.Random(steps)
            for choose in (min, *(at_random(generator) for _ in range(cuts))):
                after = ended.storage.disk.copy()
                after.power_cut(choose)
                _goes_on(after, again)
    return steps


def _ended_before(disk: SimulatedDisk, step: int) -> Life | None:
    """A life when it is about to take its n-th step; None: it has come to its end before."""
    life = Life(SimulatedStorage(disk, _raise_at(step)))
    try:
        life.run()
    except Crash:
        return life
    return None


def _raise_at(step: int) -> Callable[[str], None]:
    left = [step]

    def before(name: str) -> None:
        if left[0] == 0:
            raise Crash
        left[0] -= 1

    return before


def _goes_on(disk: SimulatedDisk, ended: Life) -> None:
    storage = SimulatedStorage(disk)
    for (root, version), rows in ended.done.items():
        files = RelationFiles(root, storage=storage)
        assert rows_of(Relation(files, VersionLog(files).read(version))) == rows
    Life(storage).run()
    disk.clock_s += BATCH_LEASE_S + 1
    for root in (ROOT, COPY):
        files = RelationFiles(root, storage=storage)
        newest = Relation(files, VersionLog(files).read())
        newest.vacuum(keep=1)
        assert VersionLog(files).numbers() == [newest.version]
        named = {f"data/{name}" for name in newest._manifest.data_files()}
        found = {str(path.relative_to(root)) for path in disk.files(root)}
        assert found == {"RELATION", "writer.lock", f"versions/{newest.version:08d}.json", *named}
        for old in range(1, newest.version):
            try:
                VersionLog(files).read(old)
            except RelationNotFound:
                continue
            raise AssertionError(f"version {old} of {root} is still there")
