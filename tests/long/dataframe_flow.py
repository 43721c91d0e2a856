"""A driver whose flow joins with a DataFrame, to be started again: ``dataframe_flow.py ROOT CORES KIND END``.

KIND is where the table's rows are from: ``files``, or ``memory``. END is ``stop``, once all files of the feed are taken
and while rows wait, or ``run`` to the end.
"""

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def table_of(spark: Any, root: Path, kind: str) -> Any:
    """The table, as a DataFrame."""
    path = str(root / "table")
    return spark.read.parquet(path) if kind == "files" else spark.createDataFrame(pq.read_table(path).to_pylist())


def main(root: Path, cores: str, kind: str, end: str) -> None:
    """Start the flow, and end it."""
    import dovetail as dt
    from dovetail.testing.flows import Feed, wait_until
    from dovetail.testing.sessions import SHORT_LIVED, local_session

    spark = local_session(root, SHORT_LIVED, master=f"local[{cores}]")
    rows = spark.readStream.schema("n long, k long").parquet(str(root / "feed"))
    flow = dt.stream(rows, "orders").enrich(
        table_of(spark, root, kind), on="k", how="left", strategy="mesh", budget="900kB", max_delay="1 hour"
    )
    trigger = "available-now" if end == "run" else None
    query = flow.write(dt.sinks.parquet(root / "out"), checkpoint=root / "checkpoint", trigger=trigger)
    if end == "run":
        query.awaitTermination()
        return
    count = len(Feed(root / "feed").rows())
    wait_until(lambda: query.progress and query.progress.operators[0].totals.stream_tuples_in == count, "all rows")
    query.stop()
    assert query.progress is not None
    print("waiting", query.progress.pending)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
