"""What was measured, as lines, as a table, as bars and as a picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SPEED = {100_000: 20.0, 1_000_000: 10.0}
_LARGE, _SMALL = 20_000_000, 3_500_000
_TIMES_ROWS = {(1_000_000, 2): 1.1, (1_000_000, 25): 1.7, (100_000, 2): 1.1, (100_000, 25): 1.4}


@dataclass(frozen=True)
class Figure:
    """One contender at one point: seconds per micro-batch."""

    contender: str
    rows: int
    batch: int
    exponent: float
    order: str
    io: str
    budget_percent: float | None
    seconds: float
    all_seconds: list[float]
    width: int = 2  # columns of the stream

    @property
    def tuples_per_second(self) -> float:
        return self.batch / self.seconds

    @property
    def label(self) -> str:
        budget = "" if self.budget_percent is None else f" {self.budget_percent:g} %"
        beside = "".join(f" {word}" for word in (self.order, self.io) if word not in ("shuffled", "map"))
        wide = "" if self.width == 2 else f" {self.width} columns"
        return f"{self.contender}{budget}{beside}{wide}"


def line(figure: Figure) -> str:
    return (
        f"R {figure.rows:>11,}  batch {figure.batch:>9,}  exponent {figure.exponent:<4g} {figure.label:<26} "
        f"{figure.seconds * 1e3:>9,.0f} ms  {figure.tuples_per_second:>11,.0f} tuples/s"
    )


def table(figures: list[Figure]) -> str:
    return "\n".join(["", *(line(figure) for figure in figures), ""])


def bars(figures: list[Figure]) -> list[dict[str, Any]]:
    """Each bar that the measured points allow to be judged; a bar over several points by the worst of them."""
    found: list[dict[str, Any]] = []

    def judge(bar: str, least: float, values: list[float]) -> None:
        if values:
            found.append({"bar": bar, "least": least, "value": min(values), "met": min(values) >= least})

    for batch, least in _SPEED.items():
        judge(
            f"times Spark's best, {_LARGE:,} rows, {batch:,} per batch",
            least,
            [
                min(s.seconds for s in _of(figures, ("merge", "broadcast"), _LARGE, batch, ours.exponent))
                / ours.seconds
                for ours in _of(figures, ("dovetail",), _LARGE, batch)
                if _of(figures, ("merge", "broadcast"), _LARGE, batch, ours.exponent)
            ],
        )
    for name, least in (("dovetail", 1.0), ("lookup", 5.0)):
        judge(
            f"{name} times DuckDB alone, {_LARGE:,} rows, 100,000 per batch",
            least,
            [
                duck.seconds / ours.seconds
                for ours in _of(figures, (name,), _LARGE, 100_000)
                for duck in _of(figures, ("duckdb",), _LARGE, 100_000, ours.exponent)
            ],
        )
    judge(
        f"of the ceiling, {_SMALL:,} rows, exponent 1, 5 %, 1,000,000 per batch",
        0.7,
        [
            top.seconds / ours.seconds
            for ours in _of(figures, ("dovetail",), _SMALL, 1_000_000, 1.0)
            for top in _of(figures, ("ceiling",), _SMALL, 1_000_000, 1.0)
            if ours.budget_percent == 5.0
        ],
    )
    for (batch, width), least in _TIMES_ROWS.items():
        bars_of = [("times the ceiling", "ceiling", least)]
        if batch == 1_000_000:
            bars_of.append(("of the keys-only ceiling", "keys", 0.85))
        for what, name, at_least in bars_of:
            judge(
                f"{what}, {width} columns, {_SMALL:,} rows, exponent 1, 5 %, {batch:,} per batch",
                at_least,
                [
                    top.seconds / ours.seconds
                    for ours in _of(figures, ("dovetail",), _SMALL, batch, 1.0, width)
                    for top in _of(figures, (name,), _SMALL, batch, 1.0, width)
                    if ours.budget_percent == 5.0
                ],
            )
    judge(
        f"time per batch of {_SMALL:,} rows over that of {_LARGE:,}, 100,000 per batch",
        1 / 1.3,
        [
            small.seconds / large.seconds
            for large in _of(figures, ("dovetail",), _LARGE, 100_000)
            for small in _of(figures, ("dovetail",), _SMALL, 100_000, large.exponent)
            if small.budget_percent == large.budget_percent
        ],
    )
    return found


def _of(
    figures: list[Figure],
    names: tuple[str, ...],
    rows: int,
    batch: int,
    exponent: float | None = None,
    width: int = 2,
) -> list[Figure]:
    return [
        figure
        for figure in figures
        if figure.contender in names
        and (figure.rows, figure.batch, figure.order, figure.io) == (rows, batch, "shuffled", "map")
        and figure.width == width
        and exponent in (None, figure.exponent)
    ]


def plot(figures: list[Figure], path: Path) -> None:
    """Tuples per second of everybody, a panel for each size of relation and micro-batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(figure.rows, figure.batch) for figure in figures})
    picture, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4.5), squeeze=False, sharey=True)
    labels = sorted({figure.label for figure in figures})
    colours = pyplot.get_cmap("tab10" if len(labels) <= 10 else "tab20")
    for axis, (rows, batch) in zip(axes[0], panels, strict=True):
        mine = [figure for figure in figures if (figure.rows, figure.batch) == (rows, batch)]
        for number, label in enumerate(labels):
            points = sorted((f.exponent, f.tuples_per_second) for f in mine if f.label == label)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=label, color=colours(number))
        axis.set_title(f"{rows:,} rows, {batch:,} per batch", fontsize=10)
        axis.set_xlabel("exponent of Zipf's law")
        axis.set_yscale("log")
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].set_ylabel("tuples per second")
    # One legend for all panels, since not everybody is in each.
    shown = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    entries = [shown[label] for label in labels]
    picture.legend(entries, labels, loc="lower center", ncols=min(8, len(labels)), fontsize=9, frameon=False)
    picture.tight_layout(rect=(0, 0.09, 1, 1))
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
