"""A flow that keeps relations, its driver killed with SIGKILL: no key twice, no row twice, none missing."""

import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from dovetail.relation import Relation
from dovetail.testing.faults import load_program, run_driver
from dovetail.testing.flows import Feed, commits_of, published_rows, unnamed_state_files

SEED = 50_021
PROGRAM = Path(__file__).with_name("kept_victim.py")
POINTS = [
    "kept.fold.after",
    "flow.commit.linked",
    "kept.fold.before",
    "flow.intent.linked",
    "flow.job.after",
    "state.file.written",
    "flow.commit.after",
    "flow.task.trailer",
    "flow.publish.after",
    "flow.cleanup.file",
]


VICTIM = load_program(PROGRAM)


def run_victim(root: Path, point: str | None = None, kill_after_s: float | None = None) -> int:
    """Run the driver; gives its exit code, or minus the signal that ended it. Whatever is left of it is killed."""
    return run_driver([sys.executable, str(PROGRAM), str(root)], root / "victim.log", point, kill_after_s)


def numbers_of(rows: list[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """The key of each source key; fails if one has two, or two have one."""
    found: dict[tuple[str, int], int] = {}
    for row in rows:
        assert found.setdefault((row["source"], row["id"]), row["sk"]) == row["sk"], "a source key has two numbers"
    assert len(set(found.values())) == len(found), "a number was given twice"
    return found


def test_keys_stay_what_they_are_whatever_is_killed(tmp_path: Path, fault_rounds: int) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    feed = Feed(tmp_path / "feed")
    kills = 2 if fault_rounds < 10 else fault_rounds
    ends: Counter[int] = Counter()
    rounds = 0
    while ends[-signal.SIGKILL] + ends[VICTIM.FAILED] < kills:
        assert rounds < 2 * kills + 2, f"the driver is seldom killed: {ends}"
        for _ in range(2):
            feed.add(VICTIM.changes(len(feed.files())))
        if rounds % 4 == 3:
            code = run_victim(tmp_path, kill_after_s=4 + 8 * chance.random())
        else:
            place = rounds - rounds // 4
            code = run_victim(tmp_path, f"{POINTS[place % len(POINTS)]}:{1 + chance.randrange(2)}")
        assert code in (-signal.SIGKILL, VICTIM.FAILED, VICTIM.DONE), (tmp_path / "victim.log").read_text()[-3000:]
        ends[code] += 1
        rounds += 1
        rows = published_rows(tmp_path / "out")
        assert max(Counter(row["n"] for row in rows).values(), default=1) == 1, "a row came out twice"
        numbers_of(rows)
    print(dict(ends))
    assert run_victim(tmp_path) == VICTIM.DONE, (tmp_path / "victim.log").read_text()[-3000:]
    rows = published_rows(tmp_path / "out")
    assert sorted(row["n"] for row in rows) == sorted(row["n"] for row in feed.rows())
    numbers = numbers_of(rows)
    assert set(numbers) == {(row["source"], row["id"]) for row in feed.rows()}
    last: dict[int, str] = {}
    change = {}
    for row in sorted(rows, key=lambda row: row["n"]):
        known = row["sk"] in last
        change[row["n"]] = "inserted" if not known else "unchanged" if last[row["sk"]] == row["city"] else "changed"
        last[row["sk"]] = row["city"]
    assert {row["n"]: row["change"] for row in rows} == change
    in_relation = Relation.open(tmp_path / "keys").to_arrow().to_pylist()
    assert {(row["source"], row["id"]): row["sk"] for row in in_relation}.items() <= numbers.items()
    assert len(in_relation) > 50, "hardly anything was folded"
    assert unnamed_state_files(tmp_path / "checkpoint") == set()
    assert len(commits_of(tmp_path / "checkpoint")) <= 3
