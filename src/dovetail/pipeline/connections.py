"""Databases that a pipeline will log in to, tried before anything starts."""

from dovetail.errors import PlanError
from dovetail.pipeline.checks import CheckedPipeline
from dovetail.pipeline.models import PostgresSink
from dovetail.pipeline.problems import PipelineError

__all__ = ["check_connections"]

_SECONDS = 3


def check_connections(checked: CheckedPipeline) -> None:
    """Log in to the sink's database, if it has one.

    Raises
    ------
    PipelineError
        If that fails, with what the database says.
    """
    sink = checked.pipeline.sink
    if not isinstance(sink, PostgresSink):
        return
    import psycopg

    from dovetail.spark.sinks.postgres import first_line

    try:
        with psycopg.connect(
            host=sink.host,
            port=sink.port,
            dbname=sink.database,
            user=sink.user,
            password=None if sink.password is None else sink.password.read().get_secret_value(),
            connect_timeout=_SECONDS,
        ):
            return
    except psycopg.Error as error:
        message = f"PostgreSQL at {sink.host}:{sink.port}: {first_line(error)}"
    except PlanError as error:
        message = str(error)
    hint = "Check host, port, database, user and password."
    raise PipelineError(checked.document.path, [checked.document.problem(("sink",), message, hint)])
