"""A flow's driver killed with SIGKILL, again and again over one input: exactly the oracle's rows come out."""

import random
import signal
import sys
from collections import Counter
from pathlib import Path

from dovetail.testing.faults import load_program, run_driver
from dovetail.testing.flows import Feed, commits_of, published_rows, unnamed_state_files
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows

SEED = 40_961
PROGRAM = Path(__file__).with_name("flow_victim.py")

# Before, inside and after each step of the protocol. Those of tasks kill a Python worker, which fails the flow.
POINTS = [
    "flow.commit.linked",
    "sink.parquet.renamed",
    "flow.job.after",
    "flow.batch.before",
    "flow.intent.before",
    "flow.intent.linked",
    "flow.intent.after",
    "flow.job.before",
    "flow.task.output",
    "flow.task.before_state",
    "state.file.before",
    "state.file.begun",
    "state.file.written",
    "state.file.after",
    "flow.task.trailer",
    "sink.parquet.written",
    "flow.commit.before",
    "flow.commit.after",
    "flow.publish.before",
    "sink.parquet.published",
    "flow.publish.after",
    "sink.parquet.forget",
    "flow.cleanup.document",
    "flow.cleanup.file",
]
KILLS_EVERY_DAY = 2


VICTIM = load_program(PROGRAM)


def run_victim(root: Path, point: str | None = None, kill_after_s: float | None = None) -> int:
    """Run the driver; gives its exit code, or minus the signal that ended it. Whatever is left of it is killed."""
    return run_driver([sys.executable, str(PROGRAM), str(root)], root / "victim.log", point, kill_after_s)


def oracle(feed: Feed) -> list[dict[str, object]]:
    first = join_oracle(feed.rows(), VICTIM.CITY_OF, on=["k"], how="left")
    return join_oracle(first, VICTIM.MAYOR_OF, on=["city"], how="left")


def test_flow_killed_at_every_step_and_at_random_times_loses_and_repeats_nothing(
    tmp_path: Path, fault_rounds: int
) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    feed = Feed(tmp_path / "feed")
    VICTIM.relations(tmp_path)
    kills = KILLS_EVERY_DAY if fault_rounds < 10 else 2 * fault_rounds
    ends: Counter[str] = Counter()
    if kills > KILLS_EVERY_DAY:
        assert run_victim(tmp_path, "flow.fingerprint.linked") == -signal.SIGKILL
    for number in range(kills):
        for _ in range(2):
            feed.add(VICTIM.orders(len(feed.files())))
        if number % 5 == 4:
            code = run_victim(tmp_path, kill_after_s=4 + 8 * chance.random())
            where = "at a random time"
        else:
            place = number - number // 5
            where = f"{POINTS[place % len(POINTS)]}:{1 + chance.randrange(2) * (place >= len(POINTS))}"
            code = run_victim(tmp_path, where)
        log = (tmp_path / "victim.log").read_text()[-3000:]
        assert code in (-signal.SIGKILL, VICTIM.FAILED, VICTIM.DONE), f"{where}: {code}\n{log}"
        ends["killed" if code == -signal.SIGKILL else "worker killed" if code == VICTIM.FAILED else "not reached"] += 1
        rows = Counter(row["n"] for row in published_rows(tmp_path / "out"))
        assert not rows or max(rows.values()) == 1, f"repeated after {where}: {rows.most_common(3)}"
    print(dict(ends))
    assert ends["killed"] + ends["worker killed"] >= kills * 0.9
    assert run_victim(tmp_path) == VICTIM.DONE, (tmp_path / "victim.log").read_text()[-3000:]
    assert_same_rows(published_rows(tmp_path / "out"), oracle(feed), f"after {kills} kills")
    assert unnamed_state_files(tmp_path / "checkpoint") == set()
    assert len(commits_of(tmp_path / "checkpoint")) <= 3
