"""Iceberg tables, exactly once: the flow's mark is a property of the table, set in the commit of the rows.

Not in the snapshot's summary: a table that expires its snapshots would forget what it has. A property that ends on the
flow's id holds the micro-batch, the digest of its receipt, and the driver's epoch.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.spark.flow.ownership import Owner
from dovetail.spark.sinks.lake import (
    LakeOptions,
    LakeSink,
    LakeTable,
    columns_to_add,
    lake_options,
    local_directory_of,
    package_of,
)
from dovetail.spark.sinks.lake_files import DataFile
from dovetail.spark.sinks.lake_mark import Mark
from dovetail.storage.local import LOCAL

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table, Transaction

__all__ = ["IcebergSink", "iceberg"]

_PROPERTY = "dovetail.flow."
_FLUSHED = 3  # snapshots
_RETRIES = "commit.retry.num-retries"


class IcebergSink(LakeSink):
    """A table of an Iceberg catalog; made by `iceberg`."""

    kind = "iceberg"

    def __init__(self, table: str, catalog: str, properties: Mapping[str, str], options: LakeOptions) -> None:
        super().__init__(options)
        if table.count(".") < 1 or not all(table.split(".")):
            raise PlanError(f"table={table!r} names no namespace.", hint="Name it as namespace.table.")
        self.table, self.catalog, self._properties = table, catalog, dict(properties)
        self._opened: Catalog | None = None
        with package_of("pyiceberg", "iceberg"):
            import pyiceberg.catalog  # noqa: F401 -- an optional package: found missing here, not in the first micro-batch

    def __repr__(self) -> str:
        # Properties may hold secrets.
        return f"IcebergSink({self.table!r}, catalog={self.catalog!r})"

    def make(self, schema: pa.Schema) -> None:
        from pyiceberg.exceptions import NoSuchTableError, TableAlreadyExistsError

        with package_of("sqlalchemy", "iceberg"):
            catalog = self._catalog()
        try:
            catalog.load_table(self.table)
        except NoSuchTableError:
            catalog.create_namespace_if_not_exists(self.table.rpartition(".")[0])
            with suppress(TableAlreadyExistsError):  # another flow has made it meanwhile
                with catalog.create_table_transaction(self.table, schema) as made, made.update_spec() as spec:
                    for name in self.options.partition_by or ():
                        spec.add_identity(name)
                self.load().make_durable()

    def load(self) -> LakeTable:
        return _IcebergTable(self._catalog().load_table(self.table))

    def _catalog(self) -> "Catalog":
        from pyiceberg.catalog import load_catalog

        if self._opened is None:
            self._opened = load_catalog(self.catalog, **self._properties)
        return self._opened


class _IcebergTable(LakeTable):
    """A table at one snapshot."""

    keeps_partition_columns = True

    def __init__(self, table: "Table") -> None:
        self._table, self.where = table, f"{'.'.join(table.name())} ({table.location()})"
        self.directory = local_directory_of(table.location(), ".".join(table.name()))
        self.files = self.directory / "data"
        spec, schema = table.spec(), table.schema()
        self._transforms = [(str(field.transform), schema.find_column_name(field.source_id)) for field in spec.fields]
        self.partition_columns = tuple(str(name) for _, name in self._transforms)

    def mark(self, flow: str) -> Mark | None:
        text = self._table.properties.get(_PROPERTY + flow)
        return None if text is None else Mark.from_dict(json.loads(text))

    def missing_columns(self, schema: pa.Schema, options: LakeOptions) -> list[pa.Field]:
        theirs = self._table.schema().as_arrow()
        missing = columns_to_add(_types(schema), _types(theirs), self.where, schema)
        required = [field.name for field in theirs if not field.nullable]
        if required:
            raise PlanError(
                f"Column {required[0]!r} of {self.where} is required, and a flow's columns may be NULL.",
                hint="Make it optional in the table.",
            )
        if options.key:
            absent = [name for name in theirs.names if name not in schema.names]
            if absent:
                raise PlanError(
                    f"{self.where} has a column {absent[0]!r} that the output lacks: an upsert replaces whole rows.",
                    hint="Add it to the output.",
                )
        else:
            other = [(transform, name) for transform, name in self._transforms if transform != "identity"]
            if other:
                raise PlanError(
                    f"{self.where} is partitioned by {other[0][0]} of {other[0][1]!r}; files can be appended to tables "
                    "partitioned by columns only.",
                    hint="Pass key= to upsert, or use a table partitioned by the column itself.",
                )
        return missing

    def add_columns(self, fields: Sequence[pa.Field]) -> bool:
        from pyiceberg.exceptions import CommitFailedException

        try:
            with self._table.update_schema() as update:
                update.union_by_name(pa.schema(fields))
        except CommitFailedException:
            return False
        return True

    def append(self, files: Sequence[DataFile], flow: str, mark: Mark, owner: Owner) -> bool:
        transaction = self._transaction()
        prefix = "file://" if self._table.location().startswith("file:") else ""
        # No duplicates: the names are unique, and looking for them reads all manifests.
        transaction.add_files([f"{prefix}{self.files / file.name}" for file in files], check_duplicate_files=False)
        return self._commit(transaction, flow, mark, owner)

    def upsert(self, rows: pa.Table, key: Sequence[str], flow: str, mark: Mark, owner: Owner) -> bool:
        transaction = self._transaction()
        done = transaction.upsert(rows, join_cols=list(key))
        if not done.rows_updated and not done.rows_inserted:
            # A commit is a compare-and-set by its snapshot, so there has to be one.
            transaction.append(rows.schema.empty_table())
        return self._commit(transaction, flow, mark, owner)

    def _transaction(self) -> "Transaction":
        # The library would repeat a commit on top of another one, without looking at the mark again.
        self._table.metadata.properties[_RETRIES] = "0"
        return self._table.transaction()

    def _commit(self, transaction: "Transaction", flow: str, mark: Mark, owner: Owner) -> bool:
        from pyiceberg.exceptions import CommitFailedException

        text = json.dumps({**mark.as_dict(), "epoch": owner.epoch.number})
        transaction.set_properties({_PROPERTY + flow: text})
        try:
            transaction.commit_transaction()
        except CommitFailedException:
            return False
        return True

    def make_durable(self) -> None:
        written = [self._table.metadata_location]
        # Not the newest only: others may have committed after this flow.
        for snapshot in self._table.snapshots()[-_FLUSHED:]:
            written.append(snapshot.manifest_list)
            manifests = snapshot.manifests(self._table.io)
            written += [one.manifest_path for one in manifests if one.added_snapshot_id == snapshot.snapshot_id]
        paths = [local_directory_of(name, self.where) for name in written]
        LOCAL.sync([path for path in paths if path.exists()])
        LOCAL.sync({*(path.parent for path in paths), self.directory, self.directory.parent})


def _types(schema: pa.Schema) -> list[tuple[str, str]]:
    return [(field.name, _type_text(field.type)) for field in schema]


def _type_text(kind: pa.DataType) -> str:
    """The name of the Iceberg type that holds an Arrow type.

    >>> _type_text(pa.int16()), _type_text(pa.list_(pa.timestamp("us", tz="UTC")))
    ('int', 'list<timestamptz>')
    """
    tests: list[tuple[Any, str]] = [
        (pa.types.is_boolean, "boolean"),
        (pa.types.is_int64, "long"),
        (pa.types.is_integer, "int"),
        (pa.types.is_float32, "float"),
        (pa.types.is_float64, "double"),
        (pa.types.is_date, "date"),
    ]
    for test, name in tests:
        if test(kind):
            return name
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "string"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "binary"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "timestamptz"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{_type_text(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{_type_text(kind.key_type)}, {_type_text(kind.item_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{part.name}: {_type_text(part.type)}' for part in kind)}>"
    return str(kind)


def iceberg(
    table: str,
    *,
    catalog: str = "default",
    properties: Mapping[str, str] | None = None,
    key: str | Sequence[str] | None = None,
    order_by: str | None = None,
    partition_by: str | Sequence[str] | None = None,
    add_columns: bool = False,
    compression: str = "snappy",
    budget: str | int | Budget = "256MB",
) -> IcebergSink:
    """A table of an Iceberg catalog that gets every row of the flow exactly once; needs the package ``pyiceberg``.

    Without `key`, rows are appended: executors write the data files, the driver commits their names. With it, rows
    replace those of the same key: executors stage them, the driver merges them and writes the changed files itself.

    Parameters
    ----------
    table
        ``namespace.table``, made if there is none. Its location must be a local directory or, on a cluster, one that
        all nodes mount. Several flows may write to it, and other programs.
    catalog, properties
        The catalog's name and properties, as for ``pyiceberg.catalog.load_catalog``, which also reads
        ``~/.pyiceberg.yaml``. Properties are in no plan, log or error message of ours.
    key, order_by, add_columns, compression, budget
        As for `delta`.
    partition_by
        The columns that a new table is partitioned by. An existing table must be partitioned by columns, not by
        transforms of them, to append to it.

    Examples
    --------
    >>> iceberg("sales.orders", catalog="prod", partition_by="day")
    IcebergSink('sales.orders', catalog='prod')
    """
    options = lake_options(key, order_by, partition_by, add_columns, compression, budget)
    return IcebergSink(table, catalog, properties or {}, options)
