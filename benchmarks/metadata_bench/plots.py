"""The pictures of the benchmark of metadata-aware joins: one for each section."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

__all__ = ["draw"]

_TITLES = {
    "ordered": "ordered arrival",
    "random": "random arrival",
    "overflow": "ordered, XJoin overflows",
    "large": "ordered, large batches",
}


def draw(name: str, verdict: dict[str, Any], directory: Path) -> Path | None:
    """The picture of a section, from what is in the JSON; None if it has none."""
    if verdict["curves"]:
        figure = _experiment(name, verdict["curves"])
    elif name == "Spark":
        figure = _on_spark(verdict["figures"])
    elif verdict["figures"]:
        figure = _soak(verdict["figures"])
    else:
        return None
    path = directory / f"{name.split()[0].lower()}.png"
    if verdict["curves"]:
        path = directory / f"experiment-{name.split()[0]}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _experiment(name: str, curves: dict[str, list[dict[str, Any]]]) -> Any:
    has_memory = name[0] in "23"
    rows = 1 + has_memory
    width = 4 if len(curves) > 2 else 5.5
    size = (width * len(curves), 3.4 * rows)
    figure, axes = plt.subplots(rows, len(curves), figsize=size, squeeze=False, layout="constrained")
    for column, (order, found) in enumerate(curves.items()):
        for curve in found:
            axes[0][column].plot(curve["results"], curve["seconds"], label=curve["name"])
            if has_memory:
                axes[1][column].plot(curve["results"], [b / 1e6 for b in curve["held_bytes"]], label=curve["name"])
        axes[0][column].set_title(_TITLES[order])
        for row, label in zip(range(rows), ("CPU seconds", "MB held"), strict=False):
            axes[row][column].set_xlabel("thousand results")
            axes[row][column].xaxis.set_major_locator(MaxNLocator(6))
            axes[row][column].xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}")
            axes[row][column].set_ylabel(label)
            axes[row][column].set_ylim(bottom=0)
            axes[row][column].legend(fontsize=9)
    figure.suptitle(f"Experiment {name.replace(' ', ': ', 1)}")
    return figure


def _on_spark(figures: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, len(figures), figsize=(5.5 * len(figures), 3.8), squeeze=False, layout="constrained")
    for axis, found in zip(axes[0], figures.values(), strict=True):
        ours, theirs = found["ours"], found["built-in"]
        most = [max(pair) for pair in zip(ours["memory_bytes"], ours["stored_bytes"], strict=True)]
        axis.plot(range(len(most)), [b / 1e6 for b in most], label=ours["name"])
        kept = theirs["stored_bytes"]
        axis.plot(range(len(kept)), [b / 1e6 for b in kept], label=f"{theirs['name']}, current version")
        axis.set_title(found["lives"]["name"], fontsize=10)
        axis.set_xlabel("micro-batch")
        axis.set_ylabel("MB of state")
        axis.set_ylim(bottom=0)
        axis.legend(loc="center", fontsize=9)
    figure.suptitle("State on Spark")
    return figure


def _soak(figures: dict[str, Any]) -> Any:
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for label, points in figures.items():
        axis.plot([n / 1e6 for n in points["records"]], [b / 1e6 for b in points["held_bytes"]], label=label)
    axis.set_xlabel("million access records")
    axis.set_ylabel("MB held")
    axis.set_yscale("log")
    axis.legend(loc="center right")
    figure.suptitle("State through a long stream")
    return figure
