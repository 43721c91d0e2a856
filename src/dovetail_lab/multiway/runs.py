"""Runs of multi-way joins: plans fed by the same arrivals, with results and CPU time noted on the way."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dovetail.errors import InternalError
from dovetail.lab.experiment import Series
from dovetail.model.multiway import ForcedPlan, plan_multiway
from dovetail.operators.mjoin import MJoinTree, TupleWindow, mjoin_spec
from dovetail.operators.mjoin.spec import Flushing
from dovetail.workloads import arrival_slices

__all__ = ["PAPER", "Curve", "Inputs", "JoinPlan", "check_same_results", "cpu_series", "numbered", "run_plan"]

PAPER = "multi-way MJoin (2003)"


@dataclass(frozen=True)
class Inputs:
    """Streams, when their tuples arrive, and what they are joined on."""

    tables: Mapping[str, pa.Table]
    times: Mapping[str, NDArray[np.float64]]
    on: Any
    slice_ms: float

    def batches(self) -> dict[str, pa.RecordBatch]:
        """Each stream in one piece, to cut arrivals from."""
        return {name: table.combine_chunks().to_batches()[0] for name, table in self.tables.items()}

    @property
    def tuples(self) -> int:
        """Of all streams."""
        return sum(table.num_rows for table in self.tables.values())

    @property
    def seconds(self) -> float:
        """Until the last tuple has arrived."""
        return max(float(times[-1]) for times in self.times.values()) / 1000


@dataclass(frozen=True)
class JoinPlan:
    """A plan to compare: one MJoin or a tree, and how it divides and spills its memory."""

    name: str
    tree: ForcedPlan = "single"
    budget_bytes: int = 1 << 30
    flushing: Flushing = "random"
    spills: bool = False
    window: int | None = None
    sequences: Mapping[str, Sequence[str]] | None = None


@dataclass
class Curve:
    """What a plan had given and taken at moments of its run; with a clean-up, the last is after it."""

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
    """Feed the arrivals to a plan; a point is noted at equal steps of the streams' time, and one after the clean-up.

    Parameters
    ----------
    drains
        Whether to do the clean-up, the disk-to-disk stage, at the end; its results may be many.
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


def numbered(table: pa.Table, name: str) -> pa.Table:
    """The table with a column that tells its tuples apart, under a name that no other stream has."""
    return table.append_column(f"n_{name}", pa.array(np.arange(table.num_rows)))


def check_same_results(curves: Sequence[Curve]) -> None:
    """Every plan and every run must give the same number of results in the end."""
    totals = {curve.name: curve.results[-1] for curve in curves}
    if len(set(totals.values())) > 1:
        raise InternalError(f"Plans of the same join gave different numbers of results: {totals}.")


def cpu_series(name: str, curves: Sequence[Curve]) -> Series:
    """CPU seconds over results, with the spread of the runs; points at which nothing new had come are left out."""
    kept = [i for i, n in enumerate(curves[0].results) if n and (i == 0 or n > curves[0].results[i - 1])]
    return Series.of_repeats(
        name, [curves[0].results[i] for i in kept], [[curve.cpu_s[i] for curve in curves] for i in kept]
    )
