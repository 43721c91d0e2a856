"""A local Spark for tests, examples and benchmarks: this process, loopback only, no pages, no chatter."""

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
"""For a Spark that lives for seconds, and may be killed: what it spends on compiling well it never gets back."""


def local_session(
    scratch: Path | None = None, settings: Mapping[str, str] | None = None, master: str = "local[2]"
) -> "SparkSession":
    """Start Spark, or take the session that this process has.

    Parameters
    ----------
    scratch : Path, optional
        Where Spark keeps its shuffle files and its warehouse; else where it keeps them by itself.
    settings : Mapping, optional
        Further settings, which win over the ones made here.
    master : str
        Two cores of this process unless said otherwise.
    """
    # Here, since the other modules of the harness are for those who have no Spark, too.
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # The workers import Dovetail, so they must be this interpreter and no other that the PATH has.
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
