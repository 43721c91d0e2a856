"""The data of the SSBJ experiments, and shared names."""

from collections.abc import Sequence
from functools import partial

from dovetail.costs import optimal_cache_share
from dovetail_lab.experiment import Context
from dovetail_lab.semi_stream import (
    DISK_TITLES,
    NAMES,
    Bench,
    Point,
)
from dovetail_lab.subjects import DiskName, Stream, Subject, open_or_build
from dovetail_lab.workloads import Zipf, relation_batches

PAPER = "SSBJ (2018)"
BOTH = ("mesh", "balanced")
MESH, SSBJ = NAMES["mesh"], NAMES["balanced"]
DISKS: tuple[DiskName, ...] = ("simulated", "direct")
PAPER_DAY = DISK_TITLES["simulated"]
SMALLER = "R has fewer rows here than the paper's 100 million; budgets are the same share of it. "


def rows_of(context: Context) -> int:
    return context.pick(400_000, 1_000_000)


def repeated(context: Context, rows: int) -> Subject:
    """The paper's master data: join values drawn with repetition, so some have several rows and some none."""

    def make() -> Subject:
        keys = Zipf(rows, 0.0, seed=context.seed)
        path = context.directory / f"repeated-{rows}-{context.seed}"
        relation = open_or_build(path, lambda: relation_batches(rows, seed=1, keys=keys))
        source = stream_of(context, rows, 1.0)
        return Subject(relation, ["sk", "pay"], source, Bench.of(context).factors, seed=context.seed)

    return Bench.of(context).subject(f"repeated {rows}", make)


def stream_of(context: Context, rows: int, exponent: float) -> Stream:
    return Stream(Zipf(rows, exponent, order="shuffled", seed=context.seed + 1), is_doubled=False)


def points_of(
    context: Context, rows: int, budgets: Sequence[float], exponent: float = 1.0, x: Sequence[float] | None = None
) -> list[Point]:
    subject = repeated(context, rows)
    return [
        Point(place, subject, subject.budget(percent), partial(stream_of, context, rows, exponent))
        for place, percent in zip(x or budgets, budgets, strict=True)
    ]


def optimum(point: Point) -> float:
    """The maximum gain of a cache over MESHJOIN with that memory, by the paper's own memory model."""
    profile = point.subject.profile(point.stream())
    assert profile.hit_curve is not None
    _, gain = optimal_cache_share(
        budget_bytes=point.budget.total_bytes, cache_entry_bytes=profile.cache_entry_bytes, hit_curve=profile.hit_curve
    )
    return gain
