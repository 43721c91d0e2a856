"""Shared parts of the experiments of the three semi-stream papers: relations built once, curves of service rates."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.core.memory import Budget
from dovetail.costs import CostFactors
from dovetail.joins import SemiStreamOperator
from dovetail_lab.experiment import Axis, Context, Series
from dovetail_lab.measure import Measurement, Rate, baseline_rate, make_operator, measure_repeatedly
from dovetail_lab.subjects import DiskName, DiskUnderTest, Stream, Subject, kept_factors, synthetic

__all__ = [
    "DISK_TITLES",
    "MEMORY_PERCENT",
    "NAMES",
    "SERVICE_RATE",
    "Bench",
    "Point",
    "growth_exponent",
    "memory_for_rates",
    "most",
    "service_rates",
    "spread_text",
]

NAMES = {"mesh": "MESHJOIN", "hybrid": "HYBRIDJOIN", "balanced": "SSBJ", "index_nested_loop": "INL", "auto": "auto"}
DISK_TITLES: Mapping[DiskName, str] = {"simulated": "disk of the papers' day", "direct": "real disk"}
SERVICE_RATE = Axis("Service rate", "tuples/s")
MEMORY_PERCENT = Axis("Memory", "% of R")

# A single lookup at a time: enough of them to fill the pool and measure its hit ratio, however slow they are.
_BASELINE_SECONDS = (0.3, 1.5)


class Bench:
    """The relations and cost factors of a run, created on first use."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._subjects: dict[str, Subject] = {}
        self._factors: dict[str, CostFactors] | None = None
        self.span_seconds = context.pick(0.08, 0.25)

    @classmethod
    def of(cls, context: Context) -> "Bench":
        """The bench of a run, shared by its experiments."""
        bench = context.shared.setdefault("bench", None) or cls(context)
        context.shared["bench"] = bench
        return bench

    def factors(self) -> dict[str, CostFactors]:
        """This machine's cost factors."""
        if self._factors is None:
            self._factors = kept_factors(self._context.directory)
        return self._factors

    def synthetic(self, rows: int) -> Subject:
        """The papers' synthetic relation with unique keys."""
        return self.subject(
            f"synthetic {rows}",
            lambda: synthetic(self._context.directory, rows, self.factors, seed=self._context.seed),
        )

    def subject(self, name: str, make: Callable[[], Subject]) -> Subject:
        """A relation that is opened or built once per run."""
        if name not in self._subjects:
            self._subjects[name] = make()
        return self._subjects[name]


@dataclass(frozen=True)
class Point:
    """A point on the x axis: a relation, memory, a stream, and optionally the block size."""

    x: float | str
    subject: Subject
    budget: Budget
    stream: Callable[[], Stream]
    block_rows: int | None = None


Build = Callable[[Point, str, DiskUnderTest, Stream], SemiStreamOperator]


def _tuned(point: Point, kind: str, disk: DiskUnderTest, stream: Stream) -> SemiStreamOperator:
    return make_operator(point.subject, kind, disk, point.budget, stream, point.block_rows)


def unpaced(point: Point, kind: str, disk: DiskUnderTest, stream: Stream) -> SemiStreamOperator:
    """Like `make_operator`, but as many tuples enter together as fit: few of them reach SSBJ's disk phase."""
    return make_operator(point.subject, kind, disk, point.budget, stream, point.block_rows, is_paced=False)


def service_rates(
    context: Context,
    points: Iterable[Point],
    kinds: Sequence[str],
    disk_name: DiskName,
    build: Build = _tuned,
    warm_share: float = 40.0,
) -> dict[str, list[list[Rate]]]:
    """Measure every strategy at every point, strategies in turns: one rate per strategy, point and repeat."""
    bench = Bench.of(context)
    taken: dict[str, list[list[Rate]]] = {kind: [] for kind in kinds}
    for point in context.each(points):
        measurements = []
        turning = [kind for kind in kinds if kind != "index_nested_loop"]
        for kind in turning:
            disk, stream = DiskUnderTest(disk_name), point.stream()
            measurements.append(Measurement(build(point, kind, disk, stream), stream, disk))
        every = measure_repeatedly(measurements, bench.span_seconds, context.repeats, warm_share)
        for kind, rates in zip(turning, every, strict=True):
            taken[kind].append(rates)
        if "index_nested_loop" in kinds:
            seconds = context.pick(*_BASELINE_SECONDS)
            rate = baseline_rate(point.subject, DiskUnderTest(disk_name), point.budget, point.stream(), seconds)
            taken["index_nested_loop"].append([rate])
    return taken


def rate_series(points: Sequence[Point], taken: Mapping[str, list[list[Rate]]]) -> tuple[Series, ...]:
    """Service rates as curves."""
    return tuple(
        Series.of_repeats(
            NAMES[kind], [point.x for point in points], [[rate.tuples_per_s for rate in rates] for rates in every]
        )
        for kind, every in taken.items()
    )


def memory_for_rates(budgets_bytes: Sequence[float], rates: Sequence[float], wanted: Sequence[float]) -> list[float]:
    """The memory for each wanted rate, interpolated in a measured curve of rates by memory (linear on log scales).

    Examples
    --------
    >>> [round(b) for b in memory_for_rates([1e6, 10e6], [1_000.0, 10_000.0], [2_000.0, 10_000.0])]
    [2000000, 10000000]
    """
    order = np.argsort(rates)
    known = np.log(np.asarray(rates, dtype=float)[order])
    bytes_known = np.log(np.asarray(budgets_bytes, dtype=float)[order])
    return [float(np.exp(np.interp(np.log(rate), known, bytes_known))) for rate in wanted]


def growth_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of a line through the points on log scales: 1 is proportional, below 1 means diminishing returns.

    Examples
    --------
    >>> round(growth_exponent([1, 10, 100], [2, 20, 200]), 3)
    1.0
    """
    return float(np.polyfit(np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float)), 1)[0])


def most(x: Sequence[float | str], y: Sequence[float]) -> float | str:
    """The position of the highest value."""
    return x[int(np.argmax(y))]


def spread_text(values: Sequence[float], form: str = "{:.1f}") -> str:
    """ "1.2 to 3.4", or one number if they are all the same.

    Examples
    --------
    >>> spread_text([3.42, 1.2, 2.0])
    '1.2 to 3.4'
    """
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
