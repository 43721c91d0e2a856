"""The state machine: whatever drivers, crashes, power cuts and operators do, in any order, the rows are right."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from world import ENOUGH_STEPS, OUR_HALF, SPARKS_HALF, Tally, World

__all__ = ["ProtocolMachine", "run_machine"]

SLOTS = 3
MOST_CHECKPOINTS = 3
MOST_BACKUPS = 4
MISTAKES = [0, 0, 1, 3]
DELETIONS = ["our half", "Spark's half", "an entry of offsets", "an entry of offsets", "an entry of commits"]
ROWS = st.integers(0, 2)
STEPS = st.integers(0, 150)
STARTING = st.integers(20, 90)  # steps of a driver that is not through with its start, most often
BACK = st.sampled_from([0, 0, 1])
SLOT = st.integers(0, SLOTS - 1)
ANY = st.integers(0, 10**6)  # taken modulo what there is


class ProtocolMachine(RuleBasedStateMachine):
    """Up to three drivers on one checkpoint or on copies of it, all with one target."""

    tally: ClassVar[Tally] = Tally()

    def __init__(self) -> None:
        super().__init__()
        self.tally.examples += 1
        self.world = World(self.tally)
        self.world.source.rows = 2
        self.mistakes = self.most_mistakes = 0

    def teardown(self) -> None:
        try:
            self.world.finish()
        finally:
            self.world.close()

    def _note(self, action: str) -> None:
        self.tally.actions[action] += 1

    @initialize(steps=st.integers(0, 400), mistakes=st.sampled_from(MISTAKES))
    def a_flow_that_runs(self, steps: int, mistakes: int) -> None:
        self._note("start")
        self.most_mistakes = mistakes
        self.world.start(0, self.world.checkpoints[0])
        self.world.advance(0, steps)

    # ================================================================ what happens by itself

    @rule(slot=SLOT, which=ANY, steps=st.integers(0, 300), rows=ROWS)
    def start(self, slot: int, which: int, steps: int, rows: int) -> None:
        self._note("start")
        if slot in self.world.drivers:
            self.world.kill(slot)
        self._arrive(rows)
        self.world.start(slot, self.world.checkpoints[which % len(self.world.checkpoints)])
        self.world.advance(slot, steps)

    @precondition(lambda self: self.world.drivers)
    @rule(which=ANY, steps=st.integers(1, 30))
    def few_steps(self, which: int, steps: int) -> None:
        self._note("few steps")
        self.world.advance(self._slot(which), steps)

    @precondition(lambda self: self.world.drivers)
    @rule(which=ANY, steps=st.integers(20, 150), rows=ROWS)
    def many_steps(self, which: int, steps: int, rows: int) -> None:
        self._note("many steps")
        self._arrive(rows)
        self.world.advance(self._slot(which), steps)

    @precondition(lambda self: self.world.drivers)
    @rule(which=ANY, rows=ROWS, loses_a_file=st.integers(0, 5).map(lambda n: n == 5))
    def as_far_as_it_gets(self, which: int, rows: int, loses_a_file: bool) -> None:
        self._note("as far as it gets")
        slot = self._slot(which)
        self._arrive(rows)
        self.world.drivers[slot][1].habits.loses_a_file = loses_a_file
        self.world.advance(slot, ENOUGH_STEPS)

    @precondition(lambda self: 0 < len(self.world.drivers) < SLOTS)
    @rule(which=ANY, before=st.integers(0, 80), batches=st.integers(0, 5), steps=STEPS)
    def suspended_and_replaced(self, which: int, before: int, batches: int, steps: int) -> None:
        """A driver stops in the middle of a micro-batch, a second one takes over, and the first one wakes."""
        self._note("suspended and replaced")
        slot, free = self._slot(which), min(set(range(SLOTS)) - set(self.world.drivers))
        checkpoint = self.world.drivers[slot][1].checkpoint
        if checkpoint not in self.world.checkpoints:
            checkpoint = self.world.checkpoints[0]  # its own has been moved away
        self._arrive(1)
        self.world.advance(slot, before)
        self.world.start(free, checkpoint)
        for _ in range(batches):
            if free in self.world.drivers:
                self.world.advance(free, ENOUGH_STEPS)
                self._arrive(1)
        if free in self.world.drivers:
            self.world.advance(free, steps)
        if slot in self.world.drivers:
            self.world.advance(slot, ENOUGH_STEPS)

    @precondition(lambda self: self.world.drivers)
    @rule(which=ANY)
    def crash(self, which: int) -> None:
        self._note("crash")
        self.world.kill(self._slot(which))

    @precondition(lambda self: not self.world.disk.is_flushed())
    @rule(seed=ANY)
    def power_cut(self, seed: int) -> None:
        self._note("power cut")
        self.world.power_cut(seed)

    # ================================================================ what operators do

    @precondition(lambda self: self.whole and len(self.world.backups) < MOST_BACKUPS)
    @rule(which=ANY)
    def back_up(self, which: int) -> None:
        self._note("backup")
        self.world.back_up(self.world.checkpoints[_one(self.whole, which)])

    @precondition(lambda self: self.whole and self.world.drivers)
    @rule(which=ANY, stops_drivers=st.booleans())
    def move(self, which: int, stops_drivers: bool) -> None:
        self._note("move")
        index = _one(self.whole, which)
        if stops_drivers:
            self.world.kill_all(self.world.checkpoints[index])
        self.world.move(index)

    @precondition(lambda self: self.is_careful and self.whole and len(self.world.checkpoints) < MOST_CHECKPOINTS)
    @rule(which=ANY, steps=st.integers(0, 200))
    def copy_beside(self, which: int, steps: int) -> None:
        self._note("copy beside")
        self._act()
        self.world.copy_beside(_one(self.whole, which))
        free = [slot for slot in range(SLOTS) if slot not in self.world.drivers]
        if free:
            self.world.start(free[0], self.world.checkpoints[-1])
            self.world.advance(free[0], steps)

    @precondition(lambda self: self.is_careful and self.world.backups)
    @rule(which=ANY, backup=ANY, stops_drivers=st.booleans(), with_target=st.booleans())
    def restore(self, which: int, backup: int, stops_drivers: bool, with_target: bool) -> None:
        index, number = which % len(self.world.checkpoints), backup % len(self.world.backups)
        place = self.world.checkpoints[index]
        if with_target:
            self._note("restore both")
            self._act()
            self.world.restore_all(index, number)
        else:
            self._note("restore")
            self._act(place if stops_drivers else None)
            self.world.restore(self.world.backups[number][0], place)

    @precondition(lambda self: self.is_careful and self._begun())
    @rule(which=ANY, kind=st.sampled_from(DELETIONS), back=BACK, stops_drivers=st.booleans(), steps=STARTING)
    def delete(self, which: int, kind: str, back: int, stops_drivers: bool, steps: int) -> None:
        """What is deleted is gone while nobody runs, or just when a driver starts."""
        self._note(f"delete {kind}")
        index = _one(self._begun(), which)
        place = self.world.checkpoints[index]
        self._act(place if stops_drivers else None)
        free = min(set(range(SLOTS)) - set(self.world.drivers), default=None)
        if free is not None and not stops_drivers:
            self.world.start(free, place)
            self.world.advance(free, steps)
        if kind == "our half":
            self.world.delete_half(index, OUR_HALF)
        elif kind == "Spark's half":
            self.world.delete_half(index, SPARKS_HALF)
        else:
            log = kind.rpartition(" ")[2]
            names = sorted(self.world.disk.names(place / log), key=int)
            if len(names) > back:
                self.world.disk.remove_tree(place / log / names[-1 - back])
        self._arrive(1)
        if free in self.world.drivers:
            self.world.advance(free, ENOUGH_STEPS)

    @property
    def whole(self) -> list[int]:
        """The checkpoints that have both halves."""
        return [n for n, place in enumerate(self.world.checkpoints) if self.world.is_whole(place)]

    @property
    def is_careful(self) -> bool:
        """Whether the operator has not made too many mistakes: after some, little is left to be tried."""
        return self.mistakes < self.most_mistakes

    def _begun(self) -> list[int]:
        """The whole checkpoints in which Spark has planned something: without a half they are not empty."""
        return [n for n in self.whole if self.world.disk.names(self.world.checkpoints[n] / "offsets")]

    def _arrive(self, rows: int) -> None:
        self.world.source.rows += rows
        self.world.source.ticks += 1

    def _slot(self, which: int) -> int:
        return _one(sorted(self.world.drivers), which)

    def _act(self, stopped: Path | None = None) -> None:
        self.mistakes += 1
        self.world.operator_acted = True
        if stopped is not None:
            self.world.kill_all(stopped)


def _one(found: Sequence[int], which: int) -> int:
    return found[which % len(found)]


def run_machine(number: int, examples: int, actions: int, shrinks: bool = False) -> Tally:
    """Run the machine with one seed; raises what it finds."""
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]

    class Seeded(ProtocolMachine):
        tally = Tally()

    chosen = settings(
        max_examples=examples,
        stateful_step_count=actions,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(seed(number)(Seeded), settings=chosen)
    except Exception as error:
        error.tally = Seeded.tally  # type: ignore[attr-defined]
        raise
    return Seeded.tally
