"""The commit protocol on a simulated disk: situations that the state machine has found, one by one."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "machine"))

from modelled_driver import Driver, published
from modelled_spark import Source

from dovetail.core.errors import StateError
from dovetail.spark.flow.ownership import require_newest, take_epoch
from dovetail.storage.simulated import SimulatedStorage
from dovetail.storage.simulated_disk import SimulatedDisk

CHECKPOINT, COPY, TARGET = Path("/checkpoint"), Path("/copy"), Path("/target")


class World:
    """A disk, a source with two rows, and drivers in this process."""

    def __init__(self) -> None:
        self.disk, self.source = SimulatedDisk(), Source(rows=2)
        self.storage = SimulatedStorage(self.disk)
        self.storage.make_directory(TARGET)

    def started(self, checkpoint: Path = CHECKPOINT, storage: SimulatedStorage | None = None) -> Driver:
        driver = Driver(checkpoint, TARGET, self.source, storage or self.storage)
        driver.start()
        return driver

    def run(self, driver: Driver) -> None:
        while (plan := driver.next_plan()) is not None:
            driver.run(plan)

    def rows(self) -> list[int]:
        return [row for row, _ in published(TARGET, self.storage)]


@pytest.fixture
def world() -> World:
    return World()


class Crash(BaseException):
    """The driver dies."""


def crash_before(disk: SimulatedDisk, step: str, nth: int) -> SimulatedStorage:
    """A storage whose process dies when it is about to take a step for the n-th time."""
    left = [nth]

    def before(name: str) -> None:
        if name == step:
            left[0] -= 1
            if left[0] == 0:
                raise Crash(step)

    return SimulatedStorage(disk, before)


def test_a_copy_beside_the_original_takes_the_target_over(world: World) -> None:
    original = world.started()
    world.run(original)
    world.disk.copy_tree(CHECKPOINT, COPY)
    world.source.rows = 4
    world.run(world.started(COPY))
    with pytest.raises(StateError, match="has taken over /target"):
        world.run(original)
    assert world.rows() == [0, 1, 2, 3]


def test_a_copy_that_went_another_way_is_refused(world: World) -> None:
    world.run(world.started())
    world.disk.copy_tree(CHECKPOINT, COPY)
    world.source.ticks = 1
    copy = world.started(COPY, crash_before(world.disk, "rename", 4))  # three: taking over, and the side sink
    world.run(copy)  # micro-batch 1 without rows
    world.source.rows = 4
    with pytest.raises(Crash):
        world.run(copy)  # micro-batch 2 is committed, not published
    world.run(world.started())
    assert world.rows() == [0, 1, 2, 3], "the original has published them as micro-batch 1"
    with pytest.raises(StateError, match="from another run than the checkpoint's"):
        world.started(COPY)


def test_what_a_late_driver_stages_during_a_takeover_is_kept(world: World) -> None:
    late = world.started()
    refusals = []

    def stage_late(step: str) -> None:
        if step == "remove_directory" and not refusals:
            with pytest.raises(StateError, match="This driver was replaced") as refusal:
                world.run(late)
            refusals.append(refusal)

    world.run(world.started(storage=SimulatedStorage(world.disk, stage_late)))
    assert refusals != []
    assert world.rows() == [0, 1], "the commit of the late driver counts, so its files must be there"


def test_an_epoch_that_was_given_again_after_a_restore_is_another_one(world: World) -> None:
    root = CHECKPOINT / "dovetail"
    world.storage.make_directory(root / "epochs")
    world.disk.copy_tree(CHECKPOINT, COPY)
    suspended = take_epoch(root, world.storage)
    world.disk.remove_tree(CHECKPOINT)
    world.disk.copy_tree(COPY, CHECKPOINT)
    newer = take_epoch(root, world.storage)
    assert newer.number == suspended.number
    require_newest(root, world.storage, newer)
    with pytest.raises(StateError, match="This driver was replaced"):
        require_newest(root, world.storage, suspended)


def test_our_half_deleted_during_the_first_micro_batch_is_missed(world: World) -> None:
    driver = world.started()
    plan = driver.next_plan()
    assert plan is not None
    world.disk.remove_tree(CHECKPOINT / "dovetail")
    with pytest.raises(StateError, match="the flow's part was lost"):
        world.started()
    with pytest.raises(StateError, match="the flow's part was lost"):
        world.started()
    assert world.rows() == []


def test_a_checkpoint_moved_under_a_driver_ends_it_with_a_reason(world: World) -> None:
    driver = world.started()
    world.run(driver)
    world.disk.copy_tree(CHECKPOINT, COPY)
    world.disk.remove_tree(CHECKPOINT)
    world.source.rows = 4
    with pytest.raises(StateError, match=r"lost Spark's part|no longer exists"):
        world.run(driver)
    world.run(world.started(COPY))
    assert world.rows() == [0, 1, 2, 3]


@pytest.mark.parametrize("left", [b"", b"v1", b'v1\n{"nextBatch'])
def test_commits_of_sparks_that_a_power_cut_has_torn_are_run_again(world: World, left: bytes) -> None:
    driver = world.started()
    world.run(driver)
    world.source.rows = 4
    world.run(driver)
    for batch in (0, 1):
        world.storage.write(CHECKPOINT / "commits" / str(batch), left)
    world.source.rows = 5
    world.run(world.started())
    assert world.rows() == [0, 1, 2, 3, 4]


def test_a_torn_commit_of_a_micro_batch_that_we_do_not_have_is_left_alone(world: World) -> None:
    world.run(world.started())
    world.storage.write(CHECKPOINT / "commits" / "7", b"")
    with pytest.raises(Exception, match="torn"):
        world.started()


def test_a_late_commit_names_what_others_have_published_since_its_driver_started(world: World) -> None:
    world.run(world.started())
    late = world.started()
    world.source.rows = 4
    world.run(world.started())
    world.source.ticks = 1
    late.restart_spark()  # Spark reads its logs after the driver has claimed the target
    with pytest.raises(StateError, match="This driver was replaced"):
        world.run(late)
    world.run(world.started())
    assert world.rows() == [0, 1, 2, 3]


def test_an_offset_that_a_power_cut_has_torn_is_planned_again(world: World) -> None:
    driver = world.started()
    world.run(driver)
    world.source.rows = 4
    plan = driver.next_plan()
    assert plan is not None
    for left in (b"", plan.text[:10], plan.text[: plan.text.rindex(b"\n")]):
        world.storage.write(CHECKPOINT / "offsets" / "1", left)
        world.started()
        assert not world.storage.exists(CHECKPOINT / "offsets" / "1")
    world.run(world.started())
    assert world.rows() == [0, 1, 2, 3]


def test_a_draft_of_a_driver_that_was_killed_does_not_keep_spark_from_its_first_micro_batch(world: World) -> None:
    world.storage.write(CHECKPOINT / "offsets" / ".0.356ebe53-ab0d-43f3-9ecc-28b2ea4f23e9.tmp", b"")
    world.run(world.started())
    assert world.rows() == [0, 1]


def test_a_torn_offset_that_an_intent_depends_on_is_damage(world: World) -> None:
    driver = world.started(storage=crash_before(world.disk, "rename", 1))
    with pytest.raises(Crash):
        world.run(driver)
    world.storage.write(CHECKPOINT / "offsets" / "0", b"")
    with pytest.raises(StateError, match="begun with other rows"):
        world.started()
