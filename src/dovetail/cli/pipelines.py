"""``dovetail init``, ``check``, ``explain``, ``run``, ``status``, ``calibrate``, ``schema``: pipelines in a shell."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.failures import Interrupted
from dovetail.cli.options import Debug, Json, Master, SparkSettings, key_values
from dovetail.cli.output import Output, TextOutput
from dovetail.cli.progress import showing_activity
from dovetail.cli.reporting import reporting
from dovetail.errors import PlanError

if TYPE_CHECKING:
    from dovetail.pipeline.checks import CheckedPipeline
    from dovetail.pipeline.runner import PlannedPipeline
    from dovetail.spark.flow_query import FlowQuery

__all__ = ["register"]

PipelineFile = Annotated[str, typer.Argument(metavar="PIPELINE", help="A pipeline file.", show_default=False)]
Jars = Annotated[
    str | None,
    typer.Option("--jars", metavar="DIRECTORY", help="Connector jars, as make jars puts them.", show_default=False),
]
_MASTER = "local[*]"
_POLL_SECONDS = 0.2
# What Spark blackens in its plans and settings: its own list, and what Kafka calls a login.
_REDACTED = "(?i)secret|password|passw|token|access[.]?key|jaas"


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (init, check, explain, run, status):
        app.command()(command)
    app.command("calibrate")(calibrate_command)
    app.command("schema")(schema_command)


# -------------------------------------------------------------------- before anything runs


def check(
    pipeline: PipelineFile,
    plan: Annotated[
        bool, typer.Option("--plan", help="Also start Spark and plan it: SQL expressions, types, budgets.")
    ] = False,
    jars: Jars = None,
    master: Master = _MASTER,
    conf: SparkSettings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a pipeline file and what it names; no query is started."""
    with reporting(json, debug) as output:
        checked = _checked(pipeline)
        _check_connections(checked)
        if plan:
            with _planned(output, checked, master, conf, jars):
                pass
        document = {
            "pipeline": pipeline,
            "name": checked.pipeline.name,
            "steps": [checked.pipeline.steps[number].kind for number in checked.chain.steps],
            "columns": None if checked.columns is None else list(checked.columns),
            "planned": plan,
        }
        output.show(document, lambda text: text.line(f"{pipeline} is all right: {_outline(checked)}."))


def explain(
    pipeline: PipelineFile,
    jars: Jars = None,
    master: Master = _MASTER,
    conf: SparkSettings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say how a pipeline will be computed: operators, memory, predicted rates. Relations that are missing are built."""
    with reporting(json, debug) as output:
        checked = _checked(pipeline)
        with _planned(output, checked, master, conf, jars) as planned:
            explanation = planned.flow.explanation()
        output.show(
            {"pipeline": pipeline, **explanation.as_dict()},
            lambda text: text.line(f"{_outline(checked)}\n\n{explanation.text()}"),
        )


def schema_command(debug: Debug = False) -> None:
    """Print the JSON schema of pipeline files, for editors."""
    with reporting(True, debug) as output:
        from dovetail.pipeline.loading import json_schema

        output.show(json_schema(), lambda _: None)


# -------------------------------------------------------------------- running


def run(
    pipeline: PipelineFile,
    trigger: Annotated[
        str | None,
        typer.Option(metavar="SPAN", help="Instead of the file's: 5 seconds, or available-now.", show_default=False),
    ] = None,
    jars: Jars = None,
    master: Master = _MASTER,
    conf: SparkSettings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a pipeline, or go on with it where it stopped. Ctrl-C stops it."""
    with reporting(json, debug) as output:
        from dovetail.pipeline.step_models import duration
        from dovetail.state.running import running

        checked = _checked(pipeline)
        if trigger is not None and trigger != "available-now":
            try:
                duration(trigger)
            except ValueError as error:
                raise PlanError(f"--trigger {error}") from None
        _check_connections(checked)
        started = time.monotonic()
        again = f"Go on with: dovetail run {pipeline}"
        # Before Spark starts: whoever comes second is told at once.
        with running(checked.path(checked.pipeline.checkpoint)), _stopping(again) as is_stopped:
            with _planned(output, checked, master, conf, jars) as planned:
                query = planned.start(trigger)
                is_stopped.watch()
                _follow(output, planned, query, is_stopped)
                document = _summary(pipeline, checked, query, time.monotonic() - started)
            if is_stopped():
                batch = "before its first micro-batch" if query.progress is None else f"after batch {document['batch']}"
                raise Interrupted(f"Stopped {batch}; nothing is lost. {again}")
            output.show(document, lambda text: _show_summary(text, document))


class _StopSign:
    """Whether somebody has pressed Ctrl-C."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._is_watching = False

    def watch(self) -> None:
        """Take Ctrl-C from Spark, whose answer is to cancel all jobs: from now on the flow is stopped properly."""
        self._is_watching = True
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._noticed)

    def _noticed(self, *_: object) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()

    def __call__(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


@contextmanager
def _stopping(again: str) -> Iterator[_StopSign]:
    sign = _StopSign()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield sign
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted; nothing is lost. {again}") from None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _follow(output: Output, planned: "PlannedPipeline", query: "FlowQuery", is_stopped: _StopSign) -> None:
    """Show progress until the flow ends, by itself or because somebody wants it to."""
    from dovetail.cli.live import showing_progress

    with showing_progress(output.messages, planned.flow.name, planned.budgets()) as live:
        while query.isActive and not is_stopped.wait(_POLL_SECONDS):
            live.update(query.progress)
        if is_stopped():
            query.stop()
        live.update(query.progress, is_last=True)
    if not is_stopped():
        query.awaitTermination(0)  # raises what it ended with


def _summary(pipeline: str, checked: "CheckedPipeline", query: "FlowQuery", seconds: float) -> dict[str, Any]:
    progress = query.progress
    operators = [] if progress is None else progress.as_dict()["operators"]
    return {
        "pipeline": pipeline,
        "name": checked.pipeline.name,
        "batch": None if progress is None else progress.batch,
        "waiting": 0 if progress is None else progress.pending,
        "seconds": round(seconds, 3),
        "operators": operators,
    }


def _show_summary(text: TextOutput, document: dict[str, Any]) -> None:
    text.line(f"{document['name']} has ended, after {document['seconds']:.1f} s")
    text.table(
        {"operator": "left", "taken in": "right", "put out": "right", "waiting": "right"},
        [
            [o["name"], f"{o['totals']['stream_tuples_in']:,}", f"{o['totals']['output_rows']:,}", f"{o['pending']:,}"]
            for o in document["operators"]
        ],
    )


# -------------------------------------------------------------------- afterwards


def status(
    pipeline: Annotated[
        str, typer.Argument(metavar="PIPELINE", help="A pipeline file, or a checkpoint.", show_default=False)
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say where a flow is, running or stopped, from its checkpoint; Spark is not started."""
    with reporting(json, debug) as output:
        from dovetail.cli.status import show_status, status_document

        if os.path.isdir(pipeline):
            checkpoint = os.path.abspath(pipeline)
        else:
            from dovetail.pipeline.checks import local_path
            from dovetail.pipeline.loading import parse_pipeline

            described, file = parse_pipeline(pipeline)
            checkpoint = local_path(described.checkpoint, file)
        document = status_document(checkpoint)
        output.show(document, lambda text: show_status(text, document))


def init(
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="Where to write it; must be new or empty.")
    ] = ".",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a small pipeline with data, commented, to start from."""
    with reporting(json, debug) as output:
        from dovetail.pipeline.starter import write_starter

        written = write_starter(Path(directory))
        where = os.path.relpath(Path(directory) / "pipeline.yaml")
        told = f"Wrote {', '.join(written)}.\nTry: dovetail check {where}, then dovetail run {where}"
        output.show(
            {"directory": directory, "files": written},
            lambda text: text.line(told),
        )


def calibrate_command(
    force: Annotated[bool, typer.Option("--force", help="Measure again, even if what is kept is fresh.")] = False,
    directory: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY", help="On the disk to measure; by default the temporary one.", show_default=False
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what disk and processor cost here, for the cost models; kept for a month."""
    with reporting(json, debug) as output, showing_activity(output.messages) as activity:
        activity.stage("Measuring")
        from dovetail.model.calibrate import calibrate, default_path

        if directory is not None and not os.path.isdir(directory):
            raise PlanError(f"{directory} is not a directory.")
        factors = calibrate(force=force, directory=directory)
        document = {"kept_in": str(default_path()), "factors": factors.as_dict()}

        def show(text: TextOutput) -> None:
            text.line(f"Cost factors of this machine, kept in {document['kept_in']}")
            text.pairs({name: str(value) for name, value in factors.as_dict().items()})

        output.show(document, show)


# -------------------------------------------------------------------- pieces


def _checked(pipeline: str) -> "CheckedPipeline":
    from dovetail.pipeline.checks import check_pipeline
    from dovetail.pipeline.loading import parse_pipeline

    return check_pipeline(*parse_pipeline(pipeline))


def _check_connections(checked: "CheckedPipeline") -> None:
    """Log in where the pipeline will: a wrong password is better known now."""
    from dovetail.pipeline.connections import check_connections

    check_connections(checked)


@contextmanager
def _planned(
    output: Output, checked: "CheckedPipeline", master: str, conf: list[str] | None, jars: str | None
) -> "Iterator[PlannedPipeline]":
    """Start Spark and plan; Spark runs for the duration of the block."""
    settings = {name: str(value) for name, value in checked.pipeline.spark.items()}
    settings = {"spark.redaction.regex": _REDACTED, **settings, **key_values("--conf", conf), **_jar_setting(jars)}
    with ExitStack() as stack:
        with showing_activity(output.messages) as activity:
            activity.stage("Starting Spark")
            from dovetail.cli.session import spark_session

            spark = stack.enter_context(spark_session(master, settings))
            activity.stage("Planning")
            from dovetail.pipeline.runner import plan_pipeline

            planned = plan_pipeline(spark, checked, activity.stage)
        yield planned


def _jar_setting(jars: str | None) -> dict[str, str]:
    if jars is None:
        return {}
    found = sorted(map(str, Path(jars).glob("*.jar")))
    if not found:
        raise PlanError(f"--jars {jars}: there are no jars.", hint="Run make jars, or name another directory.")
    return {"spark.jars": ",".join(found)}


def _outline(checked: "CheckedPipeline") -> str:
    """The chain in one line: sources, steps, sink."""
    steps = [checked.pipeline.steps[number].kind for number in checked.chain.steps]
    parts = [", ".join(checked.chain.inputs), *steps, checked.pipeline.sink.format]
    return " -> ".join(parts)
