"""Counters add up, subtract, survive JSON, and say when one went backwards."""

import json
from dataclasses import fields

import pytest

from dovetail.core.errors import InternalError, StateError
from dovetail.core.metrics import OperatorMetrics


def _every_counter_distinct() -> OperatorMetrics:
    numbers = {
        column.name: position for position, column in enumerate(fields(OperatorMetrics), 1) if column.name != "shed"
    }
    return OperatorMetrics(**numbers, shed={"random": 50, "oldest": 60})


def test_metrics_survive_json_with_every_counter() -> None:
    metrics = _every_counter_distinct()
    saved = json.loads(json.dumps(metrics.as_dict()))
    assert set(saved) == {column.name for column in fields(OperatorMetrics)}
    assert OperatorMetrics.from_dict(saved) == metrics


def test_metrics_read_back_do_not_share_the_saved_dict() -> None:
    saved = OperatorMetrics(shed={"random": 1}).as_dict()
    metrics = OperatorMetrics.from_dict(saved)
    metrics.count_shed("random", 1)
    assert saved["shed"] == {"random": 1}


def test_metrics_of_an_older_version_read_as_zero() -> None:
    assert OperatorMetrics.from_dict({"cycles": 2}) == OperatorMetrics(cycles=2)


def test_metrics_with_an_unknown_counter_are_refused() -> None:
    with pytest.raises(StateError, match="moons"):
        OperatorMetrics.from_dict({"cycles": 2, "moons": 1})


def test_metrics_merge_adds_every_counter() -> None:
    total = _every_counter_distinct()
    total.merge(_every_counter_distinct())
    single = _every_counter_distinct().as_dict()
    for name, value in total.as_dict().items():
        if name == "shed":
            assert value == {"random": 100, "oldest": 120}
        else:
            assert value == 2 * single[name], name


def test_metrics_difference_is_what_happened_since() -> None:
    metrics = _every_counter_distinct()
    before = metrics.copy()
    metrics.merge(OperatorMetrics(output_rows=7, disk_seconds=0.5, shed={"random": 2}))
    assert metrics - before == OperatorMetrics(output_rows=7, disk_seconds=0.5, shed={"random": 2, "oldest": 0})


def test_metrics_copy_is_independent() -> None:
    metrics = _every_counter_distinct()
    before = metrics.copy()
    metrics.count_shed("random", 1)
    metrics.cycles += 1
    assert before == _every_counter_distinct()


@pytest.mark.parametrize("name", [column.name for column in fields(OperatorMetrics) if column.name != "shed"])
def test_metrics_that_went_backwards_are_named(name: str) -> None:
    now, earlier = _every_counter_distinct(), _every_counter_distinct()
    setattr(now, name, getattr(now, name) - 1)
    assert now.decreased_since(earlier) == [name]
    with pytest.raises(InternalError, match=name):
        now - earlier


def test_metrics_shed_that_went_backwards_is_named() -> None:
    assert OperatorMetrics().decreased_since(OperatorMetrics(shed={"random": 1})) == ["shed[random]"]


def test_metrics_tuples_left_counts_each_way_out() -> None:
    metrics = OperatorMetrics(matched_tuples=1, unmatched_tuples=2, shed={"random": 4, "oldest": 8})
    assert metrics.shed_tuples == 12
    assert metrics.tuples_left == 15


def test_metrics_rates_cover_every_number() -> None:
    rates = _every_counter_distinct().per_second(2)
    assert rates["output_rows"] == _every_counter_distinct().output_rows / 2
    assert rates["shed_tuples"] == 55
    assert set(rates) == {c.name for c in fields(OperatorMetrics)} - {"shed"} | {"shed_tuples"}


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_metrics_rate_over_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="above zero"):
        OperatorMetrics().per_second(seconds)


def test_metrics_reject_a_misspelt_counter() -> None:
    with pytest.raises(AttributeError):
        OperatorMetrics().ouptut_rows = 1  # type: ignore[attr-defined]
