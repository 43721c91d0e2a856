"""HYBRIDJOIN, figures 3 and 6: which pages are read, and how much of them at once."""

import numpy as np

from dovetail.joins import OPERATORS, join_spec
from dovetail_lab.experiment import Axis, Context, Measured, Panel, Series, Verdict
from dovetail_lab.hybridjoin.common import HYBRID, PAGE_BYTES, PAPER_DAY, memory_of, ranked, rows_of
from dovetail_lab.semi_stream import (
    SERVICE_RATE,
    Bench,
    Point,
    rate_series,
    service_rates,
)
from dovetail_lab.subjects import PAPER_BANDWIDTH, PAPER_SEEK_S, DiskUnderTest
from dovetail_lab.waiting import PageUse


def page_use(context: Context) -> Measured:
    subject = Bench.of(context).synthetic(context.pick(400_000, 546_000))
    disk, stream = PageUse(PAPER_BANDWIDTH, PAPER_SEEK_S), ranked(subject)()
    budget = subject.budget(20.0)
    block_rows = subject.plan("hybrid", DiskUnderTest("simulated"), budget, stream).block_rows
    spec = join_spec(subject.relation, subject.stream_schema, budget=budget, block_rows=block_rows, io=disk)
    operator = OPERATORS["hybrid"](spec)
    rows_per_page = PAGE_BYTES / subject.row_bytes
    groups, pages = 16, int(subject.rows / rows_per_page)
    asked = np.zeros(groups)
    tuples = context.pick(400_000, 4_000_000)
    for _ in context.each(range(tuples // 8_192)):
        batch = stream.next()
        codes = batch.column("__code").to_numpy() // 2
        asked += np.bincount((codes - 1) * groups // subject.rows, minlength=groups)
        for _ in operator.offer(batch):
            pass
    read = disk.bytes_per_group(groups) / PAGE_BYTES
    pages_per_group = pages / groups
    places = tuple(round((group + 0.5) * pages_per_group) for group in range(groups))
    seconds = disk.elapsed_s
    series = (
        Series("asked for by the stream", places, tuple((asked / pages_per_group / seconds).tolist())),
        Series("read by HYBRIDJOIN", places, tuple((read / pages_per_group / seconds).tolist())),
    )
    y = Axis("Rate of use of a page", "1/s", "log")
    panel = Panel(PAPER_DAY, Axis("Location in R", "page of 4 kB"), y, series)
    return Measured((panel,), {"pages": pages, "tuples": tuples, "zipf_exponent": 1.0, "block_rows": block_rows})


def judge_page_use(measured: Measured) -> Verdict:
    panel = measured.panels[0]
    falls = {series.name: series.y[0] / series.y[-1] for series in panel.series}
    asked, read = (np.array(series.y) for series in panel.series)
    return Verdict.of(
        shape=bool((np.diff(asked) <= 0.05 * asked[:-1]).all()) and falls["read by HYBRIDJOIN"] > 1.2,
        numbers=f"the first sixteenth of R is asked for {falls['asked for by the stream']:.0f} times as often as the "
        f"last, and read {falls['read by HYBRIDJOIN']:.1f} times as often (lowest rate of reads {read.min():.2g}/s)",
        explanation="Reads fall less steeply than use: a block of hot pages answers many waiting tuples at once.",
    )


def buffer(context: Context) -> Measured:
    subject, budget = Bench.of(context).synthetic(rows_of(context)), memory_of(context)
    sizes = context.pick(
        (50_000, 1_000_000, 7_000_000), (60_000, 200_000, 600_000, 2_000_000, 6_000_000, 15_000_000, 30_000_000)
    )
    points = [
        Point(size / 1e3, subject, budget, ranked(subject), max(1, int(size / subject.row_bytes))) for size in sizes
    ]
    taken = service_rates(context, points, ("hybrid",), "simulated")
    x = Axis("Disk buffer", "kB", "log")
    costs = [[rate.loop_s * 1e3 for rate in rates] for rates in taken["hybrid"]]
    io = tuple(1e3 * (PAPER_SEEK_S + size / PAPER_BANDWIDTH) for size in sizes)
    places = tuple(point.x for point in points)
    return Measured(
        (
            Panel("service rate", x, SERVICE_RATE, rate_series(points, taken)),
            Panel(
                "cost of an iteration",
                x,
                Axis("Time", "ms", "log"),
                (Series.of_repeats("measured, all", places, costs), Series("disk alone", places, io)),
            ),
        ),
        {"rows": subject.rows, "memory_bytes": budget.total_bytes, "zipf_exponent": 1.0},
    )


def judge_buffer(measured: Measured) -> Verdict:
    series = measured.panel("service rate").of(HYBRID)
    best = int(np.argmax(series.y))
    return Verdict.of(
        shape=0 < best < len(series.y) - 1,
        numbers=f"best at {series.x[best]:,.0f} kB; the smallest buffer serves {series.y[0] / max(series.y):.0%} of "
        f"that, the largest {series.y[-1] / max(series.y):.0%}",
    )
