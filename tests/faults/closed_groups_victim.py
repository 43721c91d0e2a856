"""A driver with a join and a count of its groups in it, to be killed: started again and again over two feeds.

``closed_groups_victim.py ROOT`` joins the files in ROOT/news and ROOT/access, and writes the number of access records
of each news item to ROOT/out when the item is over; rows that break a promise go to ROOT/aside. It ends with `DONE`
when all that is in the feeds has been taken in, and with `FAILED` when the flow failed: a worker was killed.
"""

import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from dovetail_lab.workloads.news import NewsWorkload

ITEMS_PER_FILE, PER_ITEM = 20, 4
SHARDS = 2
DONE, FAILED = 0, 3


def rows_of(number: int) -> tuple[pa.Table, pa.Table]:
    """File `number` of both feeds. Its last access record is of an item that is over: a broken promise."""
    work = NewsWorkload(1_000_000, PER_ITEM, seed=31)
    start, stop = number * ITEMS_PER_FILE, (number + 1) * ITEMS_PER_FILE
    records, closed = work.accesses(start, stop)
    columns = {"sno": records["sno"], "n": pa.array(range(records.num_rows)), "over": pa.array([False] * len(records))}
    ends = {"sno": closed, "n": pa.nulls(len(closed), pa.int64()), "over": [True] * len(closed)}
    parts = [pa.table(columns), pa.table(ends)]
    if number:
        parts.append(pa.table({"sno": [start - 2 * work.latest], "n": [number], "over": [False]}))
    return pa.Table.from_batches([work.news(start, stop)]), pa.concat_tables(parts)


def flow_on(spark: Any, root: Path) -> Any:
    """The flow."""
    import dovetail as dt

    columns = {"news": "sno long, title string, keyword string", "access": "sno long, n long, over boolean"}
    streams = {
        name: spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(root / name))
        for name, schema in columns.items()
    }
    joined = dt.multi_join(
        streams,
        on="sno",
        keys=["news"],
        punctuations={"access": dt.Punctuation.where("over", data=False)},
        on_broken_promise="quarantine",
        quarantine_path=root / "aside",
        notices="notice",
        budget="16MB",
        shards=SHARDS,
        name="killed",
    )
    return joined.aggregate_closed({"accesses": "count", "total": ("sum", "n")})


def main(root: Path) -> int:
    """Run the flow until nothing is left to do."""
    from victim_session import victim_session

    import dovetail as dt

    spark = victim_session(root)
    files = [sorted((root / name).glob("[0-9]*.parquet")) for name in ("news", "access")]
    given = sum(table.num_rows for number in range(len(files[0])) for table in rows_of(number))
    query = flow_on(spark, root).write(dt.sinks.parquet(root / "out"), checkpoint=root / "checkpoint", keep_commits=3)
    print("started", flush=True)
    while query.isActive:
        progress = query.progress
        if progress is not None:
            join = progress.operators[0]
            if join.totals.stream_tuples_in + join.details["punctuations_in"] == given:
                query.stop(drain=True)
                if query.exception() is not None:
                    break
                print("done", query.progress.operators[0].details, flush=True)
                return DONE
        time.sleep(0.02)
    print("failed", query.exception(), flush=True)
    return FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
