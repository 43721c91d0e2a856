"""Writers of a relation killed with SIGKILL: the last good version opens and is whole, and life goes on."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dovetail import Relation
from dovetail.core.errors import RelationNotFound
from dovetail.core.faultpoints import FAULT_POINT_VARIABLE, FAULT_TRACE_VARIABLE
from dovetail.relation.shard_writer import MAX_SEGMENTS

SEED = 5_309


def passages(tale: Any, operation: str, seed: int, directory: Path) -> list[str]:
    """Every fault point that a piece of work passes, as ``name:nth``."""
    trace = directory / "trace"
    trace.touch()
    child = tale.nursery.start(tale.root, operation, seed, env={FAULT_TRACE_VARIABLE: str(trace)})
    assert child.wait() == 0, child.report
    seen: Counter[str] = Counter()
    found = []
    for name in trace.read_text().split():
        seen[name] += 1
        found.append(f"{name}:{seen[name]}")
    return found


def die_at(tale: Any, operation: str, seed: int, point: str) -> None:
    child = tale.nursery.start(tale.root, operation, seed, env={FAULT_POINT_VARIABLE: point})
    assert child.wait() == -signal.SIGKILL, f"{operation} was to die at {point}: {child.report}"


def test_first_build_killed_at_every_fault_point_can_be_repeated(tale: Any, tmp_path: Path) -> None:
    points = passages(tale, "build", 1, tmp_path)
    assert {"relation.directory.made:1", "relation.segment.durable:4", "relation.manifest.before:1"} <= set(points)
    committed = 0
    for number, point in enumerate(points):
        fresh = type(tale)(tmp_path / f"r{number}", tale.nursery)
        die_at(fresh, "build", 1, point)
        if fresh.learn("build", 1):
            committed += 1
        else:
            with pytest.raises(RelationNotFound):
                Relation.open(fresh.root)
        fresh.do("build", 2)
        fresh.check_vacuum_leaves_only_what_is_named()
    # Killed once the manifest has its name, the build is done.
    done = ("relation.manifest.linked", "relation.manifest.after")
    assert committed == sum(point.startswith(done) for point in points) == 2


@pytest.mark.parametrize("operation", ["upsert", "delete", "append", "build"])
def test_change_killed_at_every_fault_point_leaves_the_last_version_whole(
    tale: Any, tmp_path: Path, operation: str
) -> None:
    tale.do("build", 1)
    tale.do("upsert", 2)
    points = passages(tale, operation, 3, tmp_path)
    tale.learn(operation, 3, must_have_happened=True)
    assert any(point.startswith("relation.manifest") for point in points)
    for number, point in enumerate(points):
        if operation == "delete":
            # Put back what is deleted: a delete of what is gone passes fewer points.
            tale.do("build", number, check=False)
        seed = 3 + 5 * (number % 2)
        die_at(tale, operation, seed, point)
        tale.learn(operation, seed)
    tale.do("upsert", 12)
    tale.check_vacuum_leaves_only_what_is_named(keep=2)
    tale.check_vacuum_leaves_only_what_is_named()


def test_merge_killed_at_every_fault_point_leaves_the_last_version_whole(tale: Any, tmp_path: Path) -> None:
    def append_until_a_merge_is_due() -> int:
        seed = 2
        while min(_keyed_segments(tale.root)) < MAX_SEGMENTS:
            tale.do("append", seed, check=False)
            seed += 1
        return seed

    tale.do("build", 1)
    seed = append_until_a_merge_is_due()
    points = passages(tale, "append", seed, tmp_path)
    tale.learn("append", seed, must_have_happened=True)
    assert max(_keyed_segments(tale.root)) <= 2
    # A segment of new rows and a merged one in each shard.
    durable = [point for point in points if point.startswith("relation.segment.durable")]
    assert len(durable) == 2 * len(_keyed_segments(tale.root))
    tale.check_vacuum_leaves_only_what_is_named()
    seed = append_until_a_merge_is_due()
    for point in durable:
        die_at(tale, "append", seed, point)
        assert not tale.learn("append", seed)
    tale.do("append", seed)
    assert max(_keyed_segments(tale.root)) <= 2
    tale.check_vacuum_leaves_only_what_is_named()


def _keyed_segments(root: Path) -> list[int]:
    shards = Relation.open(root)._manifest.shards
    return [sum(segment.is_keyed for segment in shard.segments) for shard in shards]


def test_vacuum_killed_at_every_fault_point_is_finished_by_the_next(tale: Any, tmp_path: Path) -> None:
    tale.do("build", 1)
    for seed in range(2, 5):
        tale.do("upsert", seed)
    points = passages(tale, "vacuum", 0, tmp_path)
    assert {"relation.vacuum.leaving:3", "relation.vacuum.manifest:3", "relation.vacuum.file:1"} <= set(points)
    tale.check_vacuum_leaves_only_what_is_named()
    # The first, the last, and some between: every file is like the others.
    chosen = [p for p in points if p.startswith(("relation.vacuum.leaving", "relation.vacuum.manifest"))]
    chosen += [p for p in points if p.startswith("relation.vacuum.file")][:: max(1, len(points) // 4)]
    for point in chosen:
        for seed in range(2, 5):
            tale.do("upsert", seed, check=False)
        die_at(tale, "vacuum", 0, point)
        tale.check_whole()
        tale.do("upsert", 6)
        tale.check_vacuum_leaves_only_what_is_named()


@pytest.mark.parametrize("operation", ["build", "upsert", "vacuum"])
def test_killed_at_random_moments(tale: Any, fault_rounds: int, operation: str) -> None:
    print("seed", SEED)
    chance = random.Random(f"{SEED} {operation}")
    tale.do("build", 1)
    tale.do("upsert", 2)
    takes_s = _seconds_of_a_vacuum(tale) if operation == "vacuum" else tale.do(operation, 3)
    killed = committed = attempts = 0
    while killed < fault_rounds:
        attempts += 1
        assert attempts <= 10 * fault_rounds, "the work ends before it can be killed"
        seed = 10 + attempts
        if operation == "vacuum":
            for version in range(3):
                tale.do("upsert", seed + version, check=False)
        child = tale.nursery.start(tale.root, operation, seed)
        # One moment in each equal part of the time that the work takes, so that no part is spared.
        time.sleep((attempts % 10 + chance.random()) / 10 * takes_s)
        child.kill()
        ended = child.wait()
        assert ended in (0, -signal.SIGKILL), child.report
        killed += ended != 0
        if operation == "vacuum":
            tale.check_whole()
        else:
            happened = tale.learn(operation, seed)
            assert happened or ended != 0
            committed += happened and ended != 0
        # A new write works at once, and now and then somebody tidies up.
        if attempts % 5 == 4:
            tale.do("upsert", 1_000 + attempts)
            tale.check_vacuum_leaves_only_what_is_named(keep=2)
    print(f"{operation}: killed {killed} times in {attempts} attempts, {committed} of them after their commit")
    tale.do("upsert", 5_000)
    tale.check_vacuum_leaves_only_what_is_named()


def _seconds_of_a_vacuum(tale: Any) -> float:
    started = time.monotonic()
    assert tale.nursery.start(tale.root, "vacuum", 0).wait() == 0
    return time.monotonic() - started


def test_first_build_killed_at_random_moments(tale: Any, tmp_path: Path, fault_rounds: int) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    takes_s = tale.do("build", 1)
    killed = attempts = 0
    while killed < fault_rounds:
        attempts += 1
        assert attempts <= 10 * fault_rounds, "the work ends before it can be killed"
        fresh = type(tale)(tmp_path / f"r{attempts}", tale.nursery)
        child = tale.nursery.start(fresh.root, "build", 1)
        time.sleep((attempts % 10 + chance.random()) / 10 * takes_s)
        child.kill()
        ended = child.wait()
        assert ended in (0, -signal.SIGKILL), child.report
        killed += ended != 0
        fresh.learn("build", 1)
        fresh.do("build", 2)
        fresh.check_vacuum_leaves_only_what_is_named()
    print(f"first build: killed {killed} times in {attempts} attempts")


def test_killed_writer_holds_no_lock(tale: Any) -> None:
    tale.do("build", 1)
    die_at(tale, "upsert", 2, "relation.manifest.before")
    assert (tale.root / "writer.lock").read_text().isdigit()
    started = os.getpid()
    tale.do("upsert", 2)
    assert started == os.getpid()
