"""Pipeline files on Spark: what a step's keys mean to the flow behind it."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail import Relation
from dovetail.pipeline.checks import check_pipeline
from dovetail.pipeline.loading import parse_pipeline
from dovetail.pipeline.problems import PipelineError
from dovetail.pipeline.runner import PlannedPipeline, plan_pipeline
from dovetail.testing.flows import Feed, published_rows
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows

FILE = """\
name: bands
checkpoint: checkpoint
trigger: available-now
sources:
  readings: {format: parquet, path: feed, schema: "n bigint, k bigint"}
relations:
  bands: {path: bands}
steps:
  - enrich: ENRICH
sink: {format: parquet, path: out}
"""
BANDS = [{"band": f"b{number}", "low": 100 * number, "high": 100 * number + 30} for number in range(9)]


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    feed = Feed(tmp_path / "feed")
    for first in (0, 200):
        numbers = range(first, first + 200)
        feed.add(pa.table({"n": list(numbers), "k": [number * 7 % 50 for number in numbers]}))
    return feed


def planned(spark: SparkSession, root: Path, **enrich: Any) -> PlannedPipeline:
    (root / "p.yaml").write_text(FILE.replace("ENRICH", json.dumps({"relation": "bands", **enrich})))
    return plan_pipeline(spark, check_pipeline(*parse_pipeline(root / "p.yaml")))


def test_join_without_equality_needs_no_strategy(spark: SparkSession, feed: Feed, tmp_path: Path) -> None:
    Relation.build(pa.Table.from_pylist(BANDS), tmp_path / "bands", on="band", shards=2)
    query = planned(spark, tmp_path, on=[], condition="low <= n AND n < high").start()
    assert query.awaitTermination(120)
    oracle = [{**row, **band} for row in feed.rows() for band in BANDS if band["low"] <= row["n"] < band["high"]]
    assert_same_rows(published_rows(tmp_path / "out"), oracle, "bands")
    assert len(oracle) == 120


def test_options_of_a_step_reach_the_operator(spark: SparkSession, feed: Feed, tmp_path: Path) -> None:
    rows = [{"k": key, "city": f"c{key}"} for key in range(0, 50, 2)]
    Relation.build(pa.Table.from_pylist(rows), tmp_path / "bands", on="k", shards=2)
    options = {"strategy": "mesh", "max_delay": "1 second", "shed": "oldest", "shed_to": {"path": "shed"}}
    asked = planned(spark, tmp_path, objective="memory", rate=2_000, how="left", **options)
    observed = planned(spark, tmp_path, objective="memory", how="left", **options)
    (step,) = dt.explain(asked.flow).as_dict()["steps"]
    assert (step["sheds"], step["plan"]["rate"], step["plan"]["plan"]["required_rate"]) == (
        "oldest_first",
        2_000,
        1_000,
    )
    (step,) = dt.explain(observed.flow).as_dict()["steps"]
    assert (step["memory for"], step["plan"]["rate"]) == ("the rate that is observed", None)
    query = observed.start()
    assert query.awaitTermination(120)
    assert_same_rows(published_rows(tmp_path / "out"), join_oracle(feed.rows(), rows, on=["k"], how="left"), "left")
    assert published_rows(tmp_path / "shed") == [], "there was room for all"
    lookup = planned(spark, tmp_path, strategy="lookup")
    assert dt.explain(lookup.flow).as_dict()["steps"][0]["plan"]["route"] == "lookup"


STREAMS = """\
name: streams
checkpoint: checkpoint
trigger: available-now
sources:
  orders: {format: parquet, path: orders, schema: "id bigint, account bigint, at timestamp"}
  payments: {format: parquet, path: payments, schema: "order_id bigint, paid timestamp, done boolean"}
  accounts: {format: parquet, path: accounts, schema: "number bigint, seen timestamp"}
steps:
  - multi_join: JOIN
sink: {format: parquet, path: out}
"""
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def of_streams(root: Path, **join: Any) -> Any:
    lines = STREAMS.replace("JOIN", json.dumps(join)).splitlines(keepends=True)
    unused = [f"  {name}:" for name in ("orders", "payments", "accounts") if name not in join["inputs"]]
    (root / "p.yaml").write_text("".join(line for line in lines if not line.startswith(tuple(unused))))
    return check_pipeline(*parse_pipeline(root / "p.yaml"))


def test_join_of_streams_on_different_columns_has_every_option_of_the_call(spark: SparkSession, tmp_path: Path) -> None:
    rows: dict[str, list[dict[str, Any]]] = {
        "orders": [{"id": n, "account": n % 7, "at": BEGIN + timedelta(seconds=n)} for n in range(60)],
        "payments": [{"order_id": n, "paid": BEGIN + timedelta(seconds=n + n % 4)} for n in range(0, 60, 2)],
        "accounts": [{"number": n % 9, "seen": BEGIN + timedelta(seconds=3 * n)} for n in range(20)],
    }
    for name, given in rows.items():
        Feed(tmp_path / name).add(pa.Table.from_pylist(given))
    checked = of_streams(
        tmp_path,
        inputs=["orders", "payments", "accounts"],
        on=[["orders.id", "payments.order_id"], ["orders.account", "accounts.number"]],
        window="20 seconds",
        condition=["payments.paid < orders.at + INTERVAL 3 SECONDS"],
        time={"orders": "at", "payments": "paid", "accounts": "seen"},
        lateness="1 hour",
        idle_after="5 minutes",
        late={"path": "late"},
        plan=[["orders", "payments"], "accounts"],
        statistics={"rates": {"orders": 100}, "distinct": {"id": 60}, "horizon": "20 seconds"},
        spill_directory="spill",
    )
    planned = plan_pipeline(spark, checked)
    *_, last = dt.explain(planned.flow).as_dict()["steps"]
    assert (last["idle_after_ms"], last["lateness_ms"]) == (300_000, 3_600_000)
    assert planned.start().awaitTermination(120)
    expected = multiway_oracle(
        rows,
        [(("orders", "id"), ("payments", "order_id")), (("orders", "account"), ("accounts", "number"))],
        "inner",
        times={"orders": "at", "payments": "paid", "accounts": "seen"},
        width=timedelta(seconds=20),
        conditions=[
            ("orders", "payments", lambda order, payment: payment["paid"] - order["at"] < timedelta(seconds=3))
        ],
    )
    found = published_rows(tmp_path / "out")
    assert len(found) == len(expected) > 20
    assert Counter((row["id"], row["account"]) for row in found) == Counter(
        (row["id"], row["account"]) for row in expected
    )


def test_promises_of_streams_reach_the_join_and_unknown_inputs_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    Feed(tmp_path / "orders").add(pa.table({"id": [1]}))
    Feed(tmp_path / "payments").add(pa.table({"order_id": [1]}))
    Feed(tmp_path / "accounts").add(pa.table({"number": [1]}))
    join: dict[str, Any] = {"inputs": ["orders", "payments"], "on": {"orders": "id", "payments": "order_id"}}
    promises = {
        "keys": ["orders"],
        "punctuations": {"payments": {"where": "done", "data": False}},
        "on_broken_promise": "quarantine",
        "quarantine": {"path": "aside"},
        "notices": "told",
    }
    planned = plan_pipeline(spark, of_streams(tmp_path, **join, **promises))
    (step,) = dt.explain(planned.flow).as_dict()["steps"]
    assert (step["keys"], step["punctuations"], step["broken"]) == (
        ["orders"],
        ["payments: done, which are not data"],
        "quarantine",
    )
    with pytest.raises(PipelineError, match="no input 'order'"):
        of_streams(tmp_path, **join, condition="order.at < payments.paid")
    with pytest.raises(PipelineError, match="'order' is not one of the inputs"):
        of_streams(tmp_path, **join, keys=["order"])
    cascade = {"window": "1 hour", "time": {"orders": "at", "payments": "paid"}, "how": {"payments": "full"}}
    *_, step = dt.explain(plan_pipeline(spark, of_streams(tmp_path, **join, **cascade)).flow).as_dict()["steps"]
    assert step["how"] == "full"
    with pytest.raises(PipelineError, match="how= names 'payment'"):
        of_streams(tmp_path, **join, how={"payment": "left"})
    with pytest.raises(PipelineError, match="'id' names no input"):
        of_streams(tmp_path, inputs=join["inputs"], on=[["id", "payments.order_id"]])
