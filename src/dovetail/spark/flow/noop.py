"""The sink that discards its rows: for measurements, and for flows whose result is a relation."""

from pyspark.sql import DataFrame

from dovetail.spark.flow.sink import Receipt, Sink

__all__ = ["NoopSink", "noop"]


class NoopSink(Sink):
    """Computes all rows and discards them, to measure the flow before it."""

    kind = "noop"
    stages_in_jvm = True

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        df.write.format("noop").mode("append").save()
        return {"batch": batch}

    def publish(self, receipt: Receipt) -> None:
        """Nothing to publish."""

    def forget(self, receipt: Receipt) -> None:
        """Nothing was staged."""


def noop() -> NoopSink:
    """A sink that computes all rows and discards them."""
    return NoopSink()
