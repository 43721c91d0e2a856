"""Flows on Spark: exact results across restarts, sinks, chains, delays, and what is refused."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dovetail import Relation
from dovetail.core.errors import PlanError, RelationError, StateError
from dovetail.spark import sinks
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.steps.stream import Flow, stream
from dovetail.testing.flows import Feed, commits_of, published_rows, unnamed_state_files, wait_until
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows

KEYS = 3_000
CITIES = [{"k": key, "city": f"c{key % 17}"} for key in range(0, KEYS, 2)]


def orders(first: int, count: int) -> pa.Table:
    """Order numbers from ``first`` on, with keys of which half are in the relation, and a NULL now and then."""
    numbers = range(first, first + count)
    keys = [None if number % 97 == 0 else number * 7919 % KEYS for number in numbers]
    return pa.table({"n": list(numbers), "k": pa.array(keys, pa.int64())})


@pytest.fixture
def relation(tmp_path: Path) -> Relation:
    return Relation.build(pa.Table.from_pylist(CITIES), tmp_path / "cities", on="k", shards=3)


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "feed")


@pytest.fixture
def source(spark: SparkSession, feed: Feed) -> DataFrame:
    reader = spark.readStream.schema("n long, k long").option("maxFilesPerTrigger", 1)
    return reader.parquet(str(feed.directory))


def taken(query: FlowQuery) -> int:
    """Stream tuples that the flow's first operator has taken in, all restarts included."""
    progress = query.progress
    return 0 if progress is None else progress.operators[0].totals.stream_tuples_in


def run_until(query: FlowQuery, condition: Callable[[], object], what: str) -> None:
    wait_until(lambda: condition() or not query.isActive, what)
    if not query.isActive:
        ended(query)
        raise AssertionError(f"The flow ended before {what}.")


def ended(query: FlowQuery) -> None:
    """Let a flow end by itself, and raise what it ended with."""
    assert query.awaitTermination(120), "the flow did not end"


def expected(feed: Feed, how: str) -> list[dict[str, Any]]:
    return join_oracle(feed.rows(), CITIES, on=["k"], how=how)


@pytest.mark.parametrize(
    ("strategy", "how"), [("mesh", "inner"), ("balanced", "left"), ("hybrid", "anti"), ("auto", "semi")]
)
def test_what_waits_survives_restarts_and_nothing_is_lost_or_repeated(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path, strategy: str, how: str
) -> None:
    flow = stream(source, "orders").enrich(
        relation, on="k", how=how, strategy=strategy, budget="900kB", max_delay="1 hour"
    )
    target, checkpoint = tmp_path / "out", tmp_path / "checkpoint"

    def run() -> FlowQuery:
        for _ in range(2):
            feed.add(orders(500 * len(feed.files()), 500))
        query = flow.write(sinks.parquet(target), checkpoint=checkpoint)
        run_until(query, lambda: taken(query) == 500 * len(feed.files()), "all files were read")
        return query

    query = run()
    query.stop()
    waiting = query.progress.pending
    if strategy in ("mesh", "balanced"):
        assert waiting > 0
        assert len(published_rows(target)) < len(expected(feed, how))
    shards = commits_of(checkpoint)[-1]["operators"]["1-enrich"]
    assert sum(shard["report"]["pending"] for shard in shards) == waiting
    query = run()
    query.stop(drain=True)
    assert query.exception() is None
    assert query.progress.pending == 0
    assert_same_rows(published_rows(target), expected(feed, how), f"{strategy} {how}")
    assert unnamed_state_files(checkpoint) == set()
    assert not query.isActive


def test_second_flow_of_a_name_is_refused_and_takes_nothing(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    feed.add(orders(0, 100))
    flow = stream(source, "orders").enrich(relation, on="k", how="left")
    first = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint")
    with pytest.raises(PlanError, match="A query named 'orders' already runs"):
        flow.write(sinks.parquet(tmp_path / "other"), checkpoint=tmp_path / "second")
    first.stop(drain=True)
    assert_same_rows(published_rows(tmp_path / "out"), expected(feed, "left"), "of the first")
    assert not (tmp_path / "second" / "dovetail" / "flow.json").exists()
    ended(flow.write(sinks.parquet(tmp_path / "other"), checkpoint=tmp_path / "second", trigger="available-now"))
    assert_same_rows(published_rows(tmp_path / "other"), expected(feed, "left"), "of the second")


def test_draft_that_a_killed_driver_left_of_the_first_offsets_does_not_stop_the_flow(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    feed.add(orders(0, 100))
    offsets = tmp_path / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / ".0.356ebe53-ab0d-43f3-9ecc-28b2ea4f23e9.tmp").touch()
    flow = stream(source, "orders").enrich(relation, on="k", how="left")
    ended(flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="available-now"))
    assert_same_rows(published_rows(tmp_path / "out"), expected(feed, "left"), "after a draft")


def test_chained_joins_and_transformations_end_with_available_now(
    spark: SparkSession, relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    mayors = Relation.build(
        pa.table({"city": [f"c{n}" for n in range(12)], "mayor": [f"m{n}" for n in range(12)]}),
        tmp_path / "mayors",
        on="city",
        shards=2,
    )
    for number in range(2):
        feed.add(orders(1000 * number, 1000))
    flow = (
        stream(source, "chain")
        .transform(lambda rows: rows.where("n % 5 <> 0"))
        .enrich(relation, on="k", max_delay="1 hour", strategy="mesh", budget="2MB")
        .transform(lambda rows: rows.withColumn("twice", F.col("n") * 2).drop("n"))
        .enrich(mayors, on="city", how="left", max_delay="1 hour")
        .transform(lambda rows: rows.repartition(3, "mayor"))
    )
    query = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="available-now")
    ended(query)
    static = spark.read.parquet(str(feed.directory)).where("n % 5 <> 0")
    joined = static.join(spark.createDataFrame(CITIES), "k").withColumn("twice", F.col("n") * 2).drop("n")
    names = spark.createDataFrame([(f"c{n}", f"m{n}") for n in range(12)], "city string, mayor string")
    oracle = [row.asDict() for row in joined.join(names, "city", "left").collect()]
    assert_same_rows(published_rows(tmp_path / "out"), oracle, "chain")
    published = spark.read.parquet(str(tmp_path / "out"))
    assert published.columns == ["city", "k", "twice", "mayor"]
    assert [operator.name for operator in query.progress.operators] == ["1-enrich", "2-enrich"]
    assert unnamed_state_files(tmp_path / "checkpoint") == set()


def test_every_tuple_leaves_in_the_first_batch_after_its_delay_though_nothing_more_arrives(
    feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    rows = pa.table({"k": list(range(60_000)), "city": [f"c{n}" for n in range(60_000)]})
    relation = Relation.build(rows, tmp_path / "large", on="k", shards=2)
    flow = stream(source, "delays").enrich(
        relation, on="k", how="left", strategy="mesh", budget="300kB", max_delay="2 seconds"
    )
    feed.add(orders(0, 400))
    query = flow.write(
        sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="100 ms", keep_commits=1_000
    )
    run_until(query, lambda: taken(query) == 400 and query.progress.pending == 0, "the burst to leave")
    query.stop()
    commits = commits_of(tmp_path / "checkpoint")
    waits = []
    for commit in commits:
        reports = [shard["report"] for shard in commit["operators"]["1-enrich"]]
        oldest = [report["oldest_ms"] for report in reports if report["oldest_ms"] is not None]
        waits += [commit["time_ms"] - time_ms for time_ms in oldest]
    assert waits, "nothing ever waited: the test would see no delay"
    assert max(waits) < 2_000
    assert len(published_rows(tmp_path / "out")) == 400


def test_tuple_that_need_not_wait_leaves_an_idle_flow_in_the_batch_it_arrives_in(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    flow = stream(source, "idle").enrich(relation, on="k", how="left", max_delay="1 hour")
    checkpoint = tmp_path / "checkpoint"
    query = flow.write(sinks.memory(), checkpoint=checkpoint, trigger="100 ms", keep_commits=1_000)
    memory = query._protocol._sink
    run_until(query, lambda: (query.progress or 0) and query.progress.batch >= 3, "idle micro-batches")
    feed.add(orders(0, 5))
    run_until(query, lambda: taken(query) == 5, "the tuples to arrive")
    query.stop()
    counts = {
        commit["batch"]: sum(
            shard["report"]["metrics"]["stream_tuples_in"] for shard in commit["operators"]["1-enrich"]
        )
        for commit in commits_of(checkpoint)
    }
    arrived_in = min(batch for batch, count in counts.items() if count == 5)
    assert memory.batches[arrived_in].num_rows == 5
    assert all(memory.batches[batch].num_rows == 0 for batch in memory.batches if batch != arrived_in)


def test_columns_of_every_kind_survive_the_wait(
    spark: SparkSession, relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    kinds = {
        "text": "concat('ä', n)",
        "bytes": "cast(concat('b', n) as binary)",
        "flag": "n % 2 = 0",
        "price": "cast(n as decimal(20, 3)) / 7",
        "ratio": "cast(n as double) / 3",
        "day": "date_add(date'2024-02-28', cast(n % 9 as int))",
        "moment": "timestamp_micros(1700000000000000 + n)",
        "local": "cast(timestamp_micros(1700000000000000 + n) as timestamp_ntz)",
        "span": "make_dt_interval(0, 0, 0, n)",
        "list": "array(n, null, n + 1)",
        "pair": "named_struct('a', n, 'b', concat('s', n))",
        "map": "map(concat('k', n), n)",
        "nothing": "cast(null as int)",
    }

    def widen(rows: DataFrame) -> DataFrame:
        return rows.selectExpr("n", "k", *(f"{text} as {name}" for name, text in kinds.items()))

    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/Sao_Paulo")
    try:
        feed.add(orders(0, 120))
        flow = stream(widen(source), "wide").enrich(
            relation, on="k", how="left", strategy="mesh", budget="3MB", max_delay="1 hour"
        )
        query = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint")
        run_until(query, lambda: taken(query) == 120, "the file was read")
        assert query.progress.pending > 0
        query.stop()
        query = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint")
        query.stop(drain=True)
        static = widen(spark.read.parquet(str(feed.directory)))
        oracle = static.join(spark.createDataFrame(CITIES), "k", "left")
        given = spark.read.parquet(str(tmp_path / "out"))
        assert [(f.name, f.dataType) for f in given.schema] == [(f.name, f.dataType) for f in oracle.schema]
        assert sorted(map(str, given.collect())) == sorted(map(str, oracle.collect()))
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


@pytest.mark.parametrize("options", [{"strategy": "mesh"}, {}, {"max_delay": "2 seconds"}], ids=str)
def test_join_without_equality_sends_every_row_to_every_shard(
    feed: Feed, source: DataFrame, tmp_path: Path, options: dict[str, str]
) -> None:
    ranges = [{"low": 100 * number, "high": 100 * number + 30, "band": f"b{number}"} for number in range(9)]
    relation = Relation.build(pa.Table.from_pylist(ranges), tmp_path / "bands", on="band", shards=3)
    feed.add(orders(0, 300))
    flow = stream(source, "bands").enrich(relation, on=[], condition="low <= n AND n < high", **options)
    query = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="available-now")
    ended(query)
    oracle = [{**row, **band} for row in feed.rows() for band in ranges if band["low"] <= row["n"] < band["high"]]
    assert_same_rows(published_rows(tmp_path / "out"), oracle, "bands")
    assert len(oracle) == 90


# ==================================================================== sinks


def test_function_of_foreach_batch_may_run_any_number_of_actions_or_none(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    seen: list[tuple[int, list[Any]]] = []

    def look(rows: DataFrame, batch: int) -> None:
        if batch % 2 == 0:
            assert rows.isEmpty() == (rows.count() == 0)
            assert len(rows.limit(3).collect()) <= 3
            seen.append((batch, [row.asDict() for row in rows.collect()]))
        else:
            seen.append((batch, []))

    for number in range(4):
        feed.add(orders(100 * number, 100))
    flow = stream(source, "called").enrich(relation, on="k", how="semi")
    flow.write(sinks.foreach_batch(look), checkpoint=tmp_path / "checkpoint", trigger="available-now").awaitTermination(
        120
    )
    assert [batch for batch, _ in seen] == [0, 1, 2, 3]
    halves = [row for table in (orders(0, 100), orders(200, 100)) for row in table.to_pylist()]
    assert_same_rows([row for _, rows in seen for row in rows], join_oracle(halves, CITIES, on=["k"], how="semi"), "")
    assert len(list((tmp_path / "checkpoint" / "dovetail" / "staged").iterdir())) == 1


def test_function_that_fails_is_called_again_with_the_same_rows(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    feed.add(orders(0, 100))
    calls: list[tuple[int, set[int]]] = []

    def fail_once(rows: DataFrame, batch: int) -> None:
        calls.append((batch, {row.n for row in rows.collect()}))
        if len(calls) == 1:
            raise ValueError("the target is away")

    flow = stream(source, "failing").enrich(relation, on="k")
    query = flow.write(sinks.foreach_batch(fail_once), checkpoint=tmp_path / "checkpoint", trigger="available-now")
    with pytest.raises(ValueError, match="the target is away"):
        ended(query)
    assert "the target is away" in str(query.exception())
    flow.write(
        sinks.foreach_batch(fail_once), checkpoint=tmp_path / "checkpoint", trigger="available-now"
    ).awaitTermination(120)
    assert calls[0] == calls[1]
    assert len(calls[0][1]) > 0


def test_memory_console_and_noop_take_the_same_rows(
    spark: SparkSession, relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    feed.add(orders(0, 50))
    printed = io.StringIO()
    memory = sinks.memory()
    for sink in (memory, sinks.console(num_rows=50, file=printed), sinks.noop()):
        flow = stream(source, f"to-{sink.kind}").enrich(relation, on="k", how="left")
        query = flow.write(sink, checkpoint=tmp_path / sink.kind, trigger="available-now")
        ended(query)
        assert query.progress.operators[0].totals.output_rows == 50
    assert_same_rows(memory.rows(), expected(feed, "left"), "memory")
    assert memory.to_df(spark).count() == 50
    assert printed.getvalue().count("\n|") == 51
    assert "Batch: 0" in printed.getvalue()


# ==================================================================== the relation changes


def test_version_of_each_batch_is_the_newest_and_what_waits_keeps_its_own(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    flow = stream(source, "fresh").enrich(
        relation, on="k", how="left", strategy="mesh", budget="900kB", max_delay="1 hour", refresh="batch"
    )
    feed.add(orders(0, 300))
    query = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint")
    run_until(query, lambda: taken(query) == 300, "the first file")
    assert query.progress.pending > 0
    relation.upsert(pa.table({"k": list(range(KEYS)), "city": ["new"] * KEYS}))
    run_until(query, lambda: query.progress.operators[0].relation_version == 2, "the new version")
    feed.add(orders(300, 300))
    run_until(query, lambda: taken(query) == 600, "the second file")
    query.stop(drain=True)
    old = join_oracle(orders(0, 300).to_pylist(), CITIES, on=["k"], how="left")
    changed = [{"k": key, "city": "new"} for key in range(KEYS)]
    new = join_oracle(orders(300, 300).to_pylist(), changed, on=["k"], how="left")
    assert_same_rows(published_rows(tmp_path / "out"), old + new, "two versions")


def test_relation_that_goes_away_or_changes_its_key_is_a_clear_error_and_nothing_is_lost(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    def flow_on(found: Relation) -> Flow:
        return stream(source, "lost").enrich(found, on="k", how="left", max_delay="1 hour", refresh="batch")

    def run(flow: Flow) -> FlowQuery:
        return flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="available-now")

    path = tmp_path / "cities"
    feed.add(orders(0, 100))
    run(flow_on(relation)).awaitTermination(120)
    planned = flow_on(relation)
    shutil.move(path, tmp_path / "away")
    feed.add(orders(100, 100))
    query = run(planned)
    with pytest.raises(RelationError, match=r"does not exist.*Nothing was lost: put the relation back"):
        ended(query)
    Relation.build(pa.table({"key": ["x"], "city": ["y"]}), path, on="key", shards=3)
    query = run(planned)
    with pytest.raises(RelationError, match="has the key key; this query was planned for k"):
        ended(query)
    shutil.rmtree(path)
    shutil.move(tmp_path / "away", path)
    run(planned).awaitTermination(120)
    assert_same_rows(published_rows(tmp_path / "out"), expected(feed, "left"), "after the relation came back")


# ==================================================================== checkpoints


def test_checkpoint_that_does_not_fit_is_refused_and_the_right_flow_goes_on(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    checkpoint, target = tmp_path / "checkpoint", tmp_path / "out"

    def flow(**options: Any) -> Flow:
        wanted = {"on": "k", "strategy": "mesh", "budget": "900kB", "max_delay": "1 hour"} | options
        return stream(wanted.pop("df", source), wanted.pop("name", "mine")).enrich(
            wanted.pop("relation", relation), **wanted
        )

    def start(flow: Flow, sink: Any = None) -> FlowQuery:
        return flow.write(sink or sinks.parquet(target), checkpoint=checkpoint)

    feed.add(orders(0, 300))
    query = start(flow())
    # Until Spark has committed it as well: a first micro-batch that only we know of may begin anew.
    run_until(query, lambda: taken(query) == 300 and (checkpoint / "commits" / "0").exists(), "the first file")
    assert query.progress.pending > 0
    query.stop()
    finer = Relation.build(pa.Table.from_pylist(CITIES), tmp_path / "finer", on="k", shards=4)
    for options, message in [
        ({"name": "other"}, "belongs to the flow 'mine', this flow is 'other'"),
        ({"relation": finer}, "shards=3|relation="),
        ({"df": source.withColumn("more", F.lit(1))}, "another input .* now there is more int"),
        ({"how": "left"}, "how='inner'"),
        ({"strategy": "auto"}, "kind='enrich mesh'"),
    ]:
        with pytest.raises(StateError, match=message):
            start(flow(**options))
    with pytest.raises(StateError, match="staged for a parquet sink"):
        start(flow(), sinks.noop())
    damage = [
        (lambda place: shutil.rmtree(place / "dovetail"), "the flow's part was lost"),
        (
            lambda place: (place / "metadata").write_text(json.dumps({"id": "0" * 8 + "-0000-0000-0000-" + "0" * 12})),
            "were not made together",
        ),
        (lambda place: _flip_a_bit(place), "does not match its digest"),
    ]
    for harm, message in damage:
        copy = tmp_path / "copy"
        shutil.copytree(checkpoint, copy)
        harm(copy)
        with pytest.raises(StateError, match=message):
            ended(flow().write(sinks.parquet(tmp_path / "unused"), checkpoint=copy))
        shutil.rmtree(copy)
    query = start(flow())
    run_until(query, lambda: query.progress is not None, "a micro-batch")
    query.stop(drain=True)
    assert_same_rows(published_rows(target), expected(feed, "inner"), "the right flow")


def _flip_a_bit(checkpoint: Path) -> None:
    """In a state file that the last commit names."""
    files = [file for shard in commits_of(checkpoint)[-1]["operators"]["1-enrich"] for file in shard["files"]]
    path = checkpoint / "dovetail" / "state" / files[0]["name"]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


# ==================================================================== refused before data moves


def test_what_cannot_be_is_refused_before_anything_starts(
    spark: SparkSession, relation: Relation, source: DataFrame, tmp_path: Path
) -> None:
    assert stream(source).name == "flow"
    with pytest.raises(PlanError, match="begins with a streaming DataFrame"):
        stream(spark.range(3), "batch")
    with pytest.raises(PlanError, match="letters, digits"):
        stream(source, "a/b")
    with pytest.raises(PlanError, match=r"rand\(.* in the input"):
        stream(source.withColumn("r", F.rand()), "random")
    flow = stream(source, "plans")
    with pytest.raises(PlanError, match=r"uuid\(.* in a transformation"):
        flow.transform(lambda rows: rows.withColumn("id", F.expr("uuid()")))
    with pytest.raises(PlanError, match="returned nothing"):
        flow.transform(lambda rows: None)
    with pytest.raises(PlanError, match="max_delay='soon' is not a duration"):
        flow.enrich(relation, on="k", max_delay="soon")
    with pytest.raises(PlanError, match="refresh='never'"):
        flow.enrich(relation, on="k", refresh="never")
    with pytest.raises(PlanError, match="missing"):
        flow.enrich(relation, on="missing")
    with pytest.raises(PlanError, match="is not a sink"):
        flow.write("out", checkpoint=tmp_path / "c")
    with pytest.raises(PlanError, match="keep_commits=1"):
        flow.write(sinks.noop(), checkpoint=tmp_path / "c", keep_commits=1)
    with pytest.raises(PlanError, match="trigger='often'"):
        flow.write(sinks.noop(), checkpoint=tmp_path / "c", trigger="often")
    doubled = flow.transform(lambda rows: rows.select("n", F.col("k").alias("N")))
    with pytest.raises(PlanError, match="two columns 'N'"):
        doubled.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "c")
    assert not any((tmp_path / "c").glob("offsets/*"))
