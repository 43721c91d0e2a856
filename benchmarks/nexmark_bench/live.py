"""Latency at a fixed rate, and recovery after a SIGKILL: events arrive as files, every half second.

The clock of a result starts when the file with its latest event is renamed into its directory. For Spark and Dovetail
it ends when the micro-batch has ended; for Flink, whose results leave before their checkpoint, when the row is
emitted.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from bisect import bisect_right
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from nexmark_bench import data
from nexmark_bench.engines import ENGINES, FailedRunError, Setting, reason_in, running
from nexmark_bench.queries import Query
from nexmark_bench.usage import kill_tree

CHUNK_S = 0.5
_SILENCE_S = 20
_PRINTED = re.compile(r"\+I\[(\d+), ([^\]]+)\]")


@dataclass(frozen=True)
class Plan:
    """When what happens, in seconds since the first file."""

    rate: int  # events per second
    warm_s: int = 15  # not judged
    steady_s: int = 20  # judged; then the kill
    after_s: int = 40

    @property
    def chunks(self) -> int:
        return int((self.warm_s + self.steady_s + self.after_s) / CHUNK_S)

    @property
    def kill_at(self) -> float:
        return float(self.warm_s + self.steady_s)


class Arrivals:
    """Puts the chunks into the directories that an engine reads, each at its time."""

    def __init__(self, events: Path, target: Path, query: Query, chunks: int) -> None:
        self.placed: list[float] = []  # when each chunk was there
        self._events, self._target, self._query, self._chunks = events, target, query, chunks
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        for kind in query.inputs:
            (target / kind).mkdir(parents=True)

    def place(self) -> None:
        """The next chunk, at once."""
        number = len(self.placed)
        for kind in self._query.inputs:
            name = f"{number:04d}.parquet"
            draft = self._target / f".{kind}-{name}"
            shutil.copyfile(self._events / "all" / kind / name, draft)
            draft.rename(self._target / kind / name)
        self.placed.append(time.time())

    def start(self) -> None:
        """Place the others, one every half second."""
        self._thread.start()

    def finish(self) -> None:
        """Wait until all are placed."""
        self._thread.join()

    def stop(self) -> None:
        self._stopped.set()

    def _feed(self) -> None:
        began = time.time()
        for number in range(1, self._chunks):
            if self._stopped.wait(max(0.0, began + number * CHUNK_S - time.time())):
                return
            self.place()


class Listener:
    """What the process of an engine prints: when which of its results were there."""

    def __init__(self, process: "subprocess.Popen[str]", is_flink: bool) -> None:
        self.batches: dict[int, tuple[float, dict[str, int]]] = {}  # Spark: number to end and rows read
        self.emitted: list[tuple[int, float]] = []  # Flink: time of the latest event, and of the emission
        self._is_flink = is_flink
        self._process = process
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    @property
    def has_results(self) -> bool:
        return bool(self.emitted) or any(sum(rows.values()) for _, rows in self.batches.values())

    def wait_for_results(self, seconds: float, log: Path) -> None:
        """Return when there is a result."""
        until = time.time() + seconds
        while not self.has_results:
            if self._process.poll() is not None or time.time() > until:
                raise FailedRunError(reason_in(log.read_text(errors="replace")))
            time.sleep(0.05)

    def wait_for_the_rest(self) -> None:
        """Return when nothing new has come for a while, longer than a large micro-batch takes."""
        seen = -1
        while (count := len(self.emitted) + len(self.batches)) != seen:
            seen = count
            time.sleep(_SILENCE_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._is_flink:
                found = _PRINTED.search(line)
                if found:
                    at = datetime.fromisoformat(found[2].replace("Z", "").replace(" ", "T")).replace(tzinfo=UTC)
                    self.emitted.append((int(found[1]), at.timestamp()))
            elif line.startswith("{") and "batch" in line:
                told: dict[str, Any] = json.loads(line)
                self.batches[told["batch"]] = (told["ended"], told["rows"])


def measure_live(setting: Setting, query: Query, engine: str, plan: Plan) -> dict[str, Any]:
    """Latencies while nothing happens, and what a kill costs."""
    with tempfile.TemporaryDirectory(prefix="nexmark-") as scratch:
        directory = Path(scratch)
        arrivals = Arrivals(setting.events, directory / "live", query, plan.chunks)
        more: dict[str, Any] = {"events": str(directory / "live"), "files_per_batch": 1_000}
        log = directory / "live.log"
        is_flink = ENGINES[engine]
        arrivals.place()
        try:
            with running(setting, query, engine, "live", directory, **more) as process:
                before = Listener(process, is_flink)
                before.wait_for_results(120, log)
                arrivals.start()
                time.sleep(plan.kill_at)
                killed_at = time.time()
                kill_tree(process.pid)
                process.wait()
            if is_flink:
                more["restore"] = str(newest_checkpoint(directory / "checkpoint"))
            with running(setting, query, engine, "live", directory, **more) as process:
                after = Listener(process, is_flink)
                after.wait_for_results(120, log)
                arrivals.finish()
                after.wait_for_the_rest()
        finally:
            arrivals.stop()
        if is_flink:
            finished = _finished_by_row(plan, before, after)
        else:
            finished = _finished_by_batch(setting, query, _results_of(setting, query, plan), before, after)
    told = {"query": query.name, "engine": engine, "rate": plan.rate, "load": os.getloadavg()[0]}
    return told | judge(finished, arrivals.placed, killed_at, plan)


@dataclass(frozen=True)
class Finished:
    """Results of a chunk that were there at a time."""

    chunk: int
    at: float
    results: int = 1


def judge(finished: list[Finished], placed: list[float], killed_at: float, plan: Plan) -> dict[str, Any]:
    """Percentiles over results, and the two times of recovery.

    Examples
    --------
    >>> plan = Plan(rate=1, warm_s=0, steady_s=1, after_s=1)
    >>> finished = [Finished(0, 0.2), Finished(1, 0.9), Finished(2, 4.0), Finished(3, 4.1)]
    >>> found = judge(finished, [0.0, 0.5, 1.0, 3.9], 1.0, plan)
    >>> found["first_result_s"], found["caught_up_s"]
    (3.0, 3.1)
    """
    first, last = int(plan.warm_s / CHUNK_S), int(plan.kill_at / CHUNK_S)
    steady = [each for each in finished if first <= each.chunk < last and each.at < killed_at and each.results]
    if not steady:
        raise FailedRunError("no results before the kill: the rate is too high for it on this machine")
    waits = np.repeat([each.at - placed[each.chunk] for each in steady], [each.results for each in steady])
    p50, p99 = (float(np.percentile(waits, share)) for share in (50, 99))
    later = sorted((each.at, each.chunk) for each in finished if each.at > killed_at)
    # As fast again as before: the first result that waited no longer than those before the kill did.
    caught_up = next((at for at, chunk in later if at - placed[chunk] <= p99), None)
    return {
        "p50_ms": p50 * 1000,
        "p99_ms": p99 * 1000,
        "first_result_s": round(later[0][0] - killed_at, 3) if later else None,
        "caught_up_s": round(caught_up - killed_at, 3) if caught_up else None,
        "results": int(waits.size),
    }


def newest_checkpoint(directory: Path) -> Path:
    """The last complete checkpoint of Flink's."""
    found = sorted(directory.rglob("chk-*/_metadata"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FailedRunError("Flink wrote no checkpoint before the kill.")
    return found[-1].parent


def _boundaries(plan: Plan) -> list[int]:
    """The time of the first event of every chunk."""
    step = CHUNK_S * plan.rate * 1000 / data.EVENTS_PER_SECOND
    return [data.BASE_TIME_MS + round(number * step) for number in range(plan.chunks)]


def _results_of(setting: Setting, query: Query, plan: Plan) -> list[int]:
    """The results whose latest event is in each chunk."""
    counts = [0] * plan.chunks
    with duckdb.connect() as oracle:
        for kind in query.inputs:
            oracle.execute(f"CREATE VIEW {kind} AS SELECT * FROM read_parquet('{setting.events}/all/{kind}/*.parquet')")
        for (latest,) in oracle.execute(f"SELECT latest FROM ({query.sql})").fetchall():
            counts[bisect_right(_boundaries(plan), latest) - 1] += 1
    return counts


def _finished_by_row(plan: Plan, before: Listener, after: Listener) -> list[Finished]:
    """Flink: every result's chunk, and its emission."""
    boundaries = _boundaries(plan)
    return [Finished(bisect_right(boundaries, latest) - 1, at) for latest, at in before.emitted + after.emitted]


def _finished_by_batch(
    setting: Setting, query: Query, results: list[int], before: Listener, after: Listener
) -> list[Finished]:
    """Spark: every chunk, and the end of the micro-batch with the last of its rows."""
    batches = {**after.batches, **before.batches}  # one that ended before the kill and came again counts once
    rows = data.rows_of(setting.events, "all")
    ended = [batches[number][0] for number in sorted(batches)]
    chunks = []
    for kind in query.inputs:
        arrived = list(accumulate(rows[kind]))
        read = list(accumulate(batches[number][1].get(kind, 0) for number in sorted(batches)))
        # A micro-batch that ended just before the kill may not have been reported: its rows are missing from then on.
        missing = arrived[-1] - read[-1]
        if not 0 <= missing <= arrived[-1] // 4:
            raise FailedRunError(f"of {arrived[-1]:,} rows of {kind}, {read[-1]:,} were read")
        read = [count + (missing if place >= len(before.batches) else 0) for place, count in enumerate(read)]
        chunks.append([bisect_right(arrived, count) for count in read])
    finished, done = [], 0
    for at, complete in zip(ended, (min(each) for each in zip(*chunks, strict=True)), strict=True):
        finished += [Finished(chunk, at, results[chunk]) for chunk in range(done, complete)]
        done = max(done, complete)
    return finished
