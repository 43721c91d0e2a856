"""Spark's own join of the demo's stream: what a user would write, in a process of its own."""

import sys
from pathlib import Path

from dovetail.cli.session import spark_session

ORDERS = "order_id bigint, customer_id bigint, amount double, landed_at timestamp"


def main(root: Path, cores: int) -> None:
    """Join the orders with the customers as fast as Spark can, until the process is ended."""
    # As many partitions as cores; by default there would be 200, which is slower.
    settings = {"spark.sql.shuffle.partitions": str(cores), "spark.driver.memory": "2g"}
    with spark_session(f"local[{cores}]", settings) as spark:
        customers = spark.read.parquet(str(root / "customers.parquet"))
        orders = spark.readStream.schema(ORDERS).parquet(str(root / "landing"))
        joined = orders.join(customers, on="customer_id", how="left")
        writer = joined.writeStream.format("parquet").option("path", str(root / "spark-warehouse"))
        query = writer.option("checkpointLocation", str(root / "spark-checkpoint")).start()
        (root / "spark-started").touch()
        query.awaitTermination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
