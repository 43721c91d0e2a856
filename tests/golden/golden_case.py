"""What a golden flow is: its inputs, how it starts, and what must come of it."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from golden_plain import Row

import dovetail as dt
from dovetail.testing.flows import Feed

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
CHECKPOINT, OUT, LATER = "checkpoint", "out", "later"


@dataclass(frozen=True)
class Input:
    """One input of a flow: the rows of its files.

    Attributes
    ----------
    schema
        Of the files.
    columns
        The same for Spark.
    first, later
        Rows of the files that the flow has taken in when its copy is made, a micro-batch each; and of those after it.
    """

    schema: pa.Schema
    columns: str
    first: list[list[Row]]
    later: list[list[Row]]

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order of the files."""
        return [row for rows in (*self.first, *self.later) for row in rows]


@dataclass(frozen=True)
class Case:
    """A flow, stopped with state in its checkpoint and gone on with.

    Attributes
    ----------
    name
        Of the case and of its copy.
    inputs
        Its inputs, by the names of their directories.
    start
        Start the flow: given Spark, the case, the directory and the trigger.
    expected
        The rows that must be there in the end, by place.
    found
        The rows that are there, by place.
    prepare
        Done before the flow first starts.
    between
        Done before it goes on.
    files_per_trigger
        When it goes on, how many files of an input a micro-batch takes; None: all of them.
    killed_at
        The fault point that the copy's process died at; None: it was stopped.
    least_waiting
        How many tuples must wait in the copy.
    has_state
        Whether the copy has state files.
    kept
        Relations that the flow keeps.
    """

    name: str
    inputs: Mapping[str, Input]
    start: Callable[..., Any]
    expected: Callable[["Case"], dict[str, list[Row]]]
    found: Callable[[Path], dict[str, list[Row]]] = field(default=lambda root: {OUT: published(root / OUT)})
    prepare: Callable[[Path], Any] = field(default=lambda root: None)
    between: Callable[[Path], Any] = field(default=lambda root: None)
    files_per_trigger: int | None = None
    killed_at: str | None = None
    least_waiting: int = 0
    has_state: bool = True
    kept: tuple[str, ...] = ()

    def add_files(self, root: Path, begin: int, end: int | None = None) -> None:
        """Put files of a numbered range into the inputs' directories, those of each after the ones that are there."""
        for name, given in self.inputs.items():
            feed = Feed(root / name)
            for rows in [*given.first, *given.later][begin:end]:
                feed.add(pa.Table.from_pylist(rows, schema=given.schema))

    def add_later(self, root: Path) -> None:
        """Move the files that come after the copy, and are in it, into the inputs' directories."""
        for name in self.inputs:
            for file in sorted((root / LATER / name).iterdir()):
                number = len(list((root / name).glob("[0-9]*")))
                # The source takes files by their age.
                os.utime(file, (1_600_000_000 + number, 1_600_000_000 + number))
                os.rename(file, root / name / f"{number:06d}{file.suffix}")

    def streams(self, spark: Any, root: Path, is_resumed: bool) -> dict[str, Any]:
        """The inputs as streaming DataFrames."""
        found = {}
        for name, given in self.inputs.items():
            reader = spark.readStream.schema(given.columns)
            if is_resumed and self.files_per_trigger is not None:
                reader = reader.option("maxFilesPerTrigger", self.files_per_trigger)
            found[name] = reader.parquet(str(root / name))
        return found

    @property
    def batches(self) -> int:
        """How many micro-batches are in the copy."""
        return max(len(given.first) for given in self.inputs.values())


def published(directory: Path) -> list[Row]:
    """All rows that a reader of a Parquet sink sees; moments after the year 2262, where nanoseconds end, included."""
    files = sorted(path for path in directory.glob("*.parquet") if path.name[0] not in "._")
    tables = [pq.read_table(file, coerce_int96_timestamp_unit="us") for file in files]
    return [row for table in tables for row in table.to_pylist()]


def starter(define: Callable[[dict[str, Any], Path], Any]) -> Callable[..., Any]:
    """How a case starts whose flow is written to Parquet files."""

    def start(spark: Any, case: Case, root: Path, trigger: str, is_resumed: bool = False) -> Any:
        flow = define(case.streams(spark, root, is_resumed), root)
        sink = dt.sinks.parquet(root / OUT)
        return flow.write(sink, checkpoint=root / CHECKPOINT, trigger=trigger, keep_commits=2)

    return start


def moment(second: float) -> datetime:
    """A moment after the beginning."""
    return BEGIN + timedelta(seconds=second)


def numbered(rows: list[Row]) -> list[Row]:
    """Rows with their surrogate keys told by the first row that has the key: which number it is, nobody promises."""
    first: dict[int, int] = {}
    for row in rows:
        if row["sk"] is not None:
            first[row["sk"]] = min(row["n"], first.get(row["sk"], row["n"]))
    return [{**row, "sk": None if row["sk"] is None else first[row["sk"]]} for row in rows]
