"""A multi-way join whose spill directory is full: a clear error, nothing lost, and it goes on when there is room."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from dovetail.core.errors import SpillError
from dovetail.spark import sinks
from dovetail.spark.steps.multi_join import multi_join
from dovetail.spark.steps.stream import Flow
from dovetail.testing.flows import Feed, published_rows, unnamed_state_files
from dovetail.testing.rows import assert_same_rows

NAMES = ("a", "b", "c")
ROWS_PER_FILE = 150


@pytest.fixture
def spill_directory(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own if one can be mounted, else a directory that can be put aside."""
    place = tmp_path / "spill"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=512k", "dovetail-test", str(place)]
    is_mounted = shutil.which("mount") is not None and not subprocess.run(mounting, check=False).returncode
    yield place
    if is_mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    """Leave no room there; where it is not a disk of its own, no directory either, which stops the superuser too."""
    if not os.path.ismount(place):
        place.rename(place.with_name("aside"))
        place.touch()
        return
    with open(place / "ballast", "wb", buffering=0) as file:
        for size in (4096, 1):
            while _wrote(file, size):
                pass


def _wrote(file: Any, count: int) -> bool:
    try:
        file.write(b"\1" * count)
    except OSError:
        return False
    return True


def make_room(place: Path) -> None:
    if os.path.ismount(place):
        (place / "ballast").unlink()
    else:
        place.unlink()
        place.with_name("aside").rename(place)


def test_full_spill_directory_is_a_clear_error_and_the_join_goes_on_when_there_is_room(
    spark: SparkSession, tmp_path: Path, spill_directory: Path
) -> None:
    feeds = {name: Feed(tmp_path / name) for name in NAMES}

    def add() -> None:
        for name, feed in feeds.items():
            first = ROWS_PER_FILE * len(feed.files())
            numbers = range(first, first + ROWS_PER_FILE)
            feed.add(
                pa.table({"k": [n * 7 % 200 for n in numbers], f"v{name}": [f"{name}{n}" + "x" * 100 for n in numbers]})
            )

    def flow() -> Flow:
        streams = {
            name: spark.readStream.schema(f"k long, v{name} string")
            .option("maxFilesPerTrigger", 1)
            .parquet(str(f.directory))
            for name, f in feeds.items()
        }
        return multi_join(streams, on="k", budget="100kB", shards=2, spill_directory=spill_directory)

    def run() -> None:
        query = flow().write(
            sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="available-now"
        )
        query.awaitTermination(600)

    add()
    run()
    add()
    fill(spill_directory)
    with pytest.raises(SpillError, match=r"The spill directory .*spill.* (is full|failed): .*Free space there"):
        run()
    make_room(spill_directory)
    run()
    rows = {name: feed.rows() for name, feed in feeds.items()}
    expected = [
        {"k": a["k"], "va": a["va"], "vb": b["vb"], "vc": c["vc"]}
        for a in rows["a"]
        for b in rows["b"]
        if b["k"] == a["k"]
        for c in rows["c"]
        if c["k"] == a["k"]
    ]
    assert len(expected) > 300
    assert_same_rows(published_rows(tmp_path / "out"), expected, "after the disk was full")
    assert unnamed_state_files(tmp_path / "checkpoint") == set()
