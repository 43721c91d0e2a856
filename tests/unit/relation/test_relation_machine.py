"""A relation's versions, pins and vacuums on a simulated disk, a short run; ``make test-machine`` is the long one."""

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

sys.path.append(str(Path(__file__).parents[2] / "machine"))

from relation_machine import run_relation_machine
from relation_mutations import EXPLORED_GUARDS, RELATION_GUARDS, relation_found_without
from relation_power_cuts import crash_everywhere, cut_relation_everywhere

from dovetail.core.errors import RelationError


@pytest.mark.parametrize("seed", [1, 2])
def test_versions_stay_what_they_are_and_nothing_is_left_behind(seed: int) -> None:
    tally = run_relation_machine(seed, examples=25, actions=40)
    assert tally.actions.total() == 1_000
    assert len(tally.disks) > 10
    assert tally.refusals


def test_power_cuts_and_crashes_at_many_steps() -> None:
    cuts = cut_relation_everywhere(most_states=4, every=23)
    assert cuts.steps > 20
    assert len(cuts.disks) > 60
    assert crash_everywhere(cuts=1, every=23) > 20


@pytest.mark.parametrize("guard", RELATION_GUARDS)
def test_machine_notices_a_guard_that_is_missing(guard: str) -> None:
    assert relation_found_without(guard, seed=2, examples=60, actions=40) is not None


@pytest.mark.parametrize(
    ("guard", "explore"),
    [
        ("flush of the shards' names before the commit", lambda: crash_everywhere(cuts=0)),
        ("flush of the marker before anything else", lambda: cut_relation_everywhere(most_states=8)),
    ],
)
def test_explorations_notice_a_guard_that_is_missing(guard: str, explore: Callable[[], object]) -> None:
    with mock.patch.object(*EXPLORED_GUARDS[guard]), pytest.raises((RelationError, AssertionError)):
        explore()
