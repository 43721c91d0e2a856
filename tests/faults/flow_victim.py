"""A driver with a flow in it, to be killed: started again and again over one input, until it comes to its end.

``flow_victim.py ROOT`` joins the files in ROOT/feed with four relations, one after the other, into ROOT/out. It ends
with `DONE` when all that is in the feed has come out, and with `FAILED` when the flow failed: a worker was killed.
"""

import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

KEYS, CITIES, ROWS_PER_FILE = 20_000, 7, 60
DONE, FAILED = 0, 3

CITY_OF = [{"k": key, "city": f"c{key % CITIES}"} for key in range(0, KEYS, 2)]
MAYOR_OF = [{"city": f"c{number}", "mayor": f"m{number}"} for number in range(CITIES - 2)]
AREA_OF = [{"k": key, "area": f"a{key % 5}"} for key in range(0, KEYS, 3)]
PARTY_OF = [{"mayor": f"m{number}", "party": f"p{number % 2}"} for number in range(3)]


def orders(number: int) -> pa.Table:
    """The content of a file of the feed."""
    first = number * ROWS_PER_FILE
    numbers = list(range(first, first + ROWS_PER_FILE))
    return pa.table({"n": numbers, "k": pa.array([n * 7919 % KEYS if n % 13 else None for n in numbers], pa.int64())})


def relations(root: Path) -> list[Any]:
    """Open the relations, or build them first."""
    from dovetail import Relation

    built = []
    tables = [("areas", AREA_OF, "k"), ("cities", CITY_OF, "k"), ("mayors", MAYOR_OF, "city")]
    for name, rows, key in [*tables, ("parties", PARTY_OF, "mayor")]:
        if not (root / name).exists():
            Relation.build(pa.Table.from_pylist(rows), root / name, on=key, shards=2)
        built.append(Relation.open(root / name))
    return built


def flow_on(spark: Any, root: Path) -> Any:
    """The flow: in the second join tuples wait for many micro-batches, so that each has state to save. The first and
    the last let nothing wait: they work in place, before the first shuffle and behind the last one."""
    import dovetail as dt

    areas, cities, mayors, parties = relations(root)
    source = spark.readStream.schema("n long, k long").option("maxFilesPerTrigger", 1).parquet(str(root / "feed"))
    options = {"how": "left", "budget": "400kB", "max_delay": "1 hour"}
    return (
        dt.stream(source, "killed")
        .enrich(areas, on="k", how="left")
        .enrich(cities, on="k", strategy="mesh", **options)
        .enrich(mayors, on="city", strategy="balanced", **options)
        .enrich(parties, on="mayor", how="left")
    )


def main(root: Path) -> int:
    """Run the flow until nothing is left to do."""
    from victim_session import victim_session

    import dovetail as dt

    spark = victim_session(root)
    offered = ROWS_PER_FILE * len(list((root / "feed").glob("[0-9]*.parquet")))
    sink = dt.sinks.parquet(root / "out")
    query = flow_on(spark, root).write(sink, checkpoint=root / "checkpoint", keep_commits=3)
    print("started", flush=True)
    while query.isActive:
        progress = query.progress
        if progress is not None:
            taken = progress.operators[0].totals.stream_tuples_in
            if taken == offered:
                query.stop(drain=True)
                if query.exception() is not None or query.progress.pending:
                    break
                print("done", flush=True)
                return DONE
        time.sleep(0.02)
    print("failed", query.exception(), flush=True)
    return FAILED


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
