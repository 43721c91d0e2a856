"""``dovetail init``, ``check``, ``explain``, ``run``, ``status``, ``calibrate``, ``schema``: the pipeline commands."""

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.failures import Interrupted
from dovetail.cli.options import Debug, Json, Master, SparkSettings, key_values
from dovetail.cli.output import Output, TextOutput
from dovetail.cli.progress import showing_activity
from dovetail.cli.reporting import reporting
from dovetail.cli.watching import Seconds, watched
from dovetail.core.errors import PlanError

if TYPE_CHECKING:
    from dovetail.pipeline.checks import CheckedPipeline
    from dovetail.pipeline.runner import PlannedPipeline
    from dovetail.spark.flow.query import FlowQuery

__all__ = ["register"]

PipelineFile = Annotated[str, typer.Argument(metavar="PIPELINE", help="A pipeline file.", show_default=False)]
Jars = Annotated[
    str | None,
    typer.Option("--jars", metavar="DIRECTORY", help="Connector jars, as fetched by make jars.", show_default=False),
]
_MASTER = "local[*]"
_POLL_SECONDS = 0.2
# What Spark redacts in its plans and settings: its default, plus Kafka's login setting.
_REDACTED = "(?i)secret|password|passw|token|access[.]?key|jaas"


def register(app: typer.Typer) -> None:
    for command in (init, check, explain, run, follow, status):
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
    """Check a pipeline file and what it refers to. No query is started."""
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
        unchecked = "" if plan else " SQL expressions and types are not checked without --plan."
        output.show(document, lambda text: text.line(f"{pipeline} is valid: {checked.outline()}.{unchecked}"))


def explain(
    pipeline: PipelineFile,
    jars: Jars = None,
    master: Master = _MASTER,
    conf: SparkSettings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how a pipeline will run: operators, memory, predicted rates. Missing relations are built."""
    with reporting(json, debug) as output:
        checked = _checked(pipeline)
        with _planned(output, checked, master, conf, jars) as planned:
            explanation = planned.flow.explanation()
        output.show(
            {"pipeline": pipeline, **explanation.as_dict()},
            lambda text: text.line(f"{checked.outline()}\n\n{explanation.text()}"),
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
        typer.Option(metavar="SPAN", help="Override the file's: 5 seconds, or available-now.", show_default=False),
    ] = None,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="Go on from the checkpoint of an older form of this pipeline; the file names a new one.",
            show_default=False,
        ),
    ] = None,
    ui: Annotated[bool, typer.Option("--ui", help="Serve the live page of the flow; its address is printed.")] = False,
    ui_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="With --ui. Default: the first free one from 8610 on.",
            min=0,
            max=65_535,
            show_default=False,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Serve metrics for Prometheus on this port of loopback, at /metrics.",
            min=0,
            max=65_535,
            show_default=False,
        ),
    ] = None,
    jars: Jars = None,
    master: Master = _MASTER,
    conf: SparkSettings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a pipeline, or resume it where it stopped. Ctrl-C stops it."""
    with reporting(json, debug) as output:
        spark = {"jars": jars, "master": master, "conf": conf}
        _run(output, "run", pipeline, trigger, resume_from, ui, ui_port, metrics_port, spark)


def follow(
    pipeline: PipelineFile,
    trigger: Annotated[
        str | None,
        typer.Option(metavar="SPAN", help="Override the file's: 5 seconds, or available-now.", show_default=False),
    ] = None,
    jars: Jars = None,
    master: Master = _MASTER,
    conf: SparkSettings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Keep relations current with tables: run a pipeline that has a follow step. Ctrl-C stops it."""
    with reporting(json, debug) as output:
        spark = {"jars": jars, "master": master, "conf": conf}
        _run(output, "follow", pipeline, trigger, None, False, None, None, spark)


def _run(
    output: Output,
    command: str,
    pipeline: str,
    trigger: str | None,
    resume_from: Path | None,
    ui: bool,
    ui_port: int | None,
    metrics_port: int | None,
    spark: dict[str, Any],
) -> None:
    # Importing what checks a pipeline takes longer than a user waits for a sign of life.
    with showing_activity(output.messages) as activity:
        activity.stage(f"Checking {pipeline}")
        from dovetail.pipeline.step_models import duration
        from dovetail.storage.running import running

        checked = _checked(pipeline)
        _check_connections(checked)
    if command == "follow" and not any(step.follow is not None for step in checked.pipeline.steps):
        raise PlanError(f"{pipeline} has no follow step.", hint=f"Add one, or use dovetail run {pipeline}.")
    if trigger is not None and trigger != "available-now":
        try:
            duration(trigger)
        except ValueError as error:
            raise PlanError(f"--trigger {error}") from None
    started = time.monotonic()
    again = f"Resume with: dovetail {command} {pipeline}"
    # Before Spark starts, so that a second runner fails immediately.
    checkpoint = checked.path(checked.pipeline.checkpoint)
    with running(checkpoint), _stopping(again) as is_stopped, ExitStack() as served:
        if ui:
            _serve_page(output, served, checkpoint, ui_port)
        if metrics_port is not None:
            _serve_metrics(output, served, checkpoint, metrics_port)
        with _planned(output, checked, **spark, lines=True) as planned:
            explanation = planned.flow.explanation().text() if ui else None
            query = planned.start(trigger, None if resume_from is None else str(resume_from))
            is_stopped.watch()
            if explanation is not None:
                query.note_plan(explanation)
            _follow(output, planned, query, is_stopped)
            document = _summary(pipeline, checked, query, time.monotonic() - started)
        if is_stopped():
            batch = "before its first micro-batch" if query.progress is None else f"after batch {document['batch']}"
            raise Interrupted(f"Stopped {batch}; nothing is lost. {again}")
        output.show(document, lambda text: _show_summary(text, document))


def _serve_page(output: Output, served: ExitStack, checkpoint: str, port: int | None) -> None:
    """Before Spark starts, so that there is something to look at while it does."""
    from dovetail.web.serving import open_page

    page = served.enter_context(open_page([checkpoint], port=port))
    output.messages.print(f"Live page: {page.address}", markup=False, soft_wrap=True)


def _serve_metrics(output: Output, served: ExitStack, checkpoint: str, port: int) -> None:
    from dovetail.web.metrics import prometheus

    endpoint = served.enter_context(prometheus(checkpoint, port=port))
    output.messages.print(f"Metrics: {endpoint.address}", markup=False, soft_wrap=True)


class _StopSign:
    def __init__(self) -> None:
        self._event = threading.Event()
        self._is_watching = False

    def watch(self) -> None:
        """Replace Spark's Ctrl-C handler, which cancels all jobs: from now on the flow is stopped properly."""
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
    """Show progress until the flow ends or is stopped."""
    from dovetail.cli.live import showing_progress

    with showing_progress(output.messages, planned.flow.name, planned.budgets()) as live:
        while query.isActive and not is_stopped.wait(_POLL_SECONDS):
            live.update(query.progress)
        if is_stopped():
            query.stop()
        live.update(query.progress, is_last=True)
    if not is_stopped():
        query.awaitTermination(0)  # raises the error of the query, if any


def _summary(pipeline: str, checked: "CheckedPipeline", query: "FlowQuery", seconds: float) -> dict[str, Any]:
    progress = query.progress
    operators = [] if progress is None else progress.as_dict()["operators"]
    return {
        "pipeline": pipeline,
        "name": checked.pipeline.name,
        "batch": None if progress is None else progress.batch,
        "waiting": 0 if progress is None else progress.pending,
        "seconds": round(seconds, 3),
        "asked_to_stop": query.was_asked_to_stop,
        "operators": operators,
    }


def _show_summary(text: TextOutput, document: dict[str, Any]) -> None:
    ended = "was asked to stop, and has ended" if document["asked_to_stop"] else "has ended"
    text.line(f"{document['name']} {ended}, after {document['seconds']:.1f} s")
    text.table(
        {"operator": "left", "tuples in": "right", "rows out": "right", "waiting": "right"},
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
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every: Seconds = 1.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the state of a flow, running or stopped, from its checkpoint. Spark is not started."""
    with reporting(json, debug) as output:
        from dovetail.cli.status import show_status, status_document
        from dovetail.web.finding import checkpoint_of

        checkpoint = checkpoint_of(pipeline)
        if watch:
            watched(output, every, lambda: status_document(checkpoint), show_status)
            return
        document = status_document(checkpoint)
        output.show(document, lambda text: show_status(text, document))


def init(
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="The target directory; must be new or empty.")
    ] = ".",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a small, commented starter pipeline with sample data."""
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
    force: Annotated[bool, typer.Option("--force", help="Measure again, even if the stored result is recent.")] = False,
    directory: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY", help="On the disk to measure; default: the temporary directory.", show_default=False
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure the cost factors of disk and CPU for the cost models. The result is kept for a month."""
    with reporting(json, debug) as output, showing_activity(output.messages) as activity:
        activity.stage("Measuring")
        from dovetail.costs.host import default_path
        from dovetail.joins.calibration import calibrate

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
    """Connect to the services of the pipeline, so that a wrong password is found now."""
    from dovetail.pipeline.connections import check_connections

    check_connections(checked)


@contextmanager
def _planned(
    output: Output,
    checked: "CheckedPipeline",
    master: str,
    conf: list[str] | None,
    jars: str | None,
    lines: bool = False,
) -> "Iterator[PlannedPipeline]":
    """Start Spark and plan. Spark runs for the duration of the block. ``lines``: say so without a terminal, too."""
    settings = {name: str(value) for name, value in checked.pipeline.spark.items()}
    settings = {"spark.redaction.regex": _REDACTED, **settings, **key_values("--conf", conf), **_jar_setting(jars)}
    with ExitStack() as stack:
        with showing_activity(output.messages, lines) as activity:
            activity.stage("Starting Spark")
            from dovetail.cli.session import spark_session

            # While the JVM starts, this process has nothing else to do.
            ahead = threading.Thread(target=_import_planner, name="dovetail imports", daemon=True)
            ahead.start()
            spark = stack.enter_context(spark_session(master, settings))
            ahead.join()
            activity.stage("Planning")
            from dovetail.cli.spark_rows import watching_rows
            from dovetail.pipeline.runner import plan_pipeline

            with watching_rows(spark, activity.rows):
                planned = plan_pipeline(spark, checked, activity.stage)
        yield planned


def _import_planner() -> None:
    with suppress(ImportError):  # the import that uses it reports it
        importlib.import_module("dovetail.pipeline.runner")


def _jar_setting(jars: str | None) -> dict[str, str]:
    if jars is None:
        return {}
    found = sorted(map(str, Path(jars).glob("*.jar")))
    if not found:
        raise PlanError(f"--jars {jars}: there are no jars.", hint="Run make jars, or name another directory.")
    return {"spark.jars": ",".join(found)}
