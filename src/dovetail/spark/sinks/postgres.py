"""PostgreSQL, exactly once: executors copy into a staging table, one transaction moves the rows into the target.

``dovetail_flows``, in the target's schema, has a row per flow and sink: which driver may publish, and the last
published micro-batch. A driver that starts takes the row over, creates its own staging table and drops those of others:
a replaced driver then fails to copy or publish. The publishing transaction locks the row, compares driver and
micro-batch, moves the rows and updates it.

Every attempt of a task copies under a name of its own and reports it to the driver. The receipt has the names that
count, so rows of a failed or repeated attempt are never moved.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from dovetail.core.errors import PlanError, StateError
from dovetail.core.faultpoints import fault_point
from dovetail.spark.flow.ownership import Owner
from dovetail.spark.flow.sink import Receipt, Sink, SinkContext
from dovetail.spark.sinks.postgres_copy import ATTEMPT_COLUMN, CopyTask, as_text
from dovetail.spark.sinks.postgres_login import PostgresLogin, jdbc_options
from dovetail.spark.sinks.postgres_tables import (
    columns_of,
    create_staging,
    has_unique_index,
    quoted_name,
    refused_before_commit,
    refused_rows,
)
from dovetail.storage.digests import canonical, digest_of

if TYPE_CHECKING:
    import psycopg

__all__ = ["PostgresSink", "jdbc", "postgres"]

_FLOWS = "dovetail_flows"
_LEDGER = "dovetail_ledger"  # of earlier versions: a row per published micro-batch
_COPIED = T.StructType().add("attempt", T.StringType()).add("rows", T.LongType()).add("refused", T.StringType())


class PostgresSink(Sink):
    """A table of a PostgreSQL database; made by `postgres`."""

    kind = "postgres"

    def __init__(
        self,
        login: PostgresLogin,
        table: str,
        key: Sequence[str] | None = None,
        order_by: str | None = None,
    ) -> None:
        self._login = login
        schema, dot, name = table.rpartition(".")
        self.schema, self.table = (schema if dot else None), name
        self.key, self.order_by = None if key is None else list(key), order_by

    def __repr__(self) -> str:
        # Without the password.
        return f"PostgresSink({self._login.server}/{self._login.options['dbname']}, table={self.table!r})"

    # ================================================================ opening

    def open(self, context: SinkContext) -> None:
        """Log in and compare the columns."""
        super().open(context)
        names = context.schema.names
        for field in context.schema:
            as_text(field.name, field.dataType)
        for name in [*(self.key or ()), *([self.order_by] if self.order_by else [])]:
            if name not in names:
                raise PlanError(f"The column {name!r} is not in the output.", hint=f"It has {', '.join(names)}.")
        with self._connected(PlanError) as connection, connection.cursor() as cursor:
            self.schema = self.schema or self._found_schema(cursor)
            found = columns_of(cursor, self.schema, self.table)
            if not found:
                raise PlanError(f"There is no table {self.table!r} in schema {self.schema!r}.", hint="Create it first.")
            missing = [name for name in names if name not in found]
            if missing:
                raise PlanError(
                    f"The table {self.table!r} has no column {missing[0]!r}; it has {', '.join(found)}.",
                    hint="Add the column, or leave it out with a select.",
                )
            if self.key is not None and not has_unique_index(cursor, self.schema, self.table, self.key):
                raise PlanError(
                    f"The table {self.table!r} has no unique index on ({', '.join(self.key)}).",
                    hint="Create one, or leave key= out to add rows only.",
                )

    def _found_schema(self, cursor: "psycopg.Cursor[Any]") -> str:
        cursor.execute("SELECT table_schema FROM information_schema.tables WHERE table_name = %s", [self.table])
        found = [row[0] for row in cursor.fetchall()]
        cursor.execute("SELECT unnest(current_schemas(false))")
        path = [row[0] for row in cursor.fetchall()]
        return next((schema for schema in path if schema in found), path[0] if path else "public")

    # ================================================================ taking over

    def claim(self, owner: Owner, batch: int | None, receipt: Receipt | None) -> None:
        """Take the flow's row over, and refuse a table that is ahead of the checkpoint."""
        super().claim(owner, batch, receipt)
        self._staging, self._claimed_batch = f"{self._prefix}{owner.epoch.token}", batch
        with self._connected(StateError) as connection, connection.transaction():
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {self._named(_FLOWS)} (flow_id text, sink text, flow text, token text, "
                "batch bigint, receipt text, rows bigint, published_at timestamptz, PRIMARY KEY (flow_id, sink))"
            )
            connection.execute(
                f"INSERT INTO {self._named(_FLOWS)} (flow_id, sink, flow) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
                [owner.flow_id, self.context.place, self.context.flow],
            )
            _, newest, published = self._locked_row(connection)
            if newest is not None and (batch is None or newest > batch):
                raise StateError(
                    f"The table {self.table!r} has micro-batch {newest} of this flow, the checkpoint has "
                    f"{'none' if batch is None else batch}: it is an older copy. Going on would write rows again.",
                    hint="Restore the newest copy of the checkpoint, or start with a new one and an empty table.",
                )
            if newest is not None and newest == batch and receipt is not None and published != _digest(receipt):
                raise self._other_run(newest)
            connection.execute(
                f"UPDATE {self._named(_FLOWS)} SET token = %s WHERE flow_id = %s AND sink = %s",
                [owner.epoch.token, owner.flow_id, self.context.place],
            )
            names = self.context.schema.names
            create_staging(connection, self._named(self.table), self._named(self._staging), names)
        self._drop_staging(besides={self._staging, *([] if receipt is None else [receipt["staging"]])})

    def _locked_row(self, connection: "psycopg.Connection[Any]") -> tuple[str, int | None, str | None]:
        found = connection.execute(
            f"SELECT token, batch, receipt FROM {self._named(_FLOWS)} WHERE flow_id = %s AND sink = %s FOR UPDATE",
            [self.owner.flow_id, self.context.place],
        ).fetchone()
        if found is None:
            raise StateError(
                f"The row of this flow in {_FLOWS} was removed while it ran.",
                hint="Start the flow again with the same checkpoint.",
            )
        return found[0], found[1], found[2]

    def _require_not_replaced(self, token: str) -> None:
        if token != self.owner.epoch.token:
            raise StateError(
                f"This driver was replaced: another one, or a copy of the checkpoint, has taken over the table "
                f"{self.table!r} for this flow. What this one did was not published.",
                hint="Let the other driver run. To run the flow here, stop the other one and start the flow again.",
            )

    def _other_run(self, batch: int) -> StateError:
        return StateError(
            f"The table {self.table!r} has micro-batch {batch} of this flow from another run than the checkpoint's: a "
            "copy of the checkpoint has run as well.",
            hint="Go on with the copy that published last, or start with a new checkpoint and an empty table.",
        )

    @property
    def _prefix(self) -> str:
        return f"dovetail_{digest_of(f'{self.owner.flow_id} {self.context.place}'.encode())[:16]}_"

    def _drop_staging(self, besides: set[str]) -> None:
        with self._connected(StateError) as connection:
            found = connection.execute(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND table_name LIKE %s",
                [self.schema, self._prefix.replace("_", r"\_") + "%"],
            ).fetchall()
            for (name,) in found:
                if name not in besides:
                    connection.execute(f"DROP TABLE IF EXISTS {self._named(name)}")

    # ================================================================ the two moves

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        """Let executors copy the rows into this driver's staging table."""
        names = list(df.columns)
        columns = ", ".join(map(quoted_name, names))
        texts = [as_text(field.name, field.dataType) for field in df.schema]
        copy = f"COPY {self._named(self._staging)} ({columns}, {ATTEMPT_COLUMN}) FROM STDIN (FORMAT csv)"
        task = CopyTask(self._login.options, copy)
        try:
            reports = df.select(*texts).mapInArrow(task, _COPIED).collect()
        except Exception:
            # The staging table of a replaced driver is dropped.
            with self._connected(StateError) as connection, connection.transaction():
                self._require_not_replaced(self._locked_row(connection)[0])
            raise
        refused = next((row["refused"] for row in reports if row["refused"] is not None), None)
        if refused is not None:
            raise refused_before_commit(self.table, refused)
        fault_point("sink.postgres.copied")
        return {
            "batch": batch,
            "staging": self._staging,
            "schema": self.schema,
            "columns": names,
            "attempts": [row["attempt"] for row in reports],
            "rows": sum(row["rows"] for row in reports),
        }

    def publish(self, receipt: Receipt) -> None:
        """Move the staged rows into the target and record the micro-batch, in one transaction, once."""
        fault_point("sink.postgres.publish")
        batch = receipt["batch"]
        refusing = refused_rows(self.table, batch, self.key)
        with self._connected(StateError) as connection, refusing, connection.transaction():
            token, newest, published = self._locked_row(connection)
            self._require_not_replaced(token)
            if newest is not None and newest >= batch:
                if newest == batch and published == _digest(receipt):
                    return
                raise self._other_run(newest)
            if self._was_published_by_format_1(connection, receipt):
                return
            if receipt["rows"]:
                self._move_rows(connection, receipt)
            fault_point("sink.postgres.moved")
            connection.execute(
                f"UPDATE {self._named(_FLOWS)} SET batch = %s, receipt = %s, rows = %s, published_at = now() "
                "WHERE flow_id = %s AND sink = %s",
                [batch, _digest(receipt), receipt["rows"], self.owner.flow_id, self.context.place],
            )
        fault_point("sink.postgres.published")

    def _move_rows(self, connection: "psycopg.Connection[Any]", receipt: Receipt) -> None:
        staged = connection.execute(
            f"SELECT count(*) FROM {self._named(receipt['staging'])} WHERE {ATTEMPT_COLUMN} = ANY(%s)",
            [receipt["attempts"]],
        ).fetchone()
        if staged is None or staged[0] != receipt["rows"]:
            raise StateError(
                f"The staging table {receipt['staging']} has {0 if staged is None else staged[0]} rows of micro-batch "
                f"{receipt['batch']}, {receipt['rows']} were committed: somebody changed it.",
                hint="Restore the database and the checkpoint from copies of one moment.",
            )
        connection.execute(self._move(receipt), [receipt["attempts"]])

    def _was_published_by_format_1(self, connection: "psycopg.Connection[Any]", receipt: Receipt) -> bool:
        """Whether an earlier version has published its commit; it identified the flow by its checkpoint's path."""
        if receipt["staging"].startswith(self._prefix):
            return False
        exists = connection.execute("SELECT to_regclass(%s)", [self._named(_LEDGER)]).fetchone()
        if exists is None or exists[0] is None:
            return False
        owner = f"{self.context.flow}-{digest_of(str(self.context.staged_root).encode())[:8]}"
        found = connection.execute(
            f"SELECT 1 FROM {self._named(_LEDGER)} WHERE flow = %s AND batch = %s", [owner, receipt["batch"]]
        ).fetchone()
        return found is not None

    def _move(self, receipt: Receipt) -> str:
        columns = ", ".join(map(quoted_name, receipt["columns"]))
        rows = f"FROM {self._named(receipt['staging'])} WHERE {ATTEMPT_COLUMN} = ANY(%s)"
        insert = f"INSERT INTO {self._named(self.table)} ({columns})"
        if self.key is None:
            return f"{insert} SELECT {columns} {rows}"
        key = ", ".join(map(quoted_name, self.key))
        others = [name for name in receipt["columns"] if name not in self.key]
        latest = f"{quoted_name(self.order_by)} DESC NULLS LAST, " if self.order_by else ""
        replace = ", ".join(f"{quoted_name(name)} = EXCLUDED.{quoted_name(name)}" for name in others)
        return (
            f"{insert} SELECT DISTINCT ON ({key}) {columns} {rows} ORDER BY {key}, {latest}ctid DESC "
            f"ON CONFLICT ({key}) DO {f'UPDATE SET {replace}' if others else 'NOTHING'}"
        )

    def forget(self, receipt: Receipt) -> None:
        """Empty the staging table; the next micro-batch is not staged yet."""
        if receipt["staging"] == self._staging:
            if receipt["rows"]:
                self._empty_staging()
        elif receipt["batch"] == self._claimed_batch:
            # Not earlier: the newest commit may still be published from the previous driver's table.
            self._drop_staging(besides={self._staging})

    def _empty_staging(self) -> None:
        with self._connected(StateError) as connection:
            connection.execute(f"TRUNCATE {self._named(self._staging)}")

    # ================================================================ the connection

    def _named(self, table: str) -> str:
        return f"{quoted_name(str(self.schema))}.{quoted_name(table)}"

    def _connected(
        self, failure: type[PlanError] | type[StateError]
    ) -> "AbstractContextManager[psycopg.Connection[Any]]":
        return self._login.connected(failure)


def _digest(receipt: Receipt) -> str:
    return digest_of(canonical(dict(receipt)))


def postgres(
    table: str,
    *,
    host: str = "localhost",
    port: int = 5432,
    database: str,
    user: str,
    password: str | None = None,
    key: str | Sequence[str] | None = None,
    order_by: str | None = None,
    sslmode: str | None = None,
    sslrootcert: str | os.PathLike[str] | None = None,
    sslcert: str | os.PathLike[str] | None = None,
    sslkey: str | os.PathLike[str] | None = None,
) -> PostgresSink:
    """A table of a PostgreSQL database that gets every row of the flow exactly once.

    Parameters
    ----------
    table
        The table, or ``schema.table``; it must exist and have the flow's columns.
    host, port, database, user, password
        The login, also used by executors.
    key
        Columns of a unique index: a row replaces the one with the same key. None: rows are added.
    order_by
        With a key: of rows with the same key in one micro-batch, the one with the greatest value here wins.
    sslmode
        As in PostgreSQL: ``"require"`` encrypts the connection, ``"verify-full"`` also verifies the server's name.
        None: TLS if the server offers it.
    sslrootcert, sslcert, sslkey
        PEM files that the driver and all executors can read: the trusted certificates, and the client's own.

    Examples
    --------
    >>> postgres("orders", database="warehouse", user="etl", password="secret", sslmode="require")
    PostgresSink(localhost:5432/warehouse, table='orders')
    """
    files = {"sslrootcert": sslrootcert, "sslcert": sslcert, "sslkey": sslkey}
    tls = {name: None if path is None else os.fspath(path) for name, path in files.items()}
    login = PostgresLogin(host, port, database, user, password, {"sslmode": sslmode, **tls})
    return PostgresSink(login, table, [key] if isinstance(key, str) else key, order_by)


def jdbc(url: str, table: str, **options: Any) -> PostgresSink:
    """A table named by a JDBC address; only PostgreSQL's, see `postgres`.

    Parameters
    ----------
    url
        ``jdbc:postgresql://host:port/database``, optionally with ``?user=``, ``password=``, ``ssl=``, ``sslmode=``,
        ``sslrootcert=``, ``sslcert=`` or ``sslkey=``; other parameters are refused.
    table, options
        As for `postgres`; they must not repeat what the address has.

    Examples
    --------
    >>> jdbc("jdbc:postgresql://db:5433/warehouse?sslmode=require", "orders", user="etl")
    PostgresSink(db:5433/warehouse, table='orders')
    """
    named = jdbc_options(url)
    twice = sorted(set(named) & set(options))
    if twice:
        raise PlanError(f"{twice[0]} is given twice, in the address and as an argument.", hint="Give it once.")
    if "user" not in named and "user" not in options:
        raise PlanError("The address names no user.", hint="Pass user=, or add ?user=... to the address.")
    return postgres(table, **named, **options)
