"""Cost factors and curves: values, storage, refusal of nonsense."""

import json
import math

import pytest

from dovetail.core.errors import PlanError
from dovetail.costs import CostFactors, Curve, LoopCost

MEASURED = CostFactors(
    seek_s=1e-4,
    bandwidth_bytes_per_s=2e9,
    read_call_s=1e-5,
    probe_s=Curve(((100, 1e-8), (10_000, 3e-8))),
    cache_probe_s=Curve.constant(2e-8),
    output_s=1e-7,
    expire_s=Curve.constant(5e-8),
    stream_read_s=1e-9,
    append_s=Curve.constant(6e-8),
    switch_s=1e-7,
    lookup_s=2e-7,
    gather_s=3e-7,
    step_s=1e-4,
)


def test_curve_is_linear_in_the_logarithm_and_flat_outside():
    curve = MEASURED.probe_s
    assert curve.at(1) == curve.at(100) == 1e-8
    assert curve.at(1000) == pytest.approx(2e-8)
    assert curve.at(10_000) == curve.at(10**9) == 3e-8


@pytest.mark.parametrize(
    "points", [(), ((0, 1e-9),), ((2, 1e-9), (1, 1e-9)), ((1, 1e-9), (1, 1e-9)), ((1, -1e-9),), ((1, math.nan),)]
)
def test_impossible_curves_are_refused(points):
    with pytest.raises(PlanError):
        Curve(points)


def test_factors_survive_json():
    assert CostFactors.from_dict(json.loads(json.dumps(MEASURED.as_dict()))) == MEASURED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data.pop("seek_s"), "seek_s"),
        (lambda data: data.update(extra=1.0), "extra"),
        (lambda data: data.update(seek_s="fast"), "cannot be read"),
        (lambda data: data.update(seek_s=None), "cannot be read"),
        (lambda data: data.update(seek_s=[[1.0, 2.0]]), "wrong shape: seek_s"),
        (lambda data: data.update(probe_s=1.0), "wrong shape: probe_s"),
        (lambda data: data.update(probe_s=[1.0]), "cannot be read"),
        (lambda data: data.update(output_s=-1.0), "output_s=-1.0"),
        (lambda data: data.update(output_s=math.nan), "output_s=nan"),
        (lambda data: data.update(bandwidth_bytes_per_s=0.0), "bandwidth must be above 0"),
    ],
)
def test_damaged_factors_are_refused(change, reason):
    data = MEASURED.as_dict()
    change(data)
    with pytest.raises(PlanError, match=reason):
        CostFactors.from_dict(data)


def test_read_is_call_and_seek_and_transfer():
    assert MEASURED.read_seconds(2e6, sequential=True) == pytest.approx(1e-5 + 1e-3)
    assert MEASURED.read_seconds(2e6, sequential=False) == pytest.approx(1e-5 + 1e-4 + 1e-3)


def test_twice_as_fast_halves_every_cost():
    faster = MEASURED.with_faster(disk=2.0, cpu=2.0)
    assert faster.read_seconds(1e6, sequential=False) == pytest.approx(MEASURED.read_seconds(1e6, sequential=False) / 2)
    assert faster.probe_s.at(1000) == pytest.approx(1e-8)
    for name in ("output_s", "stream_read_s", "switch_s", "lookup_s", "gather_s", "step_s"):
        assert getattr(faster, name) == pytest.approx(getattr(MEASURED, name) / 2)


def test_other_disk_keeps_the_cpu():
    simulated = MEASURED.with_disk(seek_s=8e-3, bandwidth_bytes_per_s=60e6)
    assert simulated.read_seconds(480e3, sequential=False) == pytest.approx(0.016)
    assert simulated.probe_s == MEASURED.probe_s


def test_loop_cost_of_nothing():
    assert LoopCost(terms={}, stream_tuples=0).service_rate == 0.0
    assert math.isinf(LoopCost(terms={"read": 0.0}, stream_tuples=5).service_rate)
    assert LoopCost(terms={"read": 1.0}, stream_tuples=0).seconds_per_tuple == 0.0


def test_loop_cost_splits_into_fixed_and_per_tuple():
    cost = LoopCost(terms={"read": 1.0, "probe": 2.0, "step": 0.5, "append": 3.0, "output": 1.0}, stream_tuples=4)
    assert cost.fixed_seconds == 3.5
    assert cost.seconds_per_tuple == 1.0
    assert cost.fixed_seconds + 4 * cost.seconds_per_tuple == cost.seconds
