"""The report: every claim and verdict in both forms, plots that are whole and readable on any page."""

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dovetail.core.errors import PlanError
from dovetail_lab import Axis, Experiment, Measured, Panel, Request, Series, experiments, read_results, run_experiments
from dovetail_lab.paper import with_ratio
from dovetail_lab.plots import draw
from dovetail_lab.report import STALE_NOTE, TABLE_BEGIN, TABLE_END, summary_table, write_report, write_summary
from dovetail_lab.report_text import stale_results
from dovetail_lab.verdicts import ChangedCheck, Verdict

Make = Callable[..., Experiment]
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "lab" / "results"


@pytest.fixture
def results(tmp_path: Path, experiment: Make) -> Path:
    request = Request(experiments=[experiment("one")], results=tmp_path / "r", data=tmp_path / "d", is_quick=True)
    run_experiments(request)
    return tmp_path / "r"


class _Tags(HTMLParser):
    """Fails where a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_has_claim_verdict_command_and_plot_in_both_forms(
    tmp_path: Path, results: Path, experiment: Make
) -> None:
    report = write_report([experiment("one"), experiment("two")], results, tmp_path / "out")
    assert report.verdicts == {"one": "confirmed"}
    assert report.missing == ["two"]
    page, markdown = report.html.read_text(), report.markdown.read_text()
    for text in (page, markdown):
        assert "A claim." in text
        assert "A check." in text
        assert "dovetail lab run one" in text
    assert "&lt;2 &amp; more&gt;" in page
    assert "plots/one.svg" in markdown
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []


def test_plot_follows_the_colours_of_the_page_it_stands_in(tmp_path: Path, results: Path, experiment: Make) -> None:
    report = write_report([experiment("one")], results, tmp_path / "out")
    inside = re.search(r"<svg.*</svg>", report.html.read_text(), re.DOTALL)
    assert inside is not None
    assert "currentColor" in inside[0]
    assert "#ffffff" not in inside[0]
    ElementTree.fromstring((tmp_path / "out" / "plots" / "one.svg").read_bytes())


def test_plot_names_both_axes_with_units_and_every_series() -> None:
    panel = Panel(
        "a disk",
        Axis("Memory", "% of R", "log"),
        Axis("Service rate", "tuples/s", "log"),
        (Series("mesh", (1, 10), (5.0, 50.0)), Series("other", (1, 10), (1.0, 2.0))),
    )
    for mark in ("line", "bars", "points", "steps"):
        drawn = Panel(panel.title, panel.x, panel.y, panel.series, mark)  # type: ignore[arg-type]
        texts = "".join(ElementTree.fromstring(draw("x", [drawn])).itertext())
        for text in ("a disk", "Memory (% of R)", "Service rate (tuples/s)", "mesh", "other"):
            assert text in texts


def test_same_result_gives_the_same_plot(results: Path) -> None:
    panels = read_results(results)["one"].measured.panels
    assert draw("one", panels) == draw("one", panels)


def test_report_without_results_says_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="dovetail lab run"):
        write_report(experiments(), tmp_path, tmp_path / "out")


def test_table_goes_between_its_marks_and_nowhere_else(tmp_path: Path, results: Path, experiment: Make) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{TABLE_BEGIN}\nold\n{TABLE_END}\nafter\n")
    for _ in range(2):
        write_summary(page, [experiment("one")], read_results(results), "lab.md")
    assert page.read_text().startswith(f"before\n{TABLE_BEGIN}\n| paper |")
    assert page.read_text().endswith(f"| [1a](lab.md#one) | - | - | - |\n{TABLE_END}\nafter\n")
    page.write_text("no marks")
    with pytest.raises(PlanError, match="no place"):
        write_summary(page, [experiment("one")], read_results(results), "lab.md")


def test_results_of_another_commit_are_marked_and_refused_if_strict(
    tmp_path: Path, results: Path, experiment: Make
) -> None:
    both = [experiment("one"), experiment("two")]
    newest = read_results(results)["one"]
    replace(newest, experiment="two", source="other", started_at="2000-01-01T00:00:00+00:00").write(results)
    report = write_report(both, results, tmp_path / "out")
    assert report.stale == {"two": "measured on an earlier commit"}
    for text in (report.html.read_text(), report.markdown.read_text()):
        assert "1 results of one commit: 1 confirmed. 1 measured earlier" in text
        assert "(measured on an earlier commit)" in text
    with pytest.raises(PlanError, match="two: measured on an earlier commit"):
        write_report(both, results, tmp_path / "out", is_strict=True)


def test_result_without_a_recorded_commit_is_of_an_earlier_one(results: Path, experiment: Make) -> None:
    unknown = replace(read_results(results)["one"], source="")
    assert stale_results([experiment("one")], {"one": unknown}) == {"one": "measured on an earlier commit"}


def test_result_of_an_earlier_definition_keeps_its_verdict_and_is_marked(
    tmp_path: Path, results: Path, experiment: Make
) -> None:
    def refuse(measured: object) -> Verdict:
        raise AssertionError("it measured something else")

    changed = replace(experiment("one"), revision=2, judge=refuse)
    report = write_report([changed], results, tmp_path / "out")
    assert report.verdicts == {"one": "confirmed"}
    assert report.stale == {"one": "measured by an earlier definition"}


def test_halves_notes_and_changed_checks_are_in_both_forms(tmp_path: Path, results: Path, experiment: Make) -> None:
    halves = Verdict.of_halves({"model": "confirmed", "small": "not testable here"}, numbers="2 %")
    told = replace(
        experiment("one"),
        judge=lambda measured: halves,
        note="Streams are invented.",
        paper_says="seven times",
        changed_checks=(ChangedCheck("old one", "new one", "seen <too> late"),),
    )
    report = write_report([told], results, tmp_path / "out")
    page, markdown = report.html.read_text(), report.markdown.read_text()
    assert "model: confirmed; small: not testable here" in markdown
    assert 'model: <span class="verdict yes">confirmed</span>' in page
    assert "seen &lt;too&gt; late" in page
    for text in ("Streams are invented.", "seven times", "old one", "new one"):
        assert text in page
        assert text in markdown
    kept = read_results(results)
    assert kept["one"].verdict == halves
    assert "[1a](x#one) (model)" in summary_table([told], kept, "x")[-1]


def test_ratio_of_two_curves_is_drawn_beside_the_papers() -> None:
    curves = (Series("a", (1, 2), (6.0, 9.0), (5.0, 8.0), (7.0, 10.0)), Series("b", (1, 2), (2.0, 3.0)))
    panel = Panel("disk", Axis("x"), Axis("y", scale="log"), curves)
    shown = with_ratio(Measured((panel,)), "a", "b", ends=(7.0, 8.0), significant=1.2)
    assert [series.name for series in shown[1].series] == ["disk", "paper", "paper: significant, judged by 1.2"]
    assert shown[1].of("disk").y == (3.0, 3.0)
    assert b"paper" in draw("x", shown)
    # A result that lacks a curve is shown as it is.
    assert with_ratio(Measured((panel,)), "a", "c") == (panel,)


# -------------------------------------------------------------------- what is committed


def test_every_experiment_has_a_committed_result_of_a_full_run() -> None:
    kept = read_results(RESULTS)
    assert sorted(kept) == sorted(experiment.name for experiment in experiments())
    assert {result.size for result in kept.values()} == {"full"}


def test_committed_verdicts_are_those_of_the_experiments_as_they_are() -> None:
    kept = read_results(RESULTS)
    for experiment in experiments():
        assert kept[experiment.name].judged_by(experiment).verdict == kept[experiment.name].verdict, experiment.name


def test_table_of_verdicts_in_the_readme_is_that_of_the_results() -> None:
    _, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(TABLE_BEGIN)
    table = rest.partition(TABLE_END)[0].replace(STALE_NOTE, "").strip().split("\n")
    assert table == summary_table(experiments(), read_results(RESULTS), "docs/lab/index.md")


def test_a_verdict_against_a_paper_is_explained() -> None:
    for result in read_results(RESULTS).values():
        if result.verdict.outcome != "confirmed":
            assert result.verdict.explanation, result.experiment
