"""Tables of the PostgreSQL sink: columns and indexes, staging tables, and why a table refuses a row."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import StateError
from dovetail.spark.sinks.postgres_copy import ATTEMPT_COLUMN
from dovetail.spark.sinks.postgres_login import first_line

if TYPE_CHECKING:
    import psycopg

__all__ = [
    "columns_of",
    "create_staging",
    "has_unique_index",
    "quoted_name",
    "refused_before_commit",
    "refused_rows",
]


def quoted_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def columns_of(cursor: "psycopg.Cursor[Any]", schema: str, table: str) -> list[str]:
    """The columns of a table, in order; empty if there is none."""
    cursor.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s "
        "ORDER BY ordinal_position",
        [schema, table],
    )
    return [row[0] for row in cursor.fetchall()]


def has_unique_index(cursor: "psycopg.Cursor[Any]", schema: str, table: str, key: Sequence[str]) -> bool:
    """Whether a table has a unique index on exactly these columns, for all rows."""
    cursor.execute(
        "SELECT array_agg(a.attname::text) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid "
        "JOIN pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY(i.indkey) "
        "WHERE n.nspname = %s AND c.relname = %s AND i.indisunique AND i.indpred IS NULL GROUP BY i.indexrelid",
        [schema, table],
    )
    return any(sorted(row[0]) == sorted(key) for row in cursor.fetchall())


def create_staging(connection: "psycopg.Connection[Any]", target: str, staging: str, columns: Sequence[str]) -> None:
    """Create a table that refuses the same single rows as the target, so that they fail before the commit.

    ``target`` and ``staging`` are qualified and quoted. If a trigger may still change rows on their way into the
    target, the staging table has only the types: it must not refuse what the trigger would correct.
    """
    changed_by_triggers = connection.execute(
        # Bits of tgtype: 1 for each row, 2 before, 4 insert.
        "SELECT 1 FROM pg_trigger WHERE tgrelid = %s::regclass AND NOT tgisinternal AND tgtype & 7 = 7 LIMIT 1",
        [target],
    ).fetchone()
    if changed_by_triggers is None:
        like = f"LIKE {target} INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING IDENTITY"
        connection.execute(f"CREATE TABLE {staging} ({like}, {ATTEMPT_COLUMN} text)")
    else:
        names = ", ".join(map(quoted_name, columns))
        typed = f"SELECT {names}, ''::text AS {ATTEMPT_COLUMN} FROM {target}"
        connection.execute(f"CREATE TABLE {staging} AS {typed} WITH NO DATA")


def refused_before_commit(table: str, reported: str) -> StateError:
    """The error for a row that the staging table refused; ``reported`` is the reason that `CopyTask` reported."""
    reason = json.loads(reported)
    # The last value shown of a row is the name of the attempt, which does not help the user.
    row = (reason["detail"] or "").rpartition(f", {reason['attempt']}")[0]
    shown = f" {row})." if row else ""
    text = reason["text"].replace(reason["relation"] or table, table)
    return StateError(
        f"The table {table!r} refuses a row: {_constraint(reason['constraint'])}{text}{shown} The micro-batch was not "
        "committed.",
        hint="Correct or leave out such rows with transform or divert, or change the table; then start the flow again.",
    )


@contextmanager
def refused_rows(table: str, batch: int, key: Sequence[str] | None) -> Iterator[None]:
    """Report which row of a committed micro-batch a table refuses, and how to continue."""
    import psycopg

    try:
        yield
    except psycopg.IntegrityError as error:
        diag = error.diag
        replacing = "" if key is not None else " With key= rows replace those of the same key."
        raise StateError(
            f"The table {table!r} refuses micro-batch {batch}: {_constraint(diag.constraint_name)}{first_line(error)} "
            f"{diag.message_detail or ''} The micro-batch is committed and kept; no row of it is in the table.",
            hint="Change or remove the row in the table that stands in the way, or drop the constraint, and start the "
            f"flow again with the same checkpoint: it then publishes the micro-batch.{replacing}",
        ) from None


def _constraint(name: str | None) -> str:
    return "" if name is None else f"constraint {name!r}, "
