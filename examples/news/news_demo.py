"""News items and access records as XML files, joined live; the access stream says when a news item is over.

Run it with ``make demo-news``. Files appear in two directories while the flow runs, as a publisher and an access
monitor would write them; Spark's XML source reads them. A ``record`` with ``punct="true"`` is a punctuation: no more
access records of that number will come. When all results of a number are out, the join says so to the count behind it,
and that news item's count comes out then, once, and never has to be corrected. The state stays as small as the number
of items that are still being read. It needs no service, and removes what it wrote.
"""

import tempfile
import time
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from pyspark.sql import DataFrame, SparkSession
from rich.console import Console

import dovetail as dt
from dovetail.testing.sessions import local_session
from dovetail_lab.workloads.news import NewsWorkload

LOG_SETTINGS = Path(__file__).parents[1] / "log4j2.properties"
SPARK_SETTINGS = {"spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}"}
ITEMS, ITEMS_PER_FILE = 60, 10
console = Console(highlight=False)


def publish(path: Path, text: str) -> None:
    """Let a file appear whole."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text, encoding="utf-8")
    draft.rename(path)


def write_part(root: Path, work: NewsWorkload, number: int) -> int:
    """One file of each stream; gives how many access records it has."""
    start, stop = number * ITEMS_PER_FILE, (number + 1) * ITEMS_PER_FILE
    items = "".join(
        f"<info><sno>{row['sno']}</sno><title>{escape(row['title'])}</title>"
        f"<keyword>{escape(row['keyword'])}</keyword></info>\n"
        for row in work.news(start, stop).to_pylist()
    )
    publish(root / "news" / f"{number:04d}.xml", f"<stream>\n{items}</stream>\n")
    records, closed = work.accesses(start, stop)
    lines = "".join(
        f"<record><sno>{row['sno']}</sno><ipaddr>{row['ipaddr']}</ipaddr></record>\n" for row in records.to_pylist()
    )
    lines += "".join(f'<record punct="true"><sno>{sno}</sno><ipaddr>*</ipaddr></record>\n' for sno in closed.tolist())
    publish(root / "access" / f"{number:04d}.xml", f"<stream>\n{lines}</stream>\n")
    return int(records.num_rows)


def streams(spark: SparkSession, root: Path) -> dict[str, DataFrame]:
    """Both directories, one file of each per micro-batch."""
    reader = {"news": ("info", "sno long, title string, keyword string")}
    reader["access"] = ("record", "_punct boolean, sno long, ipaddr string")
    return {
        name: spark.readStream.format("xml")
        .schema(columns)
        .option("rowTag", tag)
        .option("maxFilesPerTrigger", 1)
        .load(str(root / name))
        for name, (tag, columns) in reader.items()
    }


def is_told(query: Any) -> bool:
    """Whether the counts of all items have come out, and the flow has said so."""
    progress = query.progress
    return progress is not None and progress.operators[1].totals.output_rows == ITEMS


def main() -> None:
    """Write, join and count."""
    work = NewsWorkload(ITEMS, accesses_per_item=10)
    final: dict[int, int] = {}

    def tell(rows: DataFrame, batch: int) -> None:
        closed = {row.sno: row.accesses for row in rows.orderBy("sno").collect()}
        assert not set(closed) & set(final), "a news item was closed twice"
        final.update(closed)
        if closed:
            told = ", ".join(f"{sno}: {count}" for sno, count in list(closed.items())[:6])
            console.print(f"  micro-batch {batch}: {len(closed)} items are over; accesses {told}, ...")

    with tempfile.TemporaryDirectory(prefix="dovetail-news-demo-") as directory:
        root = Path(directory)
        for name in ("news", "access"):
            (root / name).mkdir()
        spark = local_session(settings=SPARK_SETTINGS)
        flow = dt.multi_join(
            streams(spark, root),
            on="sno",
            keys=["news"],
            punctuations={"access": dt.Punctuation.where("_punct", data=False)},
            notices="notice",
            budget="64MB",
            name="news",
        ).aggregate_closed({"accesses": "count"})
        query = flow.write(dt.sinks.foreach_batch(tell), checkpoint=root / "checkpoint", trigger="500 ms")
        sent = 0
        for number in range(ITEMS // ITEMS_PER_FILE):
            sent += write_part(root, work, number)
            time.sleep(0.3)
        while query.isActive and not is_told(query):
            time.sleep(0.2)
        if not query.isActive:
            query.awaitTermination()  # raises what ended it
        progress = query.progress
        query.stop()
        assert progress is not None
        operator, counts = progress.operators
        console.print(
            f"[bold]{sum(final.values())} accesses of {sent} counted, for {len(final)} news items, each once.\n"
            f"  rows held at the end: {dict(operator.state_rows)}, open groups: {counts.state_rows['open']}; "
            f"{operator.details['dropped_on_arrival']} rows were never kept, {operator.details['closed_rows']} purged"
        )
        assert sum(final.values()) == sent
        spark.stop()


if __name__ == "__main__":
    main()
