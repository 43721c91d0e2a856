"""The sink that keeps nothing."""

from pyspark.sql import DataFrame

from dovetail.spark.sinks.base import Receipt, Sink

__all__ = ["NoopSink", "noop"]


class NoopSink(Sink):
    """Computes all rows and throws them away, to measure what is before it."""

    kind = "noop"
    stages_in_jvm = True

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        """Compute all rows."""
        df.write.format("noop").mode("append").save()
        return {"batch": batch}

    def publish(self, receipt: Receipt) -> None:
        """Do nothing: there is nothing to see."""

    def forget(self, receipt: Receipt) -> None:
        """Do nothing: nothing was staged."""


def noop() -> NoopSink:
    """A sink that computes all rows and throws them away.

    Examples
    --------
    >>> noop().kind
    'noop'
    """
    return NoopSink()
