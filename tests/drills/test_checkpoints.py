"""What operators do to checkpoints: the right rows come out, or an error says what to do, and nothing is repeated."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.errors import StateError
from dovetail.testing.rows import assert_same_rows

# The table formats have the same fence: a few drills every day, all of them with more rounds.
LAKE = ["delta", "iceberg"] if "DOVETAIL_DRILL_ROUNDS" in os.environ else []
EVERY = pytest.mark.parametrize("drill", ["parquet", "postgres", "foreach_batch", *LAKE], indirect=True)
FENCED = pytest.mark.parametrize("drill", ["parquet", "postgres", *LAKE], indirect=True)


def require_exact(drill: Any, what: str) -> None:
    assert_same_rows(drill.target.rows(), drill.expected(), what)


def require_unchanged(drill: Any, before: list[dict[str, Any]]) -> None:
    assert_same_rows(drill.target.rows(), before, "a refused start changed the target")


@EVERY
def test_checkpoint_deleted_and_target_emptied_at_the_same_path_loads_everything(drill: Any) -> None:
    drill.give(3)
    drill.run()
    require_exact(drill, "the first load")
    shutil.rmtree(drill.checkpoint)
    drill.target.empty()
    drill.run()
    require_exact(drill, "the second load")
    drill.give()
    drill.run()
    require_exact(drill, "what came later")


@pytest.mark.parametrize("drill", ["parquet", "postgres", "delta", "iceberg"], indirect=True)
def test_older_copy_of_the_checkpoint_is_refused_and_the_newest_goes_on(drill: Any) -> None:
    drill.give(2)
    drill.run()
    older = drill.copy("older")
    drill.give(2)
    drill.run()
    newest, before = drill.copy("newest"), drill.target.rows()
    shutil.rmtree(drill.checkpoint)
    shutil.copytree(older, drill.checkpoint)
    drill.give()
    for _ in range(2):
        with pytest.raises(StateError, match="it is an older copy") as refused:
            drill.run()
        assert "Restore the newest copy" in str(refused.value)
        require_unchanged(drill, before)
    shutil.rmtree(drill.checkpoint)
    shutil.copytree(newest, drill.checkpoint)
    drill.run()
    require_exact(drill, "the newest copy")


@pytest.mark.parametrize("drill", ["foreach_batch"], indirect=True)
def test_older_copy_with_a_target_taken_back_to_the_same_micro_batch_goes_on(drill: Any) -> None:
    """A flow cannot look into what a function does, so the operator takes both back."""
    drill.give(2)
    drill.run()
    older, done = drill.copy("older"), set(drill.target.path.iterdir())
    drill.give(2)
    drill.run()
    for file in set(drill.target.path.iterdir()) - done:
        file.unlink()
    drill.run(older)
    require_exact(drill, "both taken back")


@FENCED
def test_target_emptied_under_a_checkpoint_that_is_kept_goes_on_with_what_is_new(drill: Any) -> None:
    """Emptying a table that a flow loads is an everyday thing; what was published once does not come again."""
    drill.give(2)
    drill.run()
    drill.target.empty()
    drill.give()
    drill.run()
    assert sorted(row["n"] for row in drill.target.rows()) == list(range(20, 30))


GONE = {
    "all of Spark's": ["offsets", "commits", "sources", "metadata"],
    "Spark's log of the source": ["sources"],
    "Spark's name of the query": ["metadata"],
    "Spark's plans": ["offsets"],
    "all of ours": ["dovetail"],
    "our commits": ["dovetail/commits"],
    "our description of the flow": ["dovetail/flow.json"],
}


@EVERY
def test_checkpoint_that_has_lost_a_part_is_refused(drill: Any) -> None:
    drill.give(3)
    drill.run()
    before = drill.target.rows()
    drill.give()
    for number, (what, names) in enumerate(GONE.items()):
        damaged = drill.copy(f"damaged-{number}")
        for name in names:
            path = damaged / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for _ in range(2):  # a refused start leaves nothing behind that would let the next one go on
            with pytest.raises(StateError, match=r"Restore the (whole )?checkpoint"):
                drill.run(damaged)
            assert_same_rows(drill.target.rows(), before, f"a start without {what} changed the target")
    drill.run()
    require_exact(drill, "the undamaged checkpoint")


@FENCED
def test_lost_name_of_the_flow_is_found_in_its_commits(drill: Any) -> None:
    drill.give(2)
    drill.run()
    older = drill.copy("older")
    drill.give()
    drill.run()
    for checkpoint in (older, drill.checkpoint):
        (checkpoint / "dovetail" / "identity.json").unlink()
    drill.give()
    with pytest.raises(StateError, match="it is an older copy"):
        drill.run(older)
    drill.run()
    require_exact(drill, "the flow under its own name")


@EVERY
def test_halves_of_two_checkpoints_are_refused(drill: Any) -> None:
    drill.give(2)
    drill.run()
    before = drill.target.rows()
    other = drill.root / "other"
    drill.run_elsewhere(other)
    shutil.rmtree(other / "dovetail")
    shutil.copytree(drill.checkpoint / "dovetail", other / "dovetail")
    drill.give()
    with pytest.raises(StateError, match="they were not made together"):
        drill.run(other)
    require_unchanged(drill, before)


@EVERY
def test_last_offsets_of_spark_lost_after_the_commit_lose_no_row(drill: Any, drilling: Any) -> None:
    drill.give(2)
    drill.run()
    drill.give()
    with drilling.crash_at("flow.publish.after"):
        drill.run()
    before = drill.target.rows()
    drill.give()  # Spark would now make one micro-batch, with the number of the lost one, of other rows
    for also in ("nothing", "the source's log"):
        damaged = drill.copy(f"without-offsets-and-{also.split()[-1]}")
        newest = max((damaged / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
        log = json.loads(newest.read_text().splitlines()[2])["logOffset"]
        newest.unlink()
        if also != "nothing":
            (damaged / "sources" / "0" / str(log)).unlink()
        with pytest.raises(StateError, match="they are not of one moment"):
            drill.run(damaged)
        require_unchanged(drill, before)
    drill.run()
    require_exact(drill, "with the offsets in place")


@EVERY
def test_checkpoint_moved_after_a_crash_goes_on_exactly(drill: Any, drilling: Any) -> None:
    """The rows are published and Spark does not know it; `test_crashes` does this at every point."""
    drill.give(2)
    drill.run()
    drill.give()
    with drilling.crash_at("flow.publish.after"):
        drill.run()
    moved = Path(shutil.move(drill.checkpoint, drill.root / "moved"))
    drill.give()
    drill.run(moved)
    require_exact(drill, "moved after a crash")


@pytest.mark.parametrize("drill", ["parquet", *LAKE[:1]], indirect=True)
@pytest.mark.parametrize("point", ["flow.publish.after", "flow.publish.before"])
def test_checkpoint_and_target_moved_together_after_a_crash_go_on_exactly(
    drill: Any, drilling: Any, point: str
) -> None:
    drill.give(2)
    drill.run()
    drill.give()
    with drilling.crash_at(point):
        drill.run()
    moved = Path(shutil.move(drill.checkpoint, drill.root / "moved"))
    drill.target.path = Path(shutil.move(drill.target.path, drill.root / "moved-out"))
    drill.give()
    drill.run(moved)
    require_exact(drill, f"both moved after a crash at {point}")
    assert not (drill.root / "out").exists()


@pytest.mark.parametrize("drill", ["parquet", *LAKE[:1]], indirect=True)
def test_flow_pointed_at_another_directory_after_a_crash_loses_nothing(drill: Any, drilling: Any) -> None:
    drill.give(2)
    drill.run()
    drill.give()
    with drilling.crash_at("flow.publish.before"):
        drill.run()
    first, drill.target.path = drill.target.path, drill.root / "second"
    with pytest.raises(StateError, match="neither staged nor published") as refused:
        drill.run()
    assert f"start the flow once with the target {first}" in str(refused.value)
    drill.target.path = first
    drill.run()  # the way on: publish what was committed for the first directory
    drill.target.path = drill.root / "second"
    drill.give()
    drill.run()
    assert sorted(row["n"] for row in drill.target.rows()) == list(range(30, 40))
    drill.target.path = first
    assert sorted(row["n"] for row in drill.target.rows()) == list(range(30))
