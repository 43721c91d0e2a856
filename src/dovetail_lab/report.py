"""The report: every figure's plot, claim, verdict and command, as one HTML page and as Markdown."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import PlanError
from dovetail_lab.experiment import Experiment
from dovetail_lab.plots import draw
from dovetail_lab.report_page import page
from dovetail_lab.report_text import (
    INTRODUCTION,
    MIXED_ERA,
    RULE,
    Entry,
    by_paper,
    changes,
    described,
    details,
    headline,
    marked,
    stale_results,
    summary,
    where,
)
from dovetail_lab.results import Result, read_results
from dovetail_lab.verdicts import OUTCOMES, Outcome

__all__ = ["Report", "summary_table", "verdict_table", "write_report", "write_summary"]


@dataclass(frozen=True)
class Report:
    """The files written, and the verdicts in them."""

    html: Path
    markdown: Path
    verdicts: Mapping[str, Outcome]
    missing: Sequence[str]
    stale: Mapping[str, str]  # results that are not of the commit of the newest one, and why


def write_report(experiments: Sequence[Experiment], results: Path, target: Path, is_strict: bool = False) -> Report:
    """Build the report of all results, in the order of the experiments. Results are judged again and updated.

    ``target`` gets ``index.html``, ``index.md`` and the plots. Results of another commit than the newest are marked and
    counted apart, or refused if ``is_strict``.
    """
    stored = read_results(results)
    if not stored:
        raise PlanError(f"{results} has no results.", hint="Make some with dovetail lab run.")
    stale = stale_results(experiments, stored)
    if is_strict and stale:
        told = "; ".join(f"{name}: {why}" for name, why in stale.items())
        raise PlanError(f"Not every result is of one commit: {told}.", hint="Run these again: dovetail lab run NAME.")
    entries: list[Entry] = []
    (target / "plots").mkdir(parents=True, exist_ok=True)
    for experiment in experiments:
        if experiment.name not in stored:
            continue
        result = stored[experiment.name].judged_by(experiment)
        if result.verdict != stored[experiment.name].verdict:
            result.write(results)
        # What a result of an earlier definition lacks cannot be drawn beside the paper's claim.
        is_current = result.revision == experiment.revision
        panels = experiment.shown(result.measured) if is_current else result.measured.panels
        picture = draw(experiment.name, panels)
        (target / "plots" / f"{experiment.name}.svg").write_bytes(picture)
        entries.append(Entry(experiment, result, panels, picture, stale.get(experiment.name, "")))
    pages = {
        target / "index.md": "\n".join(_markdown(entries)) + "\n",
        target / "index.html": "\n".join(page(entries)) + "\n",
    }
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return Report(
        html=target / "index.html",
        markdown=target / "index.md",
        verdicts={entry.experiment.name: entry.result.verdict.outcome for entry in entries},
        missing=[experiment.name for experiment in experiments if experiment.name not in stored],
        stale=stale,
    )


def verdict_table(experiments: Sequence[Experiment], results: Mapping[str, Result], link: str) -> list[str]:
    """The table of verdicts in Markdown, one line per experiment with a result, linking to the page ``link``."""
    lines = [
        "| paper | figure | what it shows | the paper says | verdict | measured here |",
        "|---|---|---|---|---|---|",
    ]
    stale = stale_results(experiments, results)
    for experiment in experiments:
        if experiment.name in results:
            verdict = results[experiment.name].judged_by(experiment).verdict
            mark = f" ({stale[experiment.name]})" if experiment.name in stale else ""
            lines.append(
                f"| {experiment.paper} | [{experiment.figure}]({link}#{experiment.name}) | {experiment.title} "
                f"| {_cell(experiment.paper_says)} | {verdict.text}{mark} | {_cell(verdict.numbers)} |"
            )
    return lines


TABLE_BEGIN, TABLE_END = "<!-- verdicts of the lab -->", "<!-- end of the verdicts -->"
STALE_NOTE = "\\* measured on an earlier commit, or by an earlier definition of the experiment"


def summary_table(experiments: Sequence[Experiment], results: Mapping[str, Result], link: str) -> list[str]:
    """The verdicts by paper in Markdown: the figures of each outcome; halves of a claim with their names."""
    lines = [f"| paper | {' | '.join(OUTCOMES)} |", "|---|---|---|---|---|"]
    stale = stale_results(experiments, results)
    for paper in dict.fromkeys(experiment.paper for experiment in experiments):
        found: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
        for experiment in experiments:
            if experiment.paper == paper and experiment.name in results:
                verdict = results[experiment.name].judged_by(experiment).verdict
                mark = "\\*" if experiment.name in stale else ""
                figure = f"[{experiment.figure}]({link}#{experiment.name}){mark}"
                for half in verdict.halves:
                    found[half.outcome].append(f"{figure} ({half.claim})")
                if not verdict.halves:
                    found[verdict.outcome].append(figure)
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
    if stale_results(experiments, results):
        table += f"\n\n{STALE_NOTE}"
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# -------------------------------------------------------------------- Markdown


def _markdown(entries: Sequence[Entry]) -> Iterator[str]:
    yield "# The papers' experiments\n"
    yield f"{INTRODUCTION} How to run them: [the experiments](experiments.md). Built by `make lab-report`.\n"
    yield f"{MIXED_ERA}\n"
    yield f"{summary(entries)}. What is worth telling others: [findings](../findings.md).\n"
    yield f"{RULE}\n"
    yield f"The newest is of {where(entries)}\n"
    yield from verdict_table(
        [entry.experiment for entry in entries], {entry.experiment.name: entry.result for entry in entries}, link=""
    )
    changed = list(changes(entries))
    if changed:
        yield "\n## Checks that were changed after results had been seen\n"
        yield "| figure | old check | new check | reason |\n|---|---|---|---|"
        for experiment, *texts in changed:
            figure = f"{experiment.paper} [{experiment.figure}](#{experiment.name})"
            yield f"| {figure} | {' | '.join(_cell(text) for text in texts)} |"
    for paper, group in by_paper(entries).items():
        yield f"\n## {paper}"
        for entry in group:
            experiment, verdict = entry.experiment, entry.result.verdict
            yield f'\n<a id="{experiment.name}"></a>\n'
            yield f"### {headline(experiment)}\n"
            yield f"![{described(entry)}](plots/{experiment.name}.svg)\n"
            yield f"- **The paper's claim:** {experiment.claim}"
            yield f"- **Check:** {experiment.check}"
            yield f"- **Verdict: {marked(entry)}.** {verdict.numbers}"
            for name, text in details(entry):
                yield f"- **{name}:** {text}"
            yield f"- **Again:** `{experiment.command}` ([numbers](results/{experiment.name}.json))"
