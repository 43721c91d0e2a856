"""SSBJ, figure 5 a, b, c and f: service rates, and the contribution of the cache."""

from functools import partial
from itertools import pairwise

from dovetail.core.memory import Budget
from dovetail_lab.experiment import Axis, Context, Measured, Panel, Series, Verdict
from dovetail_lab.semi_stream import (
    DISK_TITLES,
    MEMORY_PERCENT,
    SERVICE_RATE,
    Point,
    rate_series,
    service_rates,
    spread_text,
    unpaced,
)
from dovetail_lab.ssbj.common import (
    BOTH,
    DISKS,
    MESH,
    PAPER_DAY,
    SMALLER,
    SSBJ,
    optimum,
    points_of,
    repeated,
    rows_of,
    stream_of,
)


def by_memory(context: Context) -> Measured:
    rows, budgets = rows_of(context), context.pick((1.0, 10.0), (1.0, 5.0, 10.0))
    points = points_of(context, rows, budgets)
    context.begin(len(points) * 2)
    panels = []
    for disk_name in DISKS:
        taken = service_rates(context, points, BOTH, disk_name, unpaced)
        panels.append(Panel(DISK_TITLES[disk_name], MEMORY_PERCENT, SERVICE_RATE, rate_series(points, taken)))
    most_allowed = [optimum(point) for point in points]
    return Measured(tuple(panels), {"rows": rows, "zipf_exponent": 1.0, "most_allowed": most_allowed})


def judge_by_memory(measured: Measured) -> Verdict:
    gains, real = (panel.ratios(SSBJ, MESH) for panel in measured.panels)
    allowed = measured.parameters["most_allowed"]
    return Verdict.of(
        shape=min(gains) > 1.2 and gains[-1] > gains[0],
        factor=min(gains) >= 6,
        numbers=f"SSBJ / MESHJOIN {gains[0]:.2f} at the least memory, {gains[-1]:.2f} at the most (paper: 7 and 8); on "
        f"the real disk {spread_text(real, '{:.2f}')}",
        explanation=SMALLER + f"The memory model allows at most {allowed[0]:.2f} and {allowed[-1]:.2f}: with a cache "
        "that takes the share a of the memory and answers the share h of the stream the gain is (1 - a) / (1 - h), and "
        "no a gives 7 at exponent 1.",
    )


def by_rows(context: Context) -> Measured:
    sizes = context.pick((200_000, 400_000), (350_000, 1_000_000, 1_750_000))
    budget = Budget(int(sizes[-1] * 120 * 0.1))
    points = [
        Point(rows / 1e6, repeated(context, rows), budget, partial(stream_of, context, rows, 1.0)) for rows in sizes
    ]
    taken = service_rates(context, points, BOTH, "simulated", unpaced)
    panel = Panel(PAPER_DAY, Axis("Size of R", "million rows"), SERVICE_RATE, rate_series(points, taken))
    allowed = [optimum(point) for point in points]
    return Measured((panel,), {"memory_bytes": budget.total_bytes, "zipf_exponent": 1.0, "most_allowed": allowed})


def judge_by_rows(measured: Measured) -> Verdict:
    gains = measured.panels[0].ratios(SSBJ, MESH)
    allowed = measured.parameters["most_allowed"]
    return Verdict.of(
        shape=min(gains) > 1.2 and gains[-1] < gains[0],
        factor=min(gains) >= 5,
        numbers=f"SSBJ / MESHJOIN {gains[0]:.2f} with the smallest R, {gains[-1]:.2f} with the largest (paper: 7 and "
        "5.7)",
        explanation=f"The memory model allows {allowed[0]:.2f} and {allowed[-1]:.2f}. "
        "With a fixed memory a larger R leaves a smaller share of it to the cache.",
    )


def by_skew(context: Context) -> Measured:
    rows, exponents = rows_of(context), context.pick((0.0, 1.0), (0.0, 0.5, 0.75, 1.0))
    points = [points_of(context, rows, (10.0,), exponent, (exponent,))[0] for exponent in exponents]
    context.begin(len(points) * 2)
    panels = []
    for disk_name in DISKS:
        taken = service_rates(context, points, BOTH, disk_name, unpaced)
        x = Axis("Zipf exponent of the stream")
        panels.append(Panel(DISK_TITLES[disk_name], x, SERVICE_RATE, rate_series(points, taken)))
    allowed = [optimum(point) for point in points]
    return Measured(tuple(panels), {"rows": rows, "memory_percent": 10.0, "most_allowed": allowed})


def judge_by_skew(measured: Measured) -> Verdict:
    panel = measured.panels[0]
    gains, places = panel.ratios(SSBJ, MESH), panel.of(MESH).x
    allowed = measured.parameters["most_allowed"]
    each = ", ".join(f"{gain:.2f} at {x}" for x, gain in zip(places, gains, strict=True))
    most_of_each = ", ".join(f"{gain:.2f} at {x}" for x, gain in zip(places, allowed, strict=True))
    return Verdict.of(
        shape=min(gains[1:]) > 1 and gains[-1] == max(gains) and gains[-1] > 1.5,
        factor=gains[-1] >= 6,
        numbers=f"SSBJ / MESHJOIN {each} (paper: about 1 at 0 and 8 at 1)",
        explanation=f"By the paper's own memory model the gain is at most {most_of_each}: with a slight skew hardly "
        "any join value has more bytes waiting than its rows take. There the cache gains nothing, but it takes "
        "its part of the memory: SSBJ's window is 25 % smaller, and so is what it serves.",
    )


def cache_role(context: Context) -> Measured:
    rows, budgets = rows_of(context), context.pick((1.0, 10.0), (1.0, 3.0, 5.0, 7.0, 10.0))
    points = points_of(context, rows, budgets)
    taken = service_rates(context, points, ("balanced",), "simulated", unpaced)["balanced"]
    shares = [[100 * rate.cache_share for rate in rates] for rates in taken]
    series = (Series.of_repeats("through the cache", list(budgets), shares),)
    panel = Panel(PAPER_DAY, MEMORY_PERCENT, Axis("Stream tuples answered by the cache", "%"), series)
    return Measured((panel,), {"rows": rows, "zipf_exponent": 1.0})


def judge_cache_role(measured: Measured) -> Verdict:
    shares = measured.panels[0].series[0].y
    is_growing = all(b >= a - 1 for a, b in pairwise(shares))
    steps = [b - a for a, b in pairwise(shares)]
    return Verdict.of(
        shape=is_growing and shares[-1] > shares[0] and (len(steps) < 2 or steps[-1] < steps[0]),
        factor=abs(shares[0] - 39) <= 10 and abs(shares[-1] - 54) <= 10,
        numbers=f"{shares[0]:.0f} % of the tuples at the least memory, {shares[-1]:.0f} % at the most (paper: 39 and "
        "54)",
        explanation="More than in the paper, although R has fewer rows here: by Zipf's law a hundredth of a million "
        "rows "
        "has 68 % of the stream, a hundredth of the paper's 100 million has 76 %, so a smaller R explains a smaller "
        "share, not a larger one. Tuples whose value has no row are answered by negative entries, and count here; the "
        "paper does not say whether it has such tuples.",
    )
