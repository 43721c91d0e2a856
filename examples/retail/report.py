"""The report of the demo: one HTML page with its pictures inside, and beside it the files that its numbers are from."""

import html
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dovetail.core.memory import format_bytes
from retail.charts import age_chart, budget_chart, distribution_chart, hit_chart, loaded_chart

__all__ = ["Facts", "write_report"]

_HERE = Path(__file__).parent
_SOURCES = ("checking.py", "contenders.py", "data.py", "spark_join.py")


@dataclass(frozen=True)
class Facts:
    """Everything that the report shows, as it was measured. Times are seconds since the first order landed.

    Attributes
    ----------
    options, cores, load, seconds
        How the demo was called, on what, beside how much other work, and how long it took.
    relation
        Rows and bytes of the table.
    verdict
        What the check found, see `retail.checking.Verdict`.
    moments
        When what happened.
    landed
        Pairs: time, orders landed by then.
    ours, theirs
        Triples: time, orders visible by then, median age of those that just became visible.
    ours_ages, theirs_ages
        Seconds from landing to visible: the percentiles 0 to 100, over all orders.
    theirs_share
        The part of the orders that Spark's join had loaded when Dovetail had loaded all.
    states
        What the flow said of itself while it ran.
    picture
        The pipeline: nodes and edges.
    journal
        The directory of the flow's journal.
    """

    options: Mapping[str, str]
    cores: int
    load: float
    seconds: float
    relation: Mapping[str, int]
    verdict: Mapping[str, Any]
    moments: Mapping[str, float | None]
    landed: Sequence[tuple[float, int]]
    ours: Sequence[tuple[float, int, float]]
    theirs: Sequence[tuple[float, int, float]]
    ours_ages: Sequence[float]
    theirs_ages: Sequence[float]
    theirs_share: float
    states: Sequence[Mapping[str, Any]]
    picture: Mapping[str, Any]
    journal: str

    @property
    def ours_median_s(self) -> float:
        return self.ours_ages[50]

    @property
    def ours_p95_s(self) -> float:
        return self.ours_ages[95]

    @property
    def theirs_median_s(self) -> float:
        return self.theirs_ages[50] if self.theirs_ages else float("nan")

    def hit_ratio(self) -> float:
        """The share of orders that the cache answered, over the second half of the flow's micro-batches."""
        late = [state["hit_ratio"] or 0.0 for state in self.states[len(self.states) // 2 :]]
        return sum(late) / max(1, len(late))


def write_report(path: Path, facts: Facts, pipeline: Path) -> Path:
    """Write the page and the files beside it; gives where the page is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = {name: value for name, value in asdict(facts).items() if name != "journal"}
    (path.parent / "numbers.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    with (path.parent / "journal.jsonl").open("wb") as target:
        for part in sorted(Path(facts.journal).glob("*.jsonl")):
            target.write(part.read_bytes())
    for source in (pipeline, *(_HERE / name for name in _SOURCES)):
        shutil.copyfile(source, path.parent / source.name)
    parts = {
        "table": f"{facts.relation['rows']:,} customers, {format_bytes(facts.relation['bytes'])}",
        "budget": facts.options["budget"],
        "host": f"{facts.cores} cores, half as many tasks for each; load {facts.load:.1f} at the end; "
        f"{facts.seconds:.0f} s in all",
        "cards": "".join(_cards(facts)),
        "pipeline": _diagram(facts),
        "race": _figure(
            "loaded",
            "Orders that a reader can see",
            "The same files land for both. A line that is as high as the grey one has caught up.",
            loaded_chart(facts),
        ),
        "age": _figure(
            "age",
            "How old an order is when it can be read",
            "From the moment its file landed, on a logarithmic scale.",
            age_chart(facts),
        ),
        "figures": _figure(
            "latency",
            "All orders",
            "The share of the loaded orders that were readable within so many seconds.",
            distribution_chart(facts),
        )
        + _figure(
            "memory",
            "Memory against the budget",
            "What the cache holds that all workers share. The rest of the budget is for the rows of running tasks.",
            budget_chart(facts),
        )
        + _figure(
            "hits",
            "Answered by the cache",
            "The share of each micro-batch's orders whose customer needed no look into the table. The run begins with "
            "a cold table and an empty cache.",
            hit_chart(facts),
        ),
        "story": "".join(f"<li><b>{at}</b> {text}</li>" for at, text in _story(facts)),
        "sources": "".join(_sources()),
    }
    page = (_HERE / "report.html").read_text(encoding="utf-8")
    path.write_text(re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page), encoding="utf-8")
    return path


def _cards(facts: Facts) -> list[str]:
    verdict = facts.verdict
    exact = f"{verdict['missing']:,} missing, {verdict['repeated']:,} twice, {verdict['wrong']:,} wrong"
    dead = _between(facts, "kill", "back")
    fresh = _between(facts, "changed", "first changed order")
    return [
        _card(
            f"{facts.ours_median_s:.2f} s", "median, landing to readable", f"95 % in {facts.ours_p95_s:.1f} s", "age"
        ),
        _card(f"{facts.theirs_median_s:.1f} s", f"Spark's join, of its {facts.theirs_share:.0%}", "", "age", "other"),
        _card("exactly once" if verdict["is_exact"] else "NOT EXACT", f"{verdict['loaded']:,} orders", exact, "check"),
        _card(f"{dead} s", "from kill -9 to the next orders", "a new process, JVM and plan", "kill"),
        _card(f"{fresh} s", "from a new version to the first order with it", "customers change as it runs", "change"),
        _card(f"{facts.hit_ratio():.0%}", "answered by the cache", "in the second half", "hits"),
    ]


def _card(value: str, what: str, more: str, source: str, kind: str = "ours") -> str:
    text = html.escape(more) or "&nbsp;"
    return (
        f'<a class="card {kind}" href="#from-{source}"><b>{html.escape(value)}</b><span>{html.escape(what)}</span>'
        f"<i>{text}</i></a>"
    )


def _figure(name: str, title: str, text: str, picture: str) -> str:
    return (
        f'<figure id="{name}"><h2>{html.escape(title)}</h2><p>{html.escape(text)} '
        f'<a href="#from-{name}">From what?</a></p>{picture}</figure>'
    )


def _between(facts: Facts, first: str, last: str) -> str:
    begin, end = facts.moments[first], facts.moments[last]
    return "-" if begin is None or end is None else f"{max(0.0, end - begin):.1f}"


def _diagram(facts: Facts) -> str:
    """The pipeline as boxes: those that rows pass, left to right, and below a step what it joins with."""
    nodes = {node["id"]: node for node in facts.picture["nodes"]}
    below: dict[str, list[str]] = {}
    for first, last in facts.picture["edges"]:
        if nodes[first]["kind"] == "relation":
            below.setdefault(last, []).append(first)
    last_state = facts.states[-1] if facts.states else {}
    rows = {"source": f"{facts.verdict['landed']:,} landed", "sink": f"{facts.verdict['loaded']:,} rows"}
    drawn = []
    for node in nodes.values():
        if node["kind"] == "relation":
            continue
        detail = rows.get(node["kind"]) or f"{node['detail']} join, {facts.options['budget']}"
        box = f"<b>{html.escape(node['title'])}</b><span>{html.escape(detail)}</span>"
        for relation in below.get(node["id"], []):
            version = last_state.get("version")
            box += (
                f'<div class="relation"><b>{html.escape(nodes[relation]["title"])}</b><span>'
                f"{facts.relation['rows']:,} rows, version {version}</span></div>"
            )
        drawn.append(f'<div class="node {node["kind"]}">{box}</div>')
    return '<div class="arrow" aria-hidden="true">→</div>'.join(drawn)


def _story(facts: Facts) -> list[tuple[str, str]]:
    moments, found = facts.moments, []
    for name, text in (
        ("change", "Some of the busiest customers change: an upsert begins."),
        ("changed", "The new version is there."),
        ("first changed order", "The first order joined with it can be read."),
        ("kill", "<code>kill -9</code> of Dovetail, its JVM and its workers. It is started again at once."),
        ("back", "The first orders after the kill can be read."),
        ("caught up", "Less than two seconds behind again."),
    ):
        at = moments[name]
        if at is not None:
            found.append((f"{at:.1f} s", text))
    return found


def _sources() -> list[str]:
    """What each number is from: the file it is in, and the code that measured it."""
    entries = {
        ("age", "latency"): (
            "numbers.json",
            "contenders.py",
            "A reader looks into both targets ten times a second. An order is readable when the target names its file: "
            "its age is the time of that look minus <code>landed_at</code>. The clock runs through the kill.",
        ),
        ("loaded",): ("numbers.json", "contenders.py", "Rows in the files that are readable at each look."),
        ("check",): (
            "numbers.json",
            "checking.py",
            "Every landed order is searched in the target, and every column of its row computed again, by pyarrow and "
            "numpy alone. The orders that Spark's join had loaded are compared as well.",
        ),
        ("kill",): ("numbers.json", "contenders.py", "SIGKILL to the process group, until the next new rows."),
        ("change",): (
            "numbers.json",
            "data.py",
            "From the return of <code>relation.upsert</code> until the first order with the new segment is readable. "
            "Spark's join reads the Parquet files that it listed when it started, so it shows no change before a "
            "restart; with a table format it would.",
        ),
        ("hits",): ("journal.jsonl", "pipeline.yaml", "What the flow records about each micro-batch."),
        ("memory",): (
            "numbers.json",
            "contenders.py",
            "The bytes of the cache's files, which the workers map, twice a second. Interpreters, the JVM, and the "
            "table's pages in the operating system's cache are not part of a budget.",
        ),
    }
    return [
        f'<tr id="from-{names[0]}"><td>{_anchors(names[1:])}{", ".join(names)}</td>'
        f'<td>{text}</td><td><a href="{data}">{data}</a><br><a href="{code}">{code}</a></td></tr>'
        for names, (data, code, text) in entries.items()
    ]


def _anchors(names: Sequence[str]) -> str:
    return "".join(f'<a id="from-{name}"></a>' for name in names)
