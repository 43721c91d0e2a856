"""What the machine acts on: a simulated disk with checkpoints and a target, drivers, and an operator who errs.

After everything that happens, what readers see must be right: no row twice, none from a wrong state, and no row missing
that Spark takes for done. A driver may end only with an error that names its reason.
"""

import json
import random
import re
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from modelled_driver import PLAIN, Driver, published
from modelled_spark import Plan, Source, SparkRefusal
from processes import Process

from dovetail.core.errors import DovetailError
from dovetail.spark.flow import store
from dovetail.storage.simulated import SimulatedStorage, at_random
from dovetail.storage.simulated_disk import SimulatedDisk

__all__ = ["Tally", "Violation", "World"]

TARGET = Path("/target")
SPARKS_HALF = ("metadata", "offsets", "commits", "sources")
OUR_HALF = ("dovetail",)
ENOUGH_STEPS = 100_000

REASONS = {
    "This driver was replaced": "replaced by a newer driver",
    "is committed already": "behind another driver",
    "it is an older copy": "the target is ahead of the checkpoint",
    "from another run": "the target has another run's rows",
    "has taken over": "the target was taken over",
    "neither staged nor published": "staged files are gone",
    "begun with other rows": "other rows than the intent's",
    "has lost Spark's part": "Spark's half is gone",
    "they are not of one moment": "the halves are of two moments",
    "were not made together": "the halves are of two queries",
    "the flow's part was lost": "our half is gone or behind",
    "has no commit": "our half is gone or behind",
    "were staged for the sink": "rows do not add up",
    "has no offsets of": "Spark's offsets are gone",
    "no longer exists": "the checkpoint is gone",
    "cannot be used": "a state file is gone",
    "disappeared": "a document is gone",
    "has commits but no flow.json": "our half is gone or behind",
    "cannot be read": "Spark's metadata is torn",
}


class Violation(AssertionError):  # noqa: N818 -- of what must hold
    """Rows lost or repeated, or an end without a reason."""


@dataclass
class Tally:
    """What a run of the machine has tried."""

    examples: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    disks: set[int] = field(default_factory=set)  # fingerprints of what power cuts have left
    failed_after: tuple[int, int] | None = None  # examples and actions up to the first violation


class World:
    """One example of the machine."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.disk = SimulatedDisk()
        self.source = Source()
        self.checkpoints = [Path("/checkpoints/0")]
        self.backups: list[tuple[Path, Path]] = []  # of a checkpoint, and of the target at the same moment
        self.drivers: dict[int, tuple[Process, Driver]] = {}
        self.halved: set[Path] = set()  # checkpoints and copies that have lost a half
        self.operator_acted = False
        self._looker = SimulatedStorage(self.disk)
        self._looker.make_directory(TARGET)
        self._names = 1
        ids = random.Random(7)
        self._patches = [
            mock.patch.object(uuid, "uuid4", side_effect=lambda: uuid.UUID(int=ids.getrandbits(128))),
            # They are in the host's own temporary directory, not on the simulated disk.
            mock.patch.object(store, "forget_marks"),
        ]
        for patch in self._patches:
            patch.start()

    def close(self) -> None:
        self.kill_all()
        for patch in self._patches:
            patch.stop()

    # ================================================================ drivers

    def start(self, slot: int, checkpoint: Path) -> Driver:
        """Start a driver; a process of that slot must have ended."""
        process = Process(self.disk, self._count_step)
        driver = Driver(checkpoint, TARGET, self.source, process.storage)
        driver.on_done = self.check_done

        def idle() -> bool:
            process.wait()
            return True

        process.start(lambda: driver.live(idle))
        self.drivers[slot] = (process, driver)
        return driver

    def advance(self, slot: int, steps: int) -> None:
        """Let a driver go on for some steps on the disk; it is suspended before and after."""
        process, _ = self.drivers[slot]
        process.advance(steps)
        self.check()
        if process.is_over:
            del self.drivers[slot]
            self._note_refusal(process.error)

    def _note_refusal(self, error: Exception | None) -> Exception:
        assert error is not None, "a driver ends only when it is refused"
        if isinstance(error, Violation):
            raise error
        if not isinstance(error, DovetailError | SparkRefusal):
            raise self._violation(f"a driver ended with {type(error).__name__}: {error}") from error
        self.tally.refusals[reason_of(error)] += 1
        return error

    def kill(self, slot: int) -> None:
        self.drivers.pop(slot)[0].kill()

    def kill_all(self, checkpoint: Path | None = None) -> None:
        for slot, (_, driver) in list(self.drivers.items()):
            if checkpoint in (None, driver.checkpoint):
                self.kill(slot)

    def _kill_starting(self, checkpoint: Path) -> None:
        """A driver that begins at a path where nothing is left is a new flow, which nobody can tell from a mistake."""
        for slot, (_, driver) in list(self.drivers.items()):
            if driver.checkpoint == checkpoint and not driver.has_started:
                self.kill(slot)

    def power_cut(self, seed: int) -> None:
        """The host loses power, and all drivers with it."""
        self.kill_all()
        self.disk.power_cut(at_random(random.Random(seed)))
        self.tally.disks.add(self.disk.fingerprint())
        self.check()

    def _count_step(self, step: str) -> None:
        self.tally.steps += 1

    # ================================================================ an operator

    def new_path(self, kind: str) -> Path:
        self._names += 1
        return Path(f"/{kind}/{self._names}")

    def is_whole(self, checkpoint: Path) -> bool:
        """Whether a flow has begun here, and nobody has deleted a half: without both it would be another flow."""
        return checkpoint not in self.halved and self.disk.exists(checkpoint / "dovetail" / "identity.json")

    def back_up(self, checkpoint: Path) -> None:
        copy, target = self.new_path("backups"), self.new_path("targets")
        self._copy(checkpoint, copy)
        self.disk.copy_tree(TARGET, target)
        self.backups.append((copy, target))

    def restore(self, backup: Path, place: Path) -> None:
        self.disk.remove_tree(place)
        self._copy(backup, place)

    def restore_all(self, index: int, backup: int) -> None:
        """Go back to one moment: what is younger, copies of the checkpoint included, is of no use any more."""
        self.kill_all()
        copy, target = self.backups[backup]
        self.checkpoints = [self.checkpoints[index]]
        self.backups = self.backups[: backup + 1]
        self.restore(copy, self.checkpoints[0])
        self.restore(target, TARGET)

    def _copy(self, old: Path, new: Path) -> None:
        self.disk.copy_tree(old, new)
        self.halved -= {new}
        if old in self.halved:
            self.halved.add(new)

    def move(self, index: int) -> None:
        old, new = self.checkpoints[index], self.new_path("checkpoints")
        self._kill_starting(old)
        self._copy(old, new)
        self.disk.remove_tree(old)
        self.checkpoints[index] = new

    def copy_beside(self, index: int) -> None:
        new = self.new_path("checkpoints")
        self._copy(self.checkpoints[index], new)
        self.checkpoints.append(new)

    def delete_half(self, index: int, names: Iterable[str]) -> None:
        place = self.checkpoints[index]
        self._kill_starting(place)
        self.halved.add(place)
        for name in names:
            self.disk.remove_tree(place / name)

    # ================================================================ what must hold

    def check(self) -> None:
        """Nothing is published twice, or from a wrong state."""
        for place in self._places():
            rows = published(place, self._looker)
            repeated = [row for row, count in Counter(row for row, _ in rows).items() if count > 1]
            if repeated:
                raise self._violation(f"published twice in {place}: {repeated}")
            wrong = [(row, before) for row, before in rows if before > row]
            if wrong:
                raise self._violation(f"published from a wrong state in {place}: {wrong}")

        if not self.operator_acted:
            self._check_newest_commit()

    def _check_newest_commit(self) -> None:
        """What is published of the newest micro-batch is what its commit names, and no other attempt at it."""
        commits = self.checkpoints[0] / "dovetail" / "commits"
        newest = max((name for name in self.disk.names(commits) if not name.startswith(".")), default=None)
        if newest is not None:
            receipt = json.loads(self.disk.read(commits / newest))["receipt"]
            named = {file["name"] for file in receipt["files"]}
            prefix = f"batch-{receipt['batch']:08d}-"
            others = {name for name in self.disk.names(TARGET) if name.startswith(prefix)} - named
            if others:
                raise self._violation(f"published, but not by the commit: {others}")

    def _places(self) -> list[Path]:
        """Where rows must be right: with copies and restored checkpoints, only a sink with a fence can be."""
        return [TARGET] if self.operator_acted else [TARGET, PLAIN]

    def _violation(self, message: str) -> Violation:
        if self.tally.failed_after is None:
            self.tally.failed_after = (self.tally.examples, self.tally.actions.total())
        return Violation(message)

    def check_done(self, plan: Plan) -> None:
        """All rows of a micro-batch that Spark takes for done are there."""
        for place in self._places():
            lost = set(range(plan.end)) - {row for row, _ in published(place, self._looker)}
            if lost:
                raise self._violation(f"micro-batch {plan.batch} is done, but not published in {place}: {sorted(lost)}")

    def run_to_end(self, checkpoint: Path) -> Exception | None:
        """Run the flow with one more row until it has nothing to do; what it was refused with, if it was."""
        self.kill_all()
        self.source.rows += 1
        driver = self.start(0, checkpoint)
        process, _ = self.drivers[0]
        process.advance(ENOUGH_STEPS)
        self.check()
        if process.is_over:
            del self.drivers[0]
            return self._note_refusal(process.error)
        for place in self._places():
            rows = published(place, self._looker)
            if [row for row, _ in rows] != list(range(self.source.rows)):
                raise self._violation(f"{self.source.rows} rows have arrived, {place} has {[row for row, _ in rows]}")
            if {before for _, before in rows} != {before for row, before in rows if row == before}:
                raise self._violation(f"published from a wrong state in {place}: {rows}")
        assert driver.done is not None
        self.kill(0)
        return None

    def finish(self) -> None:
        """The end of every example: each checkpoint goes on to the end, or is refused."""
        self.kill_all()
        for checkpoint in self.checkpoints:
            refusal = self.run_to_end(checkpoint)
            # The first plan, torn at the end of a line, cannot be told from a whole one; Spark can.
            is_sparks = isinstance(refusal, SparkRefusal) and not self.disk.names(checkpoint / "dovetail" / "intents")
            if refusal is not None and not self.operator_acted and not is_sparks:
                raise self._violation(f"no operator has touched anything, but: {refusal}") from refusal


def reason_of(error: Exception) -> str:
    """A refusal in short."""
    if isinstance(error, SparkRefusal):
        return f"Spark: {error}"
    for text, reason in REASONS.items():
        if text in str(error):
            return reason
    return re.sub(r"\S*[/\d]\S*", "*", str(error))[:80]
