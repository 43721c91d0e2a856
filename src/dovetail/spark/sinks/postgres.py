"""PostgreSQL, exactly once: executors copy into a staging table, one transaction moves it with a row in a ledger.

Every attempt of a task copies under a name of its own and tells the driver that name; the receipt holds the names that
count, so that what a failed or repeated attempt left behind is never moved. The ledger (``dovetail_ledger``, in the
target's schema) has a row per published micro-batch: a transaction that finds its row there does nothing.
"""

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from dovetail.errors import PlanError, StateError
from dovetail.faultpoints import fault_point
from dovetail.relation.format import digest_of
from dovetail.spark.sinks.base import Receipt, Sink, SinkContext
from dovetail.spark.sinks.postgres_copy import ATTEMPT_COLUMN, CopyTask, as_text

if TYPE_CHECKING:
    import psycopg

__all__ = ["PostgresSink", "jdbc", "postgres"]

_LEDGER = "dovetail_ledger"
_CONNECT_SECONDS = 5
_COPIED = T.StructType([T.StructField("attempt", T.StringType()), T.StructField("rows", T.LongType())])
_JDBC = re.compile(r"jdbc:postgresql://([^:/?]+)(?::(\d+))?/([^?]+)")


class PostgresSink(Sink):
    """A table of a PostgreSQL database; made by `postgres`."""

    kind = "postgres"

    def __init__(
        self,
        login: Mapping[str, str],
        table: str,
        key: Sequence[str] | None = None,
        order_by: str | None = None,
    ) -> None:
        self._login = dict(login)
        schema, dot, name = table.rpartition(".")
        self.schema, self.table = (schema if dot else None), name
        self.key, self.order_by = None if key is None else list(key), order_by

    def __repr__(self) -> str:
        # Whatever is shown of it, the password is not.
        where = f"{self._login.get('host')}:{self._login.get('port')}/{self._login.get('dbname')}"
        return f"PostgresSink({where}, table={self.table!r})"

    # ================================================================ opening

    def open(self, context: SinkContext) -> None:
        """Log in, compare the columns, make the ledger."""
        super().open(context)
        names = context.schema.names
        for field in context.schema:
            as_text(field.name, field.dataType)
        for name in [*(self.key or ()), *([self.order_by] if self.order_by else [])]:
            if name not in names:
                raise PlanError(f"The column {name!r} is not put out.", hint=f"There are {', '.join(names)}.")
        with self._connected(PlanError) as connection, connection.cursor() as cursor:
            self.schema = self.schema or self._found_schema(cursor)
            found = _columns_of(cursor, self.schema, self.table)
            if not found:
                raise PlanError(f"There is no table {self.table!r} in schema {self.schema!r}.", hint="Create it first.")
            missing = [name for name in names if name not in found]
            if missing:
                raise PlanError(
                    f"The table {self.table!r} has no column {missing[0]!r}; it has {', '.join(found)}.",
                    hint="Add the column, or leave it out with a select.",
                )
            if self.key is not None and not _has_unique_index(cursor, self.schema, self.table, self.key):
                raise PlanError(
                    f"The table {self.table!r} has no unique index on ({', '.join(self.key)}).",
                    hint="Create one, or leave key= out to add rows only.",
                )
            cursor.execute(
                f"CREATE TABLE IF NOT EXISTS {self._named(_LEDGER)} (flow text, batch bigint, rows bigint, "
                "published_at timestamptz DEFAULT now(), PRIMARY KEY (flow, batch))"
            )

    def _found_schema(self, cursor: "psycopg.Cursor[Any]") -> str:
        cursor.execute("SELECT table_schema FROM information_schema.tables WHERE table_name = %s", [self.table])
        found = [row[0] for row in cursor.fetchall()]
        cursor.execute("SELECT unnest(current_schemas(false))")
        path = [row[0] for row in cursor.fetchall()]
        return next((schema for schema in path if schema in found), path[0] if path else "public")

    @property
    def _owner(self) -> str:
        # Two flows of one name may write to one table; their checkpoints tell them apart.
        return f"{self.context.flow}-{digest_of(str(self.context.staged_root).encode())[:8]}"

    @property
    def _prefix(self) -> str:
        return f"dovetail_{digest_of(self._owner.encode())[:12]}_"

    # ================================================================ the two moves

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        """Let executors copy the rows into a table of their own."""
        staging = f"{self._prefix}{batch:010d}_{uuid.uuid4().hex[:8]}"
        names = list(df.columns)
        columns = ", ".join(map(_quoted, names))
        with self._connected(StateError) as connection:
            connection.execute(
                f"CREATE TABLE {self._named(staging)} AS SELECT {columns}, ''::text AS {ATTEMPT_COLUMN} "
                f"FROM {self._named(self.table)} WITH NO DATA"
            )
        fault_point("sink.postgres.staging")
        texts = [as_text(field.name, field.dataType) for field in df.schema]
        copy = f"COPY {self._named(staging)} ({columns}, {ATTEMPT_COLUMN}) FROM STDIN (FORMAT csv)"
        task = CopyTask(self._login, copy)
        told = df.select(*texts).mapInArrow(task, _COPIED).collect()
        fault_point("sink.postgres.copied")
        return {
            "batch": batch,
            "staging": staging,
            "schema": self.schema,
            "columns": names,
            "attempts": [row["attempt"] for row in told],
            "rows": sum(row["rows"] for row in told),
        }

    def publish(self, receipt: Receipt) -> None:
        """Move the staged rows into the target and write the ledger's row, in one transaction, once."""
        fault_point("sink.postgres.publish")
        with self._connected(StateError) as connection, connection.transaction():
            done = connection.execute(
                f"INSERT INTO {self._named(_LEDGER)} (flow, batch, rows) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
                [self._owner, receipt["batch"], receipt["rows"]],
            )
            if not done.rowcount:
                return
            connection.execute(self._move(receipt), [receipt["attempts"]])
            fault_point("sink.postgres.moved")
        fault_point("sink.postgres.published")

    def _move(self, receipt: Receipt) -> str:
        columns = ", ".join(map(_quoted, receipt["columns"]))
        rows = f"FROM {self._named(receipt['staging'])} WHERE {ATTEMPT_COLUMN} = ANY(%s)"
        insert = f"INSERT INTO {self._named(self.table)} ({columns})"
        if self.key is None:
            return f"{insert} SELECT {columns} {rows}"
        key = ", ".join(map(_quoted, self.key))
        others = [name for name in receipt["columns"] if name not in self.key]
        latest = f"{_quoted(self.order_by)} DESC NULLS LAST, " if self.order_by else ""
        replace = ", ".join(f"{_quoted(name)} = EXCLUDED.{_quoted(name)}" for name in others)
        return (
            f"{insert} SELECT DISTINCT ON ({key}) {columns} {rows} ORDER BY {key}, {latest}ctid DESC "
            f"ON CONFLICT ({key}) DO {f'UPDATE SET {replace}' if others else 'NOTHING'}"
        )

    def forget(self, receipt: Receipt) -> None:
        """Drop staging tables of micro-batches that are done for good; keep the ledger short."""
        with self._connected(StateError) as connection:
            found = connection.execute(
                "SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND table_name LIKE %s",
                [self.schema, self._prefix.replace("_", r"\_") + "%"],
            ).fetchall()
            for (name,) in found:
                number = name.removeprefix(self._prefix).partition("_")[0]
                if number.isdigit() and int(number) <= receipt["batch"]:
                    connection.execute(f"DROP TABLE IF EXISTS {self._named(name)}")
            connection.execute(
                f"DELETE FROM {self._named(_LEDGER)} WHERE flow = %s AND batch < %s",
                [self._owner, receipt["batch"] - 100],
            )

    # ================================================================ the connection

    def _named(self, table: str) -> str:
        return f"{_quoted(str(self.schema))}.{_quoted(table)}"

    @contextmanager
    def _connected(self, failure: type[PlanError] | type[StateError]) -> "Iterator[psycopg.Connection[Any]]":
        """A connection whose errors say what to do and never hold a password."""
        import psycopg

        try:
            with psycopg.connect(**self._login, connect_timeout=_CONNECT_SECONDS, autocommit=True) as connection:  # type: ignore[arg-type]
                yield connection
        except psycopg.Error as error:
            raise failure(
                f"PostgreSQL at {self._login.get('host')}:{self._login.get('port')}: {first_line(error)}",
                hint="Nothing was lost: remove the cause and start the flow again."
                if failure is StateError
                else "Check host, port, database, user and password.",
            ) from None


def first_line(error: BaseException) -> str:
    """What a database's error says, in one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text.rpartition("failed: ")[2].removeprefix("FATAL: ").strip().rstrip(".") + "."


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _columns_of(cursor: "psycopg.Cursor[Any]", schema: str, table: str) -> list[str]:
    cursor.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s "
        "ORDER BY ordinal_position",
        [schema, table],
    )
    return [row[0] for row in cursor.fetchall()]


def _has_unique_index(cursor: "psycopg.Cursor[Any]", schema: str, table: str, key: Sequence[str]) -> bool:
    cursor.execute(
        "SELECT array_agg(a.attname::text) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid "
        "JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY(i.indkey) "
        "WHERE n.nspname = %s AND c.relname = %s AND i.indisunique AND i.indpred IS NULL GROUP BY i.indexrelid",
        [schema, table],
    )
    return any(sorted(row[0]) == sorted(key) for row in cursor.fetchall())


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
) -> PostgresSink:
    """A table of a PostgreSQL database, to which every row of the flow goes exactly once.

    Parameters
    ----------
    table
        The table, or ``schema.table``; it must exist and have the flow's columns.
    host, port, database, user, password
        How to log in; executors do so as well.
    key
        Columns of a unique index: a row whose key is there replaces the old one. None: rows are added.
    order_by
        With a key: of rows with the same key in one micro-batch, the one with the greatest value here counts.

    Examples
    --------
    >>> postgres("orders", database="warehouse", user="etl", password="secret")
    PostgresSink(localhost:5432/warehouse, table='orders')
    """
    login = {"host": host, "port": str(port), "dbname": database, "user": user}
    if password is not None:
        login["password"] = password
    return PostgresSink(login, table, [key] if isinstance(key, str) else key, order_by)


def jdbc(url: str, table: str, **options: Any) -> PostgresSink:
    """A table named by an address of JDBC; so far only PostgreSQL's, see `postgres`.

    Examples
    --------
    >>> jdbc("jdbc:postgresql://db:5433/warehouse", "orders", user="etl")
    PostgresSink(db:5433/warehouse, table='orders')
    """
    match = _JDBC.fullmatch(url)
    if match is None:
        raise PlanError(
            f"{url!r} is not an address that can be written to.", hint="Use jdbc:postgresql://host:port/database."
        )
    return postgres(table, host=match[1], port=int(match[2] or 5432), database=match[3], **options)
