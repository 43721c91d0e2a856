"""Connection tests for the services of a pipeline, before anything starts."""

import re
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from dovetail.pipeline.checks import CheckedPipeline
from dovetail.pipeline.documents import Location
from dovetail.pipeline.models import JdbcTable, KafkaSink, KafkaSource, PostgresSink
from dovetail.pipeline.problems import PipelineError
from dovetail.pipeline.secrets import Secret

__all__ = ["check_connections"]

_SECONDS = 3
_POSTGRES = re.compile(r"jdbc:postgresql://([^:/?]+)(?::(\d+))?/([^?]+)(?:\?(.*))?")


def check_connections(checked: CheckedPipeline) -> None:
    """Log in to PostgreSQL databases, and connect to Kafka brokers. The error has every service that failed."""
    pipeline, wrong = checked.pipeline, []

    def told(at: Location, message: str | None, hint: str) -> None:
        if message is not None:
            wrong.append(checked.document.problem(at, message, hint))

    def check_brokers(at: Location, servers: str) -> None:
        told((*at, "servers"), _brokers(servers), "Check servers, and that the broker is running.")

    def check_login(at: Location, login: Mapping[str, Any], secret: Secret | None) -> None:
        told(at, _login(login, secret), "Check host, port, database, user, password and the options of TLS.")

    for name, source in pipeline.sources.items():
        if isinstance(source, KafkaSource):
            check_brokers(("sources", name), source.servers)
    for name, entry in pipeline.relations.items():
        build = entry.build
        place = _POSTGRES.fullmatch(build.url) if isinstance(build, JdbcTable) else None
        if isinstance(build, JdbcTable) and place is not None and not checked.has_relation(name):
            at = ("relations", name, "build")
            named = parse_qs(place[4] or "")
            login = {"host": place[1], "port": place[2] or 5432, "dbname": place[3], "user": build.user}
            check_login(at, {**login, "sslmode": named.get("sslmode", [None])[-1]}, build.password)
    sink = pipeline.sink
    if isinstance(sink, KafkaSink):
        check_brokers(("sink",), sink.servers)
    elif isinstance(sink, PostgresSink):
        login = {"host": sink.host, "port": sink.port, "dbname": sink.database, "user": sink.user}
        files = {name: getattr(sink, name) for name in ("sslrootcert", "sslcert", "sslkey")}
        found = {name: file if file in (None, "system") else checked.path(file) for name, file in files.items()}
        check_login(("sink",), {**login, "sslmode": sink.sslmode, **found}, sink.password)
    if wrong:
        raise PipelineError(checked.document.path, wrong)


def _login(login: Mapping[str, Any], secret: Secret | None) -> str | None:
    """Why the login failed; None if it succeeded."""
    import psycopg

    from dovetail.spark.sinks.postgres_login import first_line

    password = None if secret is None else secret.read().get_secret_value()
    given = {name: value for name, value in login.items() if value is not None}
    try:
        with psycopg.connect(**given, password=password, connect_timeout=_SECONDS):
            return None
    except psycopg.Error as error:
        return f"PostgreSQL at {login['host']}:{login['port']}: {first_line(error)}"


def _brokers(servers: str) -> str | None:
    """Why no broker can be reached; None if one responds."""
    why = ""
    for server in servers.split(","):
        host, _, port = server.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65_536:
            return f"{server.strip()!r} is not a broker address: write host:port."
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS):
                return None
        except OSError as error:
            why = error.strerror or str(error)
    return f"No Kafka broker responds at {servers}: {why}."
