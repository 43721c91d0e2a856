"""Who may read what a flow writes: of the checkpoint its own user only, of published output whoever the umask lets."""

import multiprocessing
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.runtime.shared_cache import SharedCache
from dovetail.spark.flow.workers import _Look
from dovetail.storage.running import RunnerLock
from dovetail.testing.flows import Feed, published_rows

NOBODY = 65_534


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def run(spark: SparkSession, root: Path) -> None:
    Feed(root / "feed").add(pa.table({"k": [1, 2]}))
    dt.Relation.build(pa.table({"k": [1], "city": ["here"]}), root / "cities", on="k", shards=2)
    source = spark.readStream.schema("k long").parquet(str(root / "feed"))
    flow = dt.stream(source, "private").enrich(
        root / "cities", on="k", how="left", strategy="mesh", budget="400kB", max_delay="1 hour"
    )
    sink = dt.sinks.parquet(root / "out")
    flow.write(sink, checkpoint=root / "new" / "checkpoint", trigger="available-now").awaitTermination()


def test_checkpoint_is_for_its_user_and_output_for_whom_the_umask_lets(spark: SparkSession, tmp_path: Path) -> None:
    run(spark, tmp_path)
    checkpoint = tmp_path / "new" / "checkpoint"
    assert mode(tmp_path / "new") == 0o755, "what lies above is not ours to close"
    assert mode(checkpoint) == 0o700
    assert mode(checkpoint / "dovetail") == 0o700
    assert (checkpoint / "offsets").is_dir(), "Spark's part is behind the same door"
    published = list((tmp_path / "out").glob("*.parquet"))
    assert published
    assert all(mode(path) == 0o644 for path in published)
    assert mode(tmp_path / "out") == 0o755
    assert len(published_rows(tmp_path / "out")) == 2
    if os.geteuid() == 0:  # then another user can try it as well
        let_others_in(tmp_path)
        assert as_nobody(_readable, str(checkpoint)) == 0
        assert as_nobody(_readable, str(tmp_path / "out")) >= len(published)


def let_others_in(directory: Path) -> None:
    """Open the directories above, which pytest closes."""
    for path in (directory, *directory.parents):
        if path.stat().st_uid == os.geteuid() and not mode(path) & 0o001:
            path.chmod(mode(path) | 0o055)


def _readable(root: str) -> int:
    return sum(os.access(path, os.R_OK) for path in Path(root).rglob("*") if path.is_file())


def as_nobody(function: Any, argument: Any) -> Any:
    """What a function gives in a process of another user."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def work() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        answers.put(function(argument))

    process = context.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    return answers.get()


def test_checkpoint_that_a_group_may_write_keeps_its_permissions(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    for directory, given in ((shared, 0o770), (own, 0o755)):
        directory.mkdir()
        directory.chmod(given)
        RunnerLock(directory, "query").release()
        assert mode(directory) == given
        assert mode(directory / "dovetail" / "runner.lock") == 0o600
    assert mode(shared / "dovetail") == 0o770
    assert mode(own / "dovetail") == 0o700


def test_cache_of_rows_is_for_its_user(tmp_path: Path) -> None:
    SharedCache(tmp_path / "dovetail-cache" / "one", 1 << 20, 1)
    assert mode(tmp_path / "dovetail-cache") == 0o700


class TestWorkersLook:
    """What a worker finds of a checkpoint."""

    def look(self, root: Path) -> str:
        return next(_Look(str(root), "id-1")(iter(())))[0]

    def checkpoint(self, root: Path, flow_id: str = "id-1") -> Path:
        (root / "state").mkdir(parents=True)
        (root / "identity.json").write_text(f'{{"id": "{flow_id}"}}')
        return root

    def test_same_directory(self, tmp_path: Path) -> None:
        assert self.look(self.checkpoint(tmp_path / "c")) == "same"

    def test_directory_that_is_not_there_or_another_flows(self, tmp_path: Path) -> None:
        assert self.look(tmp_path / "c") == "other directory"
        assert self.look(self.checkpoint(tmp_path / "d", "id-2")) == "other directory"

    def test_directory_that_may_be_looked_into_but_not_written(self, tmp_path: Path) -> None:
        root = self.checkpoint(tmp_path / "c")
        if os.geteuid() == 0:  # whom no permission stops
            let_others_in(tmp_path)
            assert as_nobody(self.look, root) == "other user"
            root.chmod(0o700)
            assert as_nobody(self.look, root) == "other user"
        else:
            (root / "state").chmod(0o500)
            assert self.look(root) == "other user"
