"""Rows that do not add up are not committed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.core.errors import InternalError, StateError
from dovetail.core.metrics import OperatorMetrics
from dovetail.spark.flow.counting import require_counts, require_state_files
from dovetail.spark.flow.step import Step, StepRecord
from dovetail.storage.state_files import ShardState, StateFile


class Join(Step):
    """A step that is never run."""

    accounts_for_tuples = True

    def __init__(self, name: str) -> None:
        self.name = name

    fingerprint = route = decide = task = finish = None  # type: ignore[assignment]


Join.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def record(taken: int, matched: int, pending: int = 0, shed: int = 0) -> StepRecord:
    metrics = OperatorMetrics(stream_tuples_in=taken, matched_tuples=matched)
    if shed:
        metrics.count_shed("random", shed)
    return StepRecord((), ({"metrics": metrics.as_dict(), "pending": pending},))


def check(first: StepRecord, second: StepRecord, staged: int | None, before: Any = None) -> None:
    stages = [Join("1-enrich"), Join("2-enrich")]
    after = {"1-enrich": first, "2-enrich": second}
    require_counts(stages, before, after, {"1-enrich": 10, "2-enrich": 7}, staged)


def test_rows_that_add_up_are_accepted() -> None:
    check(record(12, 10, pending=2), record(10, 7, pending=1, shed=2), 7)
    check(record(12, 12), record(10, 10), None)
    earlier = {"1-enrich": record(5, 5), "2-enrich": record(4, 4)}
    check(record(12, 12), record(14, 14), 7, earlier)
    # A step that was added has no earlier record.
    check(record(12, 12), record(10, 10), 7, {"1-enrich": record(5, 5)})


@pytest.mark.parametrize(
    ("first", "second", "staged", "error", "message"),
    [
        (record(12, 10), record(10, 10), 7, InternalError, "1-enrich has taken 12 tuples .* 10 have left and 0 wait"),
        (record(12, 12), record(10, 7, pending=2), 7, InternalError, "2-enrich has taken 10 .* 7 have left and 2 wait"),
        (record(12, 12), record(9, 9), 7, InternalError, "1-enrich has emitted 10 rows, 2-enrich has received 9"),
        (record(12, 12), record(20, 20), 7, InternalError, "emitted 10 rows, 2-enrich has received 20"),
        (record(12, 12), record(10, 10), 0, StateError, "emitted 7 rows, but 0 were staged .* all workers mount"),
    ],
)
def test_rows_that_were_lost_or_repeated_are_not_committed(
    first: StepRecord, second: StepRecord, staged: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(first, second, staged)


def test_state_that_the_driver_does_not_see_is_not_committed(tmp_path: Path) -> None:
    file = StateFile("1-enrich/00000/00000003-ab.arrow", "window", 0, 10, 1, "0")
    found = {"1-enrich": StepRecord((ShardState("s", (file,)),), ())}
    with pytest.raises(StateError, match=r"00000003-ab\.arrow, but the driver does not see it\. .* all workers mount"):
        require_state_files(tmp_path, 3, found)
    require_state_files(tmp_path, 4, found)  # an older file is read by tasks, which report what they miss
    (tmp_path / file.name).parent.mkdir(parents=True)
    (tmp_path / file.name).touch()
    require_state_files(tmp_path, 3, found)


def test_stages_that_cannot_count_are_left_out() -> None:
    counted = SimpleNamespace(name="0-transform")
    require_counts([counted], None, {}, {}, 5)  # type: ignore[list-item]
    require_counts([], None, {}, {}, 5)
