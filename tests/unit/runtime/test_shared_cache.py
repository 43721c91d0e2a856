"""The cache that workers share: what it serves, what it may take, and what survives a killed worker."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from dovetail.joins import LookupJoin
from dovetail.joins.spec import JoinSpec
from dovetail.relation import Relation
from dovetail.runtime import cache_front, hot_values, shared_cache
from dovetail.runtime.cache_file import Generation
from dovetail.runtime.shared_cache import SharedCache

ROWS = 20_000
BUDGET_BYTES = 1_000_000


@pytest.fixture
def relation(tmp_path: Path) -> Relation:
    keys = np.arange(ROWS, dtype=np.int64)
    rows = pa.table({"k": np.concatenate([keys, keys[:100]]), "pay": [f"row {n}" for n in range(ROWS + 100)]})
    return Relation.build(rows, tmp_path / "relation", on="k", shards=2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shared_cache._COUNTERS.clear()
    return tmp_path / "cache"


def cache_in(directory: Path) -> SharedCache:
    return SharedCache(directory, BUDGET_BYTES, workers=2)


def hot_codes() -> npt.NDArray[np.int64]:
    """500 codes that are asked for often, some of which no row has."""
    return np.concatenate([np.arange(0, 2_000, 5), np.arange(-100, 0)]).astype(np.int64)


def teach(cache: SharedCache, relation: Relation, codes: npt.NDArray[np.int64]) -> bool:
    """One task that is asked for nothing but these codes, often enough to publish."""
    with cache.attached(relation):
        cache.learn(codes, np.full(codes.size, 10_000_000 // codes.size, np.int64))
        return cache.publish_if_due(relation.reader(["pay"]), relation, 30.0)


def joined(relation: Relation, cache: SharedCache, codes: npt.NDArray[np.int64]) -> list[tuple[int, str | None]]:
    """What a task of a left join gives, with the cache before the relation."""
    reader = relation.reader(["pay"])
    stream = pa.record_batch({"__code": codes, "k": codes})
    spec = JoinSpec(reader, stream.schema, (("k", "k"),), how="left")
    with cache.attached(relation):
        batches = list(LookupJoin(spec, cache=cache.generation).offer(stream))
    return sorted((row["k"], row["pay"] or "") for batch in batches for row in batch.to_pylist())


def test_generation_answers_what_was_asked_for_and_knows_what_has_no_row(relation: Relation, directory: Path) -> None:
    cache = cache_in(directory)
    assert teach(cache, relation, hot_codes())
    with cache.attached(relation):
        assert cache.generation is not None
        assert (cache.generation.find(hot_codes()) >= 0).all()
        assert cache.generation.count(hot_codes()).tolist() == relation.reader([]).count(hot_codes()).tolist()
        assert (cache.generation.find(np.arange(5_000, 6_000)) < 0).all()


def test_join_with_a_cache_gives_what_it_gives_without(relation: Relation, directory: Path) -> None:
    codes = np.arange(-200, 3_000, dtype=np.int64)
    without = joined(relation, cache_in(directory), codes)
    teach(cache_in(directory), relation, hot_codes())
    assert joined(relation, cache_in(directory), codes) == without
    assert len(without) == codes.size + 100


def test_files_stay_within_the_budget_while_generations_follow_one_another(relation: Relation, directory: Path) -> None:
    cache = cache_in(directory)
    published = 0
    for shift in range(6):
        published += teach(cache, relation, np.arange(ROWS // 2, dtype=np.int64) + 1_000 * shift)
        sizes = [path.stat().st_size for path in directory.glob("generation-*")]
        assert len(sizes) <= 2
        assert sum(sizes) <= BUDGET_BYTES
    assert published >= 3
    assert max(sizes) > cache.generation_bytes / 2


def test_no_generation_is_written_while_one_before_the_last_is_still_mapped(
    relation: Relation, directory: Path
) -> None:
    teach(cache_in(directory), relation, hot_codes())
    first = Generation.attach(next(directory.glob("generation-*")))
    assert first is not None
    assert teach(cache_in(directory), relation, hot_codes() + 4_000)
    before = sorted(directory.glob("generation-*"))
    assert not teach(cache_in(directory), relation, hot_codes() + 8_000)
    assert sorted(directory.glob("generation-*")) == before
    first.close()
    assert teach(cache_in(directory), relation, hot_codes() + 12_000)
    assert len(list(directory.glob("generation-*"))) == 2


def test_values_that_did_not_change_are_carried_into_the_next_version(relation: Relation, directory: Path) -> None:
    teach(cache_in(directory), relation, hot_codes())
    changed = relation.upsert(pa.table({"k": pa.array([5, 10, -7]), "pay": ["five", "ten", "minus"]}))
    changed = changed.delete(pa.table({"k": pa.array([15])}))
    cache = cache_in(directory)
    with cache.attached(changed):
        assert cache.generation is not None
        assert cache.generation.version == changed.version
        gone = hot_codes()[cache.generation.find(hot_codes()) < 0]
        assert gone.tolist() == [5, 10, 15, -7]
    codes = np.arange(-20, 50, dtype=np.int64)
    assert joined(changed, cache, codes) == joined(changed, cache_in(directory.with_name("empty")), codes)
    with cache.attached(relation):
        assert cache.generation is None, "a replay with an older version must not see newer rows"


def test_after_a_vacuum_of_the_old_version_nothing_is_carried_over(relation: Relation, directory: Path) -> None:
    teach(cache_in(directory), relation, hot_codes())
    changed = relation.upsert(pa.table({"k": pa.array([5]), "pay": ["five"]}))
    changed.vacuum(keep=1)
    codes = np.arange(0, 50, dtype=np.int64)
    assert joined(changed, cache_in(directory), codes) == joined(changed, cache_in(directory.with_name("empty")), codes)


def test_cut_file_counts_as_no_generation(relation: Relation, directory: Path) -> None:
    teach(cache_in(directory), relation, hot_codes())
    path = next(directory.glob("generation-*"))
    os.truncate(path, path.stat().st_size - 100)
    cache = cache_in(directory)
    with cache.attached(relation):
        assert cache.generation is None
    assert teach(cache_in(directory), relation, hot_codes())


PUBLISHER = """
import os, sys, numpy as np
from pathlib import Path
from dovetail.relation import Relation
from dovetail.runtime import cache_file
from dovetail.runtime.shared_cache import SharedCache

relation = Relation.open(sys.argv[1])
step, calls = int(sys.argv[3]), 0
written = cache_file.GenerationWriter._write

def write_and_tell(writer, data):
    global calls
    calls += 1
    if calls == step:
        print("in the middle", flush=True)
        sys.stdin.read()
    return written(writer, data)

cache_file.GenerationWriter._write = write_and_tell
cache = SharedCache(Path(sys.argv[2]), 1_000_000, workers=2)
codes = np.arange(4_000, dtype=np.int64)
with cache.attached(relation):
    cache.learn(codes, np.full(codes.size, 10_000, np.int64))
    cache.publish_if_due(relation.reader(["pay"]), relation, 30.0)
print("published", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("step", [1, 3, 1_000], ids=["first write", "later write", "after publishing"])
def test_worker_killed_while_it_publishes_leaves_a_cache_that_serves(
    relation: Relation, directory: Path, step: int
) -> None:
    teach(cache_in(directory), relation, hot_codes())
    arguments = [sys.executable, "-c", PUBLISHER, relation.path, str(directory), str(step)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        told = victim.stdout.readline().strip()
        assert told == ("published" if step == 1_000 else "in the middle")
        with cache_in(directory).attached(relation) as cache:
            assert cache.generation is not None, "readers go on while another worker publishes"
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    assert bool(list(directory.glob("draft-*"))) == (step != 1_000)
    codes = np.arange(-200, 3_000, dtype=np.int64)
    assert joined(relation, cache_in(directory), codes) == joined(
        relation, cache_in(directory.with_name("empty")), codes
    )
    assert teach(cache_in(directory), relation, hot_codes() + 9_000), "the next publisher is not kept out"
    assert not list(directory.glob("draft-*"))


# -------------------------------------------------------------------- beyond the application


@pytest.fixture
def host_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's private directory on a host of its own."""
    (tmp_path / "hot").mkdir()
    monkeypatch.setattr(hot_values, "private_directory", lambda kind: tmp_path / kind)
    return tmp_path / "hot"


def restarted(directory: Path) -> SharedCache:
    """The cache of the same relation in the directory of the next application."""
    shared_cache._COUNTERS.clear()
    return cache_in(directory.parent / "next application" / directory.name)


def test_restarted_application_begins_with_the_hot_values(
    relation: Relation, directory: Path, host_directory: Path
) -> None:
    hot = hot_codes()
    assert teach(cache_in(directory), relation, hot)
    following, reader = restarted(directory), relation.reader(["pay"])
    assert following.begin_with_last(reader, relation)
    with following.attached(relation):
        assert following.generation is not None
        assert (following.generation.find(hot) >= 0).all()
    assert joined(relation, following, hot) == joined(relation, cache_in(directory), hot)
    assert not following.begin_with_last(reader, relation), "only an empty cache is filled"


def test_rows_of_a_restarted_application_are_those_of_the_present_version(
    relation: Relation, directory: Path, host_directory: Path
) -> None:
    assert teach(cache_in(directory), relation, hot_codes())
    changed = relation.upsert(pa.table({"k": [5, 10, -50], "pay": ["five", "ten", "new"]}))
    following = restarted(directory)
    assert following.begin_with_last(changed.reader(["pay"]), changed)
    found = dict(joined(changed, following, np.array([5, 10, -50, 150])))
    assert found == {5: "five", 10: "ten", -50: "new", 150: "row 150"}


@pytest.mark.parametrize("content", [b"", b"nothing that Arrow wrote", None])
def test_damaged_hot_values_are_as_good_as_none(
    relation: Relation, directory: Path, host_directory: Path, content: bytes | None
) -> None:
    assert teach(cache_in(directory), relation, hot_codes())
    (file,) = host_directory.iterdir()
    file.write_bytes(file.read_bytes()[:-300] if content is None else content)
    assert not restarted(directory).begin_with_last(relation.reader(["pay"]), relation)


def test_hot_values_of_another_format_are_not_read(
    relation: Relation, directory: Path, host_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_values, "_SCHEMA", hot_values._SCHEMA.with_metadata({"format": b"99"}))
    assert teach(cache_in(directory), relation, hot_codes())
    monkeypatch.undo()
    monkeypatch.setattr(hot_values, "private_directory", lambda kind: host_directory)
    assert not restarted(directory).begin_with_last(relation.reader(["pay"]), relation)


def test_only_the_hottest_values_are_kept_and_old_files_go(
    host_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot_values, "MOST_VALUES", 3)
    old = host_directory / "old"
    old.write_bytes(b"x")
    os.utime(old, (1, 1))
    hot_values.store_hot_values("name", np.arange(10), np.arange(10) + 5)
    codes, tuples = hot_values.load_hot_values("name")
    assert (codes.tolist(), tuples.tolist()) == ([7, 8, 9], [12, 13, 14])
    assert [file.name for file in host_directory.iterdir()] == ["name"]
    assert hot_values.load_hot_values("unknown")[0].size == 0


# -------------------------------------------------------------------- when it is on


class FakeReader:
    """A mapped relation of which this share is not in memory."""

    disk, io_mode = None, "map"

    def __init__(self, absent: float) -> None:
        self._absent = absent

    def absent_share(self) -> float:
        return self._absent


class FakeRecipe:
    filesystem, relation_id = None, "r"


@pytest.mark.parametrize(("absent", "expected"), [(0.0, False), (0.05, False), (0.5, True), (1.0, True)])
def test_worker_without_observations_looks_at_memory(
    monkeypatch: pytest.MonkeyPatch, absent: float, expected: bool
) -> None:
    monkeypatch.setattr(cache_front, "DEVICE_READS", cache_front.DeviceReads())
    assert cache_front.reads_wait(FakeRecipe(), FakeReader(absent)) is expected  # type: ignore[arg-type]


def test_what_was_observed_counts_for_more_than_what_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, waited = cache_front.DeviceReads(), iter([0, 50, 50, 50])
    monkeypatch.setattr(cache_front, "DEVICE_READS", reads)
    monkeypatch.setattr(cache_front, "_pages_waited_for", lambda: next(waited))
    with reads.observed("r", [1_000]):
        pass
    assert cache_front.reads_wait(FakeRecipe(), FakeReader(0.0)) is True  # type: ignore[arg-type]
    reads = cache_front.DeviceReads()
    monkeypatch.setattr(cache_front, "DEVICE_READS", reads)
    with reads.observed("r", [1_000]):
        pass
    assert cache_front.reads_wait(FakeRecipe(), FakeReader(1.0)) is False  # type: ignore[arg-type]


def test_no_cache_where_hardly_any_value_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = cache_front.DeviceReads()
    monkeypatch.setattr(cache_front, "DEVICE_READS", reads)
    pays = [cache_front._pays(FakeRecipe(), FakeReader(1.0))]  # type: ignore[arg-type]
    reads.note_tuples("r", 100, 100)
    pays.append(cache_front._pays(FakeRecipe(), FakeReader(1.0)))  # type: ignore[arg-type]
    reads.note_tuples("r", 100_000, 99_000)
    pays.append(cache_front._pays(FakeRecipe(), FakeReader(1.0)))  # type: ignore[arg-type]
    for _ in range(2):
        reads.note_tuples("r", 100_000, 54_000)
    pays.append(cache_front._pays(FakeRecipe(), FakeReader(1.0)))  # type: ignore[arg-type]
    assert pays == [True, True, False, True], "too few to judge, then uniform keys, then skewed ones"
