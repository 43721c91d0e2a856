"""Sections ``balanced`` and ``nomatch``: what a cache of join values gains and holds, what unmatched tuples cost."""

import ctypes
import gc
import multiprocessing
from pathlib import Path

import pyarrow as pa

from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.costs import optimal_cache_share, tune
from dovetail.joins import OPERATORS, join_spec
from dovetail_lab.measure import Measurement, Rate, consume, make_operator, measure_by_turns, rates_of
from dovetail_lab.subjects import OFFERED_TUPLES, DiskUnderTest
from operator_bench.harness import Data, Report, Sizes

_BUDGETS = (1.0, 5.0, 10.0)
# What the SSBJ paper reports over MESHJOIN; more than its own memory model allows, see docs/design/cache.md.
_PAPER_GAIN = "7-8"
_RATES = (50_000, 100_000)
_SETTLING_SHARE = 40.0  # how much longer than it is measured the operator may take to fill its cache


def balanced_against_mesh(data: Data, report: Report) -> None:
    """SSBJ over MESHJOIN on the papers' disk, its memory for a rate, and what it really holds."""
    report.heading("balanced / mesh, simulated disk, exponent 1, shuffled (bar: 90 % of what the memory model allows)")
    profile = data.profile(data.stream(1.0, "shuffled"))
    assert profile.hit_curve is not None
    # A cached row takes the room of its entry beside its bytes, as a waiting tuple does; the ratio is what counts.
    for percent in data.sizes.of_budgets(_BUDGETS):
        budget_bytes = data.budget(percent).total_bytes
        _, optimum = optimal_cache_share(
            budget_bytes=budget_bytes, cache_entry_bytes=profile.cache_entry_bytes, hit_curve=profile.hit_curve
        )
        _, declared = optimal_cache_share(
            budget_bytes=budget_bytes, cache_entry_bytes=profile.relation_row_bytes, hit_curve=profile.hit_curve
        )
        mesh, balanced = _settled_rates(data, percent)
        gain = balanced.tuples_per_s / mesh.tuples_per_s
        report.add(
            "balanced",
            f"gain at {percent:g} %",
            gain,
            f">= {0.9 * optimum:.2f}",
            gain >= 0.9 * optimum,
            optimum=optimum,
            optimum_at_declared_bytes=declared,
            paper=_PAPER_GAIN,
            balanced_per_s=balanced.tuples_per_s,
            mesh_per_s=mesh.tuples_per_s,
        )
    _memory_for_a_rate(data, report)
    _memory_held(data, report)


def _settled_rates(data: Data, percent: float) -> list[Rate]:
    """Mesh and balanced, the latter after as many rounds as it takes to fill its cache, however long that takes.

    Both choose themselves how many tuples enter together, and are measured over whole cycles: a w of a few tuples would
    make every step of balanced, which answers most of them at once, a step for a handful.
    """
    measurements = []
    for kind in ("mesh", "balanced"):
        stream, disk = data.stream(1.0, "shuffled"), DiskUnderTest("simulated")
        operator = make_operator(data, kind, disk, data.budget(percent), stream, is_paced=False)
        measurements.append(Measurement(operator, stream, disk))
    return measure_by_turns(measurements, data.sizes.max_seconds, warm_share=_SETTLING_SHARE)


def _memory_for_a_rate(data: Data, report: Report) -> None:
    report.heading("balanced, memory for a required rate, simulated disk, exponent 1 (bar: serves it with 1.1 times)")
    disk = DiskUnderTest("simulated")
    for rate in _RATES:
        stream = data.stream(1.0, "shuffled")
        try:
            plan = tune(
                "balanced",
                profile=data.profile(stream),
                factors=data.factors_for(disk),
                objective="memory",
                rate=rate,
            )
        except PlanError as error:
            print(f"  {rate:,} tuples/s: {error}")
            continue
        budget = Budget(int(1.1 * plan.total_bytes))
        spec = join_spec(data.relation, data.stream_schema, budget=budget, block_rows=plan.block_rows, io=disk.io)
        balanced = Measurement(OPERATORS["balanced"](spec), stream, disk)
        (measured,) = measure_by_turns([balanced], data.sizes.max_seconds, warm_share=_SETTLING_SHARE)
        report.add(
            "balanced",
            f"{rate:,} tuples/s with 1.1 x {plan.total_bytes:,} bytes",
            measured.tuples_per_s / rate,
            ">= 1",
            measured.tuples_per_s >= rate,
            served_per_s=measured.tuples_per_s,
        )


def _memory_held(data: Data, report: Report) -> None:
    report.heading("size() without the mapped block against the growth of the process (bar: within 10 %)")
    for kind in OPERATORS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            size, components, growth = pool.apply(_grow, (data.directory, data.sizes, kind))
        # A mapped block is pages of the file: accounted for, and not memory of the process's own.
        difference = abs(growth / (size - components["block"]) - 1)
        report.add(
            "balanced",
            f"{kind} at 10 %",
            difference,
            "<= 0.1, components exact",
            difference <= 0.1 and size == sum(components.values()),
            size=size,
            grown_by=growth,
            **components,
        )


def _grow(directory: Path, sizes: Sizes, kind: str) -> tuple[int, dict[str, int], int]:
    """In a process of its own: fill an operator, and compare what it says with what the process has."""
    data = Data(directory, sizes)
    # Everything is compiled and loaded by a small operator first.
    for percent in (1.0, 10.0):
        before = _resident_bytes()
        stream, budget = data.stream(1.0, "shuffled"), data.budget(percent)
        operator = OPERATORS[kind](join_spec(data.relation, data.stream_schema, budget=budget, io="map"))
        batch_rows = 512 if kind == "index_nested_loop" else OFFERED_TUPLES
        # Until the window was turned over twice: memory that was never written to is not there yet.
        while operator.metrics.tuples_left < 2 * operator.window_capacity or (
            kind == "index_nested_loop" and operator.size() < 0.8 * budget.total_bytes
        ):
            consume(operator.offer(stream.next(batch_rows)))
        growth = _resident_bytes() - before
        size, components = operator.size(), operator.sizes()
        del operator
    return size, components, growth


def _resident_bytes() -> int:
    """Memory of this process that is in use and not a mapped file."""
    gc.collect()
    # What allocators keep for the next allocation is not held by anybody.
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status does not tell RssAnon.")


def unmatched_against_matched(data: Data, report: Report) -> None:
    """The same stream with keys that lie between those of the relation."""
    report.heading("unmatched / matched stream, simulated disk, exponent 1, shuffled (bar: at least 1)")
    for kind in ("balanced", "auto"):
        for percent in data.sizes.of_budgets(_BUDGETS[1:]):
            runs = [(kind, data.stream(1.0, "shuffled", is_matched=is_matched)) for is_matched in (True, False)]
            budget, seconds = data.budget(percent), data.sizes.max_seconds
            matched, unmatched = rates_of(data, "simulated", budget, runs, seconds, _SETTLING_SHARE)
            ratio = unmatched.tuples_per_s / matched.tuples_per_s
            report.add(
                "nomatch",
                f"{kind} at {percent:g} %",
                ratio,
                ">= 1",
                ratio >= 1,
                unmatched_per_s=unmatched.tuples_per_s,
                matched_per_s=matched.tuples_per_s,
            )
