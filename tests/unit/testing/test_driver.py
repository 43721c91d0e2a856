"""The driver lets a right join pass under every schedule and catches every way of being wrong."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.memory import Budget
from dovetail.core.metrics import OperatorMetrics
from dovetail.joins.protocol import Snapshot
from dovetail.testing.batches import stream_batches
from dovetail.testing.driver import Driver, drive
from dovetail.testing.oracle import join_oracle, join_oracle_by_tuple
from dovetail.testing.rows import Row
from dovetail.testing.schedules import Action, random_schedule

STREAM_SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.int64())])
OUTPUT_SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.int64()), ("v", pa.string())])
RELATION = [{"k": k % 7, "v": f"r{k}"} for k in range(12)]
STREAM = [{"k": None if t % 11 == 5 else t % 9, "t": t} for t in range(60)]
EXPECTED = join_oracle(STREAM, RELATION, on="k")
BUDGET = Budget(4096)
OFFER_STEP_SNAPSHOT_DRAIN: list[Action] = [
    ("offer", 0),
    ("offer", 1),
    ("offer", 2),
    ("step",),
    ("snapshot_restore",),
    ("offer", 3),
    ("drain",),
]


class ToyJoin:
    """Inner equi-join on ``k`` of a stream (k, t) with a relation (k, v), so small that it is plainly right.

    The relation is a dict, borrowed, not accounted. Stream batches wait in a window; a step joins the oldest.
    """

    def __init__(self, relation_rows: list[Row], budget: Budget | None) -> None:
        self.budget = budget
        self.metrics = OperatorMetrics()
        self.values: dict[Any, list[str]] = {}
        for row in relation_rows:
            self.values.setdefault(row["k"], []).append(row["v"])
        self.window: deque[pa.RecordBatch] = deque()

    @property
    def pending(self) -> int:
        return sum(batch.num_rows for batch in self.window)

    @property
    def oldest(self) -> int | None:
        return self.metrics.tuples_left if self.pending else None

    def sizes(self) -> dict[str, int]:
        return {"window": sum(batch.get_total_buffer_size() for batch in self.window), "spare": 0}

    def size(self) -> int:
        return sum(self.sizes().values())

    def offer(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        self.metrics.stream_tuples_in += batch.num_rows
        # A copy: a slice would keep the batch that it was cut from alive.
        copy = pa.RecordBatch.from_pylist(batch.to_pylist(), schema=batch.schema)
        while self.window and self.size() + copy.get_total_buffer_size() > self.budget.total_bytes:
            yield from self.step()
        self.window.append(copy)

    def step(self) -> Iterator[pa.RecordBatch]:
        if self.window:
            yield self.emit(self.join(self.window.popleft().to_pylist()))

    def drain(self) -> Iterator[pa.RecordBatch]:
        while self.window:
            yield from self.step()

    def join(self, waiting: list[dict[str, Any]]) -> list[dict[str, Any]]:
        output = []
        for row in waiting:
            values = [] if row["k"] is None else self.values.get(row["k"], [])
            output += [{"k": row["k"], "t": row["t"], "v": value} for value in values]
            self.metrics.matched_tuples += bool(values)
            self.metrics.unmatched_tuples += not values
        return output

    def emit(self, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        self.metrics.output_rows += len(rows)
        return pa.RecordBatch.from_pylist(rows, schema=OUTPUT_SCHEMA)

    def snapshot(self) -> Snapshot:
        tables = {str(number): pa.Table.from_batches([batch]) for number, batch in enumerate(self.window)}
        return Snapshot("toy", {}, tables, {"metrics": self.metrics.as_dict()})

    def restore(self, snapshot: Snapshot) -> None:
        # Copied: the columns of one stored table share its memory.
        self.window = deque(
            pa.RecordBatch.from_pylist(table.to_pylist(), schema=table.schema) for table in snapshot.tables.values()
        )
        self.metrics = OperatorMetrics.from_dict(snapshot.values["metrics"])


class CountersBeginAnew(ToyJoin):
    """Not broken: counters are not part of the state, so they begin at zero after a restore."""

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self.metrics = OperatorMetrics()


# Each of the following breaks one promise; the driver must notice every one.


class OverBudget(ToyJoin):
    def offer(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        self.metrics.stream_tuples_in += batch.num_rows
        self.window.append(pa.RecordBatch.from_pylist(batch.to_pylist(), schema=batch.schema))
        return iter(())


class OverBudgetForAMoment(ToyJoin):
    """Takes a second copy of the window while it emits."""

    spare = 0

    def sizes(self) -> dict[str, int]:
        return super().sizes() | {"spare": self.spare}

    def drain(self) -> Iterator[pa.RecordBatch]:
        self.spare = self.budget.total_bytes
        yield from super().drain()
        self.spare = 0


class LosesATuple(ToyJoin):
    """Forgets the last match of a step, though it counts the tuple."""

    def emit(self, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        return super().emit(rows[:-1])


class DropsATuple(ToyJoin):
    """Forgets the last waiting tuple of a step altogether."""

    def join(self, waiting: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return super().join(waiting[:-1])


class RepeatsATuple(ToyJoin):
    def emit(self, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        return super().emit(rows + rows[-1:])


class RepeatsATupleSecretly(ToyJoin):
    def emit(self, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        super().emit(rows)
        return pa.RecordBatch.from_pylist(rows + rows[-1:], schema=OUTPUT_SCHEMA)


class SizeIsNotItsSum(ToyJoin):
    def size(self) -> int:
        return super().size() // 2


class SizeIsALie(ToyJoin):
    """Says so little, and so consistently, that only a measurement of what it holds finds out."""

    def sizes(self) -> dict[str, int]:
        return {"window": self.pending}


class NegativeComponent(ToyJoin):
    def sizes(self) -> dict[str, int]:
        held = super().sizes()["window"]
        return {"window": held + 1, "spare": -1} if held else {"window": 0}


class CountersGoBack(ToyJoin):
    def step(self) -> Iterator[pa.RecordBatch]:
        yield from super().step()
        self.metrics.disk_steps = 1 - self.metrics.disk_steps


class CountsTuplesTwice(ToyJoin):
    def offer(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        self.metrics.stream_tuples_in += 1
        self.metrics.unmatched_tuples += 1
        yield from super().offer(batch)


class DrainStopsEarly(ToyJoin):
    def drain(self) -> Iterator[pa.RecordBatch]:
        return self.step()


class SchemaDrifts(ToyJoin):
    def drain(self) -> Iterator[pa.RecordBatch]:
        for batch in super().drain():
            yield batch.rename_columns(["k", "t", "w"])


class NewestFirst(ToyJoin):
    """Right as a multiset, wrong as a sequence."""

    def step(self) -> Iterator[pa.RecordBatch]:
        self.window.reverse()
        yield from super().step()
        self.window.reverse()


class SnapshotEmptiesIt(ToyJoin):
    def snapshot(self) -> Snapshot:
        snapshot = super().snapshot()
        self.window.clear()
        return snapshot


class ForgetsOnRestore(ToyJoin):
    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self.window.popleft()


class OldestIsUnknown(ToyJoin):
    oldest = None


class OldestOfNothing(ToyJoin):
    @property
    def oldest(self) -> int | None:
        return self.metrics.tuples_left


class Raises(ToyJoin):
    def step(self) -> Iterator[pa.RecordBatch]:
        raise RuntimeError("The disk is on fire.")


def _batches(seed: int = 1) -> list[pa.RecordBatch]:
    return stream_batches(STREAM, on="k", schema=STREAM_SCHEMA, seed=seed)


def _make(kind: type[ToyJoin] = ToyJoin, budget: Budget = BUDGET) -> Callable[[], ToyJoin]:
    return lambda: kind(RELATION, budget)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", [ToyJoin, CountersBeginAnew])
def test_right_join_passes_under_random_schedules(kind: type[ToyJoin], seed: int) -> None:
    make = _make(kind)
    output = drive(
        make(),
        _batches(seed),
        schedule=seed,
        make_operator=make,
        expected=EXPECTED,
        expected_groups=join_oracle_by_tuple(STREAM, RELATION, on="k"),
        measure_arrays=True,
    )
    assert sum(batch.num_rows for batch in output) == len(EXPECTED)


def test_right_join_passes_with_the_smallest_budget_that_holds_a_batch() -> None:
    batches = _batches()
    largest = max(
        pa.RecordBatch.from_pylist(batch.to_pylist(), schema=batch.schema).get_total_buffer_size() for batch in batches
    )
    drive(_make(budget=Budget(largest))(), batches, expected=EXPECTED)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OverBudget, r"size\(\) is \d+, over the budget of 512 \(window \d+, spare 0\)"),
        (OverBudgetForAMoment, r"over the budget of 512"),
        (LosesATuple, r"missing: "),
        (DropsATuple, r"pending is \d+, but of \d+ tuples that came .* should wait"),
        (RepeatsATuple, r"extra: "),
        (RepeatsATupleSecretly, r"metrics.output_rows is \d+, should be \d+"),
        (SizeIsNotItsSum, r"its components are not"),
        (SizeIsALie, r"size\(\) says \d+ bytes, arrays of \d+ bytes are held"),
        (NegativeComponent, r"a component is negative"),
        (CountersGoBack, r"counters decreased: disk_steps"),
        (CountsTuplesTwice, r"metrics.stream_tuples_in is \d+, should be \d+"),
        (DrainStopsEarly, r"after drain, \d+ tuples still wait"),
        (SchemaDrifts, r"output schema changed"),
        (NewestFirst, r"their order is not"),
        (SnapshotEmptiesIt, r"snapshot\(\) changed the operator"),
        (OldestIsUnknown, r"[1-9]\d* tuples wait, and the oldest of them is None"),
        (OldestOfNothing, r"0 tuples wait, and the oldest of them is 0"),
        (ForgetsOnRestore, r"\d+ tuples waited before restore, \d+ after"),
    ],
)
def test_broken_join_is_caught(kind: type[ToyJoin], message: str) -> None:
    make = _make(kind, Budget(512))
    batches = stream_batches(STREAM, on="k", schema=STREAM_SCHEMA, seed=3, max_batch_rows=6)
    schedule = [*OFFER_STEP_SNAPSHOT_DRAIN, *(("offer", n) for n in range(4, len(batches))), ("drain",)]
    with pytest.raises(AssertionError, match=message) as caught:
        drive(
            make(),
            batches,
            schedule,
            make_operator=make,
            expected=EXPECTED,
            expected_groups=join_oracle_by_tuple(STREAM, RELATION, on="k"),
            measure_arrays=True,
        )
    assert any(line.startswith("actions: ") for line in str(caught.value).splitlines())


@pytest.mark.parametrize("kind", [LosesATuple, RepeatsATuple, SizeIsNotItsSum])
def test_failure_under_a_random_schedule_names_its_seed(kind: type[ToyJoin]) -> None:
    with pytest.raises(AssertionError, match=r"seed=17\nactions: "):
        drive(_make(kind, Budget(512))(), _batches(), schedule=17, expected=EXPECTED)


def test_error_of_the_operator_passes_with_a_note_of_seed_and_actions() -> None:
    with pytest.raises(RuntimeError, match="on fire") as caught:
        drive(_make(Raises)(), _batches(), schedule=4)
    (note,) = caught.value.__notes__
    assert note.startswith("seed=4\nactions: ")
    assert note.endswith(("step", "drain"))


def test_without_schedule_everything_is_offered_then_drained() -> None:
    driver = Driver(_make()(), _batches())
    driver.run([("offer", n) for n in range(len(_batches()))])
    driver.drain()
    output = drive(_make()(), _batches())
    assert pa.Table.from_batches(output).equals(pa.Table.from_batches(driver.output))


def test_actions_read_as_a_script() -> None:
    driver = Driver(_make()(), make_operator=_make())
    batch = stream_batches([{"k": 5, "t": 1}], on="k")[0]
    assert driver.offer(batch) == []
    driver.snapshot_restore()
    assert driver.step() == [{"k": 5, "t": 1, "v": "r5"}]
    assert driver.drain() == []
    assert driver.rows() == [{"k": 5, "t": 1, "v": "r5"}]
    assert driver.history() == "actions: offer 1 rows, snapshot_restore, step, drain"


def test_call_changes_the_operator_in_mid_flight_and_is_checked() -> None:
    def shrink_budget(operator: ToyJoin) -> None:
        operator.budget = Budget(1)

    driver = Driver(_make()(), _batches())
    driver.run([("offer", 0), ("offer", 1), ("offer", 2)])
    with pytest.raises(AssertionError, match=r"over the budget of 1(.|\n)*call shrink_budget"):
        driver.run([("call", shrink_budget)])


def test_given_budget_is_held_instead_of_the_operators_own() -> None:
    with pytest.raises(AssertionError, match="over the budget of 8 "):
        drive(_make()(), _batches(), budget=8)


def test_budget_of_the_spec_is_found() -> None:
    operator: Any = _make(OverBudget)()
    operator.budget = None
    operator.spec = type("Spec", (), {"budget": Budget(100)})()
    with pytest.raises(AssertionError, match="over the budget of 100 "):
        drive(operator, _batches())


def test_operator_without_any_budget_is_refused() -> None:
    with pytest.raises(TypeError, match="pass budget="):
        drive(ToyJoin(RELATION, budget=None), _batches())


def test_snapshot_restore_without_a_factory_is_refused() -> None:
    with pytest.raises(ValueError, match="make_operator"):
        drive(_make()(), _batches(), schedule=[("snapshot_restore",)])


def test_factory_that_gives_the_same_operator_is_refused() -> None:
    operator = _make()()
    with pytest.raises(AssertionError, match="to be replaced"):
        drive(operator, _batches(), schedule=[("snapshot_restore",)], make_operator=lambda: operator)


def test_unknown_action_is_refused() -> None:
    with pytest.raises(ValueError, match="'dance'"):
        drive(_make()(), _batches(), schedule=[("dance",)])  # type: ignore[list-item]


def test_random_schedule_is_repeatable_and_complete() -> None:
    def grow(operator: Any) -> None: ...

    for seed in range(50):
        schedule = random_schedule(seed, 7, calls=[grow])
        assert schedule == random_schedule(seed, 7, calls=[grow])
        assert [action[1] for action in schedule if action[0] == "offer"] == list(range(7))
        assert schedule[-1] == ("drain",)
    kinds = {action[0] for seed in range(50) for action in random_schedule(seed, 7, calls=[grow])}
    assert kinds == {"offer", "step", "drain", "snapshot_restore", "call"}


def test_random_schedule_without_snapshots_and_calls_has_none() -> None:
    kinds = {action[0] for seed in range(50) for action in random_schedule(seed, 7, snapshots=False)}
    assert kinds == {"offer", "step", "drain"}
    assert random_schedule(0, 3, mean_actions_between=0) == [("offer", n) for n in range(3)] + [("drain",)]
