"""The report: every figure's plot, claim, verdict and command, as one HTML page and as Markdown."""

import html
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import PlanError
from dovetail_lab.experiment import Experiment, Outcome
from dovetail_lab.plots import INK, PAPER, axis_of, draw
from dovetail_lab.results import Result, read_results

__all__ = ["Report", "summary_table", "verdict_table", "write_report", "write_summary"]

_OUTCOMES: tuple[Outcome, ...] = ("confirmed", "confirmed with a different factor", "not confirmed")
_MARKS: Mapping[Outcome, str] = {
    "confirmed": "yes",
    "confirmed with a different factor": "factor",
    "not confirmed": "no",
}


@dataclass(frozen=True)
class Report:
    """The files written, and the verdicts in them."""

    html: Path
    markdown: Path
    verdicts: Mapping[str, Outcome]
    missing: Sequence[str]


def write_report(experiments: Sequence[Experiment], results: Path, target: Path) -> Report:
    """Build the report of all results, in the order of the experiments. Results are judged again and updated.

    ``target`` gets ``index.html``, ``index.md`` and the plots.
    """
    stored = read_results(results)
    if not stored:
        raise PlanError(f"{results} has no results.", hint="Make some with dovetail lab run.")
    entries: list[tuple[Experiment, Result, bytes]] = []
    (target / "plots").mkdir(parents=True, exist_ok=True)
    for experiment in experiments:
        if experiment.name not in stored:
            continue
        result = stored[experiment.name].judged_by(experiment)
        if result.verdict != stored[experiment.name].verdict:
            result.write(results)
        picture = draw(experiment.name, result.measured.panels)
        (target / "plots" / f"{experiment.name}.svg").write_bytes(picture)
        entries.append((experiment, result, picture))
    pages = {
        target / "index.md": "\n".join(_markdown(entries)) + "\n",
        target / "index.html": "\n".join(_page(entries)) + "\n",
    }
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return Report(
        html=target / "index.html",
        markdown=target / "index.md",
        verdicts={experiment.name: result.verdict.outcome for experiment, result, _ in entries},
        missing=[experiment.name for experiment in experiments if experiment.name not in stored],
    )


def verdict_table(experiments: Sequence[Experiment], results: Mapping[str, Result], link: str) -> list[str]:
    """The table of verdicts in Markdown, one line per experiment with a result, linking to the page ``link``."""
    lines = ["| paper | figure | what it shows | verdict | measured here |", "|---|---|---|---|---|"]
    for experiment in experiments:
        if experiment.name in results:
            verdict = results[experiment.name].judged_by(experiment).verdict
            lines.append(
                f"| {experiment.paper} | [{experiment.figure}]({link}#{experiment.name}) | {experiment.title} "
                f"| {verdict.outcome} | {_cell(verdict.numbers)} |"
            )
    return lines


TABLE_BEGIN, TABLE_END = "<!-- verdicts of the lab -->", "<!-- end of the verdicts -->"


def summary_table(experiments: Sequence[Experiment], results: Mapping[str, Result], link: str) -> list[str]:
    """The verdicts by paper in Markdown: the figures of each outcome."""
    lines = [f"| paper | {' | '.join(_OUTCOMES)} |", "|---|---|---|---|"]
    for paper in dict.fromkeys(experiment.paper for experiment in experiments):
        found: dict[str, list[str]] = {outcome: [] for outcome in _OUTCOMES}
        for experiment in experiments:
            if experiment.paper == paper and experiment.name in results:
                outcome = results[experiment.name].judged_by(experiment).verdict.outcome
                found[outcome].append(f"[{experiment.figure}]({link}#{experiment.name})")
        if any(found.values()):
            lines.append(f"| {paper} | {' | '.join(', '.join(figures) or '-' for figures in found.values())} |")
    return lines


def write_summary(path: Path, experiments: Sequence[Experiment], results: Mapping[str, Result], link: str) -> None:
    """Replace the text between the two marks in a Markdown file with the table of verdicts."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise PlanError(f"{path} has no place for the table.", hint=f"Write {TABLE_BEGIN} and {TABLE_END} around it.")
    table = "\n".join(summary_table(experiments, results, link))
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _summary(entries: Sequence[tuple[Experiment, Result, bytes]]) -> str:
    counts = Counter(result.verdict.outcome for _, result, _ in entries)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome])


def _where(entries: Sequence[tuple[Experiment, Result, bytes]]) -> str:
    newest = max((result for _, result, _ in entries), key=lambda result: result.started_at)
    machine, versions = newest.machine, newest.versions
    memory = machine["memory_bytes"] / 2**30
    others = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{machine['processor']}, {machine['cores']} cores, {memory:.0f} GiB, {machine['system']}; {others}."


def _facts(result: Result) -> str:
    repeats = "once" if result.repeats == 1 else f"{result.repeats} times, bands from the lowest to the highest"
    shown = {name: value for name, value in result.measured.parameters.items() if not isinstance(value, Mapping | list)}
    parameters = "; ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in shown.items())
    return f"{result.size} size, seed {result.seed}, measured {repeats}, {result.seconds:.0f} s. {parameters}".strip()


def _value(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def _papers(entries: Sequence[tuple[Experiment, Result, bytes]]) -> dict[str, list[tuple[Experiment, Result, bytes]]]:
    grouped: dict[str, list[tuple[Experiment, Result, bytes]]] = {}
    for entry in entries:
        grouped.setdefault(entry[0].paper, []).append(entry)
    return grouped


_INTRODUCTION = (
    "Each figure and table of the papers, measured with this implementation and held against what the paper says. "
    "A disk of the papers' day is simulated (60 MB/s, 8 ms per seek; time is the CPU's plus what that disk would have "
    "taken); the real one is read past the page cache. Where a claim does not hold here, the text says why."
)


# -------------------------------------------------------------------- Markdown


def _markdown(entries: Sequence[tuple[Experiment, Result, bytes]]) -> Iterator[str]:
    yield "# The papers' experiments\n"
    yield f"{_INTRODUCTION} How to run them: [the experiments](experiments.md). Built by `make lab-report`.\n"
    yield f"Verdicts: {_summary(entries)}.\n"
    yield f"Measured on {_where(entries)}\n"
    yield from verdict_table(
        [experiment for experiment, _, _ in entries], {e.name: result for e, result, _ in entries}, link=""
    )
    for paper, group in _papers(entries).items():
        yield f"\n## {paper}"
        for experiment, result, _ in group:
            verdict = result.verdict
            yield f'\n<a id="{experiment.name}"></a>\n'
            yield f"### {_headline(experiment)}\n"
            yield f"![{_described(result)}](plots/{experiment.name}.svg)\n"
            yield f"- **The paper's claim:** {experiment.claim}"
            yield f"- **Check:** {experiment.check}"
            yield f"- **Verdict: {verdict.outcome}.** {verdict.numbers}"
            if verdict.explanation:
                yield f"- **Why:** {verdict.explanation}"
            yield f"- **Measured:** {_facts(result)}"
            yield f"- **Again:** `{experiment.command}` ([numbers](results/{experiment.name}.json))"


def _headline(experiment: Experiment) -> str:
    text = experiment.figure_text
    return f"{text[0].upper()}{text[1:]}: {experiment.title}"


def _described(result: Result) -> str:
    parts = []
    for panel in result.measured.panels:
        names = ", ".join(series.name for series in panel.series)
        parts.append(f"{panel.title}: {axis_of(panel.y)} over {axis_of(panel.x)} of {names}")
    return "; ".join(parts)


# -------------------------------------------------------------------- HTML

_STYLE = """
:root { color-scheme: light dark; --ink: #2b2f36; --paper: #ffffff; --faint: #667080; --line: #d6dae0; --card: #f7f8fa;
        --yes: #1a7f4b; --factor: #9a6700; --no: #b3261e; --link: #0b63a5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --paper: #16181d; --faint: #9aa4b2; --line: #343a44; --card: #1e2128;
          --yes: #4cc38a; --factor: #e2b53e; --no: #ff8a80; --link: #6cb6ff; } }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 68rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif; }
a { color: var(--link); }
h1 { font-size: 1.7rem; } h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); }
h3 { margin: 0 0 .5rem; font-size: 1.1rem; }
article { margin: 1.5rem 0; padding: 1rem 1.25rem; border: 1px solid var(--line); border-radius: .5rem;
          background: var(--card); break-inside: avoid; }
.plot { overflow-x: auto; } .plot svg { max-width: 100%; height: auto; color: var(--ink); display: block; }
dl { display: grid; grid-template-columns: 6.5rem 1fr; gap: .35rem .75rem; margin: .75rem 0 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
td:nth-child(4) { white-space: nowrap; }
.verdict { font-weight: 600; } .yes { color: var(--yes); } .factor { color: var(--factor); } .no { color: var(--no); }
.faint { color: var(--faint); font-size: .9rem; }
code { font-size: .9em; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dt { margin-top: .4rem; } }
@media print { body { max-width: none; padding: 0; } }
"""


def _page(entries: Sequence[tuple[Experiment, Result, bytes]]) -> Iterator[str]:
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>The papers' experiments</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>The papers' experiments</h1><p>{_text(_INTRODUCTION)}</p>"
    yield f"<p>Verdicts: {_text(_summary(entries))}.</p>"
    yield f'<p class="faint">Measured on {_text(_where(entries))}</p>'
    yield '<div class="scroll"><table><thead><tr><th>paper</th><th>figure</th><th>what it shows</th><th>verdict</th>'
    yield "<th>measured here</th></tr></thead><tbody>"
    for experiment, result, _ in entries:
        yield (
            f"<tr><td>{_text(experiment.paper)}</td>"
            f'<td><a href="#{experiment.name}">{_text(experiment.figure)}</a></td><td>{_text(experiment.title)}</td>'
            f"<td>{_outcome(result)}</td><td>{_text(result.verdict.numbers)}</td></tr>"
        )
    yield "</tbody></table></div>"
    for paper, group in _papers(entries).items():
        yield f"<h2>{_text(paper)}</h2>"
        for experiment, result, picture in group:
            yield from _article(experiment, result, picture)
    yield "</body></html>"


def _article(experiment: Experiment, result: Result, picture: bytes) -> Iterator[str]:
    verdict = result.verdict
    yield f'<article id="{experiment.name}"><h3>{_text(_headline(experiment))}</h3>'
    yield f'<div class="plot" role="img" aria-label="{html.escape(_described(result))}">{_inline(picture)}</div><dl>'
    yield f"<dt>Claim</dt><dd>{_text(experiment.claim)}</dd>"
    yield f"<dt>Check</dt><dd>{_text(experiment.check)}</dd>"
    yield f"<dt>Verdict</dt><dd>{_outcome(result)} {_text(verdict.numbers)}</dd>"
    if verdict.explanation:
        yield f"<dt>Why</dt><dd>{_text(verdict.explanation)}</dd>"
    yield f'<dt>Measured</dt><dd class="faint">{_text(_facts(result))}</dd>'
    link = f'<a href="results/{experiment.name}.json">numbers</a>'
    yield f"<dt>Again</dt><dd><code>{_text(experiment.command)}</code> ({link})</dd></dl></article>"


def _outcome(result: Result) -> str:
    outcome = result.verdict.outcome
    return f'<span class="verdict {_MARKS[outcome]}">{outcome}.</span>'


def _text(text: str) -> str:
    return html.escape(text, quote=False)


def _inline(picture: bytes) -> str:
    """The SVG for a page with its own colours: text in the page's colour, no background."""
    svg = picture.decode("utf-8")
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK, "currentColor").replace(f"fill: {PAPER}", "fill: none").strip()
