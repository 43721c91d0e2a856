"""A driver that loads a warehouse, to be killed: orders, enriched and given their keys, into PostgreSQL.

``load_victim.py ROOT PORT TABLE`` reads ROOT/feed, or the topic that ROOT/topic names; ROOT/password has the password.
It ends with `DONE` when it has taken all there is, and with `FAILED` when the flow failed.
"""

import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

ROWS_PER_FILE, CUSTOMERS = 40, 500
DONE, FAILED = 0, 3
CITY_OF = [{"customer": key, "city": f"c{key % 9}"} for key in range(0, CUSTOMERS, 2)]


def orders(number: int) -> pa.Table:
    """The content of a file of the feed: some order ids come from several sources."""
    numbers = range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)
    return pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "source": [("web", 'shop, "main"', "")[n % 3] for n in numbers],
            "order_id": pa.array([n // 2 for n in numbers], pa.int64()),
            "customer": pa.array([n * 7919 % CUSTOMERS if n % 11 else None for n in numbers], pa.int64()),
        }
    )


def flow_on(spark: Any, root: Path, name: str = "load") -> Any:
    """The flow."""
    import dovetail as dt

    try:
        dt.Relation.open(root / "customers")
    except dt.errors.RelationNotFound:  # not built yet, or killed while it was
        dt.Relation.build(pa.Table.from_pylist(CITY_OF), root / "customers", on="customer", shards=2)
    schema = "n long, source string, order_id long, customer long"
    if (root / "topic").exists():
        servers, topic = (root / "topic").read_text().split()
        records = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
        records = records.option("subscribe", topic).option("startingOffsets", "earliest")
        values = records.option("maxOffsetsPerTrigger", ROWS_PER_FILE).load().selectExpr("cast(value AS string) AS v")
        source = values.selectExpr(f"from_json(v, '{schema}') AS row").select("row.*")
    else:
        source = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(root / "feed"))
    return (
        dt.stream(source, name)
        .enrich(root / "customers", on="customer", how="left", budget="4MB")
        .surrogate_key("sk", root / "keys", on=["source", "order_id"], budget="2 kB", shards=2)
    )


def main(root: Path, port: int, table: str) -> int:
    """Run the flow until nothing is left to do."""
    import dovetail as dt

    sys.path.append(str(Path(__file__).parents[1] / "faults"))
    from victim_session import victim_session

    jars = (root / "jars").read_text() if (root / "jars").exists() else ""
    spark = victim_session(root, {"spark.jars": jars})
    password = (root / "password").read_text()
    login = {"host": "127.0.0.1", "port": port, "database": "postgres", "user": "etl", "password": password}
    sink = dt.sinks.postgres(table, **login)
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
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
