"""The pictures of the report, as SVG."""

import io
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from dovetail.core.memory import Budget, format_bytes

if TYPE_CHECKING:
    from retail.report import Facts

__all__ = ["age_chart", "budget_chart", "distribution_chart", "hit_chart", "loaded_chart"]

_INK, _LANDED, _OURS, _THEIRS, _KILL = "#333a45", "#9aa5b4", "#0b6e8f", "#d9822b", "#c0392b"
_LINE: dict[str, Any] = {"linewidth": 2}


def loaded_chart(facts: "Facts") -> str:
    """Orders landed and visible, over time."""
    figure, axes = _empty(6.2, 3.3)
    for points, color, name in (
        (facts.landed, _LANDED, "landed"),
        (facts.theirs, _THEIRS, "Spark's join"),
        (facts.ours, _OURS, "Dovetail"),
    ):
        times, counts = [0.0], [0]
        for point in points:
            times.append(point[0])
            counts.append(point[1])
        axes.step(times, np.array(counts) / 1000, where="post", color=color, label=name, **_LINE)
    _moments(axes, facts)
    _label(axes, "seconds since the first order", "thousand orders")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return _svg(figure)


def age_chart(facts: "Facts") -> str:
    """The median age of the orders that became visible, over time."""
    figure, axes = _empty(6.2, 3.3)
    for points, color, name in ((facts.theirs, _THEIRS, "Spark's join"), (facts.ours, _OURS, "Dovetail")):
        if points:
            times, ages = [p[0] for p in points], [max(0.05, p[2]) for p in points]
            axes.plot(times, ages, color=color, marker="o", markersize=3, label=name, linewidth=1.3)
    axes.set_yscale("log")
    _plain_numbers(axes, "y")
    _moments(axes, facts)
    axes.set_xlim(left=0)
    _label(axes, "seconds since the first order", "seconds old")
    axes.legend(frameon=False, fontsize=9)
    return _svg(figure)


def distribution_chart(facts: "Facts") -> str:
    """How many orders were visible within how long."""
    figure, axes = _empty(4.6, 2.9)
    for ages, color, name in ((facts.theirs_ages, _THEIRS, "Spark's join"), (facts.ours_ages, _OURS, "Dovetail")):
        if ages:
            axes.plot(np.maximum(ages, 0.05), np.arange(len(ages)), color=color, label=name, **_LINE)
    axes.set_xscale("log")
    _plain_numbers(axes, "x")
    axes.axhline(50, color=_LANDED, linewidth=0.8, linestyle=":")
    _label(axes, "seconds", "% of its orders")
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return _svg(figure)


def budget_chart(facts: "Facts") -> str:
    """Memory held by component, and the budget."""
    figure, axes = _empty(4.6, 2.9)
    times = [state["at"] for state in facts.states]
    held = [state["cache_bytes"] / 1e6 for state in facts.states]
    axes.fill_between(times, held, step="post", color=_OURS, alpha=0.35, label="cache of all workers")
    budget = Budget.parse(facts.options["budget"]).total_bytes
    axes.set_xlim(left=0)
    axes.axhline(budget / 1e6, color=_KILL, linewidth=1.6, linestyle="--", label=f"budget {format_bytes(budget)}")
    axes.set_ylim(0, budget / 1e6 * 1.25)
    _label(axes, "seconds since the first order", "MB held")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    return _svg(figure)


def hit_chart(facts: "Facts") -> str:
    """Hits of the cache per micro-batch."""
    figure, axes = _empty(4.6, 2.9)
    axes.plot(
        [state["at"] for state in facts.states],
        [100 * (state["hit_ratio"] or 0) for state in facts.states],
        color=_OURS,
        **_LINE,
    )
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    _moments(axes, facts)
    _label(axes, "seconds since the first order", "% of the orders")
    return _svg(figure)


def _empty(width: float, height: float) -> tuple[Any, Axes]:
    figure, axes = plt.subplots(figsize=(width, height))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#eceef2", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _moments(axes: Axes, facts: "Facts") -> None:
    """Marks where the customers changed and where the kill was."""
    for name, color, text, top in (("changed", _OURS, " customers change", 1.06), ("kill", _KILL, " kill -9", 0.99)):
        at = facts.moments[name]
        if at is not None:
            axes.axvline(at, color=color, linewidth=1, linestyle=":")
            axes.text(at, top, text, transform=axes.get_xaxis_transform(), color=color, fontsize=8, va="top")


def _plain_numbers(axes: Axes, name: str) -> None:
    axis = axes.yaxis if name == "y" else axes.xaxis
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(lambda *_: "")


def _label(axes: Axes, below: str, beside: str) -> None:
    axes.set_xlabel(below, color=_INK, fontsize=9)
    axes.set_ylabel(beside, color=_INK, fontsize=9)


def _svg(figure: Any) -> str:
    figure.tight_layout()
    data = io.StringIO()
    figure.savefig(data, format="svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    text = data.getvalue()
    return text[text.index("<svg") :]
