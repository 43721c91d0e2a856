"""The report as one HTML page, for a desk and for a phone: there a table's row becomes a card."""

import html
from collections.abc import Iterator, Mapping, Sequence

from dovetail_lab.plots import INK, PAPER
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
    summary,
    where,
)
from dovetail_lab.verdicts import Outcome

__all__ = ["page"]

_MARKS: Mapping[Outcome, str] = {
    "confirmed": "yes",
    "confirmed with a different factor": "factor",
    "not testable here": "untestable",
    "not confirmed": "no",
}

_STYLE = """
:root { color-scheme: light dark; --ink: #2b2f36; --paper: #ffffff; --faint: #667080; --line: #d6dae0; --card: #f7f8fa;
        --yes: #1a7f4b; --factor: #9a6700; --untestable: #5b6ee1; --no: #b3261e; --link: #0b63a5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --paper: #16181d; --faint: #9aa4b2; --line: #343a44; --card: #1e2128;
          --yes: #4cc38a; --factor: #e2b53e; --untestable: #a9b4ff; --no: #ff8a80; --link: #6cb6ff; } }
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
.verdict { font-weight: 600; } .yes { color: var(--yes); } .factor { color: var(--factor); } .no { color: var(--no); }
.untestable { color: var(--untestable); } .stale { color: var(--faint); font-weight: 400; }
.faint { color: var(--faint); font-size: .9rem; }
code { font-size: .9em; }
@media (max-width: 40rem) {
  body { padding: 1rem .75rem 3rem; } dl { grid-template-columns: 1fr; } dt { margin-top: .4rem; }
  article { padding: .75rem; } .plot svg { min-width: 30rem; max-width: none; }
  .cards thead { display: none; } .cards tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  .cards td { display: block; padding: .1rem 0; border: 0; }
  .cards td[data-name]:not(:empty)::before { content: attr(data-name) ": "; color: var(--faint); } }
@media print { body { max-width: none; padding: 0; } }
"""


def page(entries: Sequence[Entry]) -> Iterator[str]:
    """The lines of the page."""
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>The papers' experiments</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>The papers' experiments</h1><p>{_text(INTRODUCTION)}</p>"
    yield f"<p>{_text(MIXED_ERA)}</p>"
    yield f"<p>{_text(summary(entries))}.</p>"
    yield f"<p>{_rule()}</p>"
    yield f'<p class="faint">The newest is of {_text(where(entries))}</p>'
    yield from _table(
        ("paper", "figure", "what it shows", "the paper says", "verdict", "measured here"),
        [
            (
                _text(entry.experiment.paper),
                _link(entry.experiment.name, entry.experiment.figure),
                _text(entry.experiment.title),
                _text(entry.experiment.paper_says),
                _verdict(entry),
                _text(entry.result.verdict.numbers),
            )
            for entry in entries
        ],
    )
    changed = [
        (_link(experiment.name, f"{experiment.paper}, {experiment.figure}"), *map(_text, texts))
        for experiment, *texts in changes(entries)
    ]
    if changed:
        yield "<h2>Checks that were changed after results had been seen</h2>"
        yield from _table(("figure", "old check", "new check", "reason"), changed)
    for paper, group in by_paper(entries).items():
        yield f"<h2>{_text(paper)}</h2>"
        for entry in group:
            yield from _article(entry)
    yield "</body></html>"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    heads = "".join(f"<th>{name}</th>" for name in names)
    yield f'<div class="scroll"><table class="cards"><thead><tr>{heads}</tr></thead><tbody>'
    for row in rows:
        cells = [f'<td data-name="{name}">{cell}</td>' for name, cell in zip(names, row, strict=True)]
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _article(entry: Entry) -> Iterator[str]:
    experiment, verdict = entry.experiment, entry.result.verdict
    yield f'<article id="{experiment.name}"><h3>{_text(headline(experiment))}</h3>'
    yield f'<div class="plot" role="img" aria-label="{html.escape(described(entry))}">'
    yield f"{_inline(entry.picture)}</div><dl>"
    yield f"<dt>Claim</dt><dd>{_text(experiment.claim)}</dd>"
    yield f"<dt>Check</dt><dd>{_text(experiment.check)}</dd>"
    yield f"<dt>Verdict</dt><dd>{_verdict(entry)} {_text(verdict.numbers)}</dd>"
    for name, text in details(entry):
        faint = ' class="faint"' if name == "Measured" else ""
        yield f"<dt>{name}</dt><dd{faint}>{_text(text)}</dd>"
    link = f'<a href="results/{experiment.name}.json">numbers</a>'
    yield f"<dt>Again</dt><dd><code>{_text(experiment.command)}</code> ({link})</dd></dl></article>"


def _verdict(entry: Entry) -> str:
    """The outcome, or those of the halves, each in its colour."""
    verdict = entry.result.verdict
    named = [(f"{_text(half.claim)}: ", half.outcome) for half in verdict.halves] or [("", verdict.outcome)]
    told = "; ".join(f'{name}<span class="verdict {_MARKS[outcome]}">{outcome}</span>' for name, outcome in named)
    stale = f' <span class="stale">({entry.stale})</span>' if entry.stale else ""
    return f"{told}{stale}."


def _link(name: str, text: str) -> str:
    return f'<a href="#{name}">{_text(text)}</a>'


def _rule() -> str:
    before, command, after = RULE.split("`")
    return f"{_text(before)}<code>{_text(command)}</code>{_text(after)}"


def _text(text: str) -> str:
    return html.escape(text, quote=False)


def _inline(picture: bytes) -> str:
    """The SVG for a page with its own colours: text in the page's colour, no background."""
    svg = picture.decode("utf-8")
    svg = svg[svg.index("<svg") :]
    return svg.replace(INK, "currentColor").replace(f"fill: {PAPER}", "fill: none").strip()
