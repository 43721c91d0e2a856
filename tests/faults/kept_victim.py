"""A driver whose flow keeps two relations, to be killed: started again and again over one input, until it ends.

``kept_victim.py ROOT`` gives the rows in ROOT/feed their surrogate keys and keeps a type 2 dimension of them, into
ROOT/out. It ends with `DONE` when all that is in the feed was taken, and with `FAILED` when a worker was killed.
"""

import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

ROWS_PER_FILE, KEYS = 40, 150
DONE, FAILED = 0, 3


def changes(number: int) -> pa.Table:
    """The content of a file of the feed: some keys are new, some old, and some rows say nothing new."""
    numbers = range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)
    return pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "source": [("web", "shop", "phone")[n % 3] for n in numbers],
            "id": pa.array([n * 7919 % (KEYS + n // 4) for n in numbers], pa.int64()),
            "city": [f"c{n * 31 % 4}" for n in numbers],
        }
    )


def flow_on(spark: Any, root: Path) -> Any:
    """The flow; its budgets are so small, or its folds so frequent, that changes are folded all the time."""
    import dovetail as dt

    schema = "n long, source string, id long, city string"
    source = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(root / "feed"))
    return (
        dt.stream(source, "kept")
        .surrogate_key("sk", root / "keys", on=["source", "id"], budget="2 kB", shards=2)
        .transform(lambda rows: rows.withColumn("ts", rows.n.cast("timestamp")))
        .upsert(root / "dim", on="sk", columns=["city"], order_by="n", fold_every="0 s", shards=2)
    )


def main(root: Path) -> int:
    """Run the flow until nothing is left to do."""
    from victim_session import victim_session

    import dovetail as dt

    spark = victim_session(root)
    sink = dt.sinks.parquet(root / "out")
    query = flow_on(spark, root).write(sink, checkpoint=root / "checkpoint", trigger="available-now", keep_commits=3)
    print("started", flush=True)
    while query.isActive:
        time.sleep(0.05)
    failure = query.exception()
    print("ended", failure, flush=True)
    if failure is not None:
        return FAILED
    query.awaitTermination()  # leaves no file behind that no commit needs
    return DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
