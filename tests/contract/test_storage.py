"""What every storage promises while the power is on, and what of it the local one flushes."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from dovetail.core.errors import StateError
from dovetail.storage.documents import create_document, read_document
from dovetail.storage.interface import LockHeldError, Storage
from dovetail.storage.local import LocalStorage
from dovetail.storage.simulated import SimulatedStorage
from dovetail.storage.simulated_disk import SimulatedDisk


@pytest.fixture(params=["local", "simulated"])
def storage(request: pytest.FixtureRequest) -> Storage:
    return LocalStorage() if request.param == "local" else SimulatedStorage(SimulatedDisk())


@pytest.fixture
def root(storage: Storage, tmp_path: Path) -> Path:
    storage.make_directory(tmp_path / "flow")
    return tmp_path / "flow"


def test_a_name_is_created_once(storage: Storage, root: Path) -> None:
    storage.create(root / "a", b"first")
    with pytest.raises(FileExistsError):
        storage.create(root / "a", b"second")
    assert storage.read(root / "a") == b"first"
    assert storage.names(root) == ["a"], "no draft is left behind"


def test_nothing_is_created_in_a_directory_that_does_not_exist(storage: Storage, root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        storage.create(root / "b" / "a", b"")
    assert not storage.exists(root / "b")


def test_what_does_not_exist(storage: Storage, root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read(root / "a")
    with pytest.raises(FileNotFoundError):
        storage.rename(root / "a", root / "b")
    with pytest.raises(FileNotFoundError):
        storage.sync([root / "a"])
    assert not storage.exists(root / "a")
    assert storage.names(root / "a") == []
    storage.delete(root / "a")


def test_a_file_has_no_names_and_a_directory_no_content(storage: Storage, root: Path) -> None:
    storage.create(root / "a", b"")
    assert storage.names(root / "a") == []
    with pytest.raises(IsADirectoryError):
        storage.read(root)


def test_a_rename_replaces_a_file(storage: Storage, root: Path) -> None:
    storage.create(root / "a", b"new")
    storage.create(root / "b", b"old")
    storage.rename(root / "a", root / "b")
    assert storage.names(root) == ["b"]
    assert storage.read(root / "b") == b"new"


def test_a_directory_is_renamed_with_its_content(storage: Storage, root: Path) -> None:
    storage.make_directory(root / "a" / "deep")
    storage.create(root / "a" / "deep" / "x", b"1")
    storage.make_directory(root / "other")
    storage.rename(root / "a", root / "other" / "b")
    assert storage.read(root / "other" / "b" / "deep" / "x") == b"1"
    assert not storage.exists(root / "a")


def test_a_rename_to_a_directory_that_does_not_exist_is_refused(storage: Storage, root: Path) -> None:
    storage.create(root / "a", b"1")
    with pytest.raises(FileNotFoundError):
        storage.rename(root / "a", root / "nowhere" / "a")
    assert storage.read(root / "a") == b"1"


def test_a_directory_does_not_replace_one_that_has_files(storage: Storage, root: Path) -> None:
    for name in ("a", "b"):
        storage.make_directory(root / name)
        storage.create(root / name / "x", name.encode())
    with pytest.raises(OSError, match="not empty"):
        storage.rename(root / "a", root / "b")
    assert storage.read(root / "b" / "x") == b"b"


def test_a_directory_is_deleted_with_its_content(storage: Storage, root: Path) -> None:
    storage.make_directory(root / "a" / "deep")
    storage.create(root / "a" / "deep" / "x", b"1")
    storage.create(root / "b", b"2")
    storage.delete(root / "a")
    storage.delete(root / "b")
    assert storage.names(root) == []


def test_only_an_empty_directory_is_removed(storage: Storage, root: Path) -> None:
    storage.make_directory(root / "a")
    storage.create(root / "a" / "x", b"1")
    assert not storage.remove_directory(root / "a")
    assert storage.read(root / "a" / "x") == b"1"
    storage.delete(root / "a" / "x")
    assert storage.remove_directory(root / "a")
    assert storage.remove_directory(root / "a"), "it is gone already"
    storage.create(root / "b", b"")
    with pytest.raises(NotADirectoryError):
        storage.remove_directory(root / "b")


def test_a_directory_may_exist_already(storage: Storage, root: Path) -> None:
    storage.create(root / "a", b"1")
    storage.make_directory(root)
    assert storage.names(root) == ["a"]
    with pytest.raises((FileExistsError, NotADirectoryError)):
        storage.make_directory(root / "a" / "b")


def test_put_replaces_a_file(storage: Storage, root: Path) -> None:
    storage.put(root / "a", b"first")
    storage.put(root / "a", b"second")
    assert storage.read(root / "a") == b"second"
    assert storage.names(root) == ["a"], "no draft is left behind"
    with pytest.raises(FileNotFoundError):
        storage.put(root / "nowhere" / "a", b"")
    assert storage.names(root) == ["a"]


def test_a_file_is_written_piece_by_piece(storage: Storage, root: Path) -> None:
    with storage.open_new(root / "a") as file:
        assert file.write(b"one ") == 4
        file.write(memoryview(b"two"))
    storage.sync([root / "a", root])
    assert storage.read(root / "a") == b"one two"
    with pytest.raises(FileExistsError):
        storage.open_new(root / "a")
    with pytest.raises(FileNotFoundError):
        storage.open_new(root / "nowhere" / "a")


def test_a_copy_outlives_its_original(storage: Storage, root: Path) -> None:
    storage.create(root / "a", b"1")
    storage.create(root / "b", b"2")
    storage.copy(root / "a", root / "c")
    storage.delete(root / "a")
    assert storage.read(root / "c") == b"1"
    with pytest.raises(FileExistsError):
        storage.copy(root / "b", root / "c")
    with pytest.raises(FileNotFoundError):
        storage.copy(root / "a", root / "d")
    assert storage.names(root) == ["b", "c"]


def test_sizes_are_those_of_files(storage: Storage, root: Path) -> None:
    storage.create(root / "a", b"123")
    assert [storage.size(path) for path in (root / "a", root, root / "b", root / "a" / "b")] == [3, None, None, None]


def test_a_mapped_file_stays_readable_when_it_is_deleted(storage: Storage, root: Path) -> None:
    storage.create(root / "a", b"123")
    content = storage.map(root / "a")
    storage.delete(root / "a")
    assert bytes(content) == b"123"
    with pytest.raises(FileNotFoundError):
        storage.map(root / "a")


def test_a_file_is_as_old_as_its_last_writing(storage: Storage, root: Path) -> None:
    storage.put(root / "a", b"")
    if isinstance(storage, SimulatedStorage):
        storage.disk.clock_s += 90
    else:
        os.utime(root / "a", (0, (root / "a").stat().st_mtime - 90))
    assert 90 <= storage.age_s(root / "a") < 180
    storage.put(root / "a", b"")
    assert 0 <= storage.age_s(root / "a") < 90
    assert storage.names(root) == ["a"], "what it has written beside the file is gone"
    with pytest.raises(FileNotFoundError):
        storage.age_s(root / "b")


def test_a_lock_excludes_others_until_its_block_ends(storage: Storage, root: Path) -> None:
    with storage.lock(root / "lock"):
        with pytest.raises(LockHeldError, match=r"locked by process \d+") as refusal, storage.lock(root / "lock"):
            pass
        assert refusal.value.holder.isdigit()
        with storage.lock(root / "other"):
            pass
    with pytest.raises(KeyError), storage.lock(root / "lock"):
        raise KeyError
    with storage.lock(root / "lock"):
        pass
    with pytest.raises(FileNotFoundError), storage.lock(root / "nowhere" / "lock"):
        pass


def test_documents_are_read_as_written(storage: Storage, root: Path) -> None:
    assert create_document(root / "a.json", {"x": 1}, "test.storage", storage)
    assert not create_document(root / "a.json", {"x": 2}, "test.storage", storage)
    assert read_document(root / "a.json", storage) == {"x": 1}
    assert read_document(root / "b.json", storage) is None


def test_a_torn_document_is_refused(storage: Storage, root: Path) -> None:
    create_document(root / "a.json", {"x": 1}, "test.storage", storage)
    storage.create(root / "b.json", storage.read(root / "a.json")[:-3])
    with pytest.raises(StateError, match="damaged"):
        read_document(root / "b.json", storage)


# ==================================================================== the local one only


class Flushes:
    """Which files and directories were flushed, and what else was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        fsync, link = os.fsync, os.link

        def noted_fsync(descriptor: int) -> None:
            info = os.fstat(descriptor)
            self.seen.append("directory" if stat.S_ISDIR(info.st_mode) else "file")
            self.places.append((info.st_dev, info.st_ino))
            fsync(descriptor)

        def noted_link(old: str, new: str) -> None:
            self.seen.append("link")
            link(old, new)

        self.places: list[tuple[int, int]] = []
        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "link", noted_link)

    def has(self, path: Path) -> bool:
        info = path.stat()
        return (info.st_dev, info.st_ino) in self.places


def test_local_create_flushes_the_content_before_the_name_and_then_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    LocalStorage().create(tmp_path / "a", b"1")
    assert flushes.seen == ["file", "link", "directory"]
    assert flushes.has(tmp_path / "a")
    assert flushes.has(tmp_path)


def test_local_put_flushes_the_content_before_the_name_and_then_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    LocalStorage().put(tmp_path / "a", b"1")
    assert flushes.seen == ["file", "directory"]
    assert flushes.has(tmp_path / "a")
    assert flushes.has(tmp_path)


def test_local_copy_to_another_file_system_is_flushed_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(old: object, new: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (tmp_path / "a").write_bytes(b"1")
    flushes = Flushes(monkeypatch)
    monkeypatch.setattr(os, "link", refuse)
    LocalStorage().copy(tmp_path / "a", tmp_path / "b")
    assert flushes.seen == ["file"]
    assert flushes.has(tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_local_directory_is_durable_even_if_a_killed_process_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flow" / "commits").mkdir(parents=True)
    flushes = Flushes(monkeypatch)
    LocalStorage().make_directory(tmp_path / "flow" / "commits")
    assert flushes.has(tmp_path / "flow")
    assert flushes.has(tmp_path)


def test_local_sync_flushes_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"1")
    flushes = Flushes(monkeypatch)
    LocalStorage().sync([tmp_path / "a", tmp_path])
    assert flushes.seen == ["file", "directory"]


def test_two_processes_may_delete_one_directory(tmp_path: Path) -> None:
    for _ in range(20):
        for number in range(30):
            (tmp_path / "a" / str(number)).mkdir(parents=True)
        failures: list[BaseException] = []

        def delete(seen: list[BaseException] = failures) -> None:
            try:
                LocalStorage().delete(tmp_path / "a")
            except OSError as error:
                seen.append(error)

        threads = [threading.Thread(target=delete) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert not (tmp_path / "a").exists()
