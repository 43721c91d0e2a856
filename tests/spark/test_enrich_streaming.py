"""`enrich` in streaming queries: any batch size, with what Spark does before and after, versions, killed workers."""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

import dovetail as dt
from dovetail.relation import Relation

SIZES = [1, 2, 100_000, 999, 1, 10_001]
KEYS = 3_000


def make_stream(directory: Path, sizes: list[int]) -> list[Path]:
    """Parquet files of so many rows each, with NULLs, unmatched and repeated keys; later files have later times."""
    directory.mkdir()
    files, first = [], 0
    for number, size in enumerate(sizes):
        ids = range(first, first + size)
        keys = [None if n % 17 == 0 else f"ключ {n * n % (2 * KEYS)}" for n in ids]
        times = pa.array([1_700_000_000_000_000 + 1_000 * n for n in ids], pa.timestamp("us", "UTC"))
        table = pa.table({"v": pa.array(ids, pa.int64()), "k": pa.array(keys, pa.string()), "ts": times})
        path = directory / f"{number:04d}.parquet"
        pq.write_table(table, path)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
        files.append(path)
        first += size
    return files


def make_relation(path: Path) -> Relation:
    keys = [f"ключ {n}" for n in range(KEYS)] + [f"ключ {n}" for n in range(0, KEYS, 10)]
    rows = pa.table({"k": keys, "name": [f"имя {n}" for n in range(len(keys))], "version": [1] * len(keys)})
    return Relation.build(rows, path, on="k", shards=2)


def read_stream(spark: SparkSession, directory: Path) -> DataFrame:
    schema = "v long, k string, ts timestamp"
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(directory))


def run(df: DataFrame, name: str, checkpoint: Path, mode: str = "append") -> StreamingQuery:
    writer = df.writeStream.format("memory").queryName(name).outputMode(mode)
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    return query


def fingerprint(df: DataFrame) -> tuple[Any, ...]:
    """The rows of a DataFrame, whatever their order, as three numbers: comparing them all would take a minute."""
    hashed = df.select(F.xxhash64(*sorted(df.columns)).alias("h"))
    return tuple(hashed.agg(F.count("*"), F.sum(F.col("h").cast("decimal(20,0)")), F.bit_xor("h")).collect()[0])


def rows(df: DataFrame) -> Counter[Any]:
    return Counter(tuple(row) for row in df.collect())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stream") / "files"
    make_stream(directory, SIZES)
    return directory


@pytest.fixture(scope="module")
def relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    return make_relation(tmp_path_factory.mktemp("relation") / "r")


@pytest.mark.parametrize(("strategy", "way"), [("auto", "keys"), ("auto", "rows"), ("mesh", "rows")], indirect=["way"])
def test_micro_batches_of_any_size_give_what_one_join_of_all_rows_gives(
    spark: SparkSession, files: Path, relation: Relation, tmp_path: Path, strategy: str, way: str
) -> None:
    stream = read_stream(spark, files)
    left, anti = (dt.enrich(stream, relation, "k", how, strategy=strategy, budget="8MB") for how in ("left", "anti"))
    union = left.unionByName(anti, allowMissingColumns=True).coalesce(1)
    query = run(union, f"sizes_{strategy}_{way}", tmp_path / "checkpoint")
    assert len([progress for progress in query.recentProgress if progress["numInputRows"]]) == len(SIZES)
    batch = spark.read.parquet(str(files))
    table = spark.createDataFrame(relation.to_arrow())
    expected = batch.join(table, "k", "left").unionByName(batch.join(table, "k", "anti"), allowMissingColumns=True)
    assert fingerprint(spark.table(f"sizes_{strategy}_{way}")) == fingerprint(expected)


def test_watermark_survives_and_two_enriches_compose(
    spark: SparkSession, relation: Relation, tmp_path: Path, way: str
) -> None:
    make_stream(tmp_path / "files", [1, 3_000, 2_000])
    stream = read_stream(spark, tmp_path / "files").withWatermark("ts", "500 milliseconds")
    once = dt.enrich(stream, relation, "k", select="name")
    codes = spark.createDataFrame([(f"имя {n}", n % 7) for n in range(0, KEYS, 3)], "name string, class long")
    twice = dt.enrich(once.withColumn("name", F.trim("name")), codes, on="name", how="left")
    windowed = twice.groupBy(F.window("ts", "1 second")).agg(F.count("*").alias("n"), F.sum("class").alias("sum"))
    run(windowed, f"windows_{way}", tmp_path / "checkpoint")
    batch = spark.read.parquet(str(tmp_path / "files")).join(spark.createDataFrame(relation.to_arrow()), "k")
    counted = batch.join(codes, "name", "left").groupBy(F.window("ts", "1 second"))
    expected = counted.agg(F.count("*").alias("n"), F.sum("class").alias("sum"))
    latest = spark.read.parquet(str(tmp_path / "files")).agg(F.max("ts")).collect()[0][0]
    closed = expected.where(F.col("window.end") <= F.lit(latest) - F.expr("interval 500 milliseconds"))
    found = rows(spark.table(f"windows_{way}").select("window.start", "n", "sum"))
    assert found == rows(closed.select("window.start", "n", "sum"))
    assert len(found) == 4
    assert [join.how for join in dt.explain(windowed).joins] == ["left", "inner"]


def test_relation_of_a_dataframe_is_built_once_and_again_when_its_files_change(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "table")
    spark.createDataFrame([(1, "a"), (2, "b")], "k long, name string").write.parquet(path)
    stream = spark.createDataFrame([(1,), (3,)], "k long")

    def joined() -> tuple[str, Counter[Any]]:
        df = dt.enrich(stream, spark.read.parquet(path), on="k", how="left")
        return dt.explain(df).joins[0].relation, rows(df)

    first, again = joined(), joined()
    assert first == again == (first[0], Counter({(1, "a"): 1, (3, None): 1}))
    spark.createDataFrame([(3, "c")], "k long, name string").write.mode("overwrite").parquet(path)
    changed = joined()
    assert changed[0] != first[0]
    assert changed[1] == Counter({(1, None): 1, (3, "c"): 1})
    opened = Relation.open(changed[0])
    assert rows(dt.enrich(stream, changed[0], "k")) == rows(dt.enrich(stream, opened, "k")) == Counter({(3, "c"): 1})


# -------------------------------------------------------------------- versions


class Grower:
    """A stream of one-row files, one micro-batch each, so that a test can act between two of them."""

    def __init__(self, spark: SparkSession, directory: Path, relation: Relation, **options: Any) -> None:
        self.spark, self.directory = spark, directory
        (directory / "in").mkdir(parents=True)
        self.enriched = dt.enrich(read_stream(spark, directory / "in"), relation, "k", **options)
        self.written = 0

    def add(self, key: str) -> None:
        table = pa.table({"v": [self.written], "k": [key], "ts": pa.array([0], pa.timestamp("us", "UTC"))})
        pq.write_table(table, self.directory / "in" / f"{self.written:04d}.parquet")
        self.written += 1

    def start(self) -> StreamingQuery:
        writer = self.enriched.writeStream.format("parquet").option("path", str(self.directory / "out"))
        writer = writer.option("checkpointLocation", str(self.directory / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination(60)
        return query

    def result(self) -> list[tuple[int, int | None]]:
        found = self.spark.read.parquet(str(self.directory / "out")).select("v", "version").collect()
        return sorted((row.v, row.version) for row in found)


def next_version(relation: Relation, number: int) -> Relation:
    return relation.upsert(pa.table({"k": ["ключ 1"], "name": ["new"], "version": [number]}))


def test_each_micro_batch_sees_the_newest_version_and_a_replay_the_same_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    relation = make_relation(tmp_path / "r")
    flow = Grower(spark, tmp_path / "flow", relation, refresh="batch", io="direct")
    for number in (1, 2, 3):
        flow.add("ключ 1")
        query = flow.start()
        relation = next_version(relation, number + 1)
    assert flow.result() == [(0, 1), (1, 2), (2, 3)]
    # The last micro-batch as it was before its commit: Spark runs it again with the same id.
    commits = tmp_path / "flow" / "checkpoint" / "commits"
    for directory in (commits, tmp_path / "flow" / "out" / "_spark_metadata"):
        for name in ("2", ".2.crc"):
            (directory / name).unlink(missing_ok=True)
    flow.start()
    assert flow.result() == [(0, 1), (1, 2), (2, 3)]
    pins = sorted((tmp_path / "r" / "pins" / str(query.id)).iterdir())
    assert [json.loads(path.read_text())["version"] for path in pins] == [1, 2, 3]


def test_version_of_a_query_is_the_one_it_was_started_with(spark: SparkSession, tmp_path: Path) -> None:
    relation = make_relation(tmp_path / "r")
    flow = Grower(spark, tmp_path / "flow", relation)
    next_version(relation, 2)
    flow.add("ключ 1")
    flow.start()
    assert flow.result() == [(0, 1)]


@pytest.mark.parametrize("refresh", ["query", "batch"])
def test_relation_deleted_while_the_query_runs_is_a_clear_error_and_nothing_is_lost(
    spark: SparkSession, tmp_path: Path, refresh: str
) -> None:
    relation = make_relation(tmp_path / "r")
    flow = Grower(spark, tmp_path / "flow", relation, refresh=refresh)
    flow.add("ключ 1")
    flow.start()
    shutil.move(tmp_path / "r", tmp_path / "away")
    flow.add("ключ 1")
    with pytest.raises(StreamingQueryException, match=r"does not exist|Build the relation first"):
        flow.start()
    shutil.move(tmp_path / "away", tmp_path / "r")
    flow.start()
    assert flow.result() == [(0, 1), (1, 1)]


def test_relation_rebuilt_with_another_key_is_a_clear_error(spark: SparkSession, tmp_path: Path) -> None:
    relation = make_relation(tmp_path / "r")
    flow = Grower(spark, tmp_path / "flow", relation, refresh="batch")
    flow.add("ключ 1")
    flow.start()
    other = pa.table({"k": ["x"], "name": ["y"], "version": [9]})
    Relation.build(other, tmp_path / "r", on="name", shards=2, mode="overwrite")
    flow.add("ключ 1")
    with pytest.raises(StreamingQueryException, match=r"has the key name; this query was planned for k"):
        flow.start()


# -------------------------------------------------------------------- killed workers


@pytest.mark.parametrize(
    ("strategy", "way"), [("auto", "keys"), ("auto", "rows"), ("balanced", "rows")], indirect=["way"]
)
def test_workers_share_a_cache_past_the_page_cache_on_both_routes(
    spark: SparkSession, relation: Relation, tmp_path: Path, strategy: str, way: str
) -> None:
    """By lookup without a shuffle (auto), and by an operator per shard (balanced)."""
    make_stream(tmp_path / "files", [60_000] * 3)  # a worker counts 20,000 tuples before it writes a generation
    stream = read_stream(spark, tmp_path / "files")
    joined = dt.enrich(
        stream, relation, "k", "left", strategy=strategy, io="direct", budget="2MB", metrics=f"cache_{strategy}_{way}"
    )
    query = run(joined, f"cached_{strategy}_{way}", tmp_path / "checkpoint")
    batch = spark.read.parquet(str(tmp_path / "files"))
    expected = batch.join(spark.createDataFrame(relation.to_arrow()), "k", "left")
    assert fingerprint(spark.table(f"cached_{strategy}_{way}")) == fingerprint(expected)
    observed = [progress["observedMetrics"].get(f"cache_{strategy}_{way}") for progress in query.recentProgress]
    hits = [row["cache_hits"] for row in observed if row is not None]
    # The first finds no generation; what it hits is the operator's own cache, which ends with the task.
    assert hits[0] < min(hits[1:])


def killing_once(marker: Path) -> Callable[[Any], Any]:
    """A function for mapInArrow that kills the worker it runs in, once."""

    def kill_or_pass(batches: Any) -> Any:
        for batch in batches:
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    return kill_or_pass


def test_worker_killed_in_mid_task_changes_no_row(spark: SparkSession, tmp_path: Path, way: str) -> None:
    relation = make_relation(tmp_path / "r")
    make_stream(tmp_path / "files", [20_000, 20_000, 20_000])
    # Past the page cache, so that workers share a cache; the killed one has it mapped.
    enriched = dt.enrich(read_stream(spark, tmp_path / "files"), relation, "k", io="direct", budget="1MB")
    doomed = enriched.mapInArrow(killing_once(tmp_path / "killed"), enriched.schema)
    writer = doomed.writeStream.format("parquet").option("path", str(tmp_path / "out"))
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    # Local mode gives a task one attempt; the next start runs the micro-batch again.
    with pytest.raises(StreamingQueryException, match="crashed"):
        writer.start().awaitTermination(60)
    assert writer.start().awaitTermination(60)
    batch = spark.read.parquet(str(tmp_path / "files"))
    expected = batch.join(spark.createDataFrame(relation.to_arrow()), "k")
    found = spark.read.parquet(str(tmp_path / "out"))
    assert fingerprint(found) == fingerprint(expected)
    assert found.count() > 20_000
