"""``dovetail lab`` as a command: what it lists, refuses, runs and reports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


def test_list_names_every_experiment_with_the_papers_claim(run: Run) -> None:
    every = run("lab", "list", "--json").document["experiments"]
    assert "hybridjoin-fig10" in [experiment["name"] for experiment in every]
    assert all(experiment["claim"] for experiment in every)


def test_mistakes_are_refused_before_anything_runs(run: Run, tmp_path: Path) -> None:
    for arguments, hint in (
        (["no-such-figure"], "lab list"),
        ([], "--all"),
        (["hybridjoin-fig10", "--all"], "Pass names or --all"),
    ):
        refused = run("lab", "run", *arguments, "--results", str(tmp_path / "r"), "--json")
        assert refused.code == 2
        assert hint in refused.error["hint"]
    assert not (tmp_path / "r").exists()


def test_run_gives_the_verdict_and_report_shows_it(run: Run, tmp_path: Path) -> None:
    places = ["--results", str(tmp_path / "r")]
    done = run("lab", "run", "hybridjoin-fig10", "--quick", *places, "--data", str(tmp_path / "d"), "--json")
    assert done.code == 0, done.err
    assert done.document["experiments"][0]["verdict"]["outcome"] == "confirmed"
    assert "1/1 hybridjoin-fig10: confirmed" in done.err
    report = run("lab", "report", *places, "--output", str(tmp_path / "out"), "--json")
    assert report.document["verdicts"] == {"hybridjoin-fig10": "confirmed"}
    assert (tmp_path / "out" / "index.html").exists()
    listed = run("lab", "list", *places)
    assert "confirmed" in listed.out
