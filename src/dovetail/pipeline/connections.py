"""Services that a pipeline will talk to, tried before anything starts."""

import re
import socket

from dovetail.pipeline.checks import CheckedPipeline
from dovetail.pipeline.documents import Location
from dovetail.pipeline.models import JdbcTable, KafkaSink, KafkaSource, PostgresSink
from dovetail.pipeline.problems import PipelineError
from dovetail.pipeline.secrets import Secret

__all__ = ["check_connections"]

_SECONDS = 3
_POSTGRES = re.compile(r"jdbc:postgresql://([^:/?]+)(?::(\d+))?/([^?]+).*")


def check_connections(checked: CheckedPipeline) -> None:
    """Log in to databases of PostgreSQL, and see whether brokers of Kafka answer.

    Raises
    ------
    PipelineError
        With every service that cannot be had, and what it says.
    """
    pipeline, wrong = checked.pipeline, []

    def told(at: Location, message: str | None, hint: str) -> None:
        if message is not None:
            wrong.append(checked.document.problem(at, message, hint))

    def check_brokers(at: Location, servers: str) -> None:
        told((*at, "servers"), _brokers(servers), "Check servers, and that the broker runs.")

    def check_login(at: Location, host: str, port: int, database: str, user: str | None, secret: Secret | None) -> None:
        told(at, _login(host, port, database, user, secret), "Check host, port, database, user and password.")

    for name, source in pipeline.sources.items():
        if isinstance(source, KafkaSource):
            check_brokers(("sources", name), source.servers)
    for name, entry in pipeline.relations.items():
        build = entry.build
        place = _POSTGRES.fullmatch(build.url) if isinstance(build, JdbcTable) else None
        if isinstance(build, JdbcTable) and place is not None and not checked.has_relation(name):
            at = ("relations", name, "build")
            check_login(at, place[1], int(place[2] or 5432), place[3], build.user, build.password)
    sink = pipeline.sink
    if isinstance(sink, KafkaSink):
        check_brokers(("sink",), sink.servers)
    elif isinstance(sink, PostgresSink):
        check_login(("sink",), sink.host, sink.port, sink.database, sink.user, sink.password)
    if wrong:
        raise PipelineError(checked.document.path, wrong)


def _login(host: str, port: int, database: str, user: str | None, secret: Secret | None) -> str | None:
    """Why nobody can log in; None: one can."""
    import psycopg

    from dovetail.spark.sinks.postgres import first_line

    password = None if secret is None else secret.read().get_secret_value()
    try:
        with psycopg.connect(
            host=host, port=port, dbname=database, user=user, password=password, connect_timeout=_SECONDS
        ):
            return None
    except psycopg.Error as error:
        return f"PostgreSQL at {host}:{port}: {first_line(error)}"


def _brokers(servers: str) -> str | None:
    """Why no broker can be reached; None: one answers, and knows the others."""
    why = ""
    for server in servers.split(","):
        host, _, port = server.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65_536:
            return f"{server.strip()!r} is not the address of a broker: write host:port."
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS):
                return None
        except OSError as error:
            why = error.strerror or str(error)
    return f"No Kafka broker answers at {servers}: {why}."
