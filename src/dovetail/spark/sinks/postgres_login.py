"""Logins to PostgreSQL: TLS, JDBC addresses, and errors that help and contain no password."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from dovetail.core.errors import PlanError, StateError

if TYPE_CHECKING:
    import psycopg

__all__ = ["PostgresLogin", "first_line", "jdbc_options"]

_CONNECT_SECONDS = 5
_TLS_FILES = ("sslrootcert", "sslcert", "sslkey")
_TLS_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_JDBC = re.compile(r"jdbc:postgresql://(\[[^\]]+\]|[^:/?@,]+)(?::(\d+))?/([^?]+)(?:\?(.*))?")
_JDBC_OPTIONS = {"user", "password", "sslmode", *_TLS_FILES}


class PostgresLogin:
    """The arguments of ``psycopg.connect``; its text never contains the password."""

    def __init__(
        self, host: str, port: int, database: str, user: str | None, password: str | None, tls: Mapping[str, str | None]
    ) -> None:
        options = {"host": host, "port": str(port), "dbname": database, "user": user, "password": password, **tls}
        self.options = {name: str(value) for name, value in options.items() if value is not None}
        mode = self.options.get("sslmode")
        if mode is not None and mode not in _TLS_MODES:
            raise PlanError(f"sslmode={mode!r} is not known.", hint=f"Use one of {', '.join(_TLS_MODES)}.")
        if self.options.get("sslrootcert") == "system":
            return  # the certificates that the operating system trusts
        for name in _TLS_FILES:
            if name in self.options and not Path(self.options[name]).is_file():
                raise PlanError(
                    f"{name}={self.options[name]!r} is not a file on this host.",
                    hint="Name a PEM file that the driver and all workers can read.",
                )

    @property
    def server(self) -> str:
        return f"{self.options['host']}:{self.options['port']}"

    def __repr__(self) -> str:
        return f"PostgresLogin({self.server}/{self.options['dbname']})"

    @contextmanager
    def connected(self, failure: type[PlanError] | type[StateError]) -> "Iterator[psycopg.Connection[Any]]":
        """A connection whose errors are of one class and name the server."""
        import psycopg

        try:
            with psycopg.connect(**self.options, connect_timeout=_CONNECT_SECONDS, autocommit=True) as connection:  # type: ignore[arg-type]
                yield connection
        except psycopg.Error as error:
            raise failure(
                f"PostgreSQL at {self.server}: {first_line(error)}",
                hint="Nothing was lost: remove the cause and start the flow again."
                if failure is StateError
                else "Check host, port, database, user, password and the options of TLS.",
            ) from None


def first_line(error: BaseException) -> str:
    """A database's error in one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text.rpartition("failed: ")[2].removeprefix("FATAL: ").strip().rstrip(".") + "."


def jdbc_options(url: str) -> dict[str, Any]:
    """The arguments of `dovetail.sinks.postgres` for a JDBC address.

    >>> jdbc_options("jdbc:postgresql://db/warehouse?sslmode=require&user=etl")
    {'host': 'db', 'port': 5432, 'database': 'warehouse', 'sslmode': 'require', 'user': 'etl'}
    """
    match = _JDBC.fullmatch(url)
    if match is None:
        # Nothing after the question mark is shown: it may contain a password.
        raise PlanError(
            f"{url.partition('?')[0]!r} is not an address that can be written to.",
            hint="Use jdbc:postgresql://host:port/database, with user= and password= beside it.",
        )
    found: dict[str, Any] = {"host": match[1].strip("[]"), "port": int(match[2] or 5432), "database": match[3]}
    for name, value in parse_qsl(match[4] or "", keep_blank_values=True):
        if name == "ssl" and value in ("", "true", "false"):
            # As in the JDBC driver: ssl=true verifies the server.
            found.setdefault("sslmode", "disable" if value == "false" else "verify-full")
        elif name in _JDBC_OPTIONS:
            found[name] = value
        else:
            raise PlanError(
                f"The parameter {name!r} of the address is not known here.",
                hint=f"Leave it out; known are ssl, {', '.join(sorted(_JDBC_OPTIONS))}.",
            )
    return found
