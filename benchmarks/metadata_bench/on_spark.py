"""State on Spark: `multi_join` told by punctuations what is over, against the built-in stream-stream join.

Both are given the same files: news items, and access records that come while an item is open. The built-in join has to
be told how long an item can be open at most, since it purges by time only; with less it would lose results. The files
are in the order of event time and the watermark has no delay, so nothing is ever late: it purges as early as it can.
"""

import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import dovetail as dt
from dovetail.testing.flows import Feed, commits_of
from dovetail.testing.sessions import local_session

SECONDS_PER_PART = 60
_START_S = 1_767_225_600


@dataclass(frozen=True)
class Lives:
    """How long items are open.

    Attributes
    ----------
    name
        For the report.
    items_per_part, parts
        How many items are posted between two micro-batches, and how many of these there are.
    accesses_per_item
        Access records of each, spread over its life.
    long_share, long_parts
        This part of the items is open for so many parts; all others for one.
    """

    name: str
    items_per_part: int
    parts: int
    accesses_per_item: int = 10
    long_share: float = 0.0
    long_parts: int = 1

    def write(self, root: Path) -> int:
        """Files of both streams, one of each per micro-batch; gives how many results their join has."""
        random = np.random.default_rng(2003)
        items = self.items_per_part * self.parts
        posted = np.sort(random.random(items) * self.parts)
        is_long = random.random(items) < self.long_share
        ends = posted + np.where(is_long, self.long_parts, 1)
        numbers = np.repeat(np.arange(items), self.accesses_per_item)
        # Later than the posting by more than what a rounded time could hide.
        at = posted[numbers] + (ends - posted)[numbers] * (0.01 + 0.98 * random.random(numbers.size))
        seen = at < self.parts
        numbers, at = numbers[seen], at[seen]
        order = np.argsort(at, kind="stable")
        numbers, at = numbers[order], at[order]
        news, access = Feed(root / "news"), Feed(root / "access")
        for part in range(self.parts):
            mine = np.flatnonzero((posted >= part) & (posted < part + 1))
            news.add(pa.table({"sno": mine, "tn": _moments(posted[mine]), "title": [f"News item {n}" for n in mine]}))
            first, last = np.searchsorted(at, [part, part + 1])
            over = np.flatnonzero((ends >= part) & (ends < part + 1))
            records = pa.table(
                {
                    "sno": numbers[first:last],
                    "ta": _moments(at[first:last]),
                    "ip": [f"10.0.{n % 256}.{n // 256 % 256}" for n in numbers[first:last]],
                    "over": np.zeros(last - first, np.bool_),
                }
            )
            closing = {"sno": over, "ta": _moments(ends[over]), "ip": pa.nulls(over.size, pa.string())}
            access.add(pa.concat_tables([records, pa.table({**closing, "over": np.ones(over.size, np.bool_)})]))
        return int(numbers.size)


def _moments(parts: Any) -> pa.Array:
    micros = _START_S * 1_000_000 + (parts * SECONDS_PER_PART * 1_000_000).astype(np.int64)
    return pa.array(micros).cast(pa.timestamp("us", "UTC"))


@dataclass
class Held:
    """What a join held after each micro-batch."""

    name: str
    rows: list[int]
    memory_bytes: list[int]
    stored_bytes: list[int]
    results: int
    seconds: float

    def most(self, which: str) -> int:
        """The most that was held in the second half, when state is as large as it gets."""
        values: list[int] = getattr(self, which)
        return max(values[len(values) // 2 :])


def _streams(spark: SparkSession, root: Path) -> dict[str, DataFrame]:
    schemas = {"news": "sno long, tn timestamp, title string"}
    schemas["access"] = "sno long, ta timestamp, ip string, over boolean"
    return {
        name: spark.readStream.schema(columns).option("maxFilesPerTrigger", 1).parquet(str(root / name))
        for name, columns in schemas.items()
    }


def ours(spark: SparkSession, lives: Lives, root: Path, checkpoint: Path) -> Held:
    """`multi_join` that is told which rows end an item."""
    flow = dt.multi_join(
        _streams(spark, root),
        on="sno",
        keys=["news"],
        punctuations={"access": dt.Punctuation.where("over", data=False)},
        budget="256MB",
        shards=2,
        name="news",
    )
    started = time.perf_counter()
    query = flow.write(dt.sinks.noop(), checkpoint=checkpoint, trigger="available-now", keep_commits=lives.parts + 2)
    query.awaitTermination()
    seconds = time.perf_counter() - started
    shards = [commit["operators"]["1-multi_join"] for commit in commits_of(checkpoint)]
    reports = [[shard["report"] for shard in each] for each in shards]
    return Held(
        "multi_join with punctuations",
        [sum(sum(report["state_rows"].values()) for report in each) for each in reports],
        [sum(sum(report["memory"].values()) for report in each) for each in reports],
        [sum(file["bytes"] for shard in each for file in shard["files"]) for each in shards],
        sum(report["metrics"]["output_rows"] for report in reports[-1]),
        seconds,
    )


def theirs(spark: SparkSession, lives: Lives, root: Path, checkpoint: Path) -> Held:
    """The built-in join, with the narrowest range of event times that keeps every result."""
    streams = _streams(spark, root)
    news = streams["news"].withWatermark("tn", "0 seconds")
    access = streams["access"].where("NOT over").drop("over").withColumnRenamed("sno", "number")
    access = access.withWatermark("ta", "0 seconds")
    longest = lives.long_parts * SECONDS_PER_PART
    joined = news.join(access, F.expr(f"sno = number AND ta >= tn AND ta <= tn + INTERVAL {longest} SECONDS"))
    results = 0

    def count(rows: DataFrame, _: int) -> None:
        nonlocal results
        results += rows.count()

    started = time.perf_counter()
    writer = joined.writeStream.foreachBatch(count).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    seconds = time.perf_counter() - started
    found = [progress["stateOperators"][0] for progress in query.recentProgress if progress["stateOperators"]]
    return Held(
        "built-in join",
        [int(each["numRowsTotal"]) for each in found],
        [int(each["memoryUsedBytes"]) for each in found],
        # Of this, what only the current version takes: the provider keeps some older ones in memory as well.
        [int(each["customMetrics"]["stateOnCurrentVersionSizeBytes"]) for each in found],
        results,
        seconds,
    )


def compare(lives: Lives) -> tuple[str, float, dict[str, Any]]:
    """Both joins on the same files: what to print, our share of the state at most, and the figures."""
    spark = local_session(settings={"spark.log.level": "OFF"})
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        expected = lives.write(root)
        found = [run(spark, lives, root, root / f"c{n}") for n, run in enumerate((ours, theirs))]
    mine, other = found
    assert mine.results == other.results == expected, (mine.results, other.results, expected)
    # The most of ours, in memory or on disk, against the least of theirs: the current version alone.
    our_bytes = max(mine.most("memory_bytes"), mine.most("stored_bytes"))
    their_bytes = other.most("stored_bytes")
    our_rows, their_rows = mine.most("rows"), other.most("rows")
    share = max(our_bytes / their_bytes, our_rows / their_rows)
    told = (
        f"{lives.name}: {our_rows:,} rows and {our_bytes:,} bytes held against {their_rows:,} rows and "
        f"{their_bytes:,} bytes ({other.most('memory_bytes'):,} with older versions): "
        f"{our_rows / their_rows:.1%} of the rows, {our_bytes / their_bytes:.1%} of the bytes; "
        f"{expected:,} results each, in {mine.seconds:.0f} s against {other.seconds:.0f} s"
    )
    return told, share, {"lives": asdict(lives), "ours": asdict(mine), "built-in": asdict(other)}
