"""Two drivers of one flow, each a process with a JVM of its own: nothing is repeated, and the old one says why."""

import os
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.errors import StateError
from dovetail.testing.rows import assert_same_rows

LAKE = ["delta", "iceberg"] if "DOVETAIL_DRILL_ROUNDS" in os.environ else []
FENCED = pytest.mark.parametrize("drill", ["parquet", "postgres", *LAKE], indirect=True)


def require_exact(drill: Any, what: str) -> None:
    assert_same_rows(drill.target.rows(), drill.expected(), what)


@pytest.mark.parametrize("drill", ["parquet"], indirect=True)
def test_second_driver_is_refused_where_locks_reach(drill: Any, other_driver: Any) -> None:
    drill.give(2)
    other_driver.start(drill, drill.checkpoint, suspend_at="flow.job.before:2")
    other_driver.wait_until_suspended()
    with pytest.raises(StateError, match="already runs this flow"):
        drill.run()
    other_driver.wake()
    assert other_driver.end()["error"] is None
    require_exact(drill, "the first driver")


# Before its job; with the job done; with the commit made; with the check passed that it is the newest driver.
POINTS = ["flow.job.before", "flow.job.after", "flow.commit.after", "flow.publish.before"]
SINKS = ["parquet", "postgres", "foreach_batch", *LAKE]
# What every sink does of it is the same, so few of the combinations run every day.
EVERY_DAY = [
    *(("parquet", point) for point in POINTS),
    *(("postgres", point) for point in ("flow.job.before", "flow.publish.before")),
    ("foreach_batch", "flow.job.before"),
]
RUNS = [(sink, point) for sink in SINKS for point in POINTS] if "DOVETAIL_DRILL_ROUNDS" in os.environ else EVERY_DAY


@pytest.mark.parametrize(("drill", "point"), RUNS, indirect=["drill"])
def test_driver_that_was_suspended_repeats_nothing_after_another_has_gone_on(
    drill: Any, drilling: Any, other_driver: Any, point: str
) -> None:
    drill.give(2)
    other_driver.start(drill, drill.checkpoint, suspend_at=f"{point}:2")
    other_driver.wait_until_suspended()
    drilling.lose_locks(drill.checkpoint)
    drill.give(6)
    drill.run()
    require_exact(drill, "the second driver")
    before = drill.target.rows()
    other_driver.wake()
    ended = other_driver.end()
    assert ended["error"] == "StateError", ended
    if point != "flow.publish.before" or drill.target.is_fenced:
        assert "replaced" in ended["text"] or "has taken over" in ended["text"], ended
        assert "Let the other driver run" in ended["text"], ended
    assert_same_rows(drill.target.rows(), before, "the driver that woke up changed the target")
    drill.give()
    drill.run()
    require_exact(drill, "the second driver, later")


@FENCED
@pytest.mark.parametrize("point", ["flow.job.before", "flow.publish.before"])
def test_copy_of_a_checkpoint_takes_over_from_the_original_that_is_suspended(
    drill: Any, other_driver: Any, point: str
) -> None:
    """A copy has locks and epochs of its own: only the target can tell the two apart."""
    drill.give(2)
    drill.run()
    copy = drill.copy("copy")
    drill.give(2)
    other_driver.start(drill, drill.checkpoint, suspend_at=point)
    other_driver.wait_until_suspended()
    drill.run(copy)
    require_exact(drill, "the copy")
    before = drill.target.rows()
    other_driver.wake()
    ended = other_driver.end()
    assert ended["error"] == "StateError", ended
    assert "taken over" in ended["text"], ended
    assert_same_rows(drill.target.rows(), before, "the original changed the target")
    with pytest.raises(StateError, match=r"older copy|from another run"):
        drill.run()
    drill.give()
    drill.run(copy)
    require_exact(drill, "the copy, later")


@FENCED
def test_copy_of_a_checkpoint_and_its_original_run_at_the_same_time(drill: Any, other_driver: Any) -> None:
    drill.give(1)
    drill.run()
    drill.give(8)
    other_driver.start(drill, drill.checkpoint, suspend_at="flow.job.before:2")
    other_driver.wait_until_suspended()
    copy = drill.copy("copy")
    other_driver.wake()
    ends = [_error_of(drill, copy), other_driver.end()["text"]]
    for text in ends:
        assert not text or "taken over" in text or "older copy" in text or "from another run" in text, ends
    assert drill.repeated() == []
    errors = [_error_of(drill, checkpoint) for checkpoint in (drill.checkpoint, copy)]
    assert errors.count("") == 1, errors
    require_exact(drill, "the one that may go on")


def _error_of(drill: Any, checkpoint: Path) -> str:
    try:
        drill.run(checkpoint)
    except StateError as error:
        return str(error)
    return ""
