"""What a paper claims, drawn beside what was measured: its points, and ratios of two curves with its ratios."""

from collections.abc import Mapping

from dovetail_lab.experiment import Axis, Measured, Panel, Series

__all__ = ["PAPER_SERIES", "with_points", "with_ratio"]

PAPER_SERIES = "paper"
"""Begins the names of series that are a paper's, which are drawn as such."""


def with_points(measured: Measured, points: Mapping[float, float]) -> tuple[Panel, ...]:
    """The panels, the first one with the points that the paper's text gives.

    Examples
    --------
    >>> panel = Panel("p", Axis("x"), Axis("y"), (Series("here", (1, 2), (5.0, 6.0)),))
    >>> [series.name for series in with_points(Measured((panel,)), {1: 4.0})[0].series]
    ['here', 'paper']
    """
    first, *others = measured.panels
    paper = Series(PAPER_SERIES, tuple(points), tuple(points.values()))
    return (Panel(first.title, first.x, first.y, (*first.series, paper), first.mark), *others)


def with_ratio(
    measured: Measured,
    upper: str,
    lower: str,
    *,
    panels: int = 1,
    ends: tuple[float, float] | None = None,
    everywhere: float | None = None,
    significant: float | None = None,
    paper: Mapping[float, float] | None = None,
) -> tuple[Panel, ...]:
    """The panels, and one of the ratio of two curves in each of the first `panels`, on a linear axis.

    Parameters
    ----------
    measured
        What is shown.
    upper, lower
        The series that are divided.
    panels
        How many of the first panels have both.
    ends, everywhere, paper
        The ratio that the paper claims: at the first and at the last place; at every place; at some places.
    significant
        The ratio from which the check calls a difference significant, where the paper gives no number.

    Examples
    --------
    >>> panel = Panel("p", Axis("x"), Axis("y"), (Series("a", (1, 2), (6.0, 8.0)), Series("b", (1, 2), (2.0, 2.0))))
    >>> ratio = with_ratio(Measured((panel,)), "a", "b", ends=(7.0, 8.0))[1]
    >>> ratio.of("p").y, ratio.of("paper").y
    ((3.0, 4.0), (7.0, 8.0))
    """
    compared = [panel for panel in measured.panels[:panels] if {upper, lower} <= {s.name for s in panel.series}]
    if not compared:
        return measured.panels
    series = [_ratio(panel.title, panel.of(upper), panel.of(lower)) for panel in compared]
    places = series[0].x
    if ends is not None:
        series.append(Series(PAPER_SERIES, (places[0], places[-1]), ends))
    if everywhere is not None:
        series.append(Series(PAPER_SERIES, places, (everywhere,) * len(places)))
    if paper is not None:
        series.append(Series(PAPER_SERIES, tuple(paper), tuple(paper.values())))
    if significant is not None:
        name = f"{PAPER_SERIES}: significant, judged by {significant:g}"
        series.append(Series(name, places, (significant,) * len(places)))
    ratio = Panel(f"{upper} / {lower}", compared[0].x, Axis("Ratio"), tuple(series))
    return (*measured.panels, ratio)


def _ratio(name: str, upper: Series, lower: Series) -> Series:
    values = tuple(a / b for a, b in zip(upper.y, lower.y, strict=True))
    if not (upper.low and lower.low):
        return Series(name, upper.x, values)
    lows = tuple(a / b for a, b in zip(upper.low, lower.high, strict=True))
    highs = tuple(a / b for a, b in zip(upper.high, lower.low, strict=True))
    return Series(name, upper.x, values, lows, highs)
