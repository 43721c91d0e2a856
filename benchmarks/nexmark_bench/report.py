"""The table, the bars and the plot of a run."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nexmark_bench.engines import ENGINES

Figure = dict[str, Any]
TIMES_SPARK, TIMES_FLINK = 2.5, 1.5
JUDGED = ("q3", "q8", "q13-large", "q20")


def of(figures: list[Figure], query: str) -> dict[str, Figure]:
    """What was measured for a query, by engine; runs that failed are not in it."""
    return {each["engine"]: each for each in figures if each["query"] == query and "seconds" in each}


def bars(figures: list[Figure]) -> list[dict[str, Any]]:
    """Ours against the best of Spark's and the best of Flink's, by query, by wall time and by CPU time."""
    found = []
    for query in dict.fromkeys(each["query"] for each in figures):
        by_engine = of(figures, query)
        if "dovetail" not in by_engine:
            continue
        for peer, least in (("spark", TIMES_SPARK), ("flink", TIMES_FLINK)):
            theirs = [each for name, each in by_engine.items() if name.startswith(peer)]
            if not theirs:
                continue
            ratios = {
                by: by_engine["dovetail"][by] / max(each[by] for each in theirs)
                for by in ("events_per_s_core", "events_per_cpu_s")
            }
            bar = least if query in JUDGED else None
            is_met = bar is None or ratios["events_per_s_core"] >= bar
            found.append({"query": query, "peer": peer, "least": bar, "met": is_met, **ratios})
    return found


def show(console: Console, results: dict[str, Any]) -> None:
    """Tables for people; the JSON has more."""
    table = Table(title="Nexmark: events of the query's inputs, per second and core, and per second of CPU")
    for column in ("query", "engine", "events", "events/s/core", "events/CPU s", "state MB", "ours/theirs", "note"):
        table.add_column(column, justify="left" if column in ("query", "engine", "note") else "right")
    for figure in results["rates"]:
        if "seconds" not in figure:
            table.add_row(figure["query"], figure["engine"], "", "", "", "", "", figure["failed"])
            continue
        ours = of(results["rates"], figure["query"]).get("dovetail", figure)
        table.add_row(
            figure["query"],
            figure["engine"],
            f"{figure['events']:,}",
            f"{figure['events_per_s_core']:,.0f}",
            f"{figure['events_per_cpu_s']:,.0f}",
            f"{figure['state_bytes'] / 1e6:,.1f}" if figure.get("state_bytes") else "",
            "" if ours is figure else f"{ours['events_per_s_core'] / figure['events_per_s_core']:.2f}",
            "has MultiJoin" if figure.get("has_multi_join") else "",
        )
    console.print(table)
    for bar in results["bars"]:
        told = "" if bar["least"] is None else f"at least {bar['least']}: {'met' if bar['met'] else 'NOT met'}"
        console.print(
            f"{bar['query']}: {bar['events_per_s_core']:.2f} times {bar['peer']}'s best by time, "
            f"{bar['events_per_cpu_s']:.2f} by CPU time. {told}"
        )
    for each in results.get("live", []):
        what = f"{each['query']} on {each['engine']}"
        if "failed" in each:
            console.print(f"{what}: {each['failed']}")
            continue
        console.print(
            f"{what}, {each['rate']:,} events/s: p50 {each['p50_ms']:,.0f} ms, p99 {each['p99_ms']:,.0f} ms; after a "
            f"SIGKILL the first result in {_seconds(each['first_result_s'])}, as fast as before in "
            f"{_seconds(each['caught_up_s'])}"
        )


def _seconds(value: float | None) -> str:
    return "never (within the run)" if value is None else f"{value:.1f} s"


def plot(results: dict[str, Any], path: Path) -> None:
    """Events per second and core, by query and engine."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = results["rates"]
    queries = list(dict.fromkeys(each["query"] for each in rates))
    engines = [name for name in ENGINES if any(each["engine"] == name for each in rates)]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    width = 0.8 / len(engines)
    for axes, by, label in zip(
        panels,
        ("events_per_s_core", "events_per_cpu_s"),
        ("events per second and core", "events per second of CPU"),
        strict=True,
    ):
        for number, engine in enumerate(engines):
            heights = [of(rates, query).get(engine, {}).get(by, 0) for query in queries]
            axes.bar([place + number * width for place in range(len(queries))], heights, width, label=engine)
        axes.set_xticks([place + 0.4 - width / 2 for place in range(len(queries))], queries)
        axes.set_ylabel(label)
        axes.grid(True, axis="y", alpha=0.3)
    panels[0].legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
