"""Streaming sources: changes of tables, for `dovetail.follow` and for flows.

==================  ====================================================================================
source              what it reads
==================  ====================================================================================
`debezium`          Debezium's JSON envelopes, from Kafka, files or any DataFrame
`delta`             a Delta table: its rows, then the change data feed or the difference of files
`iceberg`           a table of an Iceberg catalog: its rows, then appended files or the difference of files
==================  ====================================================================================
"""

from dovetail.spark.sources.debezium import debezium
from dovetail.spark.sources.delta import delta
from dovetail.spark.sources.iceberg import iceberg

__all__ = ["debezium", "delta", "iceberg"]
