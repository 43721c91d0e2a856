"""What the sinks of table formats share: staging by executors, and publishing in one commit of the table.

Appended rows: executors write data files, the driver moves them into the table and commits their names together with
the flow's mark. Upserted rows: executors write them as well; the driver reads them back, within a budget, and lets the
format's library merge them into the table, with the mark in the same commit.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.core.errors import BudgetError, PlanError, StateError
from dovetail.core.faultpoints import fault_point
from dovetail.core.memory import Budget, format_bytes
from dovetail.spark.flow.ownership import Owner
from dovetail.spark.flow.sink import Receipt, Sink, SinkContext
from dovetail.spark.sinks.lake_files import DataFile, check_partition_columns, move_into, stage_files
from dovetail.spark.sinks.lake_mark import Mark, mark_of, newest_mark, require_known, require_next
from dovetail.spark.sinks.staging import check_columns, remove_up_to
from dovetail.storage.documents import storage_errors
from dovetail.storage.local import LOCAL

__all__ = ["LakeOptions", "LakeSink", "LakeTable", "columns_to_add", "names_of"]

PATIENCE_S = 60.0
"""How long a commit is repeated on top of those of other writers."""

_PAUSE_S = 0.05
_HIDDEN = "_dovetail"
_ORDER = "__order"


@dataclass(frozen=True)
class LakeOptions:
    """What the user chose for a table."""

    key: tuple[str, ...] = ()
    order_by: str | None = None
    partition_by: tuple[str, ...] | None = None
    add_columns: bool = False
    compression: str = "snappy"
    budget: Budget = field(default_factory=lambda: Budget(256_000_000))


class LakeTable(ABC):
    """A table of one format, as of one moment: what is committed is committed on top of that moment, or not at all."""

    where: str  # for messages
    directory: Path  # of the table
    files: Path  # the directory of its data files
    partition_columns: tuple[str, ...]
    keeps_partition_columns = False  # whether data files have them, too

    @abstractmethod
    def mark(self, flow: str) -> Mark | None:
        """The mark of a flow."""

    @abstractmethod
    def missing_columns(self, schema: pa.Schema, options: LakeOptions) -> list[pa.Field]:
        """The output's columns that the table lacks; a `PlanError` if the rest does not fit."""

    @abstractmethod
    def add_columns(self, fields: Sequence[pa.Field]) -> bool:
        """Add nullable columns; False if another writer was faster."""

    @abstractmethod
    def append(self, files: Sequence[DataFile], flow: str, mark: Mark, owner: Owner) -> bool:
        """Commit files and mark; False if another writer was faster."""

    @abstractmethod
    def upsert(self, rows: pa.Table, key: Sequence[str], flow: str, mark: Mark, owner: Owner) -> bool:
        """Replace or add rows by key, and commit the mark with them; False if another writer was faster."""

    @abstractmethod
    def make_durable(self) -> None:
        """Flush the log up to this moment: the formats' libraries leave that to the operating system."""


class LakeSink(Sink):
    """A table of a lakehouse format."""

    stages_in_jvm = True

    def __init__(self, options: LakeOptions) -> None:
        self.options = options

    @abstractmethod
    def load(self) -> LakeTable:
        """The table as it is now."""

    @abstractmethod
    def make(self, schema: pa.Schema) -> None:
        """Make the table with these columns if there is none."""

    # ================================================================ opening

    def open(self, context: SinkContext) -> None:
        """Make the table if there is none, and compare its columns with the output's."""
        super().open(context)
        check_columns(context.schema)
        names, options = context.schema.names, self.options
        for name in [*options.key, *([options.order_by] if options.order_by else [])]:
            if name not in names:
                raise PlanError(f"The column {name!r} is not in the output.", hint=f"It has {', '.join(names)}.")
        check_partition_columns(context.schema, options.partition_by or ())
        self._schema = _arrow_schema(context.schema)
        self.make(self._schema)
        table = self.load()
        if options.partition_by is not None and options.partition_by != table.partition_columns:
            has = (
                f"partitioned by {', '.join(table.partition_columns)}" if table.partition_columns else "not partitioned"
            )
            raise PlanError(f"{table.where} is {has}.", hint="Leave partition_by out: the table's own is used.")
        check_partition_columns(context.schema, table.partition_columns)
        missing = table.missing_columns(self._schema, options)
        if missing and not options.add_columns:
            raise PlanError(
                f"{table.where} has no column {missing[0].name!r}.",
                hint="Pass add_columns=True to add it, or leave it out with a select.",
            )

    # ================================================================ taking over

    def claim(self, owner: Owner, batch: int | None, receipt: Receipt | None) -> None:
        """Refuse a table that does not fit the checkpoint, and add missing columns."""
        super().claim(owner, batch, receipt)
        place = self.context.place
        self._flow = owner.flow_id if place == "main" else f"{owner.flow_id}.{place}"
        self._last: dict[str, Any] | None = None
        for table in self._attempts("its columns could not be added"):
            require_known(table.mark(self._flow), batch, receipt, table.where)
            missing = table.missing_columns(self._schema, self.options)
            if not missing or table.add_columns(missing):
                break
        self._staged_root = table.directory / _HIDDEN / self._flow
        with storage_errors(self._staged_root):
            LOCAL.make_directory(self._staged_root)
            LOCAL.make_directory(table.files)

    # ================================================================ a micro-batch

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        table = self.load()
        try:
            attempt, files = stage_files(
                df,
                self._staged_root,
                self._flow,
                batch,
                partition_by=() if self.options.key else table.partition_columns,
                keeps_partition_columns=table.keeps_partition_columns,
                compression=self.options.compression,
            )
        except Exception:
            # A copy of the checkpoint that has gone on has removed what this driver staged.
            self._require_not_replaced(batch)
            raise
        fault_point("sink.lake.written")
        receipt = {
            "batch": batch,
            "table": table.where,
            "attempt": attempt,
            "files": [file.as_dict() for file in files],
            "rows": sum(file.rows for file in files),
            "last": self._last,
        }
        if self.options.key:
            self._require_mergeable(receipt)
        return receipt

    def _require_not_replaced(self, batch: int) -> None:
        table = self.load()
        require_next(table.mark(self._flow), {"batch": batch, "files": [], "last": self._last}, table.where)

    def publish(self, receipt: Receipt) -> None:
        """Commit the rows onto the mark before them, unless they are there."""
        for table in self._attempts(f"micro-batch {receipt['batch']} is committed and kept, but not published"):
            if not require_next(table.mark(self._flow), receipt, table.where):
                break
            mark = mark_of(receipt)
            assert mark is not None, "without rows there is nothing to publish"
            fault_point("sink.lake.before")
            if self.options.key:
                rows = self._latest(self._read_back(receipt, table), self.options.key)
                is_done = table.upsert(rows, self.options.key, self._flow, mark, self.owner)
            else:
                files = [DataFile.from_dict(file) for file in receipt["files"]]
                move_into(table.files, self._staged(receipt), files, receipt["table"])
                fault_point("sink.lake.moved")
                is_done = table.append(files, self._flow, mark, self.owner)
            if is_done:
                fault_point("sink.lake.committed")
                table = self.load()
                break
        if receipt["files"]:
            table.make_durable()

    def forget(self, receipt: Receipt) -> None:
        """Remove what was staged up to this micro-batch."""
        fault_point("sink.lake.forget")
        last = newest_mark(receipt)
        self._last = None if last is None else last.as_dict()
        remove_up_to(self._staged_root, receipt["batch"])

    def _attempts(self, failure: str) -> Iterator[LakeTable]:
        """The table, again and again as long as other writers are faster."""
        give_up_at, pause_s = time.monotonic() + PATIENCE_S, _PAUSE_S
        while True:
            table = self.load()
            yield table
            if time.monotonic() > give_up_at:
                raise StateError(
                    f"{table.where}: {failure}, because other writers change the table all the time, or its log cannot "
                    "be written.",
                    hint="Let the other writers end, and start the flow again with the same checkpoint.",
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    def _staged(self, receipt: Receipt) -> Path:
        return self._staged_root / f"{receipt['batch']:08d}-{receipt['attempt']}"

    # ================================================================ upserts

    def _require_mergeable(self, receipt: Receipt) -> None:
        """Refuse, before the commit, rows that the driver cannot merge."""
        held = 0
        for file in receipt["files"]:
            path = self._staged(receipt) / file["staged"]
            footer = pq.read_metadata(path)
            held += sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
        if held > self.options.budget.total_bytes:
            raise BudgetError(
                f"Micro-batch {receipt['batch']} has {format_bytes(held)} of rows to upsert; the driver may hold "
                f"{self.options.budget}. It was not committed.",
                hint="Pass a larger budget= to the sink and start the flow again; smaller micro-batches need less.",
                minimum_bytes=held,
            )
        for file in receipt["files"]:
            keys = pq.read_table(
                self._staged(receipt) / file["staged"], columns=list(self.options.key), partitioning=None
            )
            for name in self.options.key:
                if keys.column(name).null_count:
                    raise StateError(
                        f"Micro-batch {receipt['batch']} has rows whose key column {name!r} is NULL: they can replace "
                        "no row. It was not committed.",
                        hint="Filter them with transform, or divert them, and start the flow again.",
                    )

    def _read_back(self, receipt: Receipt, table: LakeTable) -> pa.Table:
        paths = [self._staged(receipt) / file["staged"] for file in receipt["files"]]
        try:
            return pa.concat_tables([pq.read_table(path, partitioning=None).cast(self._schema) for path in paths])
        except FileNotFoundError:
            raise StateError(
                f"Micro-batch {receipt['batch']} was committed for {receipt['table']} and is neither staged nor "
                f"published in {table.where}.",
                hint=f"If {receipt['table']} is still there, start the flow once with the target {receipt['table']}; "
                "then it can continue with another.",
            ) from None

    def _latest(self, rows: pa.Table, key: Sequence[str]) -> pa.Table:
        """Of the rows of a key, the one with the greatest `order_by`, where NULL is the smallest; else the last."""
        order = self.options.order_by
        if order is not None:
            known = rows.append_column(_ORDER, pc.is_valid(rows.column(order)))
            rows = rows.take(pc.sort_indices(known, sort_keys=[(_ORDER, "ascending"), (order, "ascending")]))
        numbered = rows.append_column(_ORDER, pa.array(range(rows.num_rows), pa.int64()))
        last = numbered.group_by(list(key)).aggregate([(_ORDER, "max")])
        return rows.take(last.column(f"{_ORDER}_max"))


def columns_to_add(
    ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]], where: str, schema: pa.Schema
) -> list[pa.Field]:
    """The fields of ``schema`` that a table lacks; a `PlanError` for a column of another type.

    ``ours`` and ``theirs`` are names and types as the table's format writes them.
    """
    known, lower = dict(theirs), {name.lower(): name for name, _ in theirs}
    missing = []
    for name, kind in ours:
        if name in known:
            if known[name] != kind:
                raise PlanError(
                    f"Column {name!r} is {kind} in the output and {known[name]} in {where}.",
                    hint="Cast it with transform; a table's column cannot change its type.",
                )
        elif name.lower() in lower:
            raise PlanError(
                f"The output has a column {name!r}, {where} has {lower[name.lower()]!r}.",
                hint="Use the same case; most readers do not distinguish the two.",
            )
        else:
            missing.append(schema.field(name))
    return missing


def names_of(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def lake_options(
    key: str | Sequence[str] | None,
    order_by: str | None,
    partition_by: str | Sequence[str] | None,
    add_columns: bool,
    compression: str,
    budget: str | int | Budget,
) -> LakeOptions:
    """The options of a sink as its function takes them."""
    if order_by is not None and not names_of(key):
        raise PlanError("order_by= is for upserts.", hint="Pass key=, too.")
    by = None if partition_by is None else names_of(partition_by)
    return LakeOptions(names_of(key), order_by, by, add_columns, compression, Budget.parse(budget))


@contextmanager
def package_of(name: str, extra: str) -> Iterator[None]:
    """Turn the lack of an optional package into an error that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise PlanError(f"The package {name} is not installed.", hint=f'Run pip install "dovetail[{extra}]".') from None


def local_directory_of(location: str, what: str) -> Path:
    """The local directory of a table; a `PlanError` if it is elsewhere."""
    text = location.removeprefix("file://") if location.startswith("file:///") else location.removeprefix("file:")
    if "://" in text:
        raise PlanError(
            f"{what} is at {location}.",
            hint="This sink writes tables in local directories, or in ones that all nodes mount.",
        )
    return Path(os.path.abspath(os.path.expanduser(text)))


def _arrow_schema(schema: T.StructType) -> pa.Schema:
    return to_arrow_schema(schema, timezone="UTC")
