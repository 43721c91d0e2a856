"""The simulated disk charges what a disk of declared bandwidth and seek time would take."""

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dovetail import Relation
from dovetail.relation import SimulatedDisk
from dovetail.relation.io import PAGE_BYTES

ROWS = 20_000


@pytest.fixture(scope="module")
def relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    keys = np.arange(ROWS)
    keys[5_000:8_000] = 5_000
    table = pa.table({"k": keys, "text": ["x" * 100] * ROWS})
    return Relation.build(table, tmp_path_factory.mktemp("disk") / "r", on="k", shards=1)


def disk_of(bandwidth: float = 1e6, seek_s: float = 0.01) -> SimulatedDisk:
    return SimulatedDisk(bandwidth, seek_s, virtual=True)


@pytest.mark.parametrize("block_rows", [100, 999, ROWS])
def test_scan_pays_one_seek_and_every_byte_once(relation: Relation, block_rows: int) -> None:
    disk = disk_of()
    blocks = sum(1 for _ in relation.shard(0, io=disk).blocks(block_rows))
    assert (disk.reads, disk.seeks) == (blocks, 1)
    assert disk.bytes == relation.stats.bytes
    assert disk.elapsed_s == pytest.approx(0.01 + relation.stats.bytes / 1e6)


def test_second_cycle_pays_the_seek_back(relation: Relation) -> None:
    disk = disk_of()
    shard = relation.shard(0, io=disk)
    for _ in range(2):
        list(shard.blocks(1_000))
    assert disk.seeks == 2
    assert disk.bytes == 2 * relation.stats.bytes


def test_scattered_blocks_pay_a_seek_each(relation: Relation) -> None:
    disk = disk_of()
    shard = relation.shard(0, io=disk)
    for start in (500, 5_000, 400, 15_000):
        shard.read_block(start, 100)
    assert (disk.reads, disk.seeks) == (4, 4)
    assert disk.bytes == pytest.approx(400 * shard.disk_row_bytes, abs=4)
    assert disk.elapsed_s == pytest.approx(4 * 0.01 + disk.bytes / 1e6)


def test_gather_pays_for_each_page_of_rows_once(relation: Relation) -> None:
    disk = disk_of()
    shard = relation.shard(0, io=disk)
    shard.gather(np.array([9_000, 9_001, 100, 9_000, 101]))
    assert (disk.reads, disk.seeks) == (2, 2)
    assert disk.bytes <= 2 * PAGE_BYTES
    disk.reads = disk.seeks = 0
    page_rows = int(PAGE_BYTES // shard.disk_row_bytes)
    shard.gather(np.arange(10 * page_rows))
    assert (disk.reads, disk.seeks) == (10, 1)


def test_lookup_pays_for_each_page_of_codes_that_it_touches(relation: Relation) -> None:
    disk = disk_of()
    shard = relation.shard(0, io=disk)
    codes_per_page = PAGE_BYTES // 8
    shard.lookup(np.array([3, 4, 3, codes_per_page + 1]))
    assert (disk.reads, disk.bytes) == (2, 2 * PAGE_BYTES)
    disk.reads = 0
    # 3,000 rows have this code: they lie on six or seven pages.
    shard.lookup(np.array([5_000]))
    assert disk.reads == 8_000 // codes_per_page - 5_000 // codes_per_page + 1


def test_locate_pays_nothing(relation: Relation) -> None:
    disk = disk_of()
    relation.shard(0, io=disk).locate(np.arange(1_000))
    assert (disk.reads, disk.elapsed_s) == (0, 0.0)


def test_disk_is_shared_by_the_shards_that_use_it(tmp_path: Path) -> None:
    table = pa.table({"k": list(range(1_000))})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=2)
    disk = disk_of()
    shards = [relation.shard(number, io=disk) for number in range(2)]
    for start in (0, 100):
        for shard in shards:
            shard.read_block(start, 100)
    assert (disk.reads, disk.seeks) == (4, 4)


def test_real_disk_waits_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock of our own: what was slept and what was lost to slow sleeps add up to the declared time."""
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds + 0.003  # a sleep that overshoots

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    disk = SimulatedDisk(bandwidth_bytes_per_s=1e6, seek_s=0.01)
    for number in range(50):
        disk.access("f", number * 1_000, 1_000)
    assert disk.elapsed_s == pytest.approx(0.01 + 50 * 0.001)
    assert sum(slept) <= disk.elapsed_s
    assert now[0] - 100.0 >= disk.elapsed_s - 0.002
    virtual = SimulatedDisk(1e6, 0.01, virtual=True)
    slept.clear()
    virtual.access("f", 0, 10**9)
    assert slept == []
