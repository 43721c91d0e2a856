"""The state machine over the commit protocol, a short run; ``make test-machine`` is the long one."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "machine"))

from exploration import Bounds, explore
from power_cuts import cut_everywhere
from protocol_machine import run_machine


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_are_right_or_a_driver_is_refused_with_its_reason(seed: int) -> None:
    tally = run_machine(seed, examples=25, actions=30)
    assert tally.actions.total() > 250
    assert len(tally.disks) > 10
    assert tally.refusals


def test_every_state_after_a_power_cut_goes_on_to_the_right_rows() -> None:
    cuts = cut_everywhere(micro_batches=1, most_states=64)
    assert cuts.steps > 100
    assert len(cuts.disks) > 300


def test_two_drivers_in_any_order_with_one_switch() -> None:
    explored = explore(Bounds(micro_batches=1, switches=1, crashes=0, starts=1))
    assert explored.states > 3_000
    assert explored.refusals
