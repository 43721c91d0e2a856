"""Plans of multi-way joins on Spark, before any data moves: what their state is about has stayed the same, promises act
in every join of a plan or the plan is refused, and a tree in one process has the same joins."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dovetail.core.errors import PlanError
from dovetail.joins.multiway import MJoinTree, TimeWindow, mjoin_spec
from dovetail.joins.promises import Punctuation
from dovetail.spark.flow.step import BatchClock
from dovetail.spark.steps.multi_join import multi_join
from dovetail.spark.steps.multi_join_plan import arrow_schema
from dovetail.spark.steps.promises import MetadataJoinStep

# As written by the version before trees had one builder: a checkpoint of that version must still be taken up.
STORED = Path(__file__).with_name("multi_join_fingerprints.json")
COLUMNS = {
    "a": "x long, ta timestamp, va string",
    "b": "x int, y string, tb timestamp, vb decimal(10,2)",
    "c": "z string, w long, tc timestamp, vc string",
    "d": "x long, td timestamp, vd string",
}
CHAIN = {"abc": [("a.x", "b.x"), ("b.y", "c.z")], "abcd": [("a.x", "b.x"), ("b.y", "c.z"), ("c.w", "d.x")]}
TIME = {"window": "3 seconds", "lateness": "1 minute"}
STAR = {name: f"k long, j string, t{name} timestamp, v{name} string" for name in "abcd"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("abc", {"on": CHAIN["abc"]}),
    "chain with a window": ("abc", {"on": CHAIN["abc"], **TIME}),
    "nested chain": ("abcd", {"on": CHAIN["abcd"], "plan": [["a", "b"], ["c", "d"]], **TIME}),
    "star": ("abcd", {"on": ["k", "j"], **TIME}),
    "binary star": ("abcd", {"on": ["k", "j"], "plan": "binary", **TIME}),
    "nested star": ("abcd", {"on": ["k", "j"], "plan": [["a", "c", "b"], "d"]}),
    "promises": ("abcd", {"on": ["k", "j"], "keys": ["a"], "punctuations": {"b": "vb = 'last'"}, "notices": "n"}),
}


@pytest.fixture
def streams(spark: SparkSession, tmp_path: Path) -> Any:
    def of(columns: dict[str, str]) -> dict[str, DataFrame]:
        return {n: spark.readStream.schema(c).parquet(str(tmp_path)) for n, c in columns.items()}

    return of


def flow_of(streams: Any, case: str) -> Any:
    names, options = CASES[case]
    columns = STAR if isinstance(options["on"][0], str) else COLUMNS
    if "window" in options:
        options = {**options, "time": {name: f"t{name}" for name in names}}
    return multi_join(streams({name: columns[name] for name in names}), budget="4MB", shards=2, **options)


@pytest.mark.parametrize("case", CASES)
def test_what_the_state_of_a_plan_is_about_has_not_changed(streams: Any, case: str) -> None:
    found = [
        {"fingerprint": step.fingerprint(), "operator": step.spec.fingerprint(), "slots": list(step.layout.places)}
        for step in flow_of(streams, case).steps
    ]
    stored = json.loads(STORED.read_text())
    assert json.loads(json.dumps(found)) == stored[case]


# ---------------------------------------------------------------- promises with every plan

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("abcd", {"on": "k", "plan": "single"}),
    "binary": ("abcd", {"on": "k", "plan": "binary"}),
    "nested": ("abcd", {"on": {"a": "k", "b": "id", "c": "k", "d": "k"}, "plan": [["a", "b"], ["c", "d"]]}),
    "seven": ("abcdefg", {"on": "k"}),
    "nine": ("abcdefghi", {"on": "k"}),
    "several attributes": ("abc", {"on": [("a.k", "b.k"), ("b.vb", "c.vc")]}),
}
KINDS = [
    "condition", "no data", "stream", "part of a stream", "function", "keys", "clustered", "ordered", "quarantine path",
    "quarantine among results", "notices", "groups",
]  # fmt: skip
JOINS = {"single": 1, "binary": 3, "nested": 3, "seven": 1, "nine": 1}


def promised(kind: str, plan: str, ends: DataFrame, tmp_path: Path) -> dict[str, Any]:
    """Options of `multi_join` that promise something of input b."""
    condition = {"punctuations": {"b": "vb = 'last'"}}
    return {
        "condition": condition,
        "no data": {"punctuations": {"b": Punctuation.where("vb = 'last'", data=False)}},
        "stream": {"punctuations": {"b": ends.withColumnRenamed("k", "id") if plan == "nested" else ends}},
        "part of a stream": {"punctuations": {"b": ends.drop("k").withColumn("vb", F.lit("x"))}},
        "function": {"punctuations": {"b": lambda clock: [Punctuation({"id" if plan == "nested" else "k": 1})]}},
        "keys": {"keys": ["a", "b"]},
        "clustered": {"clustered": ["a", "c"]},
        "ordered": {"ordered": {"b": "ascending"}},
        "quarantine path": {**condition, "on_broken_promise": "quarantine", "quarantine_path": tmp_path / "aside"},
        "quarantine among results": {**condition, "on_broken_promise": "quarantine", "notices": "notice"},
        "notices": {**condition, "notices": "notice"},
        "groups": {**condition, "notices": "notice"},
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_promise_acts_in_every_join_of_a_plan_or_the_plan_is_refused(
    streams: Any, tmp_path: Path, plan: str, kind: str
) -> None:
    names, options = PLANS[plan]
    columns = {name: f"k long, t{name} timestamp, v{name} string" for name in names}
    if plan == "nested":
        columns["b"] = columns["b"].replace("k long", "id long")
    if plan == "several attributes":
        columns["c"] = columns["c"].replace("k long", "kc long")
    ends = streams({"ends": "k long, tb timestamp"})["ends"]
    options = {**options, **promised(kind, plan, ends, tmp_path), "window": "1 hour"}
    options |= {"time": {name: f"t{name}" for name in names}, "shards": 2}
    refusal = "one join attribute that all inputs share" if plan == "several attributes" else None
    if kind == "quarantine among results" and JOINS.get(plan, 1) > 1:
        refusal = "a tree of joins cannot do"
    if refusal is not None:
        with pytest.raises(PlanError, match=refusal):
            multi_join(streams(columns), **options)
        return
    flow = multi_join(streams(columns), **options)
    shown = ["k", *(f"{letter}{name}" for name in names for letter in "tv")]
    assert flow.steps[-1].output.names == shown + (["notice"] if "notices" in options else [])
    assert len(flow.steps) == JOINS[plan]
    assert all(isinstance(step, MetadataJoinStep) for step in flow.steps)
    facts = [step.explanation().facts for step in flow.steps]
    if kind == "keys":
        found = {name for of in facts for name in of["keys"] or [] if not name.startswith("~")}
        assert found == {"a", "b"}
    if kind == "function":
        given = [step.decide(None, BatchClock(1, None, False))["punctuations"] for step in flow.steps]
        inside = "k" if JOINS[plan] == 1 else "~key k 0"
        assert [list(of["b"][0]) for of in given if of] == [[inside]]
    if kind == "groups":
        assert flow.aggregate_closed({"n": "count"}).steps[-1].output.names == ["k", "n"]


@pytest.mark.parametrize("window", [{}, {"window": "2 seconds"}])
@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("count", [2, 7, 8, 12])
def test_streams_of_one_key_are_one_step(streams: Any, count: int, how: str, window: dict[str, str]) -> None:
    names = [f"i{n}" for n in range(count)]
    time = {"time": {name: f"t{name}" for name in names}} if window else {}
    columns = {name: f"k long, t{name} timestamp, v{name} string" for name in names}
    assert len(multi_join(streams(columns), on="k", how=how, **window, **time).steps) == 1


def test_outer_join_of_a_tree_says_which_plan_works(streams: Any) -> None:
    columns = {name: f"k long, v{name} string" for name in "abc"}
    with pytest.raises(PlanError, match=r'needs one MJoin of all inputs, but this plan has 2 joins.*plan="single"'):
        multi_join(streams(columns), on="k", how="left", plan="binary")


@pytest.mark.parametrize("case", [case for case, (_, options) in CASES.items() if "keys" not in options])
def test_tree_in_one_process_and_on_spark_have_the_same_joins(streams: Any, case: str) -> None:
    flow = flow_of(streams, case)
    (*_, last) = flow.steps
    plan = last._plan
    names, options = CASES[case]
    columns = STAR if isinstance(options["on"][0], str) else COLUMNS
    frames = streams({name: columns[name] for name in names})
    if "b" in frames and columns is COLUMNS:
        frames["b"] = frames["b"].withColumn("x", F.col("x").cast("long"))
    window = None
    if "window" in options:
        times = {name: f"t{name}" for name in names}
        window = TimeWindow(timedelta(seconds=3), times, timedelta(minutes=1))
    schemas = {name: arrow_schema(df.schema) for name, df in frames.items()}
    spec = mjoin_spec(schemas, options["on"], window=window, budget="4MB")
    tree = MJoinTree(spec, plan)
    assert len(tree.joins) == len(flow.steps)
    for join, step in zip(tree.joins, flow.steps, strict=True):
        assert join.spec.fingerprint() == step.spec.fingerprint()
        assert join.spec.budget == step.spec.budget
        assert join.spec.window == step.spec.window
        if window is not None:
            assert (join.spec.window.lateness, join.spec.window.late) == (60_000_000, "drop")


def test_stream_of_punctuations_of_any_input_joined_on_another_attribute_is_refused(streams: Any) -> None:
    columns = {"a": "x long, ta timestamp", "b": "x long, y long, tb timestamp", "c": "y long, tc timestamp"}
    ends = streams({"ends": "y long, tc timestamp"})["ends"]
    options: dict[str, Any] = {"window": "1 hour", "time": {name: f"t{name}" for name in "abc"}}
    with pytest.raises(PlanError, match="one join attribute that all inputs share"):
        multi_join(
            streams(columns), on=[("a.x", "b.x"), ("b.y", "c.y")], punctuations={"c": ends}, plan="binary", **options
        )
