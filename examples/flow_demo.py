"""A flow that enriches orders with customers, is killed in the middle, and goes on: every order comes out exactly once.

Run it with ``make demo-flow``. The flow runs in a process of its own, which gets SIGKILL while it works; the second
start finds in the checkpoint what had been done and what was waiting. It needs no service, and removes what it wrote.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import dovetail as dt
from dovetail.testing.flows import Feed, published_rows
from dovetail.testing.sessions import local_session

LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
SPARK_SETTINGS = {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}"}
CUSTOMERS, ORDERS_PER_FILE, FILES = 20_000, 2_000, 12
console = Console(highlight=False)


def run_flow(root: Path) -> None:
    """The flow itself: what a user would write, and a line about each micro-batch."""
    spark = local_session(settings=SPARK_SETTINGS)
    orders = (
        spark.readStream.schema("order_id long, customer_id long")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(root / "orders"))
    )
    flow = dt.stream(orders, name="orders").enrich(
        dt.Relation.open(root / "customers"), on="customer_id", how="left", budget="1MB", strategy="mesh",
        max_delay="2 seconds",
    )  # fmt: skip
    query = flow.write(dt.sinks.parquet(root / "enriched"), checkpoint=root / "checkpoint", trigger="200 ms")
    told = -1
    while query.isActive:
        progress = query.progress
        if progress is not None and progress.batch > told:
            told = progress.batch
            operator = progress.operators[0]
            taken = operator.totals.stream_tuples_in
            print(f"micro-batch {told}: {taken} orders taken in, {progress.pending} wait", flush=True)
            if taken == FILES * ORDERS_PER_FILE and progress.pending == 0:
                query.stop()
                return
        time.sleep(0.02)
    query.awaitTermination()


def start(root: Path) -> "subprocess.Popen[str]":
    """Start the flow in a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, str(root)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def main() -> None:
    """Feed the flow, kill it, start it again, and count."""
    with tempfile.TemporaryDirectory(prefix="dovetail-flow-demo-") as directory:
        root = Path(directory)
        names = pa.table({"customer_id": list(range(CUSTOMERS)), "name": [f"Customer {n}" for n in range(CUSTOMERS)]})
        dt.Relation.build(names, root / "customers", on="customer_id", shards=2)
        feed = Feed(root / "orders")
        for number in range(FILES):
            ids = range(number * ORDERS_PER_FILE, (number + 1) * ORDERS_PER_FILE)
            feed.add(pa.table({"order_id": list(ids), "customer_id": [n * 7919 % (CUSTOMERS + 1000) for n in ids]}))
        console.print("[bold]The flow starts, and is killed while it works.")
        process = start(root)
        assert process.stdout is not None
        for line in process.stdout:
            console.print(" ", line.strip())
            if line.startswith("micro-batch 4"):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        console.print(f"  killed; {len(published_rows(root / 'enriched'))} orders can be read")
        console.print("[bold]It starts again with the same checkpoint.")
        process = start(root)
        assert process.stdout is not None
        for line in process.stdout:
            console.print(" ", line.strip())
        process.wait()
        rows = pq.read_table(root / "enriched")
        distinct = len(set(rows.column("order_id").to_pylist()))
        console.print(f"[bold]{rows.num_rows} rows, {distinct} different orders, {FILES * ORDERS_PER_FILE} were sent.")
        assert rows.num_rows == distinct == FILES * ORDERS_PER_FILE


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_flow(Path(sys.argv[1]))
    else:
        main()
