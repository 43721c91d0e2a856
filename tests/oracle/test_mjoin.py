"""The multi-way join against the oracle: random join graphs, budgets, windows, interleavings and restarts.

An example is a join graph of 2 to 6 inputs with random rows (NULLs, hot keys, keys without a match, late and unordered
event times), a join type, conditions and bounds between pairs of inputs, a flushing policy, and a schedule of offers,
steps, watermarks and restarts. After every call
the operator must hold no more than it says, and no more than its budget; at the end its rows must be the oracle's.
Everything follows from one seed, which a failure prints.
"""

import operator
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from dovetail.core.errors import PlanError
from dovetail.joins.conditions import AllOf, BatchPredicate, Comparison
from dovetail.joins.multiway import (
    MJoin,
    MJoinSpec,
    MJoinTree,
    PairCondition,
    TimeBound,
    TimeDistance,
    TimeWindow,
    TupleWindow,
    mjoin_spec,
)
from dovetail.joins.multiway.graph import JoinGraph
from dovetail.joins.multiway.planner import plan_multiway
from dovetail.joins.multiway.snapshots import named_tables
from dovetail.joins.multiway.windows import furthest_apart
from dovetail.joins.protocol import Snapshot
from dovetail.storage.state_files import StateFile, read_table, write_tables
from dovetail.testing.held import held_array_bytes
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.rows import assert_same_rows, rows_of
from dovetail.testing.snapshots import through_storage

NAMES = "abcdef"
OPERATORS = {
    "<": operator.lt, "<=": operator.le, "=": operator.eq, "!=": operator.ne, ">=": operator.ge, ">": operator.gt
}  # fmt: skip
Test = tuple[str, str, Callable[[dict[str, Any], dict[str, Any]], bool]]
EXAMPLES = max(2, settings().max_examples // 12)


@dataclass
class Case:
    """A join and how it is driven; all of it follows from the seed."""

    seed: int
    inputs: int
    how: str = "inner"
    graph: str = "star"
    keys: str = "integer"
    window: str | None = None
    flushing: str = "coordinated"
    share: int = 10
    plan: Any = None
    delay: int = 9
    bounds: bool = False
    residuals: bool = False
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.names = list(NAMES[: self.inputs])
        # A tuple must fit a small part of the budget, so a state of many budgets has many tuples.
        self.rows = 50 + 35 * self.share
        columns = 1 if self.graph == "star" else 3
        kind = pa.int64() if self.keys == "integer" else pa.string()
        self.key_columns = {n: [f"{n}{c}" for c in range(columns)] for n in self.names}
        self.schemas = {
            n: pa.schema(
                [(c, kind) for c in self.key_columns[n]]
                + [(f"t{n}", pa.int64()), (n, pa.string())]
                + [(f"v{n}", pa.int64())] * self.residuals
            )
            for n in self.names
        }
        self.equalities = self._equalities()
        self.tests: list[Test] = []
        self.width = None if self.bounds and self.chance.random() < 0.7 else 40
        self.time_bounds = self._time_bounds() if self.bounds else []
        self.conditions = self._conditions() if self.residuals else []

    def _equalities(self) -> list[tuple[tuple[str, str], tuple[str, str]]]:
        """Every input is linked with one before it; in a random graph some are linked once more."""
        links = []
        for place, name in enumerate(self.names[1:], 1):
            others = [self.names[0]] if self.graph == "star" else self.chance.sample(self.names[:place], 1)
            if self.graph == "random" and self.chance.random() < 0.4:
                others.append(self.chance.choice(self.names[:place]))
            for other in others:
                links.append(
                    (
                        (other, self.chance.choice(self.key_columns[other])),
                        (name, self.chance.choice(self.key_columns[name])),
                    )
                )
        return links

    def _time_bounds(self) -> list[TimeBound]:
        """Random intervals of random pairs, some of them open; those that contradict each other are drawn again."""
        found: list[TimeBound] = []
        while len(found) < self.chance.randint(1, self.inputs):
            left, right = self.chance.sample(self.names, 2)
            low = self.chance.randint(-30, 10)
            low, high = self.chance.choice([(low, low + self.chance.randint(0, 40)), (None, low + 20), (low, None)])
            bound = TimeBound(left, right, low, high)
            try:
                furthest_apart(self.names, TimeWindow(self.width, "t", bounds=[*found, bound]))
            except PlanError:
                continue
            found.append(bound)
            self.tests.append((left, right, _within(f"t{left}", f"t{right}", low, high)))
        return found

    def _conditions(self) -> list[PairCondition]:
        """Random conditions on the values of random pairs."""
        found: list[PairCondition] = []
        for _ in range(self.chance.randint(1, 2)):
            left, right = self.chance.sample(self.names, 2)
            ours, theirs = f"v{left}", f"v{right}"
            sign = self.chance.choice(list(OPERATORS))
            kind = self.chance.choice(["comparison", "predicate", "distance", "all"])
            compared, distance = Comparison(ours, sign, theirs), TimeDistance(ours, theirs, -3, None)  # type: ignore[arg-type]
            if kind in ("comparison", "all"):
                self.tests.append((left, right, _compared(ours, sign, theirs)))
            if kind in ("distance", "all"):
                self.tests.append((left, right, _within(ours, theirs, -3, None)))
            if kind == "predicate":
                self.tests.append((left, right, _odd(ours, theirs)))
            condition = {
                "comparison": compared,
                "distance": distance,
                "all": AllOf(compared, distance),
                "predicate": BatchPredicate(_OddSum(ours, theirs), name="odd"),
            }[kind]
            found.append(PairCondition(left, right, condition))
        return found

    def spec(self, directory: Path) -> MJoinSpec:
        """The join with a budget of the share of its state, or the least that is accepted."""
        window = {
            None: None,
            "time": TimeWindow(self.width, {n: f"t{n}" for n in self.names}, bounds=self.time_bounds),
            "tuples": TupleWindow(50),
        }[self.window]
        graph = JoinGraph.of({n: s.names for n, s in self.schemas.items()}, self.equalities)
        options: dict[str, Any] = {"how": self.how, "window": window, "flushing": self.flushing, "seed": self.seed}
        options |= {"spill_directory": directory, "partitions": 8, "max_delay": self.delay}
        options["conditions"] = self.conditions
        minimum = MJoin.minimum_budget(mjoin_spec(self.schemas, graph, **options))
        # Labels as long as it takes for the state to be so many times the budget.
        budget = minimum * 3 // 2 if self.plan is None else minimum * self.inputs
        self.label_bytes = budget * self.share // self.rows - 60 if self.plan is None else 60
        return mjoin_spec(self.schemas, graph, budget=budget, **options)

    def key(self) -> Any:
        # About as many values as an input has rows, one of them hot, so that results stay few for six inputs, too.
        values, draw = max(3, self.rows // self.inputs), self.chance.random()
        number = None if draw < 0.04 else 1 if draw < 0.12 else self.chance.randrange(values)
        return number if number is None or self.keys == "integer" else f"k{number}"

    def row(self, name: str, moment: int, number: int) -> dict[str, Any]:
        time = None if self.chance.random() < 0.04 else moment - self.chance.randint(0, 8)
        keys = {column: self.key() for column in self.key_columns[name]}
        label = f"{number}:" + "x" * self.chance.randint(self.label_bytes // 2, self.label_bytes * 3 // 2)
        values = {f"v{name}": self.chance.choice([None, *range(8)])} if self.residuals else {}
        return keys | {f"t{name}": time, name: label} | values

    def batch(self, spec: MJoinSpec, name: str, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        batch = pa.RecordBatch.from_pylist(rows, schema=self.schemas[name])
        if self.plan is not None:
            return batch
        batch = spec.with_codes(name, batch)
        if self.keys != "colliding":
            return batch
        for number, column in enumerate(batch.schema.names):
            if column.startswith("__code"):
                keys = [str(code).encode() for code in batch.column(number).to_pylist()]
                codes = [None if key == b"None" else zlib.crc32(key) % 3 for key in keys]
                batch = batch.set_column(number, column, pa.array(codes, pa.int64()))
        return batch


def _within(ours: str, theirs: str, low: int | None, high: int | None) -> Callable[[Any, Any], bool]:
    def test(left: dict[str, Any], right: dict[str, Any]) -> bool:
        if left[ours] is None or right[theirs] is None:
            return False
        later = right[theirs] - left[ours]
        return (low is None or later >= low) and (high is None or later <= high)

    return test


def _compared(ours: str, sign: str, theirs: str) -> Callable[[Any, Any], bool]:
    def test(left: dict[str, Any], right: dict[str, Any]) -> bool:
        return None not in (left[ours], right[theirs]) and OPERATORS[sign](left[ours], right[theirs])

    return test


def _odd(ours: str, theirs: str) -> Callable[[Any, Any], bool]:
    return lambda left, right: None not in (left[ours], right[theirs]) and (left[ours] + right[theirs]) % 2 == 1


@dataclass(frozen=True)
class _OddSum:
    ours: str
    theirs: str

    def __call__(self, left: pa.RecordBatch, right: pa.RecordBatch) -> Any:
        return pc.equal(pc.bit_wise_and(pc.add(left[self.ours], right[self.theirs]), 1), 1)


class Storage:
    """Tables that a snapshot has left behind, in files."""

    def __init__(self, directory: Path) -> None:
        self._root, self._files = directory, dict[str, StateFile]()
        (directory / "1-multi_join" / "00000").mkdir(parents=True)

    def store(self, join: MJoin) -> Snapshot:
        """Take a snapshot, store what it has new, and forget what it no longer names."""
        snapshot = through_storage(join.snapshot(have=frozenset(self._files)))
        new = [(name, table) for name, table in snapshot.tables.items() if table.num_rows]
        written = write_tables(self._root, "1-multi_join", 0, 0, new)
        held = named_tables(snapshot.values)
        named = {**self._files, **{file.table: file for file in written}}
        self._files = {name: file for name, file in named.items() if name.removesuffix(".index") in held}
        return snapshot

    def fetch(self, name: str) -> pa.Table:
        return read_table(self._root, self._files[name])


def make(case: Case, directory: Path) -> MJoin | MJoinTree:
    spec = case.spec(directory)
    return MJoin(spec) if case.plan is None else MJoinTree(spec, plan_multiway(spec.graph, force=case.plan))


def drive(case: Case, directory: Path) -> MJoin | MJoinTree:
    """Run a case and compare; gives the operator for what else a test wants to know."""
    join, chance, restarts = make(case, directory / "0"), case.chance, 0
    spec = join.spec
    storage = Storage(directory / "storage")
    data: dict[str, list[dict[str, Any]]] = {name: [] for name in case.names}
    out: list[dict[str, Any]] = []
    moment, number, watermark = 0, 0, None

    def collect(batches: Any) -> None:
        out.extend(rows_of(batches))
        assert join.size() <= spec.budget.total_bytes
        assert held_array_bytes(join, exclude=[spec]) <= join.size()

    while number < case.rows:
        name, rows = chance.choice(case.names), []
        for _ in range(chance.randint(0, 12)):
            moment += chance.choice([0, 1, 1])
            row = case.row(name, moment, number)
            time = row[f"t{name}"]
            if not (case.window == "time" and watermark is not None and time is not None and time < watermark):
                data[name].append(row | {"place": number})
            rows.append(row)
            number += 1
        collect(join.offer(name, case.batch(spec, name, rows)))
        join.set_time(moment)
        collect(join.step(idle=chance.random() < 0.2))
        if case.window == "time" and chance.random() < 0.3:
            watermark = max(watermark or -100, moment - 10)
            collect(join.advance(watermark))
        if isinstance(join, MJoin) and chance.random() < 0.1:
            # As a runtime does it: what is not stored yet is, and what was spilled is read from there.
            snapshot = storage.store(join)
            if chance.random() < 0.5:
                restarts += 1
                join = make(case, directory / str(restarts))
                join.restore(replace(snapshot, tables={}), storage.fetch)
            else:
                join.refer_to_stored(snapshot, storage.fetch)
            assert not list((directory / str(restarts)).glob("*"))
        elif chance.random() < 0.05:
            restarts += 1
            saved = through_storage(join.snapshot())
            # A restart has its own directory, and only the snapshot to go by.
            join = make(case, directory / str(restarts))
            join.restore(saved)
    for name in case.names:
        join.finish(name)
    collect(join.drain())
    assert sum(join.state_rows().values()) == 0

    times, width = None, None
    if case.window is not None:
        column = {name: f"t{name}" if case.window == "time" else "place" for name in case.names}
        times, width = column, spec.window.width
    if case.window == "time":
        width = case.width
    shown = {name: [*case.schemas[name].names, "place"] for name in case.names}
    expected = multiway_oracle(data, case.equalities, case.how, None, times, width, shown, case.tests)
    for row in expected:
        row.pop("place", None)
    order = join.output_schema.names
    expected = [{column: row[column] for column in order} for row in expected]
    assert_same_rows(out, expected, context=f"{case}")
    return join


SEEDS = st.integers(0, 2**32)
WINDOWS = st.sampled_from([None, "time", "tuples"])
FLUSHING = st.sampled_from(["coordinated", "random"])
SHARES = st.sampled_from([1, 2])


def assume_graph(case: Case) -> None:
    """Leave out random equalities that make two columns of one input equal, which a user must filter by first."""
    try:
        JoinGraph.of({n: s.names for n, s in case.schemas.items()}, case.equalities)
    except PlanError:
        assume(False)


def drive_example(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    note(f"seed {case.seed}")
    drive(case, tmp_path_factory.mktemp("spill"))


@settings(max_examples=EXAMPLES)
@given(seed=SEEDS, inputs=st.integers(2, 6), window=WINDOWS, flushing=FLUSHING, share=SHARES)
def test_oracle_inner_joins_on_one_attribute(
    tmp_path_factory: pytest.TempPathFactory, seed: int, inputs: int, window: str | None, flushing: str, share: int
) -> None:
    # Codes that all collide cannot be read back in ranges, so with many inputs every group of pieces meets every other.
    keys = random.Random(seed).choice(["integer", "text", "colliding"] if inputs < 4 else ["integer", "text"])
    drive_example(Case(seed, inputs, window=window, flushing=flushing, share=share, keys=keys), tmp_path_factory)


@settings(max_examples=EXAMPLES)
@given(seed=SEEDS, inputs=st.integers(2, 6), window=WINDOWS, share=SHARES)
def test_oracle_inner_joins_of_random_graphs(
    tmp_path_factory: pytest.TempPathFactory, seed: int, inputs: int, window: str | None, share: int
) -> None:
    # Without a common attribute there is one domain, whose groups of pieces all meet each other.
    share = share if inputs < 4 else 1
    case = Case(seed, inputs, graph="random", window=window, share=share, flushing="random")
    assume_graph(case)
    drive_example(case, tmp_path_factory)


@settings(max_examples=EXAMPLES)
@given(seed=SEEDS, inputs=st.integers(3, 6), window=WINDOWS, plan=st.sampled_from(["auto", "binary"]))
def test_oracle_trees_of_random_graphs(
    tmp_path_factory: pytest.TempPathFactory, seed: int, inputs: int, window: str | None, plan: str
) -> None:
    flushing = "coordinated" if plan == "auto" else "random"
    case = Case(seed, inputs, graph="random", window=window, share=2, flushing=flushing, plan=plan)
    assume_graph(case)
    drive_example(case, tmp_path_factory)


@settings(max_examples=EXAMPLES)
@given(
    seed=SEEDS,
    how=st.sampled_from(["left", "right", "full", "semi", "anti"]),
    window=WINDOWS,
    flushing=FLUSHING,
    share=SHARES,
)
def test_oracle_outer_semi_and_anti_joins(
    tmp_path_factory: pytest.TempPathFactory, seed: int, how: str, window: str | None, flushing: str, share: int
) -> None:
    inputs = random.Random(seed).choice([2, 3, 4]) if how == "left" else 2
    case = Case(seed, inputs, how=how, window=window, flushing=flushing, share=share)
    drive_example(case, tmp_path_factory)


@settings(max_examples=EXAMPLES)
@given(seed=SEEDS, inputs=st.integers(2, 5), bounds=st.booleans(), flushing=FLUSHING, share=SHARES)
def test_oracle_conditions_and_bounds_of_pairs_on_one_attribute(
    tmp_path_factory: pytest.TempPathFactory, seed: int, inputs: int, bounds: bool, flushing: str, share: int
) -> None:
    window = "time" if bounds else random.Random(seed).choice([None, "time", "tuples"])
    case = Case(seed, inputs, window=window, flushing=flushing, share=share, bounds=bounds, residuals=seed % 3 > 0)
    drive_example(case, tmp_path_factory)


@settings(max_examples=EXAMPLES)
@given(seed=SEEDS, inputs=st.integers(3, 5), bounds=st.booleans(), plan=st.sampled_from(["auto", "binary", None]))
def test_oracle_conditions_and_bounds_of_pairs_in_random_graphs(
    tmp_path_factory: pytest.TempPathFactory, seed: int, inputs: int, bounds: bool, plan: str | None
) -> None:
    options: dict[str, Any] = {"window": "time" if bounds else "tuples", "bounds": bounds, "residuals": seed % 3 > 0}
    flushing = "coordinated" if plan == "auto" else "random"
    case = Case(seed, inputs, graph="random", share=1, flushing=flushing, plan=plan, **options)
    assume_graph(case)
    drive_example(case, tmp_path_factory)


@settings(max_examples=EXAMPLES)
@given(
    seed=SEEDS,
    how=st.sampled_from(["left", "right", "full", "semi", "anti"]),
    bounds=st.booleans(),
    flushing=FLUSHING,
)
def test_oracle_conditions_and_bounds_of_outer_semi_and_anti_joins(
    tmp_path_factory: pytest.TempPathFactory, seed: int, how: str, bounds: bool, flushing: str
) -> None:
    inputs = random.Random(seed).choice([2, 3]) if how == "left" else 2
    window = "time" if bounds else random.Random(seed).choice([None, "time", "tuples"])
    case = Case(seed, inputs, how=how, window=window, flushing=flushing, share=1, bounds=bounds, residuals=seed % 3 > 0)
    drive_example(case, tmp_path_factory)


@pytest.mark.parametrize("flushing", ["coordinated", "random"])
def test_oracle_everything_spills_at_a_tenth_of_the_state(tmp_path: Path, flushing: str) -> None:
    join = drive(Case(20031, 2, flushing=flushing, delay=120), tmp_path)
    assert join.metrics.flushed_rows > 200
    assert join.metrics.catch_ups > 0
    assert join.metrics.spilled_bytes > 5 * join.spec.budget.total_bytes
