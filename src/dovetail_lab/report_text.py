"""What both forms of the report tell: which results count, summaries, notes, and what was changed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dovetail_lab.experiment import Experiment, Panel
from dovetail_lab.plots import axis_of
from dovetail_lab.results import Result
from dovetail_lab.verdicts import OUTCOMES

__all__ = [
    "INTRODUCTION",
    "MIXED_ERA",
    "RULE",
    "Entry",
    "by_paper",
    "changes",
    "described",
    "details",
    "headline",
    "marked",
    "stale_results",
    "summary",
    "where",
]

_STALE_COMMIT, _STALE_DEFINITION = "measured on an earlier commit", "measured by an earlier definition"


@dataclass(frozen=True)
class Entry:
    """An experiment with its result, as it is told."""

    experiment: Experiment
    result: Result
    panels: tuple[Panel, ...]  # as drawn
    picture: bytes
    stale: str  # why it does not count as a result of this commit; empty if it does


def stale_results(experiments: Sequence[Experiment], results: Mapping[str, Result]) -> dict[str, str]:
    """The results that are not of the newest result's code, or not of their experiment's present definition, and why.

    A report is of one commit. The newest result says which; by its code and not by the commit's name, since results
    are committed after they were measured. A result that does not record its code is of an earlier commit.
    """
    kept = [results[experiment.name] for experiment in experiments if experiment.name in results]
    newest = max(kept, key=lambda result: result.started_at, default=None)
    found = {}
    for experiment in experiments:
        result = results.get(experiment.name)
        if result is None or newest is None:
            continue
        if result.revision != experiment.revision:
            found[experiment.name] = _STALE_DEFINITION
        elif not result.source or result.source != newest.source:
            found[experiment.name] = _STALE_COMMIT
    return found


def summary(entries: Sequence[Entry]) -> str:
    """How many results of each outcome there are."""
    counts = Counter(entry.result.verdict.outcome for entry in entries if not entry.stale)
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    return f"{sum(counts.values())} results of one commit: {told}" + _stale_summary(entries)


def _stale_summary(entries: Sequence[Entry]) -> str:
    """How many results do not count, and what they said."""
    counts = Counter(entry.result.verdict.outcome for entry in entries if entry.stale)
    if not counts:
        return ""
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    return f". {sum(counts.values())} measured earlier, which are marked and wait to be run again: {told}"


def where(entries: Sequence[Entry]) -> str:
    """The machine and the versions of the newest result."""
    newest = max((entry.result for entry in entries), key=lambda result: result.started_at)
    machine, versions = newest.machine, newest.versions
    memory = machine["memory_bytes"] / 2**30
    others = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{machine['processor']}, {machine['cores']} cores, {memory:.0f} GiB, {machine['system']}; {others}."


def _facts(entry: Entry) -> str:
    result = entry.result
    repeats = "once" if result.repeats == 1 else f"{result.repeats} times, bands from the lowest to the highest"
    if result.repeats > 1:
        repeats += f" of {result.repeats_are}"
    commit = f"commit {result.commit}" if result.commit else "commit not recorded"
    load = "" if result.load is None else f", load {result.load[0]:.1f} before and {result.load[1]:.1f} after"
    shown = {name: value for name, value in result.measured.parameters.items() if not isinstance(value, Mapping | list)}
    parameters = "; ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in shown.items())
    told = f"{result.size} size, seed {result.seed}, measured {repeats}, {result.seconds:.0f} s, {commit}{load}"
    return f"{told}. {parameters}".strip()


def _value(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def by_paper(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The experiments of each paper."""
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.experiment.paper, []).append(entry)
    return grouped


INTRODUCTION = (
    "Each figure and table of the papers, measured with this implementation and held against what the paper says. "
    "A disk of the papers' day is simulated (60 MB/s, 8 ms per seek; time is the CPU's plus what that disk would have "
    "taken); the real one is read past the page cache. Where a claim does not hold here, the text says why."
)
MIXED_ERA = (
    "This is a mixed era: a disk of 2007 beside a CPU of today. A seek costs what it did, while moving a tuple "
    "costs a seventh and hashing a key a four-hundredth of what it cost the MJoin paper (its table 3). So the disk "
    "decides where their CPU did: rates grow with memory without the papers' diminishing returns, and gains that "
    "come from saved CPU time are smaller or gone. Ratios of two joins on the same disk compare with the papers'; "
    "absolute rates do not. On the real disk a seek is cheap, and the CPU decides nearly everything."
)
RULE = (
    "Results are of one commit: that of the newest result, by a digest of the engine's and the lab's code. Others are "
    "not left out, since running all takes hours, but marked, and counted apart; an experiment whose definition "
    "changed keeps its old verdict, marked, until it is run again. `dovetail lab report --strict` refuses both."
)


def changes(entries: Sequence[Entry]) -> Iterator[tuple[Experiment, str, str, str]]:
    """Checks that were changed after results had been seen."""
    for entry in entries:
        for change in entry.experiment.changed_checks:
            yield entry.experiment, change.old, change.new, change.reason


def details(entry: Entry) -> Iterator[tuple[str, str]]:
    """What is told of an experiment, besides its verdict: names and texts."""
    experiment, verdict = entry.experiment, entry.result.verdict
    if experiment.note:
        yield "Note", experiment.note
    if verdict.explanation:
        yield "Why", verdict.explanation
    yield "Measured", _facts(entry)


def marked(entry: Entry) -> str:
    """The verdict, and whether it is of an earlier commit or definition."""
    return entry.result.verdict.text + (f" ({entry.stale})" if entry.stale else "")


def headline(experiment: Experiment) -> str:
    """Figure and title."""
    text = experiment.figure_text
    return f"{text[0].upper()}{text[1:]}: {experiment.title}"


def described(entry: Entry) -> str:
    """The plots in words, for readers who cannot see them."""
    parts = []
    for panel in entry.panels:
        names = ", ".join(series.name for series in panel.series)
        parts.append(f"{panel.title}: {axis_of(panel.y)} over {axis_of(panel.x)} of {names}")
    return "; ".join(parts)
