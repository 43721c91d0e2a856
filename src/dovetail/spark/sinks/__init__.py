"""The sinks of a flow. Each stages a micro-batch, and publishes it once the flow has committed it.

======================  ============================================================  ==================================
sink                    what it does                                                  after a crash
======================  ============================================================  ==================================
`parquet`               plain Parquet files in a directory                            every row exactly once
`delta`                 a Delta table: appends, or upserts by key                     every row exactly once
`iceberg`               an Iceberg table: appends, or upserts by key                  every row exactly once
`postgres`, `jdbc`      a table of a PostgreSQL database                              every row exactly once
`kafka`                 JSON records in a topic                                       at least once, with headers
`foreach_batch`         calls a function with the rows of each micro-batch            same rows and number, maybe again
`memory`                keeps the rows in this process                                only unpublished rows come again
`console`               prints the rows                                               the last may be printed again
`noop`                  computes the rows and discards them                           nothing to see
======================  ============================================================  ==================================
"""

from dovetail.spark.flow.noop import NoopSink, noop
from dovetail.spark.flow.sink import Receipt, Sink, SinkContext
from dovetail.spark.sinks.delta import DeltaSink, delta
from dovetail.spark.sinks.iceberg import IcebergSink, iceberg
from dovetail.spark.sinks.kafka import KafkaSink, kafka
from dovetail.spark.sinks.parquet import ParquetSink, parquet
from dovetail.spark.sinks.postgres import PostgresSink, jdbc, postgres
from dovetail.spark.sinks.staged import (
    ConsoleSink,
    ForeachBatchSink,
    MemorySink,
    console,
    foreach_batch,
    memory,
)

__all__ = [
    "ConsoleSink",
    "DeltaSink",
    "ForeachBatchSink",
    "IcebergSink",
    "KafkaSink",
    "MemorySink",
    "NoopSink",
    "ParquetSink",
    "PostgresSink",
    "Receipt",
    "Sink",
    "SinkContext",
    "console",
    "delta",
    "foreach_batch",
    "iceberg",
    "jdbc",
    "kafka",
    "memory",
    "noop",
    "parquet",
    "postgres",
]
