"""Streaming sources: changes of tables, for `dovetail.follow` and for flows."""

from dovetail.spark.sources.debezium import debezium

__all__ = ["debezium"]
