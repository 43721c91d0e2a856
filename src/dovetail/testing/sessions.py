"""A local Spark for tests, examples and benchmarks: in this process, loopback only, no web UI, no log output."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

SHORT_LIVED = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.log.level": "OFF",
}
"""For a Spark that lives for seconds and may be killed: optimizing compilers would not pay off."""


def local_session(
    scratch: Path | None = None, settings: Mapping[str, str] | None = None, master: str = "local[2]"
) -> "SparkSession":
    """Start Spark, or return the existing session of this process.

    ``scratch`` is the directory of Spark's shuffle files and warehouse; default: Spark's own. ``settings`` override the
    ones made here.
    """
    # Imported here, because the rest of the harness works without Spark.
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # The workers import Dovetail, so they must use this interpreter, not another one on the PATH.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    places = (
        {}
        if scratch is None
        else {"spark.local.dir": str(scratch / "local"), "spark.sql.warehouse.dir": str(scratch / "warehouse")}
    )
    builder = SparkSession.builder.master(master).appName("dovetail")
    for name, value in {**_SETTINGS, **places, **(settings or {})}.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    return session
