"""SSBJ, figure 6: switching factor, disk buffer, and the cost model."""

from functools import partial

import numpy as np

from dovetail.costs import BalancedModel, MeshModel
from dovetail.joins import BalancedJoin, SemiStreamOperator, join_spec
from dovetail_lab.experiment import Axis, Context, Measured, Panel, Series, Verdict
from dovetail_lab.measure import Rate, tuned_block_rows
from dovetail_lab.semi_stream import (
    MEMORY_PERCENT,
    NAMES,
    SERVICE_RATE,
    Point,
    most,
    rate_series,
    service_rates,
    unpaced,
)
from dovetail_lab.ssbj.common import BOTH, MESH, PAPER_DAY, SSBJ, points_of, repeated, rows_of, stream_of
from dovetail_lab.subjects import DiskUnderTest, Stream


def switching(context: Context) -> Measured:
    rows, percent = rows_of(context), context.pick(5.0, 1.0)
    factors = context.pick((0.5, 1.0, 4.0), (0.25, 0.5, 1.0, 2.0, 4.0))
    subject = repeated(context, rows)
    points = [Point(f, subject, subject.budget(percent), partial(stream_of, context, rows, 1.0)) for f in factors]

    def build(point: Point, kind: str, disk: DiskUnderTest, stream: Stream) -> SemiStreamOperator:
        block_rows = tuned_block_rows(point.subject, kind, disk, point.budget, stream)
        spec = join_spec(
            subject.relation, subject.stream_schema, budget=point.budget, block_rows=block_rows, io=disk.io
        )
        return BalancedJoin(spec, switching_factor=float(point.x))

    taken = service_rates(context, points, ("balanced",), "simulated", build)
    x = Axis("Switching factor", "", "log")
    panel = Panel(PAPER_DAY, x, SERVICE_RATE, rate_series(points, taken))
    return Measured((panel,), {"rows": rows, "memory_percent": percent, "zipf_exponent": 1.0})


def judge_switching(measured: Measured) -> Verdict:
    series = measured.panels[0].of(SSBJ)
    at_one, best = series.at(1.0), most(series.x, series.y)
    others = {x: y / at_one for x, y in zip(series.x, series.y, strict=True) if x != 1.0}
    least_harm = max(others, key=lambda x: others[x])
    return Verdict.of_halves(
        {
            "best at 1": "confirmed" if at_one >= 0.97 * max(series.y) else "not confirmed",
            "markedly worse elsewhere": "confirmed" if others[least_harm] <= 0.9 else "not confirmed",
        },
        numbers=f"best at {best}; factor 1 serves {at_one / max(series.y):.0%} of that; factor {least_harm} serves "
        f"{others[least_harm]:.0%} of factor 1, the worst factor {min(others.values()):.0%}",
        explanation="Around its optimum the gain (1 - a) / (1 - h) is flat: a value that is on the border of the "
        "inequality is worth nothing either way, so that a factor near 1 hardly costs anything.",
    )


def buffer(context: Context) -> Measured:
    rows, percent = rows_of(context), context.pick(5.0, 1.0)
    shares = context.pick((0.005, 0.05, 0.5), (0.005, 0.03, 0.1, 0.3, 0.7))
    subject = repeated(context, rows)
    budget = subject.budget(percent)
    stream = partial(stream_of, context, rows, 1.0)
    sizes = [max(1, int(share * budget.total_bytes / subject.row_bytes)) for share in shares]
    points = [Point(size * subject.row_bytes / 1e6, subject, budget, stream, size) for size in sizes]
    taken = service_rates(context, points, ("balanced",), "simulated", unpaced)["balanced"]
    rates = [[rate.tuples_per_s * (1 - rate.cache_share) for rate in every] for every in taken]
    series = (Series.of_repeats("SSBJ, disk phase", [point.x for point in points], rates),)
    y = Axis("Service rate of the disk phase", "tuples/s")
    panel = Panel(PAPER_DAY, Axis("Disk buffer", "MB", "log"), y, series)
    return Measured((panel,), {"rows": rows, "memory_percent": percent, "zipf_exponent": 1.0})


def judge_buffer(measured: Measured) -> Verdict:
    series = measured.panels[0].series[0]
    best = int(np.argmax(series.y))
    return Verdict.of(
        shape=0 < best < len(series.y) - 1,
        numbers=f"best at {series.x[best]:.3g} MB; the smallest buffer serves {series.y[0] / max(series.y):.0%} of "
        f"that, the largest {series.y[-1] / max(series.y):.0%}",
        explanation=""
        if 0 < best < len(series.y) - 1
        else "A scan goes on where it stopped, so that a small buffer costs no seek here; in the paper every buffer is "
        "a query to a database.",
    )


def cost(context: Context, exponent: float) -> Measured:
    rows, budgets = rows_of(context), context.pick((2.5, 10.0), (1.0, 5.0, 10.0))
    points = points_of(context, rows, budgets, exponent)
    made: list[SemiStreamOperator] = []

    def build(point: Point, kind: str, disk: DiskUnderTest, stream: Stream) -> SemiStreamOperator:
        made.append(unpaced(point, kind, disk, stream))
        return made[-1]

    taken = service_rates(context, points, BOTH, "simulated", build)
    measured = {kind: [[rate.loop_s * 1e3 for rate in rates] for rates in every] for kind, every in taken.items()}
    predicted: dict[str, list[float]] = {kind: [] for kind in BOTH}
    for number, point in enumerate(points):
        factors = point.subject.factors_for(DiskUnderTest("simulated"))
        profile = point.subject.profile(point.stream())
        for offset, kind in enumerate(BOTH):
            rate: Rate = taken[kind][number][-1]
            waiting = rate.window_tuples / profile.blocks(rate.block_rows)
            if kind == "mesh":
                loop = MeshModel(profile, factors).loop(rate.block_rows, waiting)
            else:
                cached = getattr(made[2 * number + offset], "cache").num_rows  # noqa: B009 -- only this one has it
                loop = BalancedModel(profile, factors).loop(rate.block_rows, cached, waiting)
            predicted[kind].append(loop.seconds * 1e3)
    series = []
    for kind in BOTH:
        series.append(Series.of_repeats(f"{NAMES[kind]}, measured", list(budgets), measured[kind]))
        series.append(Series(f"{NAMES[kind]}, predicted", tuple(budgets), tuple(predicted[kind])))
    panel = Panel(PAPER_DAY, MEMORY_PERCENT, Axis("Cost of an iteration, c_loop", "ms"), tuple(series))
    return Measured((panel,), {"rows": rows, "zipf_exponent": exponent})


def judge_cost(measured: Measured) -> Verdict:
    panel = measured.panels[0]
    errors = {
        name: max(abs(ratio - 1) for ratio in panel.ratios(f"{name}, predicted", f"{name}, measured"))
        for name in (MESH, SSBJ)
    }
    return Verdict.of(
        shape=max(errors.values()) <= 0.25,
        factor=max(errors.values()) <= 0.15,
        numbers="predicted within " + ", ".join(f"{error:.0%} ({name})" for name, error in errors.items()),
        explanation=""
        if max(errors.values()) <= 0.15
        else "The model counts an iteration's disk read and its tuples. Where the cache answers most of the stream, "
        "the CPU's part, the answers themselves, is most of an iteration, and depends on how busy the processor's "
        "caches are.",
    )
