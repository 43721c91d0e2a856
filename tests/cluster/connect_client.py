"""A client of Spark Connect: ``connect_client.py ROOT`` runs what `enrich` offers there, results as JSON on stdout."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import dovetail as dt

KEYS = 300


def cities() -> pa.Table:
    """The relation."""
    return pa.table({"k": list(range(0, KEYS, 2)), "city": [f"c{key % 7}" for key in range(0, KEYS, 2)]})


def main(root: Path) -> None:
    spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    relation = dt.Relation.build(cities(), root / "cities", on="k", shards=2)
    orders = spark.range(KEYS).selectExpr("id % 50 * 6 + id % 2 as k", "id as n")
    results: dict[str, Any] = {"session": type(spark).__module__}
    for how in ("inner", "left", "leftsemi", "leftanti"):
        results[how] = rows_of(dt.enrich(orders, relation, on="k", how=how))
    built = dt.Relation.build(spark.createDataFrame(cities()), root / "built", on="k", shards=2)
    results["built by Spark"] = rows_of(dt.enrich(orders, built, on="k"))
    results["a DataFrame as the relation"] = rows_of(dt.enrich(orders, spark.createDataFrame(cities()), on="k"))
    results["explain"] = str(dt.explain(dt.enrich(orders, relation, on="k")))
    orders.write.parquet(str(root / "orders"))
    stream = spark.readStream.schema(orders.schema).parquet(str(root / "orders"))
    results["streaming"] = streamed(dt.enrich(stream, relation, on="k", how="left"), spark, root)
    try:
        dt.stream(stream, name="not_here")
    except dt.errors.PlanError as error:
        results["flow"] = str(error)
    print("RESULTS " + json.dumps(results))
    spark.stop()


def rows_of(df: DataFrame) -> list[list[Any]]:
    return sorted((list(row) for row in df.collect()), key=str)


def streamed(df: DataFrame, spark: SparkSession, root: Path) -> list[list[Any]]:
    writer = df.writeStream.format("parquet").option("checkpointLocation", str(root / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(root / "enriched"))
    query.awaitTermination()
    return rows_of(spark.read.parquet(str(root / "enriched")).select(df.columns))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
