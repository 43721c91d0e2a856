"""Plots of results, as SVG: each figure in its paper's axes, readable in print and on a dark page."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import PlanError
from dovetail_lab.experiment import Axis, Panel, Series
from dovetail_lab.paper import PAPER_SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["INK", "PAPER", "draw"]

INK, PAPER = "#2b2f36", "#ffffff"
"""The colours of text and background in a plot's SVG; a page may replace them."""

# Okabe and Ito's colours that are visible on white and on dark grey, with markers that distinguish them in greyscale.
_COLOURS = ("#0f7fb8", "#d55e00", "#009e73", "#c06aa0", "#b8860b", "#5b6ee1", "#7a7f87")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES = ("-", "--", "-.", ":", "-", "--", "-.")
_PANEL_INCHES = (4.7, 3.5)
_PANELS_PER_ROW = 2
_LEGEND_ROW_INCHES = 0.24
_LABEL_LINE = 0.065  # height of a line of a tick label, as a fraction of the axes' height
_STEM = 0.8  # fraction of the distance between two groups of bars that the bars take
_MOST_MARKS = 40
_AXIS_POINTS, _CHARACTER_POINTS = 250, 5.6
_LABEL_CHARACTERS = 50  # fit below the x axis in one line


def draw(name: str, panels: Sequence[Panel], format: str = "svg") -> bytes:
    """Draw the panels of a result side by side, each with its own legend below it.

    ``name`` is the prefix of identifiers inside the SVG, so that several can be in one page. ``format`` is ``"svg"`` or
    ``"png"``.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise PlanError(
            "Plots need matplotlib, which is not installed.", hint="pip install ./src/dovetail_lab"
        ) from error
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9.0,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.facecolor": "none",
    }
    columns = min(_PANELS_PER_ROW, len(panels))
    rows = math.ceil(len(panels) / columns)
    legend_rows = max(math.ceil(len(panel.series) / 2) for panel in panels)
    width, height = _PANEL_INCHES
    with mpl.rc_context(settings):
        figure = Figure(
            figsize=(columns * width, rows * (height + legend_rows * _LEGEND_ROW_INCHES)),
            layout="constrained",
            facecolor=PAPER,
        )
        for number, panel in enumerate(panels):
            _draw_panel(figure.add_subplot(rows, columns, number + 1), panel)
        output = io.BytesIO()
        # Tight: a legend below labels of several lines may be larger than the layout expects.
        metadata = {"Date": None} if format == "svg" else None
        figure.savefig(output, format=format, dpi=110, bbox_inches="tight", pad_inches=0.08, metadata=metadata)
    return output.getvalue()


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=9.5, loc="left")
    _prepare(axes, panel)
    label_lines = 1
    if panel.mark == "bars":
        label_lines = _draw_bars(axes, panel.series)
    else:
        for number, series in enumerate(panel.series):
            _draw_series(axes, series, number, panel.mark)
        if any(isinstance(place, str) for series in panel.series for place in series.x):
            axes.tick_params(axis="x", labelrotation=20)
    values = [value for series in panel.series for value in (*series.y, *series.low)]
    if panel.y.scale == "linear" and values and min(values) >= 0:
        axes.set_ylim(
            bottom=0, top=1.08 * max(*values, *(value for series in panel.series for value in series.high), 1e-9)
        )
    if len(panel.series) > 1:
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, -0.2 - _LABEL_LINE * (label_lines - 1)),
            ncols=2,
            frameon=False,
            fontsize=8.5,
            handlelength=2.6,
            borderaxespad=0,
        )


def _prepare(axes: "Axes", panel: Panel) -> None:
    axes.set_xlabel(panel.x.text)
    axes.set_ylabel(panel.y.text)
    for axis, which in ((panel.x, "x"), (panel.y, "y")):
        if axis.scale == "log":
            getattr(axes, f"set_{which}scale")("log")
    axes.grid(True, which="major", color="#8a9099", alpha=0.35, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _set_ticks(axes, panel)


def _set_ticks(axes: "Axes", panel: Panel) -> None:
    """Plain numbers with separators; on a logarithmic x axis with few positions, a tick at each of them."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

    plain = FuncFormatter(lambda value, _: _number(value))
    places = sorted({place for series in panel.series for place in series.x if not isinstance(place, str)})
    is_numeric = bool(places) and panel.mark != "bars"
    if is_numeric:
        axes.xaxis.set_major_formatter(plain)
        if panel.x.scale == "linear":
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    if is_numeric and panel.x.scale == "log" and _are_apart(places):
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(plain)
    if panel.y.scale == "log":
        values = [value for series in panel.series for value in series.y if value > 0]
        # Within one power of ten the major ticks alone would leave the axis empty.
        if values and max(values) / min(values) < 12:
            axes.yaxis.set_minor_formatter(plain)
            axes.tick_params(axis="y", which="minor", labelsize=7.5)
        else:
            axes.yaxis.set_minor_formatter(NullFormatter())


def _are_apart(places: Sequence[float]) -> bool:
    """Whether labels at these positions of a logarithmic axis do not overlap.

    Examples
    --------
    >>> _are_apart([1, 10, 100]), _are_apart([6_000, 15_000, 30_000, 600_000])
    (True, False)
    """
    if len(places) > 9 or places[0] <= 0:
        return False
    points_per_unit = _AXIS_POINTS / (math.log(places[-1] / places[0]) or 1.0)
    half_widths = [_CHARACTER_POINTS * len(_number(place)) / 2 for place in places]
    return all(
        math.log(places[i + 1] / places[i]) * points_per_unit > half_widths[i] + half_widths[i + 1] + 5
        for i in range(len(places) - 1)
    )


def _draw_series(axes: "Axes", series: Series, number: int, mark: str) -> None:
    colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
    common: dict[str, Any] = {"color": colour, "label": series.name}
    if series.name.startswith(PAPER_SERIES):
        axes.plot(series.x, series.y, color=INK, linestyle=(0, (2, 2)), marker="*", markersize=8, label=series.name)
        return
    if mark == "points":
        axes.plot(series.x, series.y, linestyle="none", marker=".", markersize=3, **common)
        return
    is_dense = len(series.x) > _MOST_MARKS
    axes.plot(
        series.x,
        series.y,
        linestyle=_LINES[number % len(_LINES)],
        linewidth=1.0 if is_dense else 1.6,
        marker=None if is_dense else marker,
        markersize=4.5,
        drawstyle="steps-mid" if mark == "steps" else "default",
        **common,
    )
    if series.low:
        places = [place for place in series.x if not isinstance(place, str)]
        if len(places) == len(series.x):
            axes.fill_between(places, series.low, series.high, color=colour, alpha=0.18, linewidth=0)


def _draw_bars(axes: "Axes", every: Sequence[Series]) -> int:
    """Draw groups of bars; return the number of lines of the longest label below them."""
    places = list(dict.fromkeys(str(place) for series in every for place in series.x))
    width = _STEM / len(every)
    for number, series in enumerate(every):
        left = [places.index(str(x)) - _STEM / 2 + (number + 0.5) * width for x in series.x]
        spread = None
        if series.low:
            below = [max(0.0, y - low) for y, low in zip(series.y, series.low, strict=True)]
            above = [max(0.0, high - y) for y, high in zip(series.y, series.high, strict=True)]
            spread = [below, above]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.bar(left, series.y, width * 0.92, label=series.name, color=colour, yerr=spread, ecolor=INK, capsize=2)
    width_characters = max(8, _LABEL_CHARACTERS // len(places))
    labels = [_folded(place, width_characters) for place in places]
    axes.set_xticks(range(len(places)), labels, fontsize=8)
    if len(places) > 6:
        axes.tick_params(axis="x", labelrotation=30)
    return max(label.count("\n") + 1 for label in labels)


def _folded(text: str, width: int) -> str:
    """Wrap a label at about `width` characters."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def _number(value: float) -> str:
    """Format the number of a tick: only the digits it needs, large numbers with separators.

    Examples
    --------
    >>> [_number(v) for v in (0, 0.25, 5, 1500, 2_000_000, 1e-6)]
    ['0', '0.25', '5', '1,500', '2 M', '1e-06']
    """
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g} M"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def axis_of(axis: Axis) -> str:
    """Describe an axis in words, for readers who cannot see the plot."""
    return axis.text + (", logarithmic" if axis.scale == "log" else "")
