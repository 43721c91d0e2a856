"""A relation on a simulated disk, with processes that write, vacuum, pin and read it, and what must hold of it.

Everything is real but the disk: `Relation`, its segments, its versions and its pins. Processes are suspended before
any step on the disk, killed there, or lose power. They are on one host, where the writer's lock excludes others, or on
two, where it does not; there, as documented, a vacuum runs while nobody writes.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from processes import Process

from dovetail.core.errors import RelationConflict, RelationNotFound
from dovetail.relation.format import Manifest
from dovetail.relation.local import ArrowSource
from dovetail.relation.pins import BATCH_LEASE_S, hold, release
from dovetail.relation.relation import Relation
from dovetail.relation.version_log import VersionLog
from dovetail.storage.files import RelationFiles
from dovetail.storage.simulated import SimulatedStorage, at_random
from dovetail.storage.simulated_disk import SimulatedDisk

__all__ = ["ROOT", "Action", "RelationTally", "Violation", "World", "rows_of"]

ROOT = Path("/relations/r")
SHARDS = 2
KEYS = 6
LEASE_S = 600
ENOUGH_STEPS = 100_000

Rows = tuple[tuple[int, int], ...]
"""(key, value), sorted."""


class Violation(AssertionError):  # noqa: N818 -- of what must hold
    """A version is gone, changed or without its files; or something is left behind."""


@dataclass
class RelationTally:
    """What a run has tried."""

    examples: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    disks: set[int] = field(default_factory=set)  # fingerprints of what power cuts have left
    failed_after: tuple[int, int] | None = None  # examples and actions up to the first violation


@dataclass
class Action:
    """What a process is doing."""

    kind: str
    process: Process
    rows: Rows = ()
    keep: int = 0
    holder: str = ""


@dataclass(frozen=True)
class Pin:
    """A pin whose holder was told that it has it."""

    version: int
    until_s: float


def table_of(rows: Rows) -> pa.Table:
    return pa.table({"k": pa.array([k for k, _ in rows], pa.int64()), "v": pa.array([v for _, v in rows], pa.int64())})


def rows_of(relation: Relation) -> Rows:
    """All rows, read through the index and the segments."""
    return tuple(sorted((row["k"], row["v"]) for row in relation.to_arrow().to_pylist()))


def applied(kind: str, before: Rows, change: Rows) -> Rows:
    """What a change makes of the rows of the version before."""
    keys = {key for key, _ in change}
    kept = [row for row in before if row[0] not in keys]
    kind = "upsert" if kind == "upsert_if_latest" else kind
    return {
        "build": tuple(sorted(change)),
        "append": tuple(sorted([*before, *change])),
        "upsert": tuple(sorted([*kept, *change])),
        "delete": tuple(kept),
    }[kind]


class World:
    """One example."""

    def __init__(self, tally: RelationTally, generator: random.Random) -> None:
        self.tally, self._random = tally, generator
        self.disk = SimulatedDisk()
        self.hosts = ("a",) if generator.random() < 0.6 else ("a", "b")
        self.running: list[Action] = []
        self.content: dict[int, Rows] = {}  # of every version that anybody may rely on, or can see
        self.reliable: set[int] = set()  # versions whose commit has returned
        self.removed: set[int] = set()  # versions that a vacuum was right to remove
        self.pins: dict[str, Pin] = {}
        self._last_value = 0

    # ================================================================ what processes do

    def start(self, kind: str, keep: int = 1) -> Action:
        """Begin to do something; nothing happens before `advance`."""
        process = Process(self.disk, self._count, self._random.choice(self.hosts))
        busy = {action.holder for action in self.running}
        free = [name for name in ("reader", "flow") if name not in busy]
        holder = self._random.choice(free) if kind in ("pin", "release") else ""
        action = Action(kind, process, self._some_rows(), keep, holder)
        program: dict[str, Callable[[Action], None]] = {
            "vacuum": self._vacuum,
            "pin": self._pin,
            "release": self._release,
            "read": self._read,
        }
        process.start(lambda: program.get(kind, self._write)(action))
        self.running.append(action)
        return action

    def _some_rows(self) -> Rows:
        keys = self._random.sample(range(KEYS), self._random.randint(1, 3))
        self._last_value += 1
        return tuple((key, self._last_value) for key in keys)

    def _files(self, action: Action) -> RelationFiles:
        return RelationFiles(ROOT, storage=action.process.storage)

    def _write(self, action: Action) -> None:
        files, table = self._files(action), table_of(action.rows)
        if action.kind == "build":
            source = ArrowSource(table, files.storage)
            written = Relation._build(files, source, ("k",), SHARDS, mode="overwrite")
        else:
            relation = Relation(files, VersionLog(files).read())
            written = getattr(relation, action.kind)(table.select(["k"]) if action.kind == "delete" else table)
        # Here a caller goes on, and relies on it.
        self._see(action)
        self.reliable.add(written.version)

    def _vacuum(self, action: Action) -> None:
        files = self._files(action)
        Relation(files, VersionLog(files).read()).vacuum(keep=action.keep)

    def _pin(self, action: Action) -> None:
        files = self._files(action)
        log = VersionLog(files)
        numbers = log.numbers()
        if not numbers:
            return
        version = self._random.choice(numbers[-3:])
        self.pins.pop(action.holder, None)  # in place of the pin that it had
        until_s = self.disk.clock_s + LEASE_S
        if hold(ROOT, action.holder, [version], LEASE_S, {}, files.storage) and version in log.numbers():
            self.pins[action.holder] = Pin(version, until_s)

    def _release(self, action: Action) -> None:
        self.pins.pop(action.holder, None)
        release(ROOT, action.holder, action.process.storage)

    def _read(self, action: Action) -> None:
        files = self._files(action)
        relation = Relation(files, VersionLog(files).read())
        rows = rows_of(relation)
        if rows != self.content.get(relation.version):
            raise Violation(f"version {relation.version} was read as {rows}, not {self.content.get(relation.version)}")

    def _count(self, step: str) -> None:
        self.tally.steps += 1

    # ================================================================ what happens to them

    def advance(self, action: Action, steps: int) -> None:
        """Let a process go on, and look at what it has done."""
        action.process.advance(steps)
        self._see(action)
        if action.process.is_over:
            self.running.remove(action)
            self._look_at_error(action)

    def run_to_end(self, action: Action) -> Exception | None:
        while action in self.running:
            self.advance(action, ENOUGH_STEPS)
        return action.process.error

    def _look_at_error(self, action: Action) -> None:
        error = action.process.error
        if error is None:
            return
        # Whoever reads without a pin may meet a vacuum; check() looks for files that are missing.
        is_vacuumed = action.kind == "read" and "vacuumed or deleted while in use" in str(error)
        if isinstance(error, RelationConflict | RelationNotFound) or is_vacuumed:
            self.tally.refusals[f"{action.kind}: {type(error).__name__}"] += 1
            return
        raise Violation(f"{action.kind} ends with {type(error).__name__}: {error}") from error

    def kill(self, action: Action) -> None:
        """End a process where it is."""
        action.process.kill()
        self.running.remove(action)

    def power_cut(self) -> None:
        """All processes end, and so does what was not flushed."""
        for action in list(self.running):
            self.kill(action)
        self.disk.power_cut(at_random(self._random))
        self.tally.disks.add(self.disk.fingerprint())
        # What nobody was told of may be lost, and its number be given again.
        for version in set(self.content) - set(self._numbers()):
            if version not in self.reliable and version not in self._pinned():
                del self.content[version]
        self.check()

    # ================================================================ what must hold

    def _numbers(self) -> list[int]:
        return VersionLog(self._looker()).numbers()

    def _looker(self) -> RelationFiles:
        return RelationFiles(ROOT, storage=SimulatedStorage(self.disk))

    def _pinned(self) -> set[int]:
        return {pin.version for pin in self.pins.values() if pin.until_s >= self.disk.clock_s}

    def _see(self, action: Action) -> None:
        """Take note of versions that came and went in this step."""
        numbers = self._numbers()
        for version in numbers:
            if version not in self.content:
                self.content[version] = applied(action.kind, self.content.get(version - 1, ()), action.rows)
        known = sorted(version for version in self.content if version not in self.removed)
        for version in set(known) - set(numbers):
            if action.kind == "vacuum" and version not in known[-action.keep :]:
                self.removed.add(version)
        self.check_names()

    def check_names(self) -> None:
        """Every version that is relied upon is there, and so is every file that a version names."""
        files, numbers = self._looker(), self._numbers()
        missing = (self.reliable - self.removed) - set(numbers)
        if missing:
            raise Violation(f"versions {sorted(missing)} were committed and are gone")
        wanted = {*numbers, *self._pinned()}
        for version in sorted(wanted):
            for name in self._manifest(files, version).data_files():
                if files.size(f"data/{name}") is None:
                    raise Violation(f"version {version} has lost {name}")

    def _manifest(self, files: RelationFiles, version: int) -> Manifest:
        try:
            return VersionLog(files).read(version)
        except RelationNotFound as error:
            raise Violation(f"version {version} is pinned and gone") from error

    def check(self) -> None:
        """Every version that is there, or relied upon, has the rows that it always had."""
        self.check_names()
        files = self._looker()
        for version in sorted({*self._numbers(), *self._pinned()}):
            try:
                rows = rows_of(Relation(files, self._manifest(files, version)))
            except Violation:
                raise
            except Exception as error:
                raise Violation(f"version {version} cannot be read: {error}") from error
            if rows != self.content[version]:
                raise Violation(f"version {version} has rows {rows}, not {self.content[version]}")

    def finish(self) -> None:
        """The end of every example: one more writer and one more vacuum succeed, and leave nothing else behind."""
        for action in list(self.running):
            self.kill(action)
        self.check()
        for kind in ("build", "upsert"):
            self._must_succeed(kind)
        self.check()
        self.disk.clock_s += BATCH_LEASE_S + 1
        self._must_succeed("vacuum")
        self.check()
        (version,) = self._numbers()
        named = {f"data/{name}" for name in self._manifest(self._looker(), version).data_files()}
        wanted = {"RELATION", "writer.lock", f"versions/{version:08d}.json", *named}
        found = {str(path.relative_to(ROOT)) for path in self.disk.files(ROOT)}
        if found != wanted:
            raise Violation(f"left behind: {sorted(found - wanted)}; missing: {sorted(wanted - found)}")

    def _must_succeed(self, kind: str) -> None:
        error = self.run_to_end(self.start(kind))
        if error is not None:
            raise Violation(f"nobody else is here, but: {error}") from error
