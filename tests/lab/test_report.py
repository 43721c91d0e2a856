"""The report: every claim and verdict in both forms, plots that are whole and readable on any page."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dovetail.core.errors import PlanError
from dovetail_lab import Axis, Experiment, Panel, Request, Series, experiments, read_results, run_experiments
from dovetail_lab.plots import draw
from dovetail_lab.report import TABLE_BEGIN, TABLE_END, summary_table, write_report, write_summary

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
    assert page.read_text().endswith(f"| [1a](lab.md#one) | - | - |\n{TABLE_END}\nafter\n")
    page.write_text("no marks")
    with pytest.raises(PlanError, match="no place"):
        write_summary(page, [experiment("one")], read_results(results), "lab.md")


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
    table = rest.partition(TABLE_END)[0].strip().split("\n")
    assert table == summary_table(experiments(), read_results(RESULTS), "docs/lab/index.md")


def test_a_verdict_against_a_paper_is_explained() -> None:
    for result in read_results(RESULTS).values():
        if result.verdict.outcome != "confirmed":
            assert result.verdict.explanation, result.experiment
