"""What an experiment is: a figure of a paper, its claim, how to measure it and how to judge what was measured.

Measuring and judging are apart: `Experiment.run` gives plain numbers (`Measured`), `Experiment.judge` holds them
against the paper's claim. So a stored result can be judged again, and a judgement can be tested without a measurement.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from dovetail.errors import PlanError

__all__ = ["Axis", "Context", "Experiment", "Measured", "Outcome", "Panel", "Series", "Verdict"]

Outcome = Literal["confirmed", "confirmed with a different factor", "not confirmed"]
Scale = Literal["linear", "log"]
Mark = Literal["line", "points", "bars", "steps"]
T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """An axis as the paper has it.

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
    """One curve, or one group of bars: a value per place on the x axis, with the spread of its repeats.

    Attributes
    ----------
    name
        What the legend calls it.
    x
        Places on the x axis: numbers, or texts where bars stand beside each other.
    y
        The values: medians where the measurement was repeated.
    low, high
        The lowest and the highest of the repeats; empty where there was one.

    Examples
    --------
    >>> Series.of_repeats("mesh", [1, 2], [[3.0, 5.0, 4.0], [7.0, 7.0, 9.0]])
    Series(name='mesh', x=(1, 2), y=(4.0, 7.0), low=(3.0, 7.0), high=(5.0, 9.0))
    >>> Series("mesh", (1, 2), (4.0, 7.0)).at(2)
    7.0
    """

    name: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.low) != len(self.high) or len(self.low) not in (0, len(self.y)):
            raise PlanError(f"Series {self.name!r}: x, y and the spread must have a value per point.")

    @classmethod
    def of_repeats(cls, name: str, x: Sequence[float | str], repeats: Sequence[Sequence[float]]) -> Self:
        """A series whose i-th value was measured several times: the median, with the extremes as spread."""
        middle = tuple(float(sorted(values)[(len(values) - 1) // 2]) for values in repeats)
        if all(len(values) == 1 for values in repeats):
            return cls(name, tuple(x), middle)
        lows, highs = (tuple(float(edge(values)) for values in repeats) for edge in (min, max))
        return cls(name, tuple(x), middle, lows, highs)

    def at(self, x: float | str) -> float:
        """The value at a place that was measured."""
        return self.y[self.x.index(x)]


@dataclass(frozen=True)
class Panel:
    """One plot in the paper's axes; an experiment has one or more, for instance one per disk.

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
        """The series of that name."""
        for series in self.series:
            if series.name == name:
                return series
        raise PlanError(f"Panel {self.title!r} has no series {name!r}.")

    def ratios(self, upper: str, lower: str) -> list[float]:
        """The values of one series over those of another, place by place."""
        return [a / b for a, b in zip(self.of(upper).y, self.of(lower).y, strict=True)]


@dataclass(frozen=True)
class Measured:
    """What a run gave: the plots, and the parameters that were used (sizes, budgets, block sizes: plain data)."""

    panels: tuple[Panel, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def panel(self, title: str) -> Panel:
        """The panel of that title."""
        for panel in self.panels:
            if panel.title == title:
                return panel
        raise PlanError(f"There is no panel {title!r}; there are {', '.join(p.title for p in self.panels)}.")


@dataclass(frozen=True)
class Verdict:
    """Whether the paper's claim holds here.

    Attributes
    ----------
    outcome
        ``"confirmed"``; ``"confirmed with a different factor"``: the shape holds, the numbers are others; or ``"not
        confirmed"``.
    numbers
        What was measured, in a sentence.
    explanation
        Why it differs from the paper, where it does.

    Examples
    --------
    >>> Verdict.of(shape=True, factor=False, numbers="3.1 times", explanation="the window's entries are larger").outcome
    'confirmed with a different factor'
    >>> Verdict.of(shape=False, numbers="0.8 times", explanation="a seek costs as much as 480 kB").outcome
    'not confirmed'
    """

    outcome: Outcome
    numbers: str
    explanation: str = ""

    @classmethod
    def of(cls, *, shape: bool, factor: bool = True, numbers: str, explanation: str = "") -> Self:
        """The verdict of two checks: does the claim's shape hold, and does its factor."""
        outcome: Outcome = "not confirmed"
        if shape:
            outcome = "confirmed" if factor else "confirmed with a different factor"
        return cls(outcome, numbers, explanation)


@dataclass
class Context:
    """What a run is given.

    Attributes
    ----------
    is_quick
        The small size, below a minute.
    seed
        What every generator's seed is made from.
    repeats
        How often a measurement is repeated, for its spread.
    directory
        Where data is kept between the experiments of a run and between runs: relations are built once.
    report_progress
        Called with (parts done, parts in all).
    shared
        What experiments of the same run leave each other, for instance calibrated cost factors.

    Examples
    --------
    >>> context = Context(is_quick=True, seed=1, repeats=1, directory=Path("."))
    >>> [x * context.pick(1, 10) for x in context.each([1, 2])]
    [1, 2]
    """

    is_quick: bool
    seed: int
    repeats: int
    directory: Path
    report_progress: Callable[[int, int], None] = lambda done, total: None
    shared: dict[str, Any] = field(default_factory=dict)
    _done: int = 0
    _total: int = 0

    def pick(self, quick: T, full: T) -> T:
        """One value for the quick size, another for the full one."""
        return quick if self.is_quick else full

    def begin(self, parts: int) -> None:
        """Say of how many parts, about as long as each other, the experiment consists."""
        self._done, self._total = 0, parts
        self.report_progress(0, parts)

    def advance(self) -> None:
        """Say that another part is done."""
        self._done += 1
        self.report_progress(min(self._done, self._total), self._total)

    def each(self, points: Iterable[T]) -> Iterator[T]:
        """Go through points, a part each; they are all there is, unless `begin` has said how many parts there are."""
        every = list(points)
        if not self._total:
            self.begin(len(every))
        for point in every:
            yield point
            self.advance()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure or table of a paper.

    Attributes
    ----------
    name
        For instance ``"meshjoin-fig6a"``.
    paper, figure
        For instance ``"MESHJOIN (2007)"`` and ``"6a"``; a table is ``"table 1"``.
    title
        What the figure shows.
    claim
        What the paper says that it shows.
    check
        How the claim is held against numbers, in a sentence.
    run
        Measure: quick or full, as the context says.
    judge
        Hold what was measured against the claim.

    Examples
    --------
    >>> from dovetail.lab import find
    >>> find("hybridjoin-fig10").paper
    'HYBRIDJOIN (2011)'
    """

    name: str
    paper: str
    figure: str
    title: str
    claim: str
    check: str
    run: Callable[[Context], Measured]
    judge: Callable[[Measured], Verdict]

    @property
    def command(self) -> str:
        """How to reproduce it in full."""
        return f"dovetail lab run {self.name}"

    @property
    def figure_text(self) -> str:
        """For instance "figure 6a" or "table 1"."""
        return self.figure if self.figure.startswith("table") else f"figure {self.figure}"
