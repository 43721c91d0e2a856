"""Delta tables, exactly once: the flow's mark is in the table's transaction identifiers, in the commit of the rows.

A Delta log keeps the last version of each transaction identifier for as long as the table lives. A flow has two:
``dovetail/<flow>`` is the micro-batch, ``dovetail/<flow>/receipt`` the digest of its receipt. The commit's information
names the flow, micro-batch, epoch and digest for people who read the history.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dovetail.core.errors import PlanError, SchemaError
from dovetail.core.memory import Budget
from dovetail.spark.flow.ownership import Owner
from dovetail.spark.flow.store import local_path
from dovetail.spark.sinks.lake import LakeOptions, LakeSink, LakeTable, columns_to_add, lake_options, package_of
from dovetail.spark.sinks.lake_files import DataFile
from dovetail.spark.sinks.lake_mark import Mark
from dovetail.storage.local import LOCAL

if TYPE_CHECKING:
    from deltalake import CommitProperties

__all__ = ["DeltaSink", "delta"]

_LOG = "_delta_log"
_FLUSHED = 20  # entries of the log
_FORGETS = "delta.setTransactionRetentionDuration"


class DeltaSink(LakeSink):
    """A Delta table; made by `delta`."""

    kind = "delta"

    def __init__(self, path: str | os.PathLike[str], options: LakeOptions) -> None:
        super().__init__(options)
        self.path = local_path(path, "path")
        with package_of("deltalake", "delta"):
            import deltalake  # noqa: F401 -- an optional package: found missing here, not in the first micro-batch

    def __repr__(self) -> str:
        return f"DeltaSink({str(self.path)!r})"

    def make(self, schema: pa.Schema) -> None:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        if self.path.exists() and not self.path.is_dir():
            raise PlanError(f"path={str(self.path)!r} is a file.", hint="Name a directory.")
        if DeltaTable.is_deltatable(str(self.path)):
            return
        if self.path.is_dir() and any(self.path.iterdir()):
            raise PlanError(
                f"{self.path} has files, but is no Delta table.", hint="Name an empty or new directory, or a table."
            )
        LOCAL.make_directory(self.path)
        try:
            DeltaTable.create(str(self.path), schema, mode="error", partition_by=list(self.options.partition_by or ()))
        except DeltaError as error:
            # Another flow may have made it meanwhile.
            if not DeltaTable.is_deltatable(str(self.path)):
                raise PlanError(f"{self.path} cannot be made a Delta table: {error}") from None
        _DeltaTable(self.path).make_durable()

    def load(self) -> LakeTable:
        return _DeltaTable(self.path)


class _DeltaTable(LakeTable):
    """A table at one version."""

    def __init__(self, path: Path) -> None:
        from deltalake import DeltaTable

        self._table: DeltaTable = DeltaTable(str(path))
        self.where, self.directory, self.files = str(path), path, path
        self.partition_columns = tuple(self._table.metadata().partition_columns)

    def mark(self, flow: str) -> Mark | None:
        batch = self._table.transaction_version(_batch_id(flow))
        digest = self._table.transaction_version(_receipt_id(flow))
        return None if batch is None or digest is None else Mark(batch, f"{digest:015x}")

    def missing_columns(self, schema: pa.Schema, options: LakeOptions) -> list[pa.Field]:
        ours, theirs = _delta_types(schema), self._table.schema()
        missing = columns_to_add(ours, [(f.name, _type_text(f.type)) for f in theirs.fields], self.where, schema)
        if not options.key:
            self._require_plain_files(theirs.fields)
        if _FORGETS in self._table.metadata().configuration:
            raise PlanError(
                f"{self.where} has {_FORGETS}: it would forget which micro-batches it has.",
                hint="Remove the property from the table.",
            )
        absent = [f.name for f in theirs.fields if not f.nullable and f.name not in schema.names]
        if absent:
            raise PlanError(f"{self.where} requires a value in column {absent[0]!r}, which is not in the output.")
        return missing

    def _require_plain_files(self, columns: Sequence[Any]) -> None:
        """Refuse a table that promises more of its rows than files written elsewhere are checked for."""
        settings = self._table.metadata().configuration
        promises = [name for name in settings if name.startswith("delta.constraints.")]
        computed = ("delta.invariants", "delta.generationExpression", "delta.identity")
        promises += [
            f"{name} of column {c.name!r}" for c in columns for name in c.metadata if name.startswith(computed)
        ]
        if settings.get("delta.columnMapping.mode", "none") != "none":
            promises.append("delta.columnMapping.mode")
        promises += [f"NOT NULL of column {c.name!r}" for c in columns if not c.nullable]
        if promises:
            raise PlanError(
                f"{self.where} has {promises[0]}, which files that executors write are not checked against.",
                hint="Drop it from the table, or pass key= to upsert instead.",
            )

    def add_columns(self, fields: Sequence[pa.Field]) -> bool:
        from deltalake import CommitProperties, Field
        from deltalake import Schema as DeltaSchema
        from deltalake.exceptions import CommitFailedError

        made = DeltaSchema.from_arrow(pa.schema([field.with_nullable(True) for field in fields]))
        new = [Field(f.name, f.type, nullable=True) for f in made.fields]
        try:
            self._table.alter.add_columns(new, commit_properties=CommitProperties(max_commit_retries=0))
        except CommitFailedError:
            return False
        return True

    def append(self, files: Sequence[DataFile], flow: str, mark: Mark, owner: Owner) -> bool:
        from deltalake.exceptions import CommitFailedError

        actions = [self._action(file) for file in files]
        try:
            self._table.create_write_transaction(
                actions,
                "append",
                self._table.schema(),
                list(self.partition_columns),
                commit_properties=_properties(flow, mark, owner),
            )
        except CommitFailedError:
            return False
        return True

    def _action(self, file: DataFile) -> Any:
        from deltalake.transaction import AddAction

        path = self.files / file.name
        found = path.stat()
        stats = json.dumps(_statistics(pq.read_metadata(path)))
        return AddAction(file.name, found.st_size, dict(file.partition), int(found.st_mtime * 1000), True, stats)

    def upsert(self, rows: pa.Table, key: Sequence[str], flow: str, mark: Mark, owner: Owner) -> bool:
        from deltalake.exceptions import CommitFailedError

        same = " AND ".join(f"target.`{name}` = source.`{name}`" for name in key)
        try:
            merge = self._table.merge(
                rows,
                same,
                source_alias="source",
                target_alias="target",
                commit_properties=_properties(flow, mark, owner),
            )
            merge.when_matched_update_all().when_not_matched_insert_all().execute()
        except CommitFailedError:
            return False
        return True

    def make_durable(self) -> None:
        log = self.directory / _LOG
        # Not the newest only: others may have committed after this flow.
        entries = sorted(name for name in LOCAL.names(log) if name.endswith(".json"))[-_FLUSHED:]
        LOCAL.sync([*(log / name for name in entries), log, self.directory])
        if self._table.version() == 0:
            LOCAL.sync([self.directory.parent])


def _batch_id(flow: str) -> str:
    return f"dovetail/{flow}"


def _receipt_id(flow: str) -> str:
    return f"dovetail/{flow}/receipt"


def _properties(flow: str, mark: Mark, owner: Owner) -> "CommitProperties":
    from deltalake import CommitProperties, Transaction

    return CommitProperties(
        custom_metadata={
            "dovetail.flow": flow,
            "dovetail.batch": mark.batch,
            "dovetail.epoch": owner.epoch.number,
            "dovetail.receipt": mark.digest,
        },
        # Without repetitions: what was read of the table before must still be so when it is committed.
        max_commit_retries=0,
        app_transactions=[
            Transaction(_batch_id(flow), mark.batch),
            Transaction(_receipt_id(flow), int(mark.digest, 16)),
        ],
    )


def _delta_types(schema: pa.Schema) -> list[tuple[str, str]]:
    from deltalake import Schema as DeltaSchema
    from deltalake.exceptions import DeltaError

    try:
        return [(field.name, _type_text(field.type)) for field in DeltaSchema.from_arrow(schema).fields]
    except DeltaError as error:
        raise SchemaError(f"The output has a column that a Delta table cannot hold: {error}") from None


def _type_text(kind: Any) -> str:
    """A Delta type without what does not matter here: whether parts of it may be NULL."""
    return _shown(json.loads(kind.to_json()))


def _shown(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    match kind["type"]:
        case "struct":
            parts = [f"{part['name']}: {_shown(part['type'])}" for part in kind["fields"]]
            return f"struct<{', '.join(parts)}>"
        case "array":
            return f"array<{_shown(kind['elementType'])}>"
        case "map":
            return f"map<{_shown(kind['keyType'])}, {_shown(kind['valueType'])}>"
    return str(kind["type"])


def _statistics(footer: pq.FileMetaData) -> Mapping[str, Any]:
    """What readers skip files by, from a file's footer: of whole numbers only, which have one form in JSON."""
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in (footer.row_group(number) for number in range(footer.num_row_groups)):
        for column in (group.column(number) for number in range(group.num_columns)):
            name, found = column.path_in_schema, column.statistics
            if "." in name or found is None or not found.has_null_count:
                unknown.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + found.null_count
            is_number = found.has_min_max and column.physical_type in ("INT32", "INT64")
            if is_number and type(found.min) is int and type(found.max) is int:
                least[name] = min(least.get(name, found.min), found.min)
                most[name] = max(most.get(name, found.max), found.max)
            elif found.num_values:
                unknown.add(name)

    def of(values: dict[str, int]) -> dict[str, int]:
        return {name: value for name, value in values.items() if name not in unknown}

    return {"numRecords": footer.num_rows, "minValues": of(least), "maxValues": of(most), "nullCount": of(nulls)}


def delta(
    path: str | os.PathLike[str],
    *,
    key: str | Sequence[str] | None = None,
    order_by: str | None = None,
    partition_by: str | Sequence[str] | None = None,
    add_columns: bool = False,
    compression: str = "snappy",
    budget: str | int | Budget = "256MB",
) -> DeltaSink:
    """A Delta table that gets every row of the flow exactly once; needs the package ``deltalake``.

    Without `key`, rows are appended: executors write the data files, the driver commits their names. With it, rows
    replace those of the same key: executors stage them, the driver merges them, which reads the files of the table that
    hold these keys.

    Parameters
    ----------
    path
        A local directory or, on a cluster, one that all nodes mount. The table is made if there is none. Several flows
        may write to it, and other programs.
    key
        The columns of the key. A NULL in them ends the flow before the micro-batch is committed.
    order_by
        With a key: of rows with the same key in one micro-batch, the one with the greatest value here wins.
    partition_by
        The columns that a new table is partitioned by. Delta does not distinguish an empty text from NULL in them.
    add_columns
        Add columns of the output that the table lacks, and fill them with NULL in older rows. Columns that the output
        lacks are NULL in new rows.
    compression
        Of appended files: any that Spark writes.
    budget
        With a key: the maximum size of a micro-batch's rows, which the driver holds. What the library needs to read and
        write the table's own files is not counted.

    Examples
    --------
    >>> delta("/tmp/orders", partition_by="day").options.partition_by
    ('day',)
    """
    return DeltaSink(path, lake_options(key, order_by, partition_by, add_columns, compression, budget))
