"""The report of the retail example: one HTML file, pictures inside, nothing to load."""

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from dovetail.core.memory import format_bytes

__all__ = ["Sample", "write_report"]

_INK, _ORDERS, _LOADED, _THIRD = "#333333", "#8a97a8", "#0b6e8f", "#c8553d"
_LINE: dict[str, Any] = {"linewidth": 1.8, "marker": "o", "markersize": 3.5}


@dataclass(frozen=True)
class Sample:
    """The flow after one micro-batch.

    Attributes
    ----------
    batch, at_s
        Which, and seconds since the start.
    offered, taken, loaded
        Rows landed, taken in by the first operator and put out by the last, since the start.
    hit_ratio, waiting
        Of the join with the customers.
    memory_bytes
        Held by each operator.
    """

    batch: int
    at_s: float
    offered: int
    taken: int
    loaded: int
    hit_ratio: float
    waiting: int
    memory_bytes: Mapping[str, int]

    @classmethod
    def of(cls, progress: Any, begun_s: float, offered: int) -> "Sample":
        """What a flow's progress tells."""
        first, last = progress.operators[0], progress.operators[-1]
        return cls(
            batch=progress.batch,
            at_s=progress.time_ms / 1000 - begun_s,
            offered=offered,
            taken=first.totals.stream_tuples_in,
            loaded=last.totals.output_rows,
            hit_ratio=last.hit_ratio,
            waiting=last.pending,
            memory_bytes={operator.name: sum(operator.memory_bytes.values()) for operator in progress.operators},
        )


def write_report(path: Path, samples: Sequence[Sample], result: Mapping[str, Any], budgets: Mapping[str, int]) -> Path:
    """Write the report; gives where it is."""
    latencies = result["latencies_s"]
    pictures = [
        ("Orders per second", "Landed in bursts, loaded as fast as they come.", lambda axes: _rates(axes, samples)),
        ("From landing to warehouse", "How long orders took, all of them.", lambda axes: _latency(axes, latencies)),
        (
            "Answered from memory",
            "The part of the orders whose customer the join's cache knew; the rest waits for the disk.",
            lambda axes: _hits(axes, samples),
        ),
        ("Memory", "Held by each operator, and what it may take.", lambda axes: _memory(axes, samples, budgets)),
    ]
    figures = {
        "rows landed": f"{result['landed']:,}",
        "duplicates caught": f"{result['duplicates']:,}",
        "orders loaded": f"{result['loaded']:,}",
        "exactly once": "yes" if result["is_exact"] else "NO",
        "micro-batches": f"{result['micro_batches']:,}",
        "median latency": f"{np.median(latencies):.1f} s",
        "95 % within": f"{np.quantile(latencies, 0.95):.1f} s",
    }
    cards = "".join(f"<div><b>{html.escape(v)}</b><span>{html.escape(k)}</span></div>" for k, v in figures.items())
    parts = "".join(
        f'<figure><h2>{html.escape(title)}</h2><p>{html.escape(text)}</p><img alt="{html.escape(title)}" '
        f'src="data:image/png;base64,{_picture(draw)}"></figure>'
        for title, text, draw in pictures
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_PAGE.format(cards=cards, parts=parts), encoding="utf-8")
    return path


def _picture(draw: Callable[[Axes], None]) -> str:
    figure, axes = plt.subplots(figsize=(7.2, 3.2), dpi=130)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    draw(axes)
    figure.tight_layout()
    data = io.BytesIO()
    figure.savefig(data, format="png")
    plt.close(figure)
    return base64.b64encode(data.getvalue()).decode()


def _rates(axes: Axes, samples: Sequence[Sample]) -> None:
    at = np.array([sample.at_s for sample in samples])
    elapsed = np.maximum(np.diff(at), 0.1)
    for name, color, counts in (
        ("landed", _ORDERS, [sample.offered for sample in samples]),
        ("loaded", _LOADED, [sample.loaded for sample in samples]),
    ):
        # Each micro-batch as long as it took: what is known is its mean, and nothing in between.
        axes.stairs(np.diff(counts) / elapsed, at, color=color, label=name, linewidth=1.8)
    _label(axes, "seconds since the start", "orders / s")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, fontsize=9)


def _latency(axes: Axes, latencies: Any) -> None:
    top = float(np.quantile(latencies, 0.999))
    axes.hist(np.clip(latencies, 0, top), bins=40, color=_LOADED)
    for share, name in ((0.5, "median"), (0.95, "95 %")):
        at = float(np.quantile(latencies, share))
        axes.axvline(at, color=_THIRD, linewidth=1.4)
        axes.text(at, axes.get_ylim()[1] * 0.94, f" {name} {at:.1f} s", color=_THIRD, fontsize=9, va="top")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _label(axes, "seconds from landing to warehouse", "orders")


def _hits(axes: Axes, samples: Sequence[Sample]) -> None:
    axes.plot([s.at_s for s in samples], [100 * s.hit_ratio for s in samples], color=_LOADED, **_LINE)
    axes.set_ylim(0, 105)
    _label(axes, "seconds since the start", "% of the orders")


def _memory(axes: Axes, samples: Sequence[Sample], budgets: Mapping[str, int]) -> None:
    colors = (_ORDERS, _THIRD, _LOADED)
    for name, color in zip(samples[-1].memory_bytes, colors, strict=False):
        held = [sample.memory_bytes[name] / 1e6 for sample in samples]
        label = f"{name} (budget {format_bytes(budgets[name])})" if name in budgets else name
        axes.plot([sample.at_s for sample in samples], held, color=color, label=label, **_LINE)
    axes.set_ylim(bottom=0)
    _label(axes, "seconds since the start", "MB held")
    axes.legend(frameon=False, fontsize=9)


def _label(axes: Axes, below: str, beside: str) -> None:
    axes.set_xlabel(below, color=_INK, fontsize=9)
    axes.set_ylabel(beside, color=_INK, fontsize=9)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Dovetail: the retail example</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #333; max-width: 1180px; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.6rem; margin: 0 }} h2 {{ font-size: 1.05rem; margin: 0 }} p {{ margin: .2rem 0 .6rem; color: #666 }}
.cards {{ display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.4rem 0 }}
.cards div {{ border: 1px solid #ddd; border-radius: 8px; padding: .6rem 1rem; min-width: 7.5rem }}
.cards b {{ display: block; font-size: 1.25rem; color: #0b6e8f }} .cards span {{ font-size: .85rem; color: #666 }}
.pictures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1.6rem }}
figure {{ margin: 0 }} img {{ width: 100% }}
</style></head><body>
<h1>The retail example</h1>
<p>Orders of three shops, landed in bursts: duplicates caught, keys assigned, customers joined, loaded as Parquet.</p>
<div class="cards">{cards}</div><div class="pictures">{parts}</div>
</body></html>
"""
