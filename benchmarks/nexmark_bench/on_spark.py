"""A query on Spark, by Dovetail or by Spark's own join, in a process of its own; prints lines of JSON.

``on_spark.py JOB.json``: the job says what to do (see `engines.py`). ``rate``: the results on the first slices as
Parquet, which also warms everything up; when told ``go``, the query over all slices, timed, into nothing. ``live``:
over a directory that files are added to, until it is killed; prints every micro-batch's end and the rows that it read.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from pyspark.sql import DataFrame, SparkSession

import dovetail as dt
from dovetail.testing.sessions import local_session
from nexmark_bench.queries import Query, queries
from nexmark_bench.usage import cpu_seconds

_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_TYPES = {"string": "string", "int64": "long"}


class Runner:
    """One job: its session, its query and its side input."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.query: Query = queries(job["large_rows"])[job["query"]]
        self.is_ours = job["engine"] == "dovetail"
        settings = {"spark.driver.memory": job["heap"]}
        if job["engine"] == "spark-rocksdb":
            settings["spark.sql.streaming.stateStore.providerClass"] = _ROCKSDB
            settings["spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"] = "true"
        self.spark: SparkSession = local_session(Path(job["scratch"]), settings)

    def frames(self, directory: str) -> dict[str, DataFrame]:
        """The query's inputs as streams of so many files a micro-batch."""
        found = {}
        for kind in self.query.inputs:
            schema = ", ".join(f"{name} {_TYPES[each]}" for name, each in self.job["schemas"][kind].items())
            reader = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", self.job["files_per_batch"])
            found[kind] = reader.parquet(f"{directory}/{kind}")
        return found

    def start(self, directory: str, checkpoint: str, output: str | None, is_live: bool = False) -> Any:
        """The running query: into nothing, or into Parquet files."""
        frames = self.frames(directory)
        if self.is_ours and self.query.is_stateful:
            sink = dt.sinks.noop() if output is None else dt.sinks.parquet(output)
            flow = self.query.dovetail(frames)
            return flow.write(sink, checkpoint=checkpoint, trigger="0 seconds" if is_live else "available-now")
        if self.query.is_stateful:
            joined = self.query.spark(frames)
        elif self.is_ours:
            joined = self.query.dovetail(frames, dt.Relation.open(self.job["relation"]))
        else:
            joined = self.query.spark(frames, self.spark.read.parquet(self.job["side"]))
        writer = joined.writeStream.option("checkpointLocation", checkpoint)
        writer = writer.format("noop") if output is None else writer.format("parquet").option("path", output)
        return (writer if is_live else writer.trigger(availableNow=True)).start()

    def rate(self) -> dict[str, Any]:
        """Results on the first slices, for comparison; then seconds and CPU seconds over all, and bytes of state."""
        self.start(
            f"{self.job['events']}/prefix", f"{self.job['checkpoint']}/prefix", self.job["output"]
        ).awaitTermination()
        wait_for_comparison()
        began, cpu = time.monotonic(), cpu_seconds(os.getpid())
        running = self.start(f"{self.job['events']}/all", f"{self.job['checkpoint']}/all", None)
        running.awaitTermination()
        seconds, cpu = time.monotonic() - began, cpu_seconds(os.getpid()) - cpu
        progress = [each for each in running.recentProgress if each["numInputRows"]]
        return {
            "seconds": seconds,
            "cpu_seconds": cpu,
            "batch_ms": [each["durationMs"]["triggerExecution"] for each in progress],
            "state_bytes": self._state_bytes(running, progress),
        }

    def _state_bytes(self, running: Any, progress: list[Any]) -> int:
        if not self.query.is_stateful:
            return 0
        if self.is_ours:
            return int(running.progress.operators[0].state_bytes)
        total = 0
        for operator in progress[-1]["stateOperators"]:
            # RocksDB's memory is its caches; its state is what it has on disk.
            total += operator["customMetrics"].get("rocksdbSstFileSize") or operator["memoryUsedBytes"]
        return int(total)

    def live(self) -> None:
        """Until killed, every micro-batch: when it ended, and how many rows of each input it read."""
        running = self.start(self.job["events"], f"{self.job['checkpoint']}/live", None, is_live=True)
        print(json.dumps({"started": time.time()}), flush=True)
        last = -1
        while running.exception() is None:
            for each in running.recentProgress:
                # An idle query reports, too, with the number that its next micro-batch will have.
                if each["batchId"] > last and each["numInputRows"]:
                    last = each["batchId"]
                    self._tell(each)
            time.sleep(0.02)
        raise running.exception()

    def _tell(self, progress: Any) -> None:
        from datetime import datetime

        began = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).timestamp()
        # By source in the order of the plan, which need not be that of the query: told apart by their directories.
        rows = {Path(_path(each["description"])).name: each["numInputRows"] for each in progress["sources"]}
        ended = began + progress["durationMs"].get("triggerExecution", 0) / 1000
        print(json.dumps({"batch": progress["batchId"], "ended": ended, "rows": rows}), flush=True)


def _path(description: str) -> str:
    """The directory in a file source's description, ``FileStreamSource[file:/...]``."""
    return description.partition("[")[2].rstrip("]")


def wait_for_comparison() -> None:
    """Nothing is timed before the caller has compared the results."""
    print(json.dumps({"rows": "written"}), flush=True)
    if sys.stdin.readline().strip() != "go":
        raise SystemExit("The results differ, so nothing was timed.")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    runner = Runner(job)
    if job["mode"] == "live":
        runner.live()
    print(json.dumps(runner.rate()), flush=True)
    runner.spark.stop()


if __name__ == "__main__":
    main()
