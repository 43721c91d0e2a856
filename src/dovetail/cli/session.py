"""The Spark session of one command: local by default, silent, gone when the command ends.

Spark writes to the terminal from several places (its launcher, two logging systems, the Python workers). The JVM is
therefore started with its output in a file; the last line of it is shown if Spark does not start.
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

from dovetail.cli.failures import SparkFailure, SparkStartError, explain_spark

_QUIET = {
    "spark.log.level": "OFF",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_LOOPBACK = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
_EXIT_SECONDS = 10


@contextmanager
def spark_session(master: str, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """A Spark session for the duration of a block; a session that this process already has is used and left alone.

    Raises
    ------
    SparkStartError
        There is no Java, or Spark refuses the master or a setting.
    SparkFailure
        Spark failed in the block; a ``SparkFailure`` outlives the session.
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
            # Such an error asks the JVM for its text, which will be gone when somebody wants to print it.
            raise SparkFailure(str(error)).with_traceback(error.__traceback__) from None
        finally:
            # A second Ctrl-C must not leave a half-stopped Spark; what follows takes a second or so, and is bounded.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _stop(gateway)
            signal.signal(signal.SIGINT, previous_handler)


def _silence_python_side() -> None:
    """Keep PySpark and py4j from logging to the terminal: what went wrong is told once, by the command."""
    # Failed queries, as JSON, by a handler of its own.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL + 1)
    # Interrupted calls, through the root logger, which prints where nobody has given it a handler.
    logging.getLogger().addHandler(logging.NullHandler())


def _configuration(master: str, settings: Mapping[str, str], scratch: str) -> SparkConf:
    is_local = master.startswith("local")
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # The workers import Dovetail, so they must be this interpreter and no other that the PATH has.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    chosen = {
        "spark.master": master,
        "spark.app.name": "dovetail",
        "spark.sql.warehouse.dir": str(Path(scratch) / "warehouse"),
        **_QUIET,
        **(_LOOPBACK if is_local else {}),
        **settings,
    }
    return SparkConf(loadDefaults=False).setAll(list(chosen.items()))


def _launch(conf: SparkConf, log_path: Path) -> Any:
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        raise SparkStartError(
            "Spark needs Java 17 or newer, and there is none.",
            hint="Install one, for instance default-jre-headless, or set JAVA_HOME.",
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
    """Let a first Ctrl-C wait for the end of a block; what is given tells whether there was one.

    A JVM whose launcher is interrupted finds nobody to report to and, instead of ending, stays behind for good. A
    second Ctrl-C is obeyed at once all the same, for somebody whose JVM hangs.
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
    with suppress(Py4JError, OSError):  # the JVM may be gone already, which is what we want
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
