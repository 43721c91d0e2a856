"""The README's examples are code that runs."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from dovetail.testing.flows import Feed, published_rows, wait_until

README = Path(__file__).parents[2] / "README.md"
MOMENTS = {"orders": "ordered", "payments": "paid", "shipments": "shipped"}


def streams(spark: SparkSession, directory: Path) -> dict[str, DataFrame]:
    feed = Feed(directory)
    feed.add(pa.table({"order_id": [1, 2, 3], "customer_id": [7, 700, 5000]}))
    files = spark.readStream.schema("order_id long, customer_id long").parquet(str(feed.directory))
    columns = {"orders": ["order_id", "customer_id"], "payments": ["order_id"], "shipments": ["order_id"]}
    return {
        name: files.selectExpr(*columns[name], f"timestamp_seconds(order_id) {moment}")
        for name, moment in MOMENTS.items()
    }


def test_examples_run_and_give_what_they_promise(spark: SparkSession, tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    for place in ("data", "warehouse", "checkpoints"):
        text = text.replace(f'"/{place}/', f'"{tmp_path}/{place}/')
    joining, flowing, operating = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {
        "df": spark.range(1000).selectExpr("id customer_id", "'basic' segment"),
        "changes": spark.range(500).selectExpr("id customer_id", "'premium' segment"),
        "orders": spark.createDataFrame([(7, 1), (700, 2), (5000, 3)], "customer_id long, amount int"),
    }
    exec(joining, names)
    assert sorted(tuple(row) for row in names["enriched"].collect()) == [(7, 1, "premium"), (700, 2, "basic")]

    names.update(streams(spark, tmp_path / "feed"))
    exec(flowing, names)
    query = names["query"]
    wait_until(lambda: not query.isActive or len(published_rows(tmp_path / "warehouse" / "orders")) == 2, "two rows")
    query.stop(drain=True)
    rows = {row["order_id"]: row["segment"] for row in published_rows(tmp_path / "warehouse" / "orders")}
    assert rows == {1: "premium", 2: "basic"}
    flow = names["flow"].write(names["dt"].sinks.memory(), checkpoint=tmp_path / "multi", trigger="available-now")
    assert flow.awaitTermination(120)
    assert flow.progress.operators[0].totals.output_rows == 3

    names["customers"] = pa.table({"customer_id": [7, 8], "segment": ["basic", "basic"]})
    names["orders"] = pa.record_batch({"customer_id": [7, 7, 5000], "amount": [1, 2, 3]})
    exec(operating, names)
    joined = sorted((row for batch in names["joined"] for row in batch.to_pylist()), key=lambda row: row["amount"])
    assert joined == [
        {"customer_id": 7, "amount": 1, "segment": "basic"},
        {"customer_id": 7, "amount": 2, "segment": "basic"},
        {"customer_id": 5000, "amount": 3, "segment": None},
    ]
