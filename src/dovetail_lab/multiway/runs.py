"""Runs of multi-way joins: plans with the same arrivals, with results and CPU time recorded along the way."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dovetail.core.errors import InternalError
from dovetail.joins.multiway import MJoinTree, TupleWindow, mjoin_spec
from dovetail.joins.multiway.planner import ForcedPlan, plan_multiway
from dovetail.joins.multiway.spec import Flushing
from dovetail_lab.experiment import Series
from dovetail_lab.workloads import arrival_slices

__all__ = [
    "PAPER",
    "Curve",
    "Inputs",
    "JoinPlan",
    "check_same_results",
    "cpu_series",
    "numbered",
    "run_plan",
    "warm_up",
]

PAPER = "multi-way MJoin (2003)"


@dataclass(frozen=True)
class Inputs:
    """Streams, the arrival times of their tuples, and their join columns."""

    tables: Mapping[str, pa.Table]
    times: Mapping[str, NDArray[np.float64]]
    on: Any
    slice_ms: float

    def batches(self) -> dict[str, pa.RecordBatch]:
        """Each stream as one batch, to slice arrivals from."""
        return {name: table.combine_chunks().to_batches()[0] for name, table in self.tables.items()}

    @property
    def tuples(self) -> int:
        """The total number of tuples."""
        return sum(table.num_rows for table in self.tables.values())

    @property
    def seconds(self) -> float:
        """The time until the last tuple has arrived."""
        return max(float(times[-1]) for times in self.times.values()) / 1000


@dataclass(frozen=True)
class JoinPlan:
    """A plan to compare: one MJoin or a tree, with its memory division and spill policy."""

    name: str
    tree: ForcedPlan = "single"
    budget_bytes: int = 1 << 30
    flushing: Flushing = "random"
    spills: bool = False
    window: int | None = None
    sequences: Mapping[str, Sequence[str]] | None = None


@dataclass
class Curve:
    """Results and CPU time of a plan over its run; with a clean-up, the last point is after it."""

    name: str
    moments_s: list[float] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    points_while_arriving: int = 0

    def note(self, moment_s: float, results: int, cpu_s: float) -> None:
        """Add a point."""
        self.moments_s.append(moment_s)
        self.results.append(results)
        self.cpu_s.append(cpu_s)


def run_plan(inputs: Inputs, plan: JoinPlan, points: int = 40, *, seed: int = 0, drains: bool = True) -> Curve:
    """Feed the arrivals to a plan; record points at equal intervals of stream time, and one after the clean-up.

    ``drains`` is whether to run the clean-up, the disk-to-disk stage, at the end; it may have many results.
    """
    schemas = {name: table.schema for name, table in inputs.tables.items()}
    curve, results, cpu_s = Curve(plan.name), 0, 0.0
    step_s = inputs.seconds / points
    with tempfile.TemporaryDirectory(prefix="dovetail-lab-") as directory:
        spec = mjoin_spec(
            schemas,
            on=inputs.on,
            budget=plan.budget_bytes,
            spill_directory=directory if plan.spills else None,
            flushing=plan.flushing,
            window=None if plan.window is None else TupleWindow(plan.window),
            sequences=None if plan.sequences is None else {name: list(s) for name, s in plan.sequences.items()},
            seed=seed,
        )
        join = MJoinTree(spec, plan_multiway(spec.graph, force=plan.tree))
        batches = inputs.batches()
        for moment_ms, name, first, last in arrival_slices(inputs.times, inputs.slice_ms):
            while len(curve.results) < points - 1 and moment_ms / 1000 > (len(curve.results) + 1) * step_s:
                curve.note((len(curve.results) + 1) * step_s, results, cpu_s)
            rows = batches[name].slice(first, last - first)
            started = time.process_time()
            for batch in join.offer(name, rows):
                results += batch.num_rows
            cpu_s += time.process_time() - started
        curve.note(inputs.seconds, results, cpu_s)
        curve.points_while_arriving = len(curve.results)
        if drains:
            for name in inputs.tables:
                join.finish(name)
            started = time.process_time()
            for batch in join.drain():
                results += batch.num_rows
            cpu_s += time.process_time() - started
            curve.note(inputs.seconds, results, cpu_s)
        metrics = join.metrics
        curve.counters = {
            "inserts": metrics.inserts,
            "probes": metrics.probes,
            "comparisons": metrics.comparisons,
            "spilled_bytes": metrics.spilled_bytes,
            "results": results,
        }
    return curve


def warm_up(inputs: Inputs, plans: Sequence[JoinPlan]) -> None:
    """Run every plan over the first tenth of the arrivals: it compiles, and memory and caches are as in later runs."""
    counts = {name: max(1, table.num_rows // 10) for name, table in inputs.tables.items()}
    tables = {name: table.slice(0, counts[name]) for name, table in inputs.tables.items()}
    times = {name: inputs.times[name][: counts[name]] for name in tables}
    for plan in plans:
        run_plan(Inputs(tables, times, inputs.on, inputs.slice_ms), plan)


def numbered(table: pa.Table, name: str) -> pa.Table:
    """Add a column that identifies tuples, with a name that no other stream has."""
    return table.append_column(f"n_{name}", pa.array(np.arange(table.num_rows)))


def check_same_results(curves: Sequence[Curve]) -> None:
    """Check that every plan and every run has the same final number of results."""
    totals = {curve.name: curve.results[-1] for curve in curves}
    if len(set(totals.values())) > 1:
        raise InternalError(f"Plans of the same join have different numbers of results: {totals}.")


def cpu_series(name: str, curves: Sequence[Curve]) -> Series:
    """CPU seconds over results, with the spread of the runs; points without new results are left out."""
    kept = [i for i, n in enumerate(curves[0].results) if n and (i == 0 or n > curves[0].results[i - 1])]
    return Series.of_repeats(
        name, [curves[0].results[i] for i in kept], [[curve.cpu_s[i] for curve in curves] for i in kept]
    )
