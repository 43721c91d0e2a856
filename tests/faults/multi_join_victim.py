"""A driver with a multi-way join in it, to be killed: started again and again over three feeds.

``multi_join_victim.py ROOT`` joins the files in ROOT/a, ROOT/b and ROOT/c into ROOT/out, with a budget far below what
the join has to hold, so that most of it lies on disk. It ends with `DONE` when all that is in the feeds has come out,
and with `FAILED` when the flow failed: a worker was killed.
"""

import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

NAMES = ("a", "b", "c")
KEYS, ROWS_PER_FILE, WINDOW_FILES = 600, 60, 30
BUDGET_BYTES, SHARDS = 400_000, 2
START = datetime(2026, 1, 1, tzinfo=UTC)
DONE, FAILED = 0, 3


def rows_of(name: str, number: int) -> pa.Table:
    """The content of a file of a feed: a second of an input, with some keys that are NULL."""
    place = NAMES.index(name)
    numbers = range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)
    keys = [(n * 7919 + place * 31 + n * n * (place + 1)) % KEYS if n % 17 else None for n in numbers]
    moments = [START + timedelta(seconds=number, milliseconds=n % ROWS_PER_FILE * 16) for n in numbers]
    return pa.table(
        {
            "k": pa.array(keys, pa.int64()),
            f"t{name}": pa.array(moments, pa.timestamp("us", "UTC")),
            f"n{name}": pa.array(numbers, pa.int64()),
            f"v{name}": [f"{name}{n}" + "x" * 300 for n in numbers],
        }
    )


def flow_on(spark: Any, root: Path) -> Any:
    """The flow: rows join that are at most `WINDOW_FILES` files apart."""
    import dovetail as dt

    streams = {
        name: spark.readStream.schema(f"k long, t{name} timestamp, n{name} long, v{name} string")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(root / name))
        for name in NAMES
    }
    return dt.multi_join(
        streams,
        on="k",
        window=f"{WINDOW_FILES} seconds",
        time={name: f"t{name}" for name in NAMES},
        lateness="5 seconds",
        budget=BUDGET_BYTES,
        shards=SHARDS,
        name="killed",
    )


def main(root: Path) -> int:
    """Run the flow until nothing is left to do."""
    from victim_session import victim_session

    import dovetail as dt

    spark = victim_session(root)
    offered = sum(ROWS_PER_FILE * len(list((root / name).glob("[0-9]*.parquet"))) for name in NAMES)
    query = flow_on(spark, root).write(dt.sinks.parquet(root / "out"), checkpoint=root / "checkpoint", keep_commits=3)
    print("started", flush=True)
    while query.isActive:
        progress = query.progress
        if progress is not None and progress.operators[0].totals.stream_tuples_in == offered:
            query.stop(drain=True)
            if query.exception() is not None or query.progress.pending:
                break
            print("done", query.progress.operators[0].details, flush=True)
            return DONE
        time.sleep(0.02)
    print("failed", query.exception(), flush=True)
    return FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
