"""A multi-way join that spills, its driver and its workers killed with SIGKILL: exactly the oracle's rows come out."""

import random
import signal
import sys
from collections import Counter
from pathlib import Path

import duckdb
import pyarrow as pa

from dovetail.testing.faults import load_program, run_driver
from dovetail.testing.flows import Feed, commits_of, published_rows, state_bytes, unnamed_state_files
from dovetail.testing.rows import assert_same_rows

SEED = 52_289
PROGRAM = Path(__file__).with_name("multi_join_victim.py")

# Before, inside and after each step of the protocol. Those of tasks kill a Python worker, which fails the flow.
POINTS = [
    "mjoin.spill.written",
    "flow.commit.linked",
    "state.file.after",
    "flow.job.after",
    "flow.batch.before",
    "flow.intent.before",
    "flow.intent.linked",
    "flow.intent.after",
    "flow.job.before",
    "flow.task.output",
    "mjoin.spill.begun",
    "mjoin.compacted",
    "flow.task.before_state",
    "state.file.before",
    "state.file.begun",
    "state.file.written",
    "flow.task.trailer",
    "sink.parquet.written",
    "flow.commit.before",
    "flow.commit.after",
    "flow.publish.before",
    "sink.parquet.renamed",
    "sink.parquet.published",
    "flow.publish.after",
    "sink.parquet.forget",
    "flow.cleanup.document",
    "flow.cleanup.file",
]
KILLS_EVERY_DAY = 2
FILES_BEFORE, FILES_PER_KILL = 12, 2


VICTIM = load_program(PROGRAM)


class Scene:
    """Three feeds and the driver that joins them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.feeds = {name: Feed(root / name) for name in VICTIM.NAMES}
        self.log = root / "victim.log"

    def add(self, files: int) -> None:
        for _ in range(files):
            for name, feed in self.feeds.items():
                feed.add(VICTIM.rows_of(name, len(feed.files())))

    def run(self, point: str | None = None, kill_after_s: float | None = None) -> int:
        return run_driver([sys.executable, str(PROGRAM), str(self.root)], self.log, point, kill_after_s)

    def said(self) -> str:
        return self.log.read_text()[-3000:]

    def published(self) -> list[tuple[int, int, int]]:
        return [(row["na"], row["nb"], row["nc"]) for row in published_rows(self.root / "out")]

    def oracle(self) -> list[dict[str, int]]:
        """What another engine makes of the same rows."""
        engine = duckdb.connect()
        for name in VICTIM.NAMES:
            engine.register(name, self._rows(name))
        span = f"interval {VICTIM.WINDOW_FILES} seconds"
        near = " and ".join(
            f"{x} - {y} between -{span} and {span}" for x, y in (("ta", "tb"), ("ta", "tc"), ("tb", "tc"))
        )
        found = engine.sql(f"select na, nb, nc from a join b using (k) join c using (k) where {near}")
        rows: list[dict[str, int]] = found.arrow().read_all().to_pylist()
        return rows

    def _rows(self, name: str) -> pa.Table:
        numbers = range(len(self.feeds[name].files()))
        return pa.concat_tables([VICTIM.rows_of(name, number).drop_columns([f"v{name}"]) for number in numbers])


def test_join_killed_at_every_step_and_at_random_times_loses_and_repeats_nothing(
    tmp_path: Path, fault_rounds: int
) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    scene = Scene(tmp_path)
    kills = KILLS_EVERY_DAY if fault_rounds < 10 else 2 * fault_rounds
    scene.add(FILES_BEFORE)
    ends: Counter[str] = Counter()
    for number in range(kills):
        scene.add(FILES_PER_KILL)
        if number % 5 == 4:
            code, where = scene.run(kill_after_s=4 + 8 * chance.random()), "at a random time"
        else:
            place = number - number // 5
            where = f"{POINTS[place % len(POINTS)]}:{1 + chance.randrange(2) * (place >= len(POINTS))}"
            code = scene.run(where)
        assert code in (-signal.SIGKILL, VICTIM.FAILED, VICTIM.DONE), f"{where}: {code}\n{scene.said()}"
        end = "killed" if code == -signal.SIGKILL else "worker killed" if code == VICTIM.FAILED else "not reached"
        print(f"{number + 1}. {where}: {end}", flush=True)
        ends[end] += 1
        rows = Counter(scene.published())
        assert not rows or max(rows.values()) == 1, f"repeated after {where}: {rows.most_common(3)}"
    print(dict(ends))
    assert ends["killed"] + ends["worker killed"] >= kills * 0.9
    assert scene.run() == VICTIM.DONE, scene.said()
    expected = scene.oracle()
    assert len(expected) > 1_000
    published = [dict(zip(("na", "nb", "nc"), row, strict=True)) for row in scene.published()]
    assert_same_rows(published, expected, f"after {kills} kills")
    _check_what_is_left(tmp_path / "checkpoint")


def _check_what_is_left(checkpoint: Path) -> None:
    """It did spill; no file is there that no kept commit names; and no more than twice the live state."""
    assert unnamed_state_files(checkpoint) == set()
    commits = commits_of(checkpoint)
    assert len(commits) <= 3
    reports = [shard["report"] for shard in commits[-1]["operators"]["1-multi_join"]]
    assert all(report["counters"]["flushed_rows"] > 0 for report in reports)
    directory, live = state_bytes(checkpoint)
    held = sum(rows for report in reports for rows in report["state_rows"].values())
    print(f"{directory} bytes in the state directory, {live} live, {held} rows held")
    assert live > 2 * VICTIM.BUDGET_BYTES
    assert directory <= 2 * live
