"""What a power cut may leave of a simulated disk, and what it may not."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.storage.interface import LockHeldError
from dovetail.storage.simulated import SimulatedStorage, at_random, every_choice
from dovetail.storage.simulated_disk import SimulatedDisk

ROOT = Path("/")
A, B = ROOT / "a", ROOT / "b"

Tree = tuple[tuple[str, bytes], ...]


class Crash(BaseException):
    """The process dies."""


def tree(disk: SimulatedDisk) -> Tree:
    return tuple((str(path), disk.read(path)) for path in disk.files(ROOT))


def left_by_power_cuts(disk: SimulatedDisk, most: int = 10_000) -> set[Tree]:
    found = set()
    for choose in every_choice(most):
        after = disk.copy()
        after.power_cut(choose)
        assert after.is_flushed()
        found.add(tree(after))
    return found


def storage_with(*flushed: Path) -> SimulatedStorage:
    storage = SimulatedStorage(SimulatedDisk())
    for path in flushed:
        storage.create(path, b"old")
    return storage


def test_a_written_file_may_be_lost_torn_or_whole() -> None:
    storage = storage_with()
    storage.write(A, b"1234")
    assert left_by_power_cuts(storage.disk) == {
        (),
        (("/a", b""),),
        (("/a", b"12"),),
        (("/a", b"123"),),
        (("/a", b"1234"),),
    }


def test_a_file_written_over_has_its_old_content_or_a_part_of_the_new() -> None:
    storage = storage_with(A)
    storage.write(A, b"12")
    assert left_by_power_cuts(storage.disk) == {(("/a", content),) for content in (b"old", b"", b"1", b"12")}


def test_flushed_content_needs_its_name() -> None:
    storage = storage_with()
    storage.write(A, b"1")
    storage.sync([A])
    assert left_by_power_cuts(storage.disk) == {(), (("/a", b"1"),)}
    storage.sync([ROOT])
    assert left_by_power_cuts(storage.disk) == {(("/a", b"1"),)}


def test_a_flushed_name_needs_its_content() -> None:
    storage = storage_with()
    storage.write(A, b"1")
    storage.sync([ROOT])
    assert left_by_power_cuts(storage.disk) == {(("/a", b""),), (("/a", b"1"),)}


def test_unflushed_names_are_lost_in_any_order() -> None:
    storage = storage_with()
    for path in (A, B):
        storage.write(path, b"")
    assert left_by_power_cuts(storage.disk) == {
        (),
        (("/a", b""),),
        (("/b", b""),),
        (("/a", b""), ("/b", b"")),
    }


def test_changes_of_one_name_keep_their_order() -> None:
    storage = storage_with(A)
    storage.delete(A)
    storage.write(A, b"")
    storage.sync([A])
    assert left_by_power_cuts(storage.disk) == {(("/a", b"old"),), (), (("/a", b""),)}


def test_a_deleted_file_may_come_back() -> None:
    storage = storage_with(A)
    storage.delete(A)
    assert left_by_power_cuts(storage.disk) == {(("/a", b"old"),), ()}
    storage.sync([ROOT])
    assert left_by_power_cuts(storage.disk) == {()}


def test_a_renamed_file_has_the_old_name_the_new_one_or_both() -> None:
    storage = storage_with(A)
    storage.rename(A, B)
    assert left_by_power_cuts(storage.disk) == {
        (("/a", b"old"),),
        (("/b", b"old"),),
        (("/a", b"old"), ("/b", b"old")),
    }


@pytest.mark.parametrize(
    ("flushed", "left"),
    [
        (ROOT / "from", {(("/to/x", b"old"),)}),
        (ROOT / "to", {(("/to/x", b"old"),), (("/from/x", b"old"), ("/to/x", b"old"))}),
    ],
)
def test_a_rename_is_durable_once_both_directories_are(flushed: Path, left: set[Tree]) -> None:
    storage = storage_with()
    for name in ("from", "to"):
        storage.make_directory(ROOT / name)
    storage.create(ROOT / "from" / "x", b"old")
    storage.rename(ROOT / "from" / "x", ROOT / "to" / "x")
    storage.sync([flushed])
    assert left_by_power_cuts(storage.disk) == left
    storage.sync([ROOT / "from", ROOT / "to"])
    assert left_by_power_cuts(storage.disk) == {(("/to/x", b"old"),)}


def test_a_rename_between_two_names_of_one_file_does_nothing() -> None:
    storage = storage_with(A)
    storage.disk.link(A, B)
    storage.rename(A, B)
    assert storage.names(ROOT) == ["a", "b"]


def test_a_directory_has_one_name() -> None:
    storage = storage_with()
    storage.make_directory(ROOT / "d")
    storage.create(ROOT / "d" / "x", b"1")
    storage.rename(ROOT / "d", ROOT / "e")
    assert left_by_power_cuts(storage.disk) == {(("/d/x", b"1"),), (("/e/x", b"1"),)}
    storage.sync([ROOT])
    assert left_by_power_cuts(storage.disk) == {(("/e/x", b"1"),)}


def test_files_go_with_the_name_of_their_directory() -> None:
    storage = storage_with()
    storage.write(ROOT / "d" / "x", b"1")
    storage.sync([ROOT / "d" / "x", ROOT / "d"])
    assert left_by_power_cuts(storage.disk) == {(), (("/d/x", b"1"),)}


def test_a_directory_made_durable_stays() -> None:
    storage = storage_with()
    storage.write(ROOT / "d" / "x", b"1")  # by a program that flushes nothing
    storage.sync([ROOT / "d" / "x", ROOT / "d"])
    storage.make_directory(ROOT / "d")
    assert left_by_power_cuts(storage.disk) == {(("/d/x", b"1"),)}


def test_a_deleted_directory_may_be_left_with_a_part_of_its_files() -> None:
    storage = storage_with()
    storage.make_directory(ROOT / "d")
    for name in ("x", "y"):
        storage.create(ROOT / "d" / name, b"")
    storage.delete(ROOT / "d")
    assert left_by_power_cuts(storage.disk) == {
        (),
        (("/d/x", b""),),
        (("/d/y", b""),),
        (("/d/x", b""), ("/d/y", b"")),
    }


def test_a_created_file_is_whole_or_not_there_wherever_the_process_dies() -> None:
    steps = steps_of(lambda storage: storage.create(A, b"1234"))
    assert steps == ["create.draft", "create.flush", "create.link", "create.linked", "create.sync"]
    for dies_at in range(len(steps)):
        storage = dying(dies_at, lambda storage: storage.create(A, b"1234"))
        for left in left_by_power_cuts(storage.disk):
            assert dict(left).get("/a") in (None, b"1234")


def test_a_created_file_survives_every_power_cut() -> None:
    storage = storage_with(A)
    assert left_by_power_cuts(storage.disk) == {(("/a", b"old"),)}


def test_two_creates_at_once_and_one_succeeds() -> None:
    disk = SimulatedDisk()
    other = SimulatedStorage(disk)

    def create_in_between(step: str) -> None:
        if step == "create.link":
            other.create(A, b"other")

    with pytest.raises(FileExistsError):
        SimulatedStorage(disk, create_in_between).create(A, b"own")
    assert tree(disk) == (("/a", b"other"),)


def test_a_copy_survives_and_is_independent() -> None:
    storage = storage_with()
    storage.write(ROOT / "d" / "x", b"1")
    storage.disk.copy_tree(ROOT / "d", ROOT / "backup" / "d")
    storage.write(ROOT / "d" / "x", b"2")
    storage.disk.power_cut(max)
    assert storage.read(ROOT / "backup" / "d" / "x") == b"1"


def test_a_copied_disk_goes_on_by_itself() -> None:
    storage = storage_with(A)
    before = storage.disk.copy()
    storage.delete(A)
    assert tree(before) == (("/a", b"old"),)
    assert tree(storage.disk) == ()


def test_fingerprints_tell_states_apart() -> None:
    storage = storage_with()
    storage.write(A, b"1")
    unflushed = storage.disk.copy()
    storage.sync([A, ROOT])
    assert unflushed.fingerprint() == storage.disk.fingerprint()
    assert unflushed.fingerprint(with_pending=True) != storage.disk.fingerprint(with_pending=True)
    storage.write(A, b"2")
    assert unflushed.fingerprint() != storage.disk.fingerprint()


def test_fingerprints_do_not_depend_on_the_way() -> None:
    first, second = storage_with(A, B), storage_with(B, A)
    assert first.disk.fingerprint(with_pending=True) == second.disk.fingerprint(with_pending=True)


def test_random_power_cuts_leave_only_what_the_enumeration_allows() -> None:
    storage = storage_with(A, B)
    storage.rename(A, ROOT / "c")
    storage.delete(B)
    storage.write(ROOT / "d", b"12")
    allowed = left_by_power_cuts(storage.disk)
    generator, met = random.Random(1), set()
    for _ in range(2_000):
        after = storage.disk.copy()
        after.power_cut(at_random(generator))
        met.add(tree(after))
    assert met == allowed


def steps_of(act: Callable[[SimulatedStorage], None]) -> list[str]:
    steps: list[str] = []
    act(SimulatedStorage(SimulatedDisk(), steps.append))
    return steps


def dying(at: int, act: Callable[[SimulatedStorage], None]) -> SimulatedStorage:
    """A storage whose process died before its n-th step."""
    left = [at]

    def die(step: str) -> None:
        if left[0] == 0:
            raise Crash(step)
        left[0] -= 1

    storage = SimulatedStorage(SimulatedDisk(), die)
    with pytest.raises(Crash):
        act(storage)
    return storage


def test_a_put_is_the_old_file_or_the_new_one() -> None:
    storage = storage_with(A)
    for step in ("draft", "flush", "rename", "sync"):
        found = left_by_power_cuts(crashed(storage.disk, f"put.{step}", lambda s: s.put(A, b"new")))
        named = {dict(files)["/a"] for files in found}
        assert named == ({b"old"} if step != "sync" else {b"old", b"new"})
    storage.put(A, b"new")
    assert left_by_power_cuts(storage.disk) == {(("/a", b"new"),)}


def test_a_stream_is_lost_or_torn_until_it_is_flushed() -> None:
    storage = storage_with()
    with storage.open_new(A) as file:
        file.write(b"1")
        file.write(b"2")
    assert left_by_power_cuts(storage.disk) == {(), (("/a", b""),), (("/a", b"1"),), (("/a", b"12"),)}
    storage.sync([A, ROOT])
    assert left_by_power_cuts(storage.disk) == {(("/a", b"12"),)}


def test_a_lock_reaches_its_host_and_ends_with_the_power() -> None:
    disk = SimulatedDisk()
    here, there = SimulatedStorage(disk, host="here"), SimulatedStorage(disk, host="there")
    lock = here.lock(A)
    with lock, there.lock(A), pytest.raises(LockHeldError), SimulatedStorage(disk, host="here").lock(A):
        pass
    lock = here.lock(A)
    lock.__enter__()
    disk.power_cut(min)
    with SimulatedStorage(disk, host="here").lock(A):
        pass


def crashed(disk: SimulatedDisk, at: str, act: Callable[[SimulatedStorage], None]) -> SimulatedDisk:
    """A copy of the disk, on which a process has crashed before a step."""

    def before(step: str) -> None:
        if step == at:
            raise Crash

    after = disk.copy()
    with pytest.raises(Crash):
        act(SimulatedStorage(after, before))
    return after
