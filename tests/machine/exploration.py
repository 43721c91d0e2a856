"""Every order in which two drivers can take their steps, with crashes and takeovers at every step.

Breadth is bounded by how often the scheduler switches away from a driver that could go on, how many crashes there are,
and how often each driver starts; within the bounds, every state is reached, and each is looked at once. In each,
nothing is published twice; each that ends is gone on with by one more driver, which must publish the rest.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from modelled_driver import PLAIN, Driver, published
from modelled_spark import Plan, Source
from replay import Life, advance, begun, frozen_clocks

from dovetail.storage.simulated import SimulatedStorage
from dovetail.storage.simulated_disk import SimulatedDisk

__all__ = ["Bounds", "Explored", "explore"]

CHECKPOINT, TARGET = Path("/checkpoint"), Path("/target")


@dataclass(frozen=True)
class Bounds:
    """How far to look; None: without a bound."""

    micro_batches: int = 3
    switches: int | None = 2
    crashes: int = 1
    starts: int = 2  # of each driver
    glues: bool = True  # a call whose answer can hardly change belongs to the step before it


@dataclass
class Explored:
    """What was seen."""

    states: int = 0
    transitions: int = 0
    disks: set[int] = field(default_factory=set)
    ends: int = 0
    refusals: Counter[str] = field(default_factory=Counter)


@dataclass
class BoundedSource(Source):
    """One row per micro-batch, up to a number of them."""

    total: int = 3

    def positions(self, end: int) -> tuple[int, int]:
        return min(end + 1, self.total), 0


@dataclass(frozen=True)
class State:
    disk: SimulatedDisk
    print: int  # of the disk
    lives: tuple[Life | None, ...]  # None: crashed, or not started yet
    starts: tuple[int, ...]
    running: int | None
    switches: int | None
    crashes: int

    @property
    def key(self) -> object:
        lives = tuple(None if life is None else life.key for life in self.lives)
        return hash((self.print, lives, self.starts, self.running, self.switches, self.crashes))


def explore(bounds: Bounds, drivers: int = 2) -> Explored:
    """Reach every state within the bounds; raises an `AssertionError` in one that is wrong."""
    explored, source = Explored(), BoundedSource(total=bounds.micro_batches)
    disk = SimulatedDisk()
    SimulatedStorage(disk).make_directory(TARGET)
    first = State(disk, disk.fingerprint(), (None,) * drivers, (0,) * drivers, None, bounds.switches, bounds.crashes)
    with frozen_clocks():
        seen, todo, finished = {first.key}, [first], set[int]()
        while todo:
            state = todo.pop()
            explored.states += 1
            explored.disks.add(state.print)
            following = list(_following(state, bounds, source))
            explored.transitions += len(following)
            for after in following:
                if after.key not in seen:
                    seen.add(after.key)
                    todo.append(after)
            is_end = all(life is None or life.end is not None for life in state.lives)
            if is_end and state.print not in finished:
                finished.add(state.print)
                explored.ends += 1
                _finish(state.disk, source)
            for life in state.lives:
                if life is not None and life.end not in (None, "idle"):
                    explored.refusals[str(life.end)] += 1
    return explored


def _following(state: State, bounds: Bounds, source: Source) -> "list[State]":
    found = []
    current = None if state.running is None else state.lives[state.running]
    can_go_on = current is not None and current.end is None
    for number, life in enumerate(state.lives):
        switches = state.switches
        if can_go_on and number != state.running and switches is not None:
            if switches == 0:
                continue
            switches -= 1
        if life is None or life.end is not None:
            if state.starts[number] < bounds.starts and (life is None or life.end != "idle"):
                starts = _with(state.starts, number, state.starts[number] + 1)
                fresh = begun(f"driver {number}, start {starts[number]}", CHECKPOINT, TARGET, source)
                lives = _with(state.lives, number, fresh)
                found.append(replace(state, lives=lives, starts=starts, running=number, switches=switches))
            continue
        after, disk = advance(life, state.disk, _checker(state.disk), bounds.glues)
        mark = state.print if disk is state.disk else disk.fingerprint()
        if mark != state.print:
            _check_nothing_twice(disk)
        lives = _with(state.lives, number, after)
        found.append(replace(state, disk=disk, print=mark, lives=lives, running=number, switches=switches))
        if state.crashes:
            crashed = replace(state, lives=_with(state.lives, number, None), running=None, crashes=state.crashes - 1)
            found.append(crashed)
    return found


def _checker(disk: SimulatedDisk) -> Callable[[Plan], None]:
    """All rows of a micro-batch that is done are there."""

    def check(plan: Plan) -> None:
        for place in (TARGET, PLAIN):
            rows = {row for row, _ in published(place, SimulatedStorage(disk))}
            assert rows >= set(range(plan.end)), f"micro-batch {plan.batch} is done, but {place} has only {rows}"

    return check


def _check_nothing_twice(disk: SimulatedDisk) -> None:
    for place in (TARGET, PLAIN):
        rows = [row for row, _ in published(place, SimulatedStorage(disk))]
        assert len(rows) == len(set(rows)), f"published twice in {place}: {rows}"


def _finish(disk: SimulatedDisk, source: BoundedSource) -> None:
    """One more driver goes on alone, and nothing is missing then."""
    disk = disk.copy()
    driver = Driver(CHECKPOINT, TARGET, source, SimulatedStorage(disk))
    driver.start()
    while (plan := driver.next_plan()) is not None:
        driver.run(plan)
    for place in (TARGET, PLAIN):
        rows = published(place, SimulatedStorage(disk))
        assert rows == [(row, row) for row in range(source.total)], f"{place} has {rows}"


def _with(values: tuple, number: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:number], value, *values[number + 1 :])
