"""What operators do, with a topic as the target: no row is ever lost, and headers tell records that were sent again."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dovetail.core.errors import StateError
from dovetail.testing.faults import load_program
from dovetail.testing.rows import assert_same_rows

DRILLING = load_program(Path(__file__).parents[1] / "drills" / "drilling.py")


@pytest.fixture
def drill(kafka: Any, spark: SparkSession, tmp_path: Path) -> Any:
    return DRILLING.Drill(spark, tmp_path, DRILLING.KafkaTarget(kafka.servers, tmp_path.name, spark))


@pytest.fixture(scope="module")
def other_driver(tmp_path_factory: pytest.TempPathFactory, connector_jars: list[str]) -> Iterator[Any]:
    other = DRILLING.OtherDriver(tmp_path_factory.mktemp("other"), ",".join(connector_jars))
    yield other
    other.close()


def require_exact(drill: Any, what: str) -> None:
    """A reader that leaves out what it has seen has every row once."""
    assert_same_rows(drill.target.rows(), drill.expected(), what)


@pytest.mark.parametrize("point", ["sink.staged.taken", "flow.publish.after", "flow.publish.before", "flow.job.after"])
def test_records_sent_again_after_a_crash_and_a_move_are_told_by_their_headers(drill: Any, point: str) -> None:
    drill.give(2)
    drill.run()
    drill.give()
    with DRILLING.crash_at(point):
        drill.run()
    drill.give()
    drill.run(Path(shutil.move(drill.checkpoint, drill.root / "moved")))
    require_exact(drill, f"after a crash at {point}")
    sent = len(drill.target.records())
    assert sent == (50 if point in ("sink.staged.taken", "flow.publish.after") else 40)


def test_older_copy_sends_rows_again_and_loses_none(drill: Any) -> None:
    drill.give(2)
    drill.run()
    older = drill.copy("older")
    drill.give(1)
    drill.run()
    drill.give(2)
    # Other rows under a number that readers have seen: in one micro-batch of the copy are those of two.
    drill.run(older)
    seen = Counter(row["n"] for row in drill.target.rows())
    assert set(seen) == set(range(50)), "a reader that leaves out what it has seen has lost rows"
    assert {n for n, times in seen.items() if times > 1} == set(range(20, 30)), "rows come again, as documented"


def test_checkpoint_that_has_lost_a_half_is_refused(drill: Any) -> None:
    drill.give(2)
    drill.run()
    before = len(drill.target.records())
    drill.give()
    for name in ("dovetail", "offsets"):
        damaged = drill.copy(f"without-{name}")
        shutil.rmtree(damaged / name)
        with pytest.raises(StateError, match="Restore the whole checkpoint"):
            drill.run(damaged)
    assert len(drill.target.records()) == before


@pytest.mark.parametrize("point", ["flow.job.before", "flow.publish.before"])
def test_driver_that_was_suspended_sends_nothing_that_headers_do_not_tell(
    drill: Any, other_driver: Any, point: str
) -> None:
    drill.give(2)
    other_driver.start(drill, drill.checkpoint, suspend_at=f"{point}:2")
    other_driver.wait_until_suspended()
    DRILLING.lose_locks(drill.checkpoint)
    drill.give(3)
    drill.run()
    sent = len(drill.target.records())
    other_driver.wake()
    ended = other_driver.end()
    if point == "flow.job.before":
        assert ended["error"] == "StateError", ended
        assert "This driver was replaced" in ended["text"], ended
        assert len(drill.target.records()) == sent
    require_exact(drill, "two drivers")
