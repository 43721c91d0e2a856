"""A join of streams that gives far more than it is given: output is streamed, memory stays within the budget."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from dovetail.spark import sinks
from dovetail.spark.steps.multi_join import multi_join
from dovetail.testing.flows import Feed

BUDGET_BYTES = 600_000


def test_key_with_a_million_matches_comes_out_in_bounded_batches(spark: SparkSession, tmp_path: Path) -> None:
    streams = {}
    for name, rows in (("a", 1000), ("b", 1000), ("c", 1)):
        feed = Feed(tmp_path / name)
        feed.add(pa.table({"k": [7] * rows, f"v{name}": range(rows)}))
        streams[name] = spark.readStream.schema(f"k long, v{name} long").parquet(str(feed.directory))
    flow = multi_join(streams, on="k", budget=BUDGET_BYTES, shards=1)
    query = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="available-now")
    assert query.awaitTermination(600), "the flow did not end"
    pairs = pa.concat_tables(
        [pq.read_table(file, columns=["va", "vb"]) for file in (tmp_path / "out").glob("*.parquet")]
    )
    assert pairs.num_rows == 1_000_000
    assert pairs.group_by(["va", "vb"]).aggregate([]).num_rows == 1_000_000
    assert query.progress is not None
    assert sum(query.progress.operators[0].memory_bytes.values()) <= BUDGET_BYTES
