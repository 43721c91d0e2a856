"""Groups of a join counted downstream, driver and workers killed with SIGKILL: each group comes out once, complete."""

import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from dovetail.testing.faults import load_program, run_driver
from dovetail.testing.flows import Feed, commits_of, published_rows, unnamed_state_files

SEED = 60_131
PROGRAM = Path(__file__).with_name("closed_groups_victim.py")

# Around what makes a group's row, its state and the side output one fact. Those of tasks kill a worker.
POINTS = [
    "flow.commit.after",
    "state.file.after",
    "flow.publish.before",
    "flow.commit.before",
    "flow.task.output",
    "flow.intent.after",
    "flow.task.before_state",
    "flow.task.trailer",
    "sink.parquet.written",
    "flow.commit.linked",
    "sink.parquet.renamed",
    "sink.parquet.published",
    "flow.publish.after",
    "flow.cleanup.document",
]
KILLS_EVERY_DAY = 3
FILES_BEFORE, FILES_PER_KILL = 2, 2


VICTIM = load_program(PROGRAM)


class Scene:
    """Two feeds and the driver that counts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.feeds = [Feed(root / name) for name in ("news", "access")]
        self.log = root / "victim.log"
        self.files = 0

    def add(self, files: int) -> None:
        for _ in range(files):
            for feed, table in zip(self.feeds, VICTIM.rows_of(self.files), strict=True):
                feed.add(table)
            self.files += 1

    def run(self, point: str | None = None, kill_after_s: float | None = None) -> int:
        return run_driver([sys.executable, str(PROGRAM), str(self.root)], self.log, point, kill_after_s)

    def said(self) -> str:
        return self.log.read_text()[-3000:]

    def groups(self) -> list[tuple[int, int, int | None]]:
        return [(row["sno"], row["accesses"], row["total"]) for row in published_rows(self.root / "out")]

    def aside(self) -> list[tuple[int, int, str]]:
        files = sorted((self.root / "aside").glob("*/*.parquet"))
        return [(r["sno"], r["n"], r["__reason"]) for file in files for r in pq.read_table(file).to_pylist()]

    def expected(self) -> tuple[dict[int, tuple[int, int | None]], list[tuple[int, int]]]:
        """Each closed item's records, counted from the files; and the rows that came after their item was over."""
        counts: Counter[int] = Counter()
        sums: Counter[int] = Counter()
        over: set[int] = set()
        broken: list[tuple[int, int]] = []
        for number in range(self.files):
            rows = VICTIM.rows_of(number)[1].to_pylist()
            for row in rows:
                if row["over"]:
                    continue
                if row["sno"] in over:
                    broken.append((row["sno"], row["n"]))
                else:
                    counts[row["sno"]] += 1
                    sums[row["sno"]] += row["n"]
            over |= {row["sno"] for row in rows if row["over"]}
        return {sno: (counts[sno], sums[sno] if counts[sno] else None) for sno in over}, broken


def test_group_count_killed_at_every_step_tells_each_closed_group_once(tmp_path: Path, fault_rounds: int) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    scene = Scene(tmp_path)
    kills = KILLS_EVERY_DAY if fault_rounds < 10 else fault_rounds
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
        ends["killed" if code == -signal.SIGKILL else "worker killed" if code == VICTIM.FAILED else "not reached"] += 1
        told = Counter(sno for sno, _, _ in scene.groups())
        assert not told or max(told.values()) == 1, f"told twice after {where}: {told.most_common(3)}"
    print(dict(ends))
    assert ends["killed"] + ends["worker killed"] >= kills * 0.9
    assert scene.run() == VICTIM.DONE, scene.said()
    expected, broken = scene.expected()
    found = scene.groups()
    assert len(found) == len({sno for sno, _, _ in found})
    assert {sno: (count, total) for sno, count, total in found} == expected
    assert len(expected) > 20 * kills
    aside = scene.aside()
    assert sorted((sno, n) for sno, n, _ in aside) == sorted(broken)
    assert {reason for _, _, reason in aside} == {"it matches an earlier punctuation of its input"}
    assert unnamed_state_files(tmp_path / "checkpoint") == set()
    # Only what is open is held: the latest ten items, by the join and by the count.
    shards = commits_of(tmp_path / "checkpoint")[-1]["operators"]
    assert sum(shard["report"]["state_rows"]["news"] for shard in shards["1-multi_join"]) <= 20
    assert sum(shard["report"]["state_rows"]["open"] for shard in shards["2-aggregate_closed"]) <= 20
