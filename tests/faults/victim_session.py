"""Spark for a program whose processes are killed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.testing.sessions import SHORT_LIVED, local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["victim_session"]


def victim_session(scratch: Path, settings: Mapping[str, str] | None = None) -> "SparkSession":
    """A session with workers that start fast; ``DOVETAIL_VICTIM_MASTER`` says how often a task is tried."""
    found = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([found] if found else [])])
    warm = {"spark.python.daemon.module": "warm_daemon"}
    master = os.environ.get("DOVETAIL_VICTIM_MASTER", "local[2]")
    return local_session(scratch, {**SHORT_LIVED, **warm, **(settings or {})}, master)
