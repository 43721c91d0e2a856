"""What `explain` predicts of `dt.enrich` with its defaults, against what its join takes in Spark's workers.

Axes: tuples per query (1 k, 10 k, 100 k, 1 M), rows of the relation (``--rows``), all keys different or Zipf's law
(``--exponent``). Every task notes the processor's time of its join, the way to Python and back left out: by the clock
it would also be what the JVM takes of the same cores meanwhile. The figure is the median over all tasks of
``--queries`` queries, the first two left out. Bar: the prediction within 25 % of it.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from enrich_bench import data
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.runtime.enrich import LookupTask
from dovetail.spark.steps import enrich as enriching
from dovetail.testing.sessions import local_session

BAR = 0.25
WARM_UP = 2


@dataclass
class TimedTask(LookupTask):
    """The task of `enrich`, which also notes the seconds that its join took."""

    notes: str = field(default="", kw_only=True)

    def join(self, *given: Any, **named: Any) -> Any:
        """The join, timed."""
        return Timed(super().join(*given, **named), self.notes)


class Timed:
    """A join whose offers are timed; one line per task, which has one batch."""

    def __init__(self, join: Any, notes: str) -> None:
        self._join, self._notes = join, notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._join, name)

    def offer(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The results of a batch; what happens to them between two of them is not counted."""
        seconds, results = 0.0, self._join.offer(batch)
        while True:
            began = time.thread_time()
            result = next(results, None)
            seconds += time.thread_time() - began
            if result is None:
                break
            yield result
        with open(self._notes, "a", encoding="utf-8") as file:
            file.write(f"{batch.num_rows} {seconds}\n")


def main() -> None:
    """Measure, print one table, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_500_000)
    parser.add_argument("--exponent", type=float, default=0.0)
    parser.add_argument("--queries", type=int, default=12)
    parser.add_argument("--data", default=None, metavar="DIR", help="keep the relation there")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="dovetail-explained-"))
    spark = local_session(scratch, {"spark.driver.memory": "2g"})
    try:
        directory = scratch if given.data is None else Path(given.data)
        figures = [figure(spark, directory, scratch, given, size) for size in (1_000, 10_000, 100_000, 1_000_000)]
    finally:
        spark.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{'tuples':>10} {'predicted ms':>13} {'measured ms':>12} {'off by':>7}")
    for one in figures:
        off = one["predicted_ms"] / one["measured_ms"] - 1
        verdict = "met" if abs(off) <= BAR else "MISSED"
        print(f"{one['tuples']:>10,} {one['predicted_ms']:>13.2f} {one['measured_ms']:>12.2f} {off:>7.0%}  {verdict}")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1))


def figure(
    spark: SparkSession, directory: Path, scratch: Path, given: argparse.Namespace, size: int
) -> dict[str, float]:
    """Prediction and measurement for one number of tuples, divided among two tasks."""
    relation = data.make_relation(spark, directory, given.rows)
    notes = scratch / f"notes-{size}"
    numbers = spark.range(0, size, numPartitions=2)
    key = data.key_column(numbers.id, given.rows, given.exponent, "shuffled")
    stream = numbers.select(key.alias("k"), numbers.id.alias("v"))
    predicted = dt.explain(dt.enrich(stream, relation, on="k")).joins[0].join_ms[size]

    def timed(*given: Any, **named: Any) -> TimedTask:
        return TimedTask(*given, **named, notes=str(notes))

    with mock.patch.object(enriching, "LookupTask", timed):
        joined = dt.enrich(stream, relation, on="k")
    measured = []
    for number in range(given.queries):
        notes.write_text("")
        joined.write.format("noop").mode("overwrite").save()
        if number >= WARM_UP:
            measured += _seconds_per_task(notes, size)
    return {"tuples": size, "predicted_ms": predicted, "measured_ms": 1e3 * statistics.median(measured)}


def _seconds_per_task(notes: Path, size: int) -> list[float]:
    """A task may have several batches: the seconds of all, divided by the two tasks."""
    lines = [line.split() for line in notes.read_text().splitlines()]
    assert sum(int(rows) for rows, _ in lines) == size, "a task was tried twice"
    return [sum(float(seconds) for _, seconds in lines) / 2]


if __name__ == "__main__":
    main()
