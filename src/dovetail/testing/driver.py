"""Run any semi-stream join through a schedule of actions, and check it after each.

The driver treats the operator as a black box. It checks that every operator keeps the same promises:

- ``size()`` never exceeds the budget, also between two batches of one call, and is the sum of ``sizes()``;
- every tuple submitted is matched, unmatched, shed or pending: the counters and ``pending`` agree with the tuples
  submitted, and ``output_rows`` with the rows received;
- counters never decrease;
- closing an iterator early loses nothing: rows that it did not return come later;
- nothing waits after ``drain``, and ``oldest`` is ``None`` exactly when nothing waits;
- every output batch has the same schema;
- ``snapshot`` changes nothing, and a new operator that restores it from storage has the same number of tuples waiting.

A broken promise is an `AssertionError` whose message has the seed and the actions so far. The same note is added to any
error that the operator raises.

Examples
--------
>>> from dovetail.testing.batches import stream_batches
>>> class Echo:
...     '''Gives back what it is offered, at once.'''
...     budget, pending, oldest, metrics = Budget(1000), 0, None, OperatorMetrics()
...     def offer(self, batch):
...         self.metrics.stream_tuples_in += batch.num_rows
...         self.metrics.matched_tuples += batch.num_rows
...         self.metrics.output_rows += batch.num_rows
...         yield batch
...     def step(self): return iter(())
...     def drain(self): return iter(())
...     def sizes(self): return {"nothing": 0}
...     def size(self): return 0
>>> output = drive(Echo(), stream_batches([{"k": 1}, {"k": 2}], on="k", seed=1), schedule=5)
>>> sum(batch.num_rows for batch in output)
2
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from dovetail.core.memory import Budget
from dovetail.core.metrics import OperatorMetrics
from dovetail.testing.batches import CODE_COLUMN
from dovetail.testing.held import held_array_bytes
from dovetail.testing.rows import Row, assert_same_groups, assert_same_rows, rows_of
from dovetail.testing.schedules import Action, describe_action, random_schedule
from dovetail.testing.snapshots import through_storage

__all__ = ["Action", "Drivable", "Driver", "drive", "random_schedule"]


class Drivable(Protocol):
    """The interface of an operator that the driver uses; ``snapshot`` and ``restore`` only if the schedule does."""

    def offer(self, batch: pa.RecordBatch, /) -> Iterable[pa.RecordBatch]: ...
    def step(self) -> Iterable[pa.RecordBatch]: ...
    def drain(self) -> Iterable[pa.RecordBatch]: ...
    def size(self) -> int: ...
    def sizes(self) -> dict[str, int]: ...
    @property
    def pending(self) -> int: ...
    @property
    def oldest(self) -> int | None: ...
    @property
    def metrics(self) -> OperatorMetrics: ...


def drive(
    operator: Drivable,
    batches: Sequence[pa.RecordBatch],
    schedule: Sequence[Action] | int | None = None,
    *,
    make_operator: Callable[[], Drivable] | None = None,
    budget: Budget | int | None = None,
    expected: Sequence[Row] | None = None,
    expected_groups: Sequence[Sequence[Row]] | None = None,
    measure_arrays: bool = False,
    borrowed: Sequence[Any] = (),
) -> list[pa.RecordBatch]:
    """Run an operator through a schedule and return its output, in order.

    Parameters
    ----------
    operator
        New, or prepared by the test.
    batches
        The stream, for ``("offer", number)``.
    schedule
        Actions; or a seed for `random_schedule`; or ``None``: offer everything, then drain.
    make_operator
        Creates a new operator of the same kind, for ``("snapshot_restore",)``.
    budget
        The limit of ``size()``; by default the operator's own ``budget``, or its ``spec``'s, read before each check.
    expected, expected_groups
        The expected rows, in any order and in stream order: results of `join_oracle` and `join_oracle_by_tuple`.
    measure_arrays, borrowed
        Whether to compare ``size()`` with `held_array_bytes`; what the operator references but does not own.
    """
    seed = None
    if schedule is None:
        schedule = [*(("offer", number) for number in range(len(batches))), ("drain",)]
    elif isinstance(schedule, int):
        seed, schedule = (
            schedule,
            random_schedule(schedule, len(batches), snapshots=make_operator is not None),
        )
    driver = Driver(
        operator,
        batches,
        make_operator=make_operator,
        budget=budget,
        seed=seed,
        measure_arrays=measure_arrays,
        borrowed=borrowed,
    )
    driver.run(schedule)
    if expected is not None:
        assert_same_rows(driver.rows(), expected, context=driver.history())
    if expected_groups is not None:
        assert_same_groups(driver.rows(), expected_groups, context=driver.history())
    return driver.output


class Driver:
    """One operator under test, driven action by action; the parameters are those of `drive`.

    Every action checks the operator's promises and returns the rows emitted, so that a test reads like a script: offer
    a batch, expect nothing; step, expect these rows. ``operator`` is another one after a restore; ``output`` is every
    batch emitted so far.
    """

    def __init__(
        self,
        operator: Drivable,
        batches: Sequence[pa.RecordBatch] = (),
        *,
        make_operator: Callable[[], Drivable] | None = None,
        budget: Budget | int | None = None,
        seed: int | None = None,
        measure_arrays: bool = False,
        borrowed: Sequence[Any] = (),
    ) -> None:
        self.operator = operator
        self.output: list[pa.RecordBatch] = []
        self._batches = batches
        self._make_operator = make_operator
        self._budget = None if budget is None else Budget.parse(budget)
        self._seed = seed
        self._measure_arrays = measure_arrays
        self._borrowed = borrowed
        self._done: list[str] = []
        self._rest: pa.RecordBatch | None = None
        self._begin_accounting()
        self._check()

    # --- actions

    def run(self, schedule: Iterable[Action]) -> None:
        for action in schedule:
            match action:
                case ("offer", int(number), *after):
                    self._offer(self._batches[number], describe_action(action), *after)
                case ("offer", batch, *after):
                    self.offer(batch, *after)
                case ("step", *after):
                    self.step(*after)
                case ("drain", *after):
                    self.drain(*after)
                case ("snapshot_restore",):
                    self.snapshot_restore()
                case ("call", change):
                    self.call(change)
                case _:
                    raise ValueError(f"{action!r} is not an action.")

    def offer(self, batch: pa.RecordBatch, after: int | None = None) -> list[dict[str, Any]]:
        """Offer a batch. With ``after``, here and below, the iterator is closed after that many batches."""
        return self._offer(batch, describe_action(("offer", batch)), after)

    def step(self, after: int | None = None) -> list[dict[str, Any]]:
        """Run one disk step."""
        return self._act(describe_action(("step",) if after is None else ("step", after)), self.operator.step, after)

    def drain(self, after: int | None = None) -> list[dict[str, Any]]:
        """Step until nothing waits."""
        rows = self._offer_rest()
        description = describe_action(("drain",) if after is None else ("drain", after))
        rows += self._act(description, self.operator.drain, after)
        if after is None:
            self._require(self.operator.pending == 0, f"after drain, {self.operator.pending} tuples still wait")
        return rows

    def call(self, change: Callable[[Any], object]) -> None:
        """Change a parameter of the operator: w, b, or the budget."""
        self._done.append(describe_action(("call", change)))
        with _Noted(self):
            change(self.operator)
        self._check()

    def snapshot_restore(self) -> None:
        """Continue with a new operator that restored this one's snapshot."""
        self._done.append("snapshot_restore")
        if self._make_operator is None:
            raise ValueError("snapshot_restore needs make_operator=, which creates a new operator.")
        before: Any = self.operator
        pending, metrics, sizes = before.pending, before.metrics.copy(), before.sizes()
        with _Noted(self):
            snapshot = before.snapshot()
        is_unchanged = (before.pending, before.metrics, before.sizes()) == (pending, metrics, sizes)
        self._require(is_unchanged, "snapshot() changed the operator")
        fresh: Any = self._make_operator()
        self._require(fresh is not before, "make_operator returned the operator that is to be replaced")
        with _Noted(self):
            fresh.restore(through_storage(snapshot))
        self._require(fresh.pending == pending, f"{pending} tuples waited before restore, {fresh.pending} after")
        self.operator = fresh
        self._begin_accounting()
        self._check()

    # --- output

    def rows(self) -> list[dict[str, Any]]:
        """Every row emitted so far, in order, without the code column."""
        return rows_of(self.output, drop=[CODE_COLUMN])

    def history(self) -> str:
        """The seed and the actions so far, one per line."""
        seed = "" if self._seed is None else f"seed={self._seed}\n"
        return f"{seed}actions: {', '.join(self._done) or 'none'}"

    # --- promises

    def _offer(self, batch: pa.RecordBatch, description: str, after: int | None = None) -> list[dict[str, Any]]:
        rows = self._offer_rest()
        before = self.operator.metrics.stream_tuples_in
        if after is None:
            self._offered += batch.num_rows
            return rows + self._act(description, lambda: self.operator.offer(batch))
        self._done.append(description)
        emitted = self._take(lambda: self.operator.offer(batch), after)
        accepted = self.operator.metrics.stream_tuples_in - before
        self._require(0 <= accepted <= batch.num_rows, f"of {batch.num_rows} tuples {accepted} were accepted")
        self._offered += accepted
        self._rest = batch.slice(accepted) if accepted < batch.num_rows else None
        return rows + self._received(emitted)

    def _offer_rest(self) -> list[dict[str, Any]]:
        """Offer the tuples that were not accepted because the last offer was closed early."""
        rest, self._rest = self._rest, None
        return [] if rest is None else self._offer(rest, "offer the rest")

    def _act(
        self, description: str, act: Callable[[], Iterable[pa.RecordBatch]], after: int | None = None
    ) -> list[dict[str, Any]]:
        self._done.append(description)
        return self._received(self._take(act, after))

    def _take(self, act: Callable[[], Iterable[pa.RecordBatch]], after: int | None) -> list[pa.RecordBatch]:
        """Run an action and return its output, at most ``after`` batches."""
        emitted: list[pa.RecordBatch] = []
        with _Noted(self):
            batches: Any = iter(act())
            for batch in batches:
                emitted.append(batch)
                self._emitted += batch.num_rows
                # During a call counters may lag behind, but the memory limit holds at any time.
                self._check_size()
                if len(emitted) == after:
                    batches.close()
                    break
        return emitted

    def _received(self, emitted: list[pa.RecordBatch]) -> list[dict[str, Any]]:
        for batch in emitted:
            first = (self.output or emitted)[0]
            self._require(
                batch.schema.equals(first.schema),
                f"output schema changed from\n{first.schema}\nto\n{batch.schema}\n",
            )
        self.output += emitted
        self._check()
        return rows_of(emitted, drop=[CODE_COLUMN])

    def _begin_accounting(self) -> None:
        """Start from the operator's current counters: a restore may keep them or reset them."""
        metrics = self.operator.metrics
        self._metrics_before = metrics.copy()
        self._tuples_in_before, self._output_rows_before = metrics.stream_tuples_in, metrics.output_rows
        self._offered = self._emitted = 0
        # An operator whose counters were reset by a restore has not counted its waiting tuples.
        self._inherited = self.operator.pending if metrics.stream_tuples_in == 0 else 0

    def _check(self) -> None:
        operator, metrics = self.operator, self.operator.metrics
        self._check_size()
        if self._measure_arrays:
            measured, claimed = held_array_bytes(operator, exclude=self._borrowed), operator.size()
            self._require(measured <= claimed, f"size() says {claimed} bytes, arrays of {measured} bytes are held")
        pending, oldest = operator.pending, operator.oldest
        self._require(pending >= 0, f"pending is {pending}")
        self._require(
            oldest is None if pending == 0 else oldest is not None and oldest >= 0,
            f"{pending} tuples wait, and the oldest of them is {oldest}",
        )
        decreased = metrics.decreased_since(self._metrics_before)
        self._require(not decreased, f"counters decreased: {', '.join(decreased)}")
        self._metrics_before = metrics.copy()
        self._require_equal(
            "metrics.stream_tuples_in", metrics.stream_tuples_in, self._tuples_in_before + self._offered
        )
        self._require_equal("metrics.output_rows", metrics.output_rows, self._output_rows_before + self._emitted)
        waiting = self._inherited + metrics.stream_tuples_in - metrics.tuples_left
        self._require(
            operator.pending == waiting,
            f"pending is {operator.pending}, but of {self._inherited + metrics.stream_tuples_in} tuples that "
            f"came {metrics.matched_tuples} left matched, {metrics.unmatched_tuples} unmatched and "
            f"{metrics.shed_tuples} shed, so {waiting} should wait",
        )

    def _check_size(self) -> None:
        sizes, size, budget_bytes = self.operator.sizes(), self.operator.size(), self._budget_bytes()
        components = ", ".join(f"{name} {held}" for name, held in sizes.items())
        self._require(size <= budget_bytes, f"size() is {size}, over the budget of {budget_bytes} ({components})")
        self._require(sum(sizes.values()) == size, f"size() is {size}, its components are not ({components})")
        self._require(min(sizes.values(), default=0) >= 0, f"a component is negative ({components})")

    def _budget_bytes(self) -> int:
        operator: Any = self.operator
        declared = self._budget or getattr(operator, "budget", None)
        if declared is None:
            declared = getattr(getattr(operator, "spec", None), "budget", None)
        if declared is None:
            raise TypeError("The operator has neither budget nor spec.budget: pass budget=.")
        return Budget.parse(declared).total_bytes

    def _require_equal(self, name: str, found: int, wanted: int) -> None:
        self._require(found == wanted, f"{name} is {found}, should be {wanted}")

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise AssertionError(f"{problem}.\n{self.history()}")


class _Noted:
    """Adds the driver's history to any error."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(self._driver.history())
