"""Three flows for an hour, idle and busy by turns: ``make soak``.

One loads enriched orders with their keys into PostgreSQL, one joins three streams into Parquet, one never gets a row
and would load into PostgreSQL. Every few seconds memory, open files, and the files in checkpoints and in temporary
directories are counted. The second half of the run may not hold more than the second quarter did; a flow may wake at
most once per trigger; and a flow that loads has the staging table of its start, and makes no other. Ends with exit code
1 otherwise.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from load import SERVERS, Load
from scenes import MultiJoin

import dovetail as dt
from dovetail.testing.flows import Feed
from dovetail.testing.sessions import local_session

TRIGGER_S = 5.0
SETTINGS = {
    "spark.driver.memory": "1g",
    # Spark keeps the log of 100 micro-batches and of ten minutes of files: fewer, so that this levels off early.
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.sql.streaming.fileSource.log.cleanupDelay": "30s",
    "spark.sql.streaming.fileSource.log.compactInterval": "10",
}
ALLOWED = {
    "driver_mb": 1.10,
    "jvm_mb": 1.25,
    "workers_mb": 1.10,
    "handles": 1.05,
    "checkpoint": 1.10,
    "temporary": 1.10,
}
"""The most that the median of the last half may be of the one of the second quarter."""
_TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public' ORDER BY 1"


@dataclass(frozen=True)
class Sample:
    """What is held at one moment."""

    at_s: float
    is_busy: bool
    driver_mb: float
    jvm_mb: float
    workers_mb: float
    handles: int
    checkpoint: int
    temporary: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--turn", type=float, default=60.0, help="seconds of each idle and each busy turn")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--out", type=Path, default=Path("artifacts"), help="where the JSON goes")
    chosen = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="dovetail-soak-"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch / "tmp")
    (scratch / "tmp").mkdir()
    directory = Path(tempfile.mkdtemp(prefix="dovetail-postgres-", dir="/tmp"))
    server = SERVERS.Postgres(directory, SERVERS.postgres_programs(), SERVERS.free_port())
    try:
        server.create()
        server.start()
        soak = Soak(scratch, server)
        samples, wakes = soak.run(60 * chosen.minutes, chosen.turn, chosen.every)
        tables = [name for (name,) in server.execute(_TABLES)]
        soak.stop()
        server.stop("immediate")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(scratch, ignore_errors=True)
    chosen.out.mkdir(parents=True, exist_ok=True)
    found = {"samples": [asdict(sample) for sample in samples], "wakes": wakes, "tables": tables}
    (chosen.out / "soak.json").write_text(json.dumps(found, indent=1))
    return 0 if _tell(samples, wakes, tables) else 1


class Soak:
    """The flows, what feeds them, and what is measured of them."""

    def __init__(self, root: Path, server: Any) -> None:
        self._root, self._chance = root, random.Random(1)
        self._orders, self._nothing = Feed(root / "load" / "feed"), Feed(root / "idle" / "feed")
        self._streams = {name: Feed(root / "join" / name) for name in MultiJoin.victim.NAMES}
        columns = "n bigint, source text, order_id bigint, customer bigint, city text, sk bigint"
        for table in ("orders", "never"):
            server.execute(f"CREATE TABLE {table} ({columns})")
        login = {"host": "127.0.0.1", "port": server.port, "database": "postgres", "user": "etl"}
        postgres = {**login, "password": server.password}
        spark = local_session(root, SETTINGS)
        trigger = f"{TRIGGER_S:g} seconds"
        flows = {
            "load": (Load.victim.flow_on(spark, root / "load"), dt.sinks.postgres("orders", **postgres)),
            "idle": (Load.victim.flow_on(spark, root / "idle", "idle"), dt.sinks.postgres("never", **postgres)),
            "join": (MultiJoin.victim.flow_on(spark, root / "join"), dt.sinks.parquet(root / "join" / "out")),
        }
        self._spark = spark
        self.queries = {
            name: flow.write(sink, checkpoint=root / name / "checkpoint", trigger=trigger, keep_commits=3)
            for name, (flow, sink) in flows.items()
        }

    def run(self, seconds: float, turn_s: float, every_s: float) -> tuple[list[Sample], dict[str, float]]:
        """Feed, and measure; gives the samples and, per flow, micro-batches per trigger."""
        started, samples = time.monotonic(), []
        before = self._batches()
        while (now := time.monotonic() - started) < seconds:
            is_busy = int(now / turn_s) % 2 == 0
            if is_busy:
                self._feed()
            self._require_active()
            samples.append(self._sample(now, is_busy))
            if len(samples) % 24 == 1:
                print(samples[-1], flush=True)
            time.sleep(max(0.0, every_s - (time.monotonic() - started - now)))
        triggers = (time.monotonic() - started) / TRIGGER_S
        return samples, {name: (batch - before[name]) / triggers for name, batch in self._batches().items()}

    def stop(self) -> None:
        """End the flows and Spark."""
        for query in self.queries.values():
            query.stop()
        self._spark.stop()

    def _feed(self) -> None:
        for _ in range(self._chance.randint(1, 4)):
            self._orders.add(Load.victim.orders(len(self._orders.files())))
            for name, feed in self._streams.items():
                feed.add(MultiJoin.victim.rows_of(name, len(feed.files())))

    def _batches(self) -> dict[str, int]:
        """The newest micro-batch that each flow has begun."""
        return {
            name: max(
                (int(path.name) for path in (self._root / name / "checkpoint" / "offsets").glob("[0-9]*")), default=-1
            )
            for name in self.queries
        }

    def _require_active(self) -> None:
        for name, query in self.queries.items():
            assert query.isActive, f"{name} has ended: {query.exception()}"

    def _sample(self, at_s: float, is_busy: bool) -> Sample:
        driver = psutil.Process()
        children = [child for child in driver.children(recursive=True) if child.is_running()]
        jvm = [child for child in children if child.name().startswith("java")]
        python = [child for child in children if child not in jvm]
        checkpoints = [self._root / name / "checkpoint" for name in self.queries]
        return Sample(
            at_s,
            is_busy,
            _anonymous_mb([driver]),
            _anonymous_mb(jvm),
            _anonymous_mb(python),
            sum(_handles(process) for process in [driver, *children]),
            sum(map(_files, checkpoints)),
            _files(self._root / "tmp") + _files(self._root / "local"),
        )


def _anonymous_mb(processes: list[psutil.Process]) -> float:
    """Memory of their own, without mapped files."""
    total = 0
    for process in processes:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except FileNotFoundError:
            continue  # it has just ended
        held = status.partition("RssAnon:")[2].split()
        total += int(held[0]) if held else 0  # a process that has ended holds nothing
    return total / 1024


def _handles(process: psutil.Process) -> int:
    try:
        return process.num_fds()
    except psutil.NoSuchProcess:
        return 0


def _files(directory: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(directory))


def _tell(samples: list[Sample], wakes: dict[str, float], tables: list[str]) -> bool:
    """Print what was found; whether it is as it must be."""
    part = len(samples) // 4
    is_flat = True
    print("| held | second quarter | last half | of it | at most |\n|---|---|---|---|---|")
    for name, most in ALLOWED.items():
        early = statistics.median(getattr(sample, name) for sample in samples[part : 2 * part])
        late = statistics.median(getattr(sample, name) for sample in samples[2 * part :])
        share = late / early if early else float(late > 0)
        is_flat &= share <= most
        print(f"| {name} | {early:,.0f} | {late:,.0f} | {share:.2f} | {most:.2f} |")
    for name, per_trigger in wakes.items():
        print(f"{name}: {per_trigger:.2f} micro-batches per trigger")
    print("tables:", ", ".join(tables))
    wakes_seldom = all(per_trigger <= 1.02 for per_trigger in wakes.values())
    staging = [name for name in tables if name not in ("orders", "never", "dovetail_flows")]
    return is_flat and wakes_seldom and len(staging) <= 2  # one for each flow that loads


if __name__ == "__main__":
    sys.exit(main())
