"""Crashes at every fault point of a driver, after which an operator restores an older copy or moves the checkpoint."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.errors import StateError
from dovetail.testing.rows import assert_same_rows

# The table formats: with more rounds only; each has a crash and an older copy every day in `test_checkpoints`.
LAKE = ["delta", "iceberg"] if "DOVETAIL_DRILL_ROUNDS" in os.environ else []
EVERY = pytest.mark.parametrize("drill", ["parquet", "postgres", "foreach_batch", *LAKE], indirect=True)
# Each step of the protocol, and what lies between two of them.
STEPS = [
    *("flow.epoch.linked", "flow.batch.before", "flow.intent.before", "flow.intent.linked", "flow.intent.after"),
    *("flow.job.before", "flow.job.after", "flow.commit.before", "flow.commit.linked", "flow.commit.after"),
    *("flow.publish.before", "flow.publish.after", "flow.steps.published", "flow.cleanup.document"),
]


def moved(drill: Any, checkpoint: Path, number: int) -> Path:
    """The checkpoint, at another path."""
    return Path(shutil.move(checkpoint, drill.root / f"moved-{number}"))


def error_of(drill: Any, checkpoint: Path) -> str:
    try:
        drill.run(checkpoint)
    except StateError as error:
        return str(error)
    return ""


@EVERY
def test_crash_at_every_point_then_an_older_copy_then_the_moved_checkpoint(
    drill: Any, drilling: Any, drill_rounds: int
) -> None:
    drill.give(4)
    drill.run()
    drill.give()
    passed: list[str] = []
    with drilling.fault_hook(passed.append):
        drill.run()
    points = list(dict.fromkeys(passed))
    assert set(STEPS) <= set(points)
    if drill_rounds == 1 and not isinstance(drill.target, drilling.ParquetTarget):
        # Up to the commit all sinks are alike.
        points = [point for point in points if point.startswith(("sink.", "flow.commit", "flow.publish"))]
    print(f"{len(points)} points: {' '.join(points)}")
    checkpoint = drill.checkpoint
    for number, point in enumerate(points * drill_rounds):
        older = drill.copy(f"older-{number}", checkpoint)
        drill.give()
        with drilling.crash_at(point):
            drill.run(checkpoint)
        checkpoint = moved(drill, checkpoint, number)
        # A target that cannot be looked into takes older copies for what they say; see the drill of taking both back.
        # Every third point is tried with an older copy each day, all of them over a few rounds.
        if drill.target.is_fenced and (drill_rounds > 1 or number % 3 == 0) and not error_of(drill, older):
            # It was not published yet, so the older copy could do it. Now the other one is the older copy.
            checkpoint, older = older, checkpoint
            assert error_of(drill, older), f"both go on after a crash at {point}"
        else:
            drill.run(checkpoint)
        assert_same_rows(drill.target.rows(), drill.expected(), f"after a crash at {point}")


@pytest.mark.parametrize("drill", ["parquet", "postgres"], indirect=True)
def test_killed_driver_whose_checkpoint_is_moved_loses_and_repeats_nothing(drill: Any, doomed_driver: Any) -> None:
    """SIGKILL for the driver and its JVM, when the rows are published and nobody knows it yet."""
    drill.give(3)
    doomed_driver.start(drill, drill.checkpoint, kill_at="flow.publish.after:2")
    doomed_driver.wait_until_killed()
    assert len(drill.target.rows()) == 20
    drill.give()
    drill.run(moved(drill, drill.checkpoint, 0))
    assert_same_rows(drill.target.rows(), drill.expected(), "moved after a kill")
