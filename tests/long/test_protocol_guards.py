"""Every guard of the commit protocol, taken out: the state machine fails. And the larger explorations."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "machine"))

from exploration import Bounds, explore
from mutations import GUARDS, found_without
from power_cuts import cut_everywhere

MOST_SEEDS = 6
SOONEST = {"epoch check": 3, "offset check": 4}
"""Where another seed than the first finds it soonest; the others are tried after it."""


@pytest.mark.parametrize("guard", GUARDS)
def test_machine_fails_without(guard: str) -> None:
    seeds = sorted(range(1, MOST_SEEDS + 1), key=lambda seed: seed != SOONEST.get(guard, 1))
    found = (found_without(guard, seed, examples=300, actions=40) for seed in seeds)
    assert any(one is not None for one in found)


def test_two_drivers_and_three_micro_batches() -> None:
    explored = explore(Bounds(micro_batches=3, switches=1, crashes=0, starts=1))
    print(f"{explored.states:,} states, {len(explored.disks):,} of the disk, {explored.ends:,} ends")
    assert explored.states > 10_000


def test_power_cuts_in_three_micro_batches() -> None:
    cuts = cut_everywhere(micro_batches=3, most_states=64)
    print(f"{cuts.steps} steps, {len(cuts.disks):,} states of the disk")
    assert cuts.steps > 200
