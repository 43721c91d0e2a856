"""Several streams joined in a flow: exact across restarts and spilling; windows, outer rows, and what is refused."""

import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dovetail.core.errors import DovetailError, StateError
from dovetail.joins.conditions import BatchPredicate
from dovetail.joins.multiway import PairCondition
from dovetail.spark import sinks
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.steps.explain import explain
from dovetail.spark.steps.multi_join import multi_join
from dovetail.spark.steps.stream import Flow
from dovetail.testing.cascade_oracle import cascade_oracle
from dovetail.testing.flows import Feed, published_rows, unnamed_state_files, wait_until
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.rows import assert_same_rows

SEED = 20_703
START = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = ("a", "b", "c")
SPARK_COLUMNS = {name: f"k long, t{name} timestamp, v{name} string" for name in NAMES}


def arrivals(name: str, first_second: int, count: int, chance: random.Random, keys: int = 30) -> pa.Table:
    """Rows of an input within twenty seconds from a moment on; some have no key or no time."""
    moments = [START + timedelta(seconds=first_second, milliseconds=chance.randrange(20_000)) for _ in range(count)]
    return pa.table(
        {
            "k": pa.array([chance.randrange(keys) if chance.random() < 0.95 else None for _ in moments], pa.int64()),
            f"t{name}": pa.array([m if chance.random() < 0.97 else None for m in moments], pa.timestamp("us", "UTC")),
            f"v{name}": [f"{name}{number}é{chance.randrange(1 << 30)}" for number in range(count)],
        }
    )


class Inputs:
    """Feeds of several inputs, and the streams that read them."""

    def __init__(self, spark: SparkSession, directory: Path, names: tuple[str, ...] = NAMES) -> None:
        self.feeds = {name: Feed(directory / name) for name in names}
        self.chance = random.Random(SEED)
        self._spark = spark
        print("seed", SEED)

    def add(self, first_second: int, **counts: int) -> None:
        for name, count in counts.items():
            self.feeds[name].add(arrivals(name, first_second, count, self.chance))

    def streams(self) -> dict[str, DataFrame]:
        return {
            name: self._spark.readStream.schema(SPARK_COLUMNS[name])
            .option("maxFilesPerTrigger", 1)
            .parquet(str(feed.directory))
            for name, feed in self.feeds.items()
        }

    def expected(self, how: Any = "inner", width: timedelta | None = None) -> list[dict[str, Any]]:
        rows = {name: feed.rows() for name, feed in self.feeds.items()}
        first = next(iter(rows))
        equalities = [((first, "k"), (name, "k")) for name in rows if name != first]
        times = None if width is None else {name: f"t{name}" for name in rows}
        return multiway_oracle(rows, equalities, how, times=times, width=width)  # type: ignore[arg-type]

    @property
    def times(self) -> dict[str, str]:
        return {name: f"t{name}" for name in self.feeds}


def run(flow: Flow, tmp_path: Path) -> FlowQuery:
    """Take what is there, and end."""
    query = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="available-now")
    assert query.awaitTermination(600), "the flow did not end"
    return query


def taken_in(query: FlowQuery) -> int:
    """Rows that the flow has joined."""
    return 0 if query.progress is None else query.progress.operators[0].totals.stream_tuples_in


def joined(tmp_path: Path) -> list[dict[str, Any]]:
    """What the flow has put out; Spark writes moments as nanoseconds without a zone, and means UTC."""
    rows = published_rows(tmp_path / "out")
    moments = {column for row in rows[:1] for column in row if column in ("ta", "tb", "tc")}
    return [{c: _moment(v) if c in moments else v for c, v in row.items()} for row in rows]


def _moment(value: Any) -> datetime | None:
    return None if value is None else value.to_pydatetime().replace(tzinfo=UTC)


def test_three_streams_with_a_window_across_restarts_and_spilling(spark: SparkSession, tmp_path: Path) -> None:
    inputs = Inputs(spark, tmp_path)
    width = timedelta(seconds=3)
    for second, counts in ((0, (60, 50, 70)), (15, (40, 90, 0)), (30, (80, 0, 60)), (36, (1, 60, 50))):
        inputs.add(second, **{name: count for name, count in zip(NAMES, counts, strict=True) if count})
        flow = multi_join(
            inputs.streams(), on="k", window="3 seconds", time=inputs.times, lateness="1 hour", budget="40kB", shards=2
        )
        query = run(flow, tmp_path)
        assert_same_rows(joined(tmp_path), inputs.expected(width=width), f"after second {second}")
    progress = query.progress
    assert progress is not None
    (operator,) = progress.operators
    assert operator.details["flushed_rows"] > 0
    assert operator.totals.stream_tuples_in == sum(len(feed.rows()) for feed in inputs.feeds.values())
    assert sum(operator.memory_bytes.values()) <= 40_000
    assert unnamed_state_files(tmp_path / "checkpoint") == set()


@pytest.mark.parametrize(("idle_after", "least_s", "most_s"), [(None, 0, 20), ("1 millisecond", 400, 620)])
def test_silent_input_holds_the_others_back_until_it_is_idle(
    spark: SparkSession, tmp_path: Path, idle_after: str | None, least_s: int, most_s: int
) -> None:
    inputs = Inputs(spark, tmp_path, ("a", "b"))
    inputs.add(0, a=20, b=20)
    for second in range(100, 700, 100):
        inputs.add(second, a=20)
    given = sum(len(feed.rows()) for feed in inputs.feeds.values())
    options: dict[str, Any] = {"how": "left", "window": "2 seconds", "time": inputs.times, "shards": 2}
    flow = multi_join(inputs.streams(), on="k", idle_after=idle_after, **options)
    query = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint")
    wait_until(lambda: taken_in(query) == given, "all rows")
    query.stop()
    alone = [row for row in joined(tmp_path) if row["vb"] is None and row["k"] is not None and row["ta"] is not None]
    latest = max(row["ta"] for row in alone)
    assert START + timedelta(seconds=least_s) < latest < START + timedelta(seconds=most_s)


@pytest.mark.parametrize("how", ["left", "full", "anti"])
def test_rows_without_a_match_come_out_once_when_their_window_has_passed(
    spark: SparkSession, tmp_path: Path, how: str
) -> None:
    inputs = Inputs(spark, tmp_path, ("a", "b"))
    width = timedelta(seconds=2)
    inputs.add(0, a=40, b=15)
    inputs.add(20, a=30, b=25)
    flow = multi_join(
        inputs.streams(), on="k", how=how, window="2 seconds", time=inputs.times, lateness="20 seconds", shards=2
    )
    run(flow, tmp_path)
    before = len(joined(tmp_path))
    # An hour later on both sides: everything before is decided, and these rows' own window stays open.
    for name in ("a", "b"):
        late = pa.table(
            {
                "k": [-1],
                f"t{name}": pa.array([START + timedelta(hours=1)], pa.timestamp("us", "UTC")),
                f"v{name}": ["z"],
            }
        )
        inputs.feeds[name].add(late)
        inputs.feeds[name].add(late.slice(0, 0))
    run(flow, tmp_path)
    expected = [row for row in inputs.expected(how, width) if row["k"] != -1]
    decided = [row for row in joined(tmp_path) if row["k"] != -1]
    assert before < len(expected)
    assert_same_rows(decided, expected, how)


@pytest.mark.parametrize("how", [{"b": "left", "c": "full"}, {"b": "full", "c": "anti"}])
def test_cascade_of_outer_joins_across_restarts(spark: SparkSession, tmp_path: Path, how: dict[str, Any]) -> None:
    inputs = Inputs(spark, tmp_path)
    width = timedelta(seconds=2)
    options: dict[str, Any] = {"window": "2 seconds", "time": inputs.times, "lateness": "20 seconds", "shards": 2}
    for second in (0, 20):
        inputs.add(second, a=40, b=15, c=25)
        flow = multi_join(inputs.streams(), on="k", how=how, budget="120kB", **options)
        run(flow, tmp_path)
    # An hour later on all sides; then a micro-batch for each join, in which it learns how far the one below it is.
    for name in NAMES:
        late = arrivals(name, 3_600, 1, inputs.chance).set_column(0, "k", pa.array([-1]))
        inputs.feeds[name].add(late.set_column(1, f"t{name}", pa.array([START + timedelta(hours=1)], late[1].type)))
        for _ in range(3):
            inputs.feeds[name].add(late.slice(0, 0))
    query = run(flow, tmp_path)
    rows = {name: feed.rows() for name, feed in inputs.feeds.items()}
    equalities = [(("a", "k"), (name, "k")) for name in "bc"]
    expected = cascade_oracle(rows, equalities, how, inputs.times, width)
    decided = [row for row in joined(tmp_path) if row["k"] != -1]
    assert_same_rows(decided, [row for row in expected if row["k"] != -1], str(how))
    assert query.progress is not None
    assert all(sum(operator.state_rows.values()) <= 6 for operator in query.progress.operators), "the rest is purged"
    assert "order of the inputs" in explain(flow).text()
    with pytest.raises(StateError, match="how"):
        run(multi_join(inputs.streams(), on="k", how={**how, "c": "left"}, **options), tmp_path)


def test_cascade_oracle_is_what_spark_makes_of_using(spark: SparkSession, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    for how in ({"b": "left", "c": "full", "d": "inner"}, {"b": "full", "c": "right", "d": "semi"}):
        rows = {
            name: [{"k": chance.choice([None, *range(6)]), f"v{name}": f"{name}{n}"} for n in range(8)]
            for name in "abcd"
        }
        frames = {name: spark.createDataFrame(each, f"k long, v{name} string") for name, each in rows.items()}
        result = frames["a"]
        for name, kind in how.items():
            result = result.join(frames[name], on=["k"], how=kind)
        equalities = [(("a", "k"), (name, "k")) for name in "bcd"]
        expected = cascade_oracle(rows, equalities, how)  # type: ignore[arg-type]
        assert_same_rows([row.asDict() for row in result.collect()], expected, str(how))


@pytest.mark.parametrize("plan", ["single", "binary"])
def test_bounds_of_pairs_and_conditions_across_restarts(spark: SparkSession, tmp_path: Path, plan: Any) -> None:
    inputs = Inputs(spark, tmp_path)
    shorter = BatchPredicate(lambda a, c: pc.less(pc.utf8_length(a["va"]), pc.utf8_length(c["vc"])), name="shorter")
    options: dict[str, Any] = {
        "condition": [
            "tb BETWEEN a.ta AND a.ta + INTERVAL 4 SECONDS AND vb <> va",
            "c.tc > b.tb - INTERVAL '1500 MILLISECONDS' AND c.tc <= b.tb + INTERVAL 3 SECONDS",
            PairCondition("a", "c", shorter),
        ],
        "time": inputs.times,
        "lateness": "1 hour",
        "budget": "120kB",
        "shards": 2,
        "plan": plan,
    }

    def expected() -> list[dict[str, Any]]:
        rows = {name: [r for r in feed.rows() if r["k"] is not None] for name, feed in inputs.feeds.items()}
        return [
            {**a, **b, **c}
            for a in rows["a"]
            for b in rows["b"]
            for c in rows["c"]
            if a["k"] == b["k"] == c["k"]
            and None not in (a["ta"], b["tb"], c["tc"])
            and timedelta(0) <= b["tb"] - a["ta"] <= timedelta(seconds=4)
            and timedelta(seconds=-1.5) < c["tc"] - b["tb"] <= timedelta(seconds=3)
            and len(a["va"]) < len(c["vc"])
        ]

    for second in (0, 15):
        inputs.add(second, a=120, b=110, c=130)
        flow = multi_join(inputs.streams(), on="k", **options)
        run(flow, tmp_path)
        assert len(expected()) > 20
        assert_same_rows(joined(tmp_path), expected(), f"after second {second}")
    *_, step = explain(flow).as_dict()["steps"]
    assert step["window_ms"] is None
    assert step["bounds"]
    with pytest.raises(StateError, match=r"conditions|window"):
        run(multi_join(inputs.streams(), on="k", **{**options, "condition": options["condition"][:1]}), tmp_path)


def test_late_rows_are_dropped_and_counted_and_state_is_purged(spark: SparkSession, tmp_path: Path) -> None:
    inputs = Inputs(spark, tmp_path, ("a", "b"))
    inputs.add(0, a=50, b=50)
    inputs.add(3600, a=50, b=50)
    flow = multi_join(inputs.streams(), on="k", window="5 seconds", time=inputs.times, shards=2)
    run(flow, tmp_path)
    on_time = inputs.expected(width=timedelta(seconds=5))
    # The watermark is an hour ahead of these.
    inputs.add(0, a=25, b=25)
    query = run(flow, tmp_path)
    assert_same_rows(joined(tmp_path), on_time, "late rows join nothing")
    assert query.progress is not None
    (operator,) = query.progress.operators
    rows = [row for feed in inputs.feeds.values() for row in feed.rows()[100:]]
    assert operator.details["late_tuples"] == sum(
        row.get("ta") is not None or row.get("tb") is not None for row in rows
    )
    assert sum(operator.state_rows.values()) <= 100
    assert operator.details["purged_rows"] > 0


def test_late_rows_go_to_the_side_output_once_and_the_rest_is_joined(spark: SparkSession, tmp_path: Path) -> None:
    inputs = Inputs(spark, tmp_path, ("a", "b"))
    inputs.add(0, a=40, b=40)
    # Time jumps ahead, and then back on one input: what comes then is late, but for what has no event time at all.
    inputs.add(3600, a=40, b=40)
    flow = multi_join(
        inputs.streams(),
        on="k",
        how="left",
        window="5 seconds",
        time=inputs.times,
        lateness="30 seconds",
        late="side",
        late_path=tmp_path / "late",
        shards=2,
    )
    query = run(flow, tmp_path)
    assert not (tmp_path / "late").exists()
    inputs.add(0, a=30)
    inputs.feeds["b"].add(arrivals("b", 0, 1, inputs.chance).slice(0, 0))
    query = run(flow, tmp_path)
    came_late = [row for row in inputs.feeds["a"].rows()[80:] if row["ta"] is not None]
    found = [
        row for file in sorted((tmp_path / "late" / "a").glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]
    assert_same_rows(found, came_late, "late rows")
    assert query.progress is not None
    assert query.progress.operators[0].details["late_tuples"] == len(came_late)
    # What has no event time is in no window, so that it has no match; what was late does not come out at all.
    given = {row["va"] for row in joined(tmp_path)}
    assert not given & {row["va"] for row in came_late}
    assert given >= {row["va"] for row in inputs.feeds["a"].rows() if row["ta"] is None}
    # Published again, as after a crash: the same files.
    before = sorted(path.name for path in (tmp_path / "late").rglob("*"))
    run(flow, tmp_path)
    assert sorted(path.name for path in (tmp_path / "late").rglob("*")) == before


def test_explain_tells_the_tree_its_reasons_and_the_rates(spark: SparkSession, tmp_path: Path) -> None:
    streams = Inputs(spark, tmp_path).streams()
    single = explain(multi_join(streams, on="k", budget="64MB"))
    (step,) = single.as_dict()["steps"]
    assert step["plan"]["plan"] == ["a", "b", "c"]
    assert step["budget_bytes"] == 64_000_000
    assert "MJoin on k" in str(single)
    streams["c"] = streams["c"].drop("k")
    tree = explain(multi_join(streams, on=[("a.k", "b.k"), ("b.vb", "c.vc")], plan=[["a", "b"], "c"]))
    lower, upper = json.loads(json.dumps(tree.as_dict()))["steps"]
    assert lower["plan"] is None
    assert upper["plan"]["shuffles"] == 2
    assert upper["plan"]["tree"]["children"][0]["attribute"] == "k"
    assert upper["plan"]["output_rate"] > 0
    assert "The plan was given." in str(tree)
    assert "predicted" in str(tree)


def test_keys_of_several_columns_names_and_types(spark: SparkSession, tmp_path: Path) -> None:
    left, right = Feed(tmp_path / "left"), Feed(tmp_path / "right")
    left.add(
        pa.table({"id": pa.array([1, 2, 3, None], pa.int32()), "é x": ["a", "b", None, "d"], "l": [[1], [2], [3], [4]]})
    )
    right.add(
        pa.table({"k": pa.array([1, 2, 2, 3], pa.int64()), "s": ["a", "b", "b", "c"], "r": [1.5, 2.5, 3.5, None]})
    )
    flow = multi_join(
        {
            "left": spark.readStream.schema("id int, `é x` string, l array<long>").parquet(str(left.directory)),
            "right": spark.readStream.schema("k long, s string, r double").parquet(str(right.directory)),
        },
        on={"left": ["id", "é x"], "right": ["k", "s"]},
        shards=3,
    )
    run(flow, tmp_path)
    expected = [
        {"id": 1, "é x": "a", "l": [1], "r": 1.5},
        {"id": 2, "é x": "b", "l": [2], "r": 2.5},
        {"id": 2, "é x": "b", "l": [2], "r": 3.5},
    ]
    assert_same_rows(joined(tmp_path), expected, "composite key")


# Now and then chunks in memory are merged, which is a larger part of the state where memory holds less of it.
@pytest.mark.parametrize(("budget", "share"), [("64MB", 20), ("400kB", 4)])
def test_a_small_micro_batch_writes_little_however_much_is_held(
    spark: SparkSession, tmp_path: Path, budget: str, share: int
) -> None:
    inputs = Inputs(spark, tmp_path, ("a", "b"))
    for name in ("a", "b"):
        inputs.feeds[name].add(arrivals(name, 0, 6_000, inputs.chance, keys=10_000_000))
    run(multi_join(inputs.streams(), on="k", budget=budget, shards=1), tmp_path)
    written = []
    for _ in range(2):
        inputs.add(30, a=20, b=20)
        query = run(multi_join(inputs.streams(), on="k", budget=budget, shards=1), tmp_path)
        assert query.progress is not None
        (operator,) = query.progress.operators
        assert (operator.details["flushed_rows"] > 6_000) == (budget == "400kB"), "most of it is on disk, or nothing"
        # A worker that starts anew has attached the state, and yet spills and stores only what is new.
        written.append((operator.written_bytes, operator.details["spilled_bytes"]))
        assert 0 < operator.written_bytes < operator.state_bytes / share
    assert written[1][1] - written[0][1] < operator.state_bytes / 20


def test_other_shards_or_another_window_are_refused_at_the_start(spark: SparkSession, tmp_path: Path) -> None:
    inputs = Inputs(spark, tmp_path, ("a", "b"))
    inputs.add(0, a=5, b=5)
    options: dict[str, Any] = {"on": "k", "time": inputs.times, "window": "5 seconds", "shards": 2}
    run(multi_join(inputs.streams(), **options), tmp_path)
    for changed, told in (({"shards": 3}, "shards=2"), ({"window": "6 seconds"}, "window"), ({"how": "left"}, "how")):
        with pytest.raises(StateError, match=told):
            run(multi_join(inputs.streams(), **{**options, **changed}), tmp_path)


@pytest.mark.parametrize("plan", ["single", "binary"])
def test_checkpoint_of_a_host_with_other_cores_is_taken_up(spark: SparkSession, tmp_path: Path, plan: Any) -> None:
    inputs = Inputs(spark, tmp_path)
    # What the default would have been on a host with one more core.
    shards = spark.sparkContext.defaultParallelism + 1
    for part, chosen in enumerate([shards, None, None]):
        inputs.add(part * 5, a=40, b=40, c=40)
        flow = multi_join(inputs.streams(), on="k", plan=plan, shards=chosen)
        query = run(flow, tmp_path)
        assert_same_rows(joined(tmp_path), inputs.expected(), f"part {part}")
    assert query.progress is not None
    commit = sorted((tmp_path / "checkpoint" / "dovetail" / "commits").glob("*.json"))[-1]
    assert {len(states) for states in json.loads(commit.read_text())["operators"].values()} == {shards}
    assert {step.shards for step in flow.steps} == {shards - 1}, "the flow itself is as it was described"
    with pytest.raises(StateError, match=f"was made with shards={shards} "):
        run(multi_join(inputs.streams(), on="k", plan=plan, shards=shards + 1), tmp_path)


def test_bad_requests_are_refused_before_anything_runs(spark: SparkSession, tmp_path: Path) -> None:
    inputs = Inputs(spark, tmp_path)
    streams = inputs.streams()
    a, b, c = streams.values()
    by_text = {"a": a, "b": b, "c": c.drop("k")}
    only_later = {"a": a, "b": b.drop("k"), "c": c}
    windowed = {"window": "2 seconds", "time": inputs.times}
    for wrong, told in [
        ({"inputs": {"a": a}}, "at least two"),
        ({"inputs": {"a": a, "b": spark.range(3)}}, "'b' is not a streaming DataFrame"),
        ({"inputs": {"a": a, "b": b.drop("k")}}, "'b' has no column 'k'"),
        ({"inputs": {"a": a, "b": b.withColumn("k", F.col("k").cast("string"))}}, "b.k is string"),
        ({"inputs": {"a": a, "b": b.withColumnRenamed("vb", "va")}}, "both have a column 'va'"),
        ({"inputs": {"a": a, "b": b.withColumn("vb", F.rand())}}, "rand"),
        ({"on": []}, "names no join column"),
        ({"on": [("a.k", "b.k")]}, "not connected"),
        ({"how": "full"}, "how='full' without a watermark: .* never be"),
        ({"how": {"b": "left", "c": "full"}}, "how='left' without a watermark"),
        ({"how": {"b": "left"}}, "does not say how 'c' is joined"),
        ({"how": {"b": "left", "d": "full"}}, "how= names 'd'; the inputs are a, b, c"),
        ({"how": {"b": "left", "c": "outer"}}, "'outer'} is none of inner, left"),
        ({"how": {"a": "left", "b": "left", "c": "inner"}}, "the first input is joined with nothing"),
        (
            {"how": {"b": "semi", "c": "inner"}, "on": [("a.k", "b.k"), ("b.vb", "c.vc")], "inputs": by_text},
            "c.vc with 'b', whose columns",
        ),
        ({"how": {"b": "semi", "c": "inner"}, "condition": "vb < vc"}, "compares 'c' with 'b', whose columns are gone"),
        (
            {"how": {"b": "inner", "c": "left"}, "on": [("a.k", "c.k"), ("b.vb", "c.vc")], "inputs": only_later}
            | windowed,
            "links 'b' with",
        ),
        ({"how": {"b": "left", "c": "left"}, "plan": "binary", "on": "k", **windowed, "keys": ["a"]}, "promises out"),
        ({"how": {"b": "left", "c": "inner"}, "plan": "single", **windowed}, "another order than that of the inputs"),
        ({"how": {"b": "left", "c": "inner"}, "condition": "ta < tb", "time": inputs.times}, "keeps rows of a, but no"),
        ({"how": "cross"}, "how='cross'"),
        ({"window": 10_000, "time": inputs.times}, "no shuffle keeps"),
        ({"window": "2 seconds"}, "needs the event-time column"),
        ({"window": "2 seconds", "time": {"a": "ta"}}, "no column of input 'b'"),
        ({"window": "2 seconds", "time": "ta"}, "'b' has no column 'ta'"),
        ({"window": "2 seconds", "time": {"a": "va", "b": "tb", "c": "tc"}}, "a.va is string"),
        ({"window": "soon", "time": inputs.times}, "window='soon'"),
        ({"lateness": "2 seconds"}, "lateness= needs a window"),
        ({"idle_after": "2 seconds"}, "idle_after= needs a window"),
        ({"idle_after": "soon", "window": "2 seconds", "time": inputs.times}, "idle_after='soon'"),
        ({"budget": "1kB"}, "1,000|1 kB|1000"),
        ({"shards": 0}, "shards=0"),
        ({"late": "side", "window": "2 seconds", "time": inputs.times}, "late_path=None do not go together"),
        ({"late_path": "late", "window": "2 seconds", "time": inputs.times}, "late='drop' and late_path='late'"),
        ({"late": "side", "late_path": "late"}, "needs a window"),
        ({"late": "keep", "window": "2 seconds", "time": inputs.times}, "late='keep' is none of"),
        ({"condition": "ta <", "time": inputs.times}, "it is incomplete"),
        ({"condition": "a.ta < z.tb"}, "no input 'z'"),
        ({"condition": "a.ta < b.missing"}, "input 'b' has no column 'missing'"),
        ({"condition": "k < ta"}, "a, b, c all have a column 'k'"),
        ({"condition": "a.ta < a.k"}, "both columns of 'a'"),
        ({"condition": "a.va < b.tb"}, "string and timestamp, which are not compared"),
        ({"condition": "a.va < b.tb + INTERVAL 1 HOUR"}, "Cast them to timestamp"),
        ({"condition": "a.ta < b.tb + INTERVAL 1 MONTH"}, "is not an interval of"),
        ({"condition": "ta + 3 < tb"}, "'3' stands where INTERVAL was expected"),
        ({"condition": "ta != tb + INTERVAL 1 HOUR"}, "an interval with !="),
        ({"condition": "ta < tb", "time": {"a": "ta", "b": "tb"}}, "no column of input 'c'"),
        ({"condition": "ta < tb", "time": inputs.times, "how": "left"}, "would wait for ever"),
        ({"condition": ["ta < tb", "tb < ta"], "time": inputs.times}, "No rows can satisfy|from .* to .* after"),
        ({"plan": "quick"}, "plan='quick' is none of"),
        ({"name": "no/name"}, "no/name"),
    ]:
        options: dict[str, Any] = {"inputs": streams, "on": "k", **wrong}
        with pytest.raises(DovetailError, match=told):
            multi_join(options.pop("inputs"), **options)
