"""The Spark session of one command: local by default, silent, stopped when the command ends.

Spark writes to the terminal from several places (its launcher, two logging systems, the Python workers). Therefore the
JVM is started with its output redirected to a file. If Spark does not start, the last line of the file is shown.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from dovetail.cli.failures import SparkFailure, SparkStartError
from dovetail.spark.plan.spark_errors import explain_spark

_QUIET = {
    "spark.log.level": "OFF",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
_EXIT_SECONDS = 10
# Of a JVM that starts, most processor time goes to its optimizing compiler, for code that will never run again. It is
# still there, for code that is ten times as hot as it would otherwise have to be.
_JVM_OPTIONS = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 "
    "-XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)
_DRIVER_OPTIONS = "spark.driver.extraJavaOptions"


@contextmanager
def spark_session(master: str, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """Start a Spark session for the duration of a block; an existing session of the process is used and not stopped.

    A `SparkStartError` if there is no Java, or Spark refuses the master or a setting. An error of Spark in the block
    becomes a `SparkFailure`, which can be printed after the session has stopped.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    _silence_python_side()
    previous_handler = signal.getsignal(signal.SIGINT)
    with tempfile.TemporaryDirectory(prefix="dovetail-spark-", ignore_cleanup_errors=True) as scratch:
        conf = _configuration(master, settings, scratch)
        gateway = _launch(conf, Path(scratch) / "spark.log")
        try:
            yield _connect(conf, gateway)
        except (PySparkException, Py4JError) as error:
            # Such an error fetches its text from the JVM, which will have stopped when the error is printed.
            raise SparkFailure(str(error)).with_traceback(error.__traceback__) from None
        finally:
            # A second Ctrl-C must not leave a half-stopped Spark. Stopping takes about a second.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _stop(gateway)
            signal.signal(signal.SIGINT, previous_handler)


def _silence_python_side() -> None:
    """Keep PySpark and py4j from logging to the terminal: the command reports errors once."""
    # Failed queries, as JSON, through a separate handler.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    # Interrupted calls, through the root logger, which prints if it has no handler.
    logging.getLogger().addHandler(logging.NullHandler())


def _configuration(master: str, settings: Mapping[str, str], scratch: str) -> SparkConf:
    is_local = master.startswith("local")
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # The workers import Dovetail, so they must use this interpreter, not another one on the PATH.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    chosen = {
        "spark.master": master,
        "spark.app.name": "dovetail",
        "spark.sql.warehouse.dir": str(Path(scratch) / "warehouse"),
        **_QUIET,
        **(_LOOPBACK if is_local else {}),
        **settings,
    }
    if is_local:
        # The last of several options counts: the user's.
        chosen[_DRIVER_OPTIONS] = f"{_JVM_OPTIONS} {settings.get(_DRIVER_OPTIONS, '')}".strip()
    return SparkConf(loadDefaults=False).setAll(list(chosen.items()))


def _launch(conf: SparkConf, log_path: Path) -> Any:
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        raise SparkStartError(
            "Spark needs Java 17 or newer, but none was found.",
            hint="Install one, for example default-jre-headless, or set JAVA_HOME.",
        )
    with open(log_path, "wb") as log:
        try:
            with _interrupts_deferred() as was_interrupted:
                gateway = launch_gateway(conf, popen_kwargs={"stdout": log, "stderr": subprocess.STDOUT})
        except PySparkException as error:
            raise SparkStartError(
                f"Spark did not start: {_last_line(log_path) or explain_spark(error)}",
                hint="Check JAVA_HOME (Java 17 or newer), --master and --conf.",
            ) from error
    if was_interrupted():
        _stop(gateway)
        raise KeyboardInterrupt
    return gateway


@contextmanager
def _interrupts_deferred() -> Iterator[Callable[[], bool]]:
    """Defer a first Ctrl-C to the end of a block; yield a function that returns whether there was one.

    If the launcher of a JVM is interrupted, the JVM cannot report back and keeps running forever. A second Ctrl-C is
    obeyed immediately, in case the JVM hangs.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    interrupts = 0

    def remember(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts > 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: interrupts > 0
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _connect(conf: SparkConf, gateway: Any) -> SparkSession:
    try:
        SparkContext(conf=conf, gateway=gateway)
        return SparkSession.builder.getOrCreate()
    except (PySparkException, Py4JError) as error:
        raise SparkStartError(
            f"Spark did not start: {explain_spark(error)}", hint="Check --master and --conf."
        ) from error


def _stop(gateway: Any) -> None:
    context = SparkContext._active_spark_context
    with suppress(Py4JError, OSError):  # the JVM may already have stopped
        if context is not None:
            context.stop()
        gateway.shutdown()
    if gateway.proc is None:
        return
    gateway.proc.stdin.close()
    try:
        gateway.proc.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
