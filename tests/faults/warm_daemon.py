"""Spark's daemon of Python workers, with Dovetail imported before the first fork.

A worker that is killed is replaced by a fork: without this, each replacement spends a second or two on imports. Set
``spark.python.daemon.module`` to this module.
"""

import pyarrow.parquet  # noqa: F401 -- to be there after a fork
from pyspark import daemon

import dovetail.runtime.enrich_shard
import dovetail.runtime.kept
import dovetail.runtime.promises
import dovetail.spark.sinks  # noqa: F401

if __name__ == "__main__":
    daemon.manager()
