"""The definition of an experiment: a figure of a paper, its claim, how to measure it and how to judge the result.

Measuring and judging are separate: `Experiment.run` returns plain numbers (`Measured`), `Experiment.judge` compares
them with the paper's claim. So a stored result can be judged again, and a judgement can be tested without measuring.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from dovetail.core.errors import PlanError
from dovetail_lab.verdicts import ChangedCheck, Outcome, Verdict

__all__ = ["Axis", "ChangedCheck", "Context", "Experiment", "Measured", "Outcome", "Panel", "Series", "Verdict"]

Scale = Literal["linear", "log"]
Mark = Literal["line", "points", "bars", "steps"]
T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """An axis as in the paper.

    Examples
    --------
    >>> Axis("Service rate", "tuples/s", scale="log").text
    'Service rate (tuples/s)'
    >>> Axis("Zipf exponent").text
    'Zipf exponent'
    """

    label: str
    unit: str = ""
    scale: Scale = "linear"

    @property
    def text(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


@dataclass(frozen=True)
class Series:
    """One curve, or one group of bars: a value per x position, with the spread of its repeats.

    Examples
    --------
    >>> Series.of_repeats("mesh", [1, 2], [[3.0, 5.0, 4.0], [7.0, 7.0, 9.0]])
    Series(name='mesh', x=(1, 2), y=(4.0, 7.0), low=(3.0, 7.0), high=(5.0, 9.0))
    >>> Series("mesh", (1, 2), (4.0, 7.0)).at(2)
    7.0
    """

    name: str  # in the legend
    x: tuple[float | str, ...]  # numbers, or texts for bars
    y: tuple[float, ...]  # medians, if repeated
    low: tuple[float, ...] = ()  # the minimum of the repeats
    high: tuple[float, ...] = ()  # the maximum of the repeats

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.low) != len(self.high) or len(self.low) not in (0, len(self.y)):
            raise PlanError(f"Series {self.name!r}: x, y and the spread must have a value per point.")

    @classmethod
    def of_repeats(cls, name: str, x: Sequence[float | str], repeats: Sequence[Sequence[float]]) -> Self:
        """A series of repeated measurements: the medians, with the extremes as spread."""
        middle = tuple(float(sorted(values)[(len(values) - 1) // 2]) for values in repeats)
        if all(len(values) == 1 for values in repeats):
            return cls(name, tuple(x), middle)
        lows, highs = (tuple(float(edge(values)) for values in repeats) for edge in (min, max))
        return cls(name, tuple(x), middle, lows, highs)

    def at(self, x: float | str) -> float:
        """The value at a measured x position."""
        return self.y[self.x.index(x)]


@dataclass(frozen=True)
class Panel:
    """One plot in the paper's axes; an experiment has one or more, for example one per disk.

    Examples
    --------
    >>> panel = Panel("simulated disk", Axis("Memory", "% of R"), Axis("Rate", "tuples/s"),
    ...               (Series("mesh", (1, 2), (10.0, 20.0)), Series("inl", (1, 2), (1.0, 1.0))))
    >>> panel.ratios("mesh", "inl")
    [10.0, 20.0]
    """

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    mark: Mark = "line"

    def of(self, name: str) -> Series:
        """Return the series with this name."""
        for series in self.series:
            if series.name == name:
                return series
        raise PlanError(f"Panel {self.title!r} has no series {name!r}.")

    def ratios(self, upper: str, lower: str) -> list[float]:
        """The ratio of one series to another, point by point."""
        return [a / b for a, b in zip(self.of(upper).y, self.of(lower).y, strict=True)]


@dataclass(frozen=True)
class Measured:
    """The result of a run: the plots, and the parameters used (sizes, budgets, block sizes) as plain data."""

    panels: tuple[Panel, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def panel(self, title: str) -> Panel:
        """Return the panel with this title."""
        for panel in self.panels:
            if panel.title == title:
                return panel
        raise PlanError(f"There is no panel {title!r}; there are {', '.join(p.title for p in self.panels)}.")


@dataclass
class Context:
    """The inputs of a run.

    Examples
    --------
    >>> context = Context(is_quick=True, seed=1, repeats=1, directory=Path("."))
    >>> [x * context.pick(1, 10) for x in context.each([1, 2])]
    [1, 2]
    """

    is_quick: bool  # the small size, below a minute
    seed: int
    repeats: int  # of a measurement within this run; the runner repeats whole runs, with other seeds, and asks for one
    directory: Path  # of data kept between runs: relations are built once
    report_progress: Callable[[int, int], None] = lambda done, total: None
    shared: dict[str, Any] = field(default_factory=dict)  # between experiments of a run, such as cost factors
    _done: int = 0
    _total: int = 0

    def pick(self, quick: T, full: T) -> T:
        """Choose between the values for the quick and the full size."""
        return quick if self.is_quick else full

    def begin(self, parts: int) -> None:
        """Set the number of parts, of about equal length, of the experiment."""
        self._done, self._total = 0, parts
        self.report_progress(0, parts)

    def advance(self) -> None:
        """Report that another part is done."""
        self._done += 1
        self.report_progress(min(self._done, self._total), self._total)

    def each(self, points: Iterable[T]) -> Iterator[T]:
        """Iterate over points, one part each; sets the number of parts unless `begin` was called."""
        every = list(points)
        if not self._total:
            self.begin(len(every))
        for point in every:
            yield point
            self.advance()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure or table of a paper.

    Examples
    --------
    >>> from dovetail_lab import find
    >>> find("hybridjoin-fig10").paper
    'HYBRIDJOIN (2011)'
    """

    name: str  # such as "meshjoin-fig6a"
    paper: str  # such as "MESHJOIN (2007)"
    figure: str  # such as "6a" or "table 1"
    title: str  # what the figure shows
    claim: str  # the paper's statement
    check: str  # how numbers are compared with the claim, as a sentence
    run: Callable[[Context], Measured]
    judge: Callable[[Measured], Verdict]
    paper_says: str = ""  # the paper's figure in a few words, for the summary
    note: str = ""  # what a reader must know beside the claim, such as that data is invented
    changed_checks: tuple[ChangedCheck, ...] = ()
    revision: int = 1  # of the definition: a result of another one is not judged, but stays as it was
    shown: Callable[[Measured], tuple[Panel, ...]] = lambda measured: measured.panels  # as drawn

    @property
    def command(self) -> str:
        """The command that reproduces it in full."""
        return f"dovetail lab run {self.name}"

    @property
    def figure_text(self) -> str:
        """For example "figure 6a" or "table 1"."""
        return self.figure if self.figure.startswith("table") else f"figure {self.figure}"
