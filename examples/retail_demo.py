"""The retail example: a bursty stream of orders, cleaned, keyed, joined with a million customers and loaded.

Run it with ``make demo``. The pipeline is ``examples/retail/pipeline.yaml``; this program makes the data, feeds it in
bursts while the flow runs, checks what was loaded, and writes an HTML report. It needs no service.
"""

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from retail_report import Sample, write_report
from rich.console import Console

import dovetail as dt
from dovetail.cli.live import showing_progress
from dovetail.core.memory import format_bytes
from dovetail.pipeline.checks import check_pipeline
from dovetail.pipeline.loading import parse_pipeline
from dovetail.pipeline.runner import plan_pipeline
from dovetail.testing.flows import Feed
from dovetail.testing.sessions import local_session
from dovetail_lab.workloads import Zipf

PIPELINE = Path(__file__).with_name("retail") / "pipeline.yaml"
LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
SPARK_SETTINGS = {
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}",
}
Int64Array = npt.NDArray[np.int64]
SHOPS = np.array(["north", "south", "web"])
SEED = 11
REPEATED = 0.03
console = Console(highlight=False)


def make_customers(count: int, root: Path) -> dt.Relation:
    """The master data, as a relation."""
    ids = np.arange(1, count + 1, dtype=np.int64)
    table = pa.table(
        {
            "customer_id": ids,
            "name": pc.binary_join_element_wise("customer", pa.array(ids).cast(pa.string()), " "),
            "segment": pa.array(np.array(["new", "regular", "vip"])[ids % 3]),
            "city": pc.binary_join_element_wise("city", pa.array(ids % 9973).cast(pa.string()), " "),
        }
    )
    return dt.Relation.build(table, root / "relations" / "customers", on="customer_id", shards=4, unique=True)


class Shops(threading.Thread):
    """Lands files of orders in bursts: mostly quiet, now and then ten times as busy."""

    def __init__(self, root: Path, customers: int, orders_per_second: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self.feed, self.offered = Feed(root / "landing"), 0
        self._zipf = Zipf(customers + customers // 50, 1.0, order="shuffled", seed=SEED)
        self._rate, self._seconds = orders_per_second, seconds
        self._chance = np.random.default_rng(SEED)
        self._next = 0

    def run(self) -> None:
        """Land a file every half second."""
        begun = time.monotonic()
        while time.monotonic() - begun < self._seconds:
            is_burst = self._chance.random() < 0.18
            self.land(int(self._rate * 0.5 * (3.5 if is_burst else 0.45)))
            time.sleep(0.5)

    def land(self, count: int) -> None:
        """Land one file: new orders, and a few that were landed before."""
        new = np.arange(self._next, self._next + count, dtype=np.int64)
        self._next += count
        again = self._chance.integers(0, self._next, int(count * REPEATED))
        ids = self._chance.permutation(np.concatenate([new, again]))
        table = pa.table(
            {
                "shop": SHOPS[ids % 3],
                "order_id": ids // 3,
                "customer_id": self._customers_of(ids),
                "amount": np.round(5 + (ids * 7919 % 20_000) / 100, 2),
                "ordered_at": pa.array([datetime.now(UTC)] * ids.size, pa.timestamp("us", tz="UTC")),
            }
        )
        self.feed.add(table)
        self.offered += ids.size

    def _customers_of(self, ids: Int64Array) -> Int64Array:
        """The customer of each order, the same when the order comes again; a few are in no master data."""
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return self._zipf.codes_of(self._zipf.ranks_at(mixed / 2.0**64))


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say what is being done, and then how long it took."""
    started = time.perf_counter()
    with console.status(what):
        yield
    console.print(f"[green]✓[/] {what} [dim]({time.perf_counter() - started:.1f} s)[/]")


def watch(query: Any, planned: Any, shops: Shops) -> list[Sample]:
    """Show progress until everything that was landed has been loaded; gives what was seen on the way."""
    samples: list[Sample] = []
    begun = time.time()
    with showing_progress(console, "retail", planned.budgets()) as live:
        while query.isActive:
            progress = query.progress
            live.update(progress)
            if progress is not None and (not samples or samples[-1].batch != progress.batch):
                samples.append(Sample.of(progress, begun, shops.offered))
            first = None if progress is None else progress.operators[0].totals.stream_tuples_in
            if not shops.is_alive() and first == shops.offered:
                query.stop(drain=True)
                break
            time.sleep(0.05)
    failure = query.exception()
    if failure is not None:
        raise failure
    samples.append(Sample.of(query.progress, begun, shops.offered))
    return samples


def check(root: Path, shops: Shops) -> dict[str, Any]:
    """Compare what was loaded with what was landed, without Spark."""
    landed = pa.concat_tables([pq.read_table(file) for file in shops.feed.files()])
    files = sorted((root / "warehouse").glob("batch-*.parquet"))
    loaded = pa.concat_tables([pq.read_table(file) for file in files])
    wanted = landed.group_by(["shop", "order_id"]).aggregate([]).num_rows
    keys = loaded.column("order_key")
    seen = loaded.group_by(["shop", "order_id"]).aggregate([]).num_rows
    is_exact = loaded.num_rows == wanted == seen == pc.count_distinct(keys).as_py() and keys.null_count == 0
    latencies = []
    for file in files:
        written = pa.scalar(datetime.fromtimestamp(file.stat().st_mtime, UTC), pa.timestamp("us", tz="UTC"))
        times = pq.read_table(file, columns=["ordered_at"]).column(0)
        waited = pc.subtract(written, times.cast(pa.timestamp("us", tz="UTC"))).cast(pa.int64())
        latencies.append(np.asarray(waited.to_numpy(), np.float64) / 1e6)
    batches = Counter(int(file.name.split("-")[1]) for file in files)
    return {
        "landed": landed.num_rows,
        "loaded": loaded.num_rows,
        "duplicates": landed.num_rows - loaded.num_rows,
        "without_customer": loaded.column("name").null_count,
        "micro_batches": len(batches),
        "is_exact": bool(is_exact),
        "latencies_s": np.concatenate(latencies),
    }


def main() -> int:
    """Make the data, run the pipeline, check the warehouse, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--customers", type=int, default=1_000_000, help="rows of the master data")
    parser.add_argument("--rate", type=int, default=20_000, help="orders per second, on average")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long orders are landed")
    parser.add_argument("--report", type=Path, default=Path("artifacts/demo/report.html"), help="where the report goes")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="dovetail-retail-"))
    os.environ["RETAIL_ROOT"] = str(root)
    try:
        with timed(f"Making a relation of {given.customers:,} customers"):
            relation = make_customers(given.customers, root)
        shops = Shops(root, given.customers, given.rate, given.seconds)
        with timed("Checking the pipeline, starting Spark"):
            checked = check_pipeline(*parse_pipeline(PIPELINE))
            planned = plan_pipeline(local_session(settings=SPARK_SETTINGS), checked)
        console.print(f"  {PIPELINE.name}: orders -> deduplicate -> surrogate_key -> enrich -> parquet")
        console.print(f"  customers: {relation.stats.rows:,} rows, {format_bytes(relation.stats.bytes)} on disk")
        query = planned.start()
        shops.start()
        samples = watch(query, planned, shops)
        result = check(root, shops)
        report = write_report(given.report, samples, result, planned.budgets())
        say(result, report)
        return 0 if result["is_exact"] else 1
    finally:
        shutil.rmtree(root, ignore_errors=True)


def say(result: dict[str, Any], report: Path) -> None:
    """The summary."""
    latencies = result["latencies_s"]
    verdict = "[green]exactly once[/]" if result["is_exact"] else "[red]NOT what was landed[/]"
    console.print(
        f"[green]✓[/] {result['landed']:,} rows landed, {result['duplicates']:,} of them duplicates; "
        f"{result['loaded']:,} orders loaded, {verdict}, each with a key of its own"
    )
    console.print(
        f"  from landing to warehouse: median {np.median(latencies):.1f} s, 95 % within "
        f"{np.quantile(latencies, 0.95):.1f} s; {result['without_customer']:,} orders of unknown customers"
    )
    console.print(f"  report: {report}")


if __name__ == "__main__":
    sys.exit(main())
