"""Writes and reads relations with Spark jobs.

A write is one job: it computes code and shard in the JVM, shuffles every row to its shard, sorts by code, and lets
:func:`dovetail.relation.shard_writer.write_shard` write the shard's files. Each task returns one row that describes
what it wrote; the driver combines the rows and commits. A task that runs twice writes files under different names, and
the version names only those of the attempt whose row arrived.
"""

import copy
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from dovetail.core.errors import DovetailError, InternalError, PlanError
from dovetail.core.table_formats import table_format_of
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN, Manifest, Operation, Shard, shard_from_dict
from dovetail.relation.local import nullable_fields
from dovetail.relation.relation import Relation
from dovetail.relation.shard_writer import ShardTask, remove_new_files, write_shard
from dovetail.runtime.process_pins import pin_for_this_process
from dovetail.spark.plan.codes import check_key_columns, code_column, quoted, shard_column
from dovetail.spark.plan.payload import decode, encode, encoded_schema, nullable_schema

_PARQUET_INDEX = "InMemoryFileIndex"  # of files read as they are; tables' own readers have another
RECEIPT_SCHEMA = "shard int, receipt string"
_POLL_SECONDS = 0.2


class DataFrameSource:
    """Rows to write, computed by a Spark DataFrame."""

    def __init__(self, df: DataFrame) -> None:
        if df.isStreaming:
            raise PlanError(
                "a streaming DataFrame cannot be written to a relation: write it from foreachBatch, batch by batch."
            )
        _refuse_files_of_tables(df)
        self._df = df
        stored = nullable_schema(df.schema)
        self.schema: pa.Schema = nullable_fields(to_arrow_schema(encoded_schema(stored), timezone="UTC"))
        self.spark_schema: dict[str, Any] = stored.jsonValue()

    def write(
        self,
        root: str,
        operation: Operation,
        base: Manifest,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Shard]:
        """Apply ``operation`` to every shard of ``base`` with these rows, in one Spark job."""
        columns = list(base.key) if operation == "delete" else base.schema.names
        check_key_columns(self._df.schema, base.key)
        shards = len(base.shards)
        code = code_column(self._df.schema, base.key, base.code_kind)
        rows = (
            encode(self._df.select(*map(_column, columns)))
            .withColumn(CODE_COLUMN, code)
            .withColumn(SHARD_COLUMN, shard_column(F.col(CODE_COLUMN), shards))
            .select(SHARD_COLUMN, CODE_COLUMN, *map(_column, columns))
            .repartitionById(shards, F.col(SHARD_COLUMN))
            .sortWithinPartitions(F.col(CODE_COLUMN).asc_nulls_first())
            # mapInArrow resolves unquoted names: a dot or a backtick in one would be syntax.
            .toDF(*(f"c{number}" for number in range(len(columns) + 2)))
        )
        task = partial(_write_partition, root, operation, base.to_json())
        receipts = rows.mapInArrow(task, RECEIPT_SCHEMA)
        with _JobProgress(self._df.sparkSession, shards, progress):
            collected = receipts.collect()
        results = {row.shard: json.loads(row.receipt) for row in collected}
        if len(results) != len(collected):
            raise InternalError(f"{len(collected)} tasks wrote {len(results)} shards: two of them wrote the same one.")
        found = {number: shard_from_dict(r["shard"]) for number, r in results.items() if "shard" in r}
        refusals = [r["error"] for r in results.values() if "error" in r]
        if refusals:
            remove_new_files(root, base, found)
            raise DovetailError.from_dict(refusals[0])
        # A partition without rows runs too, but has no row to read its shard from: it changed nothing.
        return [found.get(number, base.shards[number]) for number in range(shards)]


def _refuse_files_of_tables(df: DataFrame) -> None:
    """Refuse the files of a Delta or Iceberg table that are read without its log: some of their rows are deleted."""
    if not hasattr(df, "_jdf"):
        return  # on Spark Connect the plan is not here
    leaves = df._jdf.queryExecution().analyzed().collectLeaves()
    for leaf in (leaves.apply(number) for number in range(leaves.size())):
        if leaf.nodeName().partition(" ")[0] not in ("LogicalRelation", "Relation"):
            continue
        relation = leaf.relation()
        if relation.getClass().getSimpleName() != "HadoopFsRelation":
            continue
        if relation.location().getClass().getSimpleName() != _PARQUET_INDEX:
            continue
        roots = relation.location().rootPaths()
        for root in (Path(roots.apply(number).toUri().getPath()) for number in range(roots.size())):
            # A partition of a table is read from a directory below it.
            for place in (root, *root.parents):
                table = table_format_of(str(place))
                if table is not None:
                    raise PlanError(
                        f"{root} belongs to the {table} table {place}: its files also hold rows that were deleted or "
                        "replaced.",
                        hint="Pass the table's directory itself to Relation.build, not a DataFrame of its files.",
                    )


def read(relation: Relation, spark: SparkSession) -> DataFrame:
    """A relation's rows as a Spark DataFrame, one partition per shard.

    Columns have the type they had when Spark built the relation, or Spark's type for their Arrow type.
    """
    pin_for_this_process(relation)
    schema = spark_schema(relation)
    shards = spark.range(relation.num_shards, numPartitions=relation.num_shards)
    task = partial(_read_shards, relation.path, relation.version)
    return decode(shards.mapInArrow(task, encoded_schema(schema)), schema)


def spark_schema(relation: Relation) -> T.StructType:
    """A relation's columns as a Spark schema."""
    if relation.spark_schema is not None:
        # A copy: fromJson removes the collations from its argument.
        return T.StructType.fromJson(copy.deepcopy(relation.spark_schema))
    return from_arrow_schema(relation.schema)


def _column(name: str) -> Any:
    return F.col(quoted(name))


# -------------------------------------------------------------------- in the tasks


def _write_partition(
    root: str, operation: Operation, base_json: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    base = Manifest.from_json(base_json, "the base version")
    names = [SHARD_COLUMN, CODE_COLUMN, *(base.key if operation == "delete" else base.schema.names)]
    named = (batch.rename_columns(names) for batch in batches if batch.num_rows)
    first = next(named, None)
    if first is None:
        return
    number = first.column(SHARD_COLUMN)[0].as_py()
    try:
        shard = write_shard(ShardTask(root, number, operation, base), _without_shard(first, named, number))
        receipt = {"shard": asdict(shard)}
    except DovetailError as error:
        # Reported to the driver as data: Spark would bury an exception in its own messages.
        receipt = {"error": error.as_dict()}
    columns = [pa.array([number], pa.int32()), pa.array([json.dumps(receipt)])]
    yield pa.RecordBatch.from_arrays(columns, names=["shard", "receipt"])


def _without_shard(first: pa.RecordBatch, batches: Iterator[pa.RecordBatch], number: int) -> Iterator[pa.RecordBatch]:
    for batch in itertools.chain([first], batches):
        if pc.min_max(batch.column(SHARD_COLUMN)).as_py() != {"min": number, "max": number}:
            raise InternalError(f"rows of several shards reached the task of shard {number}.")
        yield batch.drop_columns([SHARD_COLUMN])


def _read_shards(path: str, version: int, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    relation = Relation.open(path, version)
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            for block in relation.shard(number, include_null_keys=True).blocks(10_000):
                yield block.rows


# -------------------------------------------------------------------- progress


class _JobProgress:
    """Reports a running job's finished tasks from a background thread."""

    def __init__(self, spark: SparkSession, shards: int, report: Callable[[int, int], None] | None) -> None:
        self._spark, self._shards, self._report = spark, shards, report
        self._stop = threading.Event()

    def __enter__(self) -> None:
        if self._report is not None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def __exit__(self, *exc: object) -> None:
        if self._report is not None:
            self._stop.set()
            self._thread.join()
            if exc[0] is None:
                self._report(self._shards, self._shards)

    def _watch(self) -> None:
        assert self._report is not None
        tracker = self._spark.sparkContext.statusTracker()
        while not self._stop.wait(_POLL_SECONDS):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            done = sum(stage.numCompletedTasks for stage in stages if stage is not None)
            total = sum(stage.numTasks for stage in stages if stage is not None)
            if total:
                self._report(done, total)
