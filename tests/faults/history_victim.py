"""A driver whose flow keeps a history, to be killed: started again and again over one input, until it ends.

``history_victim.py ROOT`` keeps every version of the rows in ROOT/feed in ROOT/dim, and writes the versions that each
micro-batch opened or closed to ROOT/out. It ends with `DONE` when all that is in the feed was taken, and with `FAILED`
when a worker was killed.
"""

import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

ROWS_PER_FILE, KEYS, CITIES = 40, 150, 4
START = datetime(2026, 1, 1, tzinfo=UTC)
DONE, FAILED = 0, 3


def changes(number: int) -> pa.Table:
    """The content of a file of the feed: a row a second; some say nothing new."""
    numbers = range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)
    return pa.table(
        {
            "id": pa.array([n * 7919 % (KEYS + n // 4) for n in numbers], pa.int64()),
            "city": [f"c{n * n * 31 % CITIES}" for n in numbers],
            "ts": pa.array([START + timedelta(seconds=n) for n in numbers], pa.timestamp("us", "UTC")),
        }
    )


def flow_on(spark: Any, root: Path) -> Any:
    """The flow; its budget is so small that changes are folded all the time."""
    import dovetail as dt

    schema = "id long, city string, ts timestamp"
    source = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(root / "feed"))
    flow = dt.stream(source, "history")
    return flow.history(root / "dim", on="id", time="ts", columns=["city"], budget="2 kB", fold_every="0 s", shards=2)


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
