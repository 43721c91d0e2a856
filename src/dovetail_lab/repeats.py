"""Independent repeats: an experiment measured anew with other seeds, and their results made one, with bands."""

from collections.abc import Sequence

from dovetail.core.errors import InternalError
from dovetail_lab.experiment import Measured, Panel, Series

__all__ = ["merge"]


def merge(runs: Sequence[Measured]) -> Measured:
    """The medians of several runs, with the lowest and highest as bands; parameters are those of the first run.

    Examples
    --------
    >>> from dovetail_lab.experiment import Axis
    >>> runs = [Measured((Panel("p", Axis("x"), Axis("y"), (Series("s", (1, 2), (y, 2 * y)),)),)) for y in (3.0, 5.0)]
    >>> merge(runs).panel("p").of("s")
    Series(name='s', x=(1, 2), y=(3.0, 6.0), low=(3.0, 6.0), high=(5.0, 10.0))
    """
    if len(runs) == 1:
        return runs[0]
    panels = []
    for first in runs[0].panels:
        same = [run.panel(first.title) for run in runs]
        series = tuple(_merged([panel.of(each.name) for panel in same]) for each in first.series)
        panels.append(Panel(first.title, first.x, first.y, series, first.mark))
    return Measured(tuple(panels), runs[0].parameters)


def _merged(every: Sequence[Series]) -> Series:
    first = every[0]
    return Series.of_repeats(first.name, first.x, list(zip(*(_at(series, first.x) for series in every), strict=True)))


def _at(series: Series, places: Sequence[float | str]) -> Sequence[float]:
    """The values of a run at the places of the first one: the same, or at the same share of the whole."""
    if tuple(series.x) == tuple(places):
        return series.y
    numbers = [place for place in series.x if not isinstance(place, str)]
    wanted = [place for place in places if not isinstance(place, str)]
    if len(numbers) != len(series.x) or len(wanted) != len(places):
        raise InternalError(f"Runs of {series.name!r} have different bars: {series.x} and {tuple(places)}.")
    import numpy as np  # not above: the command's help imports this file

    # Curves over the number of results: other seeds have other results, but every curve has an end.
    return [float(y) for y in np.interp(np.array(wanted) / wanted[-1], np.array(numbers) / numbers[-1], series.y)]
