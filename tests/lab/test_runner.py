"""Runs: results that are kept at once, runs that are broken off and resumed, progress."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.core.errors import PlanError
from dovetail_lab import (
    Axis,
    Context,
    Experiment,
    Measured,
    Panel,
    Request,
    Result,
    Series,
    Step,
    Verdict,
    read_results,
    run_experiments,
)
from dovetail_lab.repeats import merge
from dovetail_lab.source import commit, source_digest

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


def test_a_result_says_which_code_it_is_of_and_how_busy_the_machine_was(tmp_path: Path, experiment: Make) -> None:
    (result,) = run_experiments(request_for(tmp_path, experiment("one")))
    document = json.loads((tmp_path / "results" / "one.json").read_text())
    assert document["source"] == source_digest()
    assert document["commit"] == commit()
    assert all(load >= 0 for load in document["load"])
    assert read_results(tmp_path / "results")["one"].load == result.load


def test_repeats_are_runs_with_other_seeds_whose_spread_is_the_band(tmp_path: Path, experiment: Make) -> None:
    seeds: list[int] = []

    def measure(context: Context) -> Measured:
        seeds.append(context.seed)
        values = (float(context.seed), 2.0 * context.seed)
        return Measured((Panel("p", Axis("x"), Axis("y"), (Series("s", (1, 2), values),)),), {"rows": context.repeats})

    seeded = replace(experiment("one"), run=measure, judge=lambda measured: Verdict("confirmed", ""))
    (result,) = run_experiments(request_for(tmp_path, seeded, repeats=3))
    assert seeds == [7, 8, 9]
    series = result.measured.panel("p").of("s")
    assert (series.y, series.low, series.high) == ((8.0, 16.0), (7.0, 14.0), (9.0, 18.0))
    assert result.repeats_are == "independent runs with other seeds"


def test_curves_of_other_seeds_with_other_ends_are_merged_at_the_same_share_of_their_results() -> None:
    curves = [Series("s", (50, 100), (1.0, 2.0)), Series("s", (60, 120, 240), (2.0, 4.0, 8.0))]
    runs = [Measured((Panel("p", Axis("x"), Axis("y"), (curve,)),)) for curve in curves]
    merged = merge(runs).panel("p").of("s")
    assert (merged.x, merged.low, merged.high) == ((50, 100), (1.0, 2.0), (4.0, 8.0))


def test_result_of_the_first_format_is_read_with_what_its_repeats_were(tmp_path: Path, experiment: Make) -> None:
    (result,) = run_experiments(request_for(tmp_path, experiment("one")))
    path = tmp_path / "results" / "one.json"
    document = json.loads(path.read_text())
    for name in ("revision", "commit", "source", "load", "repeats_are"):
        del document[name]
    del document["verdict"]["halves"]
    path.write_text(json.dumps({**document, "format": 1}))
    old = read_results(tmp_path / "results")["one"]
    assert old.measured == result.measured
    assert old.verdict == result.verdict
    assert (old.source, old.commit, old.load, old.revision) == ("", "", None, 1)
    assert old.repeats_are == "spans or runs with one seed"


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
    assert len(ran) == 1 + change.get("repeats", 3 if change == {"is_quick": False} else 1)


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
