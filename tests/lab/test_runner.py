"""Runs: results that are kept at once, runs that are broken off and resumed, progress."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.core.errors import PlanError
from dovetail_lab import Context, Experiment, Request, Result, Step, read_results, run_experiments

Make = Callable[..., Experiment]


def request_for(tmp_path: Path, *experiments: Experiment, **changes: object) -> Request:
    request = Request(
        experiments=experiments, results=tmp_path / "results", data=tmp_path / "data", is_quick=True, seed=7
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def test_a_result_says_what_it_was_made_with_and_is_read_back_whole(tmp_path: Path, experiment: Make) -> None:
    (result,) = run_experiments(request_for(tmp_path, experiment("one")))
    document = json.loads((tmp_path / "results" / "one.json").read_text())
    assert (document["seed"], document["size"], document["repeats"]) == (7, "quick", 1)
    assert document["machine"]["cores"] >= 1
    assert "numpy" in document["versions"]
    assert document["parameters"] == {"rows": 10, "seed": 7}
    assert document["verdict"]["outcome"] == "confirmed"
    (panel,) = document["panels"]
    assert panel["series"][0] == {"name": "mesh", "x": [1, 10], "y": [3.0, 8.0], "low": [3.0, 8.0], "high": [4.0, 9.0]}
    assert read_results(tmp_path / "results")["one"].measured == result.measured


def test_interrupted_run_keeps_what_is_finished_and_resume_runs_the_rest_only(tmp_path: Path, experiment: Make) -> None:
    ran: list[str] = []

    def interrupt(context: Context) -> None:
        raise KeyboardInterrupt

    first = experiment("first", lambda context: ran.append("first"))
    with pytest.raises(KeyboardInterrupt):
        run_experiments(request_for(tmp_path, first, experiment("second", interrupt)))
    assert list(read_results(tmp_path / "results")) == ["first"]
    second = experiment("second", lambda context: ran.append("second"))
    results = run_experiments(request_for(tmp_path, first, second, is_resumed=True))
    assert ran == ["first", "second"]
    assert [result.experiment for result in results] == ["first", "second"]


@pytest.mark.parametrize("change", [{"is_quick": False}, {"seed": 8}, {"repeats": 2}])
def test_resume_runs_again_what_was_measured_otherwise(
    tmp_path: Path, experiment: Make, change: dict[str, object]
) -> None:
    ran: list[int] = []
    counted = experiment("one", lambda context: ran.append(context.repeats))
    run_experiments(request_for(tmp_path, counted))
    run_experiments(request_for(tmp_path, counted, is_resumed=True, **change))
    assert len(ran) == 2


def test_without_resume_an_experiment_is_run_again(tmp_path: Path, experiment: Make) -> None:
    ran: list[int] = []
    counted = experiment("one", lambda context: ran.append(1))
    for _ in range(2):
        run_experiments(request_for(tmp_path, counted))
    assert len(ran) == 2


def test_progress_grows_to_the_end_and_tells_the_time_left(tmp_path: Path, experiment: Make) -> None:
    steps: list[Step] = []
    run_experiments(request_for(tmp_path, experiment("one"), experiment("two")), steps.append)
    shares = [step.share_done for step in steps]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert steps[0].seconds_left > 0
    assert steps[-1].seconds_left == 0
    assert [step.result.experiment for step in steps if step.result is not None] == ["one", "two"]


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text('{"format": 99}')
    with pytest.raises(PlanError, match=r"one\.json"):
        read_results(tmp_path)


def test_a_stored_result_is_judged_by_the_experiment_as_it_is_now(tmp_path: Path, experiment: Make) -> None:
    (result,) = run_experiments(request_for(tmp_path, experiment("one")))
    other = replace(experiment("one"), judge=lambda measured: replace(result.verdict, numbers="anew"))
    judged: Result = result.judged_by(other)
    assert judged.verdict.numbers == "anew"
    assert judged.measured == result.measured
