"""Outer joins as SQL cascades them, against nested loops in plain Python: random graphs, types, windows and restarts.

An example has 2 to 8 inputs with random rows (NULL keys and times, hot keys, late rows), a random join type for each
input after the first, a join graph (one key, or a random tree of equalities), a window or bounds between event times,
conditions, a budget of which most must spill, and a schedule of offers, steps, watermarks and restarts. Everything
follows from one seed, which a failure prints.
"""

import operator
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from dovetail.core.errors import PlanError
from dovetail.joins.conditions import Comparison
from dovetail.joins.multiway import MJoinTree, PairCondition, TimeBound, TimeWindow, TupleWindow, mjoin_spec
from dovetail.joins.multiway.planner import plan_multiway
from dovetail.testing.cascade_oracle import cascade_oracle
from dovetail.testing.held import held_array_bytes
from dovetail.testing.rows import assert_same_rows, rows_of
from dovetail.testing.snapshots import through_storage

NAMES = "abcdefgh"
TYPES = ["inner", "left", "right", "full", "semi", "anti"]
SIGNS = {"<": operator.lt, ">=": operator.ge, "!=": operator.ne}
EXAMPLES = max(2, settings().max_examples // 6)
Row = dict[str, Any]


class Case:
    """A cascade and how it is driven; all of it follows from the seed."""

    def __init__(self, seed: int, inputs: int, graph: str, window: str | None, spills: bool) -> None:
        self.chance = random.Random(seed)
        self.names = list(NAMES[:inputs])
        self.window, self.spills = window, spills
        self.how = {name: self.chance.choice(TYPES) for name in self.names[1:]}
        self.keys = 1 if graph == "star" else 2
        self.schemas = {
            n: pa.schema(
                [(f"{n}{c}", pa.int64()) for c in range(self.keys)]
                + [(f"t{n}", pa.int64()), (f"v{n}", pa.int64()), (n, pa.string())]
            )
            for n in self.names
        }
        self.equalities = []
        for place, name in enumerate(self.names[1:], 1):
            other = self.names[0] if graph == "star" else self.chance.choice(self._carried(place))
            column = 0 if graph == "star" else self.chance.randrange(self.keys)
            self.equalities.append(((other, f"{other}{column}"), (name, f"{name}{0 if graph == 'star' else column}")))
        self.tests: list[Any] = []
        self.conditions = self._conditions() if self.chance.random() < 0.4 else []
        self.bounds = self._bounds() if window == "bounds" else []
        self.width = {"time": 12, "tuples": 30}.get(window or "")

    def _carried(self, place: int) -> list[str]:
        return [n for n in self.names[:place] if self.how.get(n) not in ("semi", "anti")]

    def _conditions(self) -> list[PairCondition]:
        place = self.chance.randrange(1, len(self.names))
        left, right, sign = self.chance.choice(self._carried(place)), self.names[place], self.chance.choice(list(SIGNS))
        ours, theirs = f"v{left}", f"v{right}"
        self.tests.append(
            (left, right, lambda x, y: None not in (x[ours], y[theirs]) and SIGNS[sign](x[ours], y[theirs]))
        )
        return [PairCondition(left, right, Comparison(ours, sign, theirs))]  # type: ignore[arg-type]

    def _bounds(self) -> list[TimeBound]:
        """Every input is bounded, on both sides, with one before it; some with a second one."""
        found = []
        for place, right in enumerate(self.names[1:], 1):
            carried = self._carried(place)
            for left in self.chance.sample(carried, min(len(carried), self.chance.choice([1, 1, 2]))):
                low = self.chance.randint(-8, 2)
                high = low + self.chance.randint(4, 12)
                found.append(TimeBound(left, right, low, high))

                def test(x: Row, y: Row, ours: str = f"t{left}", theirs: str = f"t{right}", low: int = low,
                         high: int = high) -> bool:  # fmt: skip
                    return None not in (x[ours], y[theirs]) and low <= y[theirs] - x[ours] <= high

                self.tests.append((left, right, test))
        return found

    def make(self, directory: Path) -> MJoinTree:
        window: Any = None
        if self.window == "tuples":
            window = TupleWindow(self.width or 0)
        elif self.window is not None:
            columns = {name: f"t{name}" for name in self.names}
            window = TimeWindow(self.width, columns, bounds=self.bounds)
        spec = mjoin_spec(
            self.schemas,
            [(f"{a}.{x}", f"{b}.{y}") for (a, x), (b, y) in self.equalities],
            how=self.how,  # type: ignore[arg-type]
            window=window,
            conditions=self.conditions,
            budget=(56_000 if self.spills else 2_000_000) * max(1, len(self.names) - 1),
            spill_directory=directory,
            partitions=4,
            flushing=self.chance.choice(["coordinated", "random"]),
            max_delay=self.chance.choice([None, 9]),
        )
        return MJoinTree(spec, plan_multiway(spec.graph, how=self.how))  # type: ignore[arg-type]

    def row(self, name: str, moment: int, number: int) -> Row:
        chance = self.chance
        values = 12 if self.window is None else 6
        keys = {
            f"{name}{c}": None if chance.random() < 0.05 else 0 if chance.random() < 0.1 else chance.randrange(values)
            for c in range(self.keys)
        }
        time = None if chance.random() < 0.05 else moment - chance.randint(0, 6)
        # A row of the last join has all labels, and must fit a small part of the budget.
        label = f"{number}" + ("x" * (3600 // max(4, len(self.names))) if self.spills else "")
        return keys | {f"t{name}": time, f"v{name}": chance.choice([None, *range(6)]), name: label}


def drive(case: Case, directory: Path) -> MJoinTree:
    """Run a case, and compare what comes out, whenever it does, with the oracle."""
    join, chance, restarts = case.make(directory / "0"), case.chance, 0
    data: dict[str, list[Row]] = {name: [] for name in case.names}
    out: list[Row] = []
    moment, number, watermark = 0, 0, None
    by_time = case.window in ("time", "bounds")

    def collect(batches: Any) -> None:
        out.extend(rows_of(batches))
        assert join.size() <= join.spec.budget.total_bytes
        assert held_array_bytes(join, exclude=[join.spec]) <= join.size()

    # Nested loops over what cascades multiply: few rows per input where there are many inputs.
    most = {2: 120, 3: 100, 4: 80}.get(len(case.names), 70)
    while number < most:
        name, rows = chance.choice(case.names), []
        for _ in range(chance.randint(0, 6)):
            moment += chance.choice([0, 1, 1, 2])
            row = case.row(name, moment, number)
            time = row[f"t{name}"]
            if not (by_time and watermark is not None and time is not None and time < watermark):
                data[name].append(row | {"place": number})
            rows.append(row)
            number += 1
        collect(join.offer(name, pa.RecordBatch.from_pylist(rows, schema=case.schemas[name])))
        join.set_time(moment)
        collect(join.step(idle=chance.random() < 0.2))
        if by_time and chance.random() < 0.5:
            watermark = max(watermark or -100, moment - 7)
            collect(join.advance(watermark))
        if chance.random() < 0.1:
            collect(join.drain())
        if chance.random() < 0.1:
            restarts += 1
            saved = through_storage(join.snapshot())
            join = case.make(directory / str(restarts))
            join.restore(saved)
    for name in case.names:
        join.finish(name)
    collect(join.drain())
    assert sum(join.state_rows().values()) == 0
    times = None
    if case.window is not None:
        times = {name: "place" if case.window == "tuples" else f"t{name}" for name in case.names}
    shown = {name: [*case.schemas[name].names, "place"] for name in case.names}
    expected = cascade_oracle(data, case.equalities, case.how, times, case.width, shown, case.tests)  # type: ignore[arg-type]
    order = join.output_schema.names
    assert_same_rows(out, [{c: row[c] for c in order} for row in expected], context=f"{case.how} {case.equalities}")
    return join


@settings(max_examples=EXAMPLES)
@given(
    seed=st.integers(0, 2**32),
    inputs=st.integers(2, 8),
    graph=st.sampled_from(["star", "tree"]),
    window=st.sampled_from([None, "time", "time", "bounds", "tuples"]),
    spills=st.booleans(),
)
def test_oracle_cascades_of_joins(
    tmp_path_factory: pytest.TempPathFactory, seed: int, inputs: int, graph: str, window: str | None, spills: bool
) -> None:
    note(f"seed {seed}")
    case = Case(seed, inputs, graph, window, spills)
    directory = tmp_path_factory.mktemp("spill")
    try:
        case.make(directory)
    except PlanError as error:
        # Random bounds may contradict each other, which is refused.
        assume("No rows can satisfy the bounds" not in str(error))
        raise
    drive(case, directory)
