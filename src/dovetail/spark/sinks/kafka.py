"""Kafka, at least once: every record has headers by which a reader recognises duplicates.

A record is identified by ``flow_id``, ``batch``, ``attempt`` and ``sequence``. The attempt distinguishes the records of
a micro-batch that was computed twice, which happens when an older copy of a checkpoint is restored: they may be other
rows, and a reader that skipped them would lose them.
"""

from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dovetail.core.errors import PlanError
from dovetail.spark.flow.sink import Receipt, SinkContext
from dovetail.spark.plan.codes import quoted
from dovetail.spark.sinks.staged import StagedSink

__all__ = ["KafkaSink", "kafka"]


class KafkaSink(StagedSink):
    """A topic; made by `kafka`."""

    kind = "kafka"

    def __init__(self, servers: str, topic: str, key: Sequence[str] | None, options: Mapping[str, str]) -> None:
        self.servers, self.topic, self.key = servers, topic, None if key is None else list(key)
        self._options = dict(options)

    def __repr__(self) -> str:
        # Options may hold secrets.
        return f"KafkaSink(servers={self.servers!r}, topic={self.topic!r})"

    def open(self, context: SinkContext) -> None:
        """Check the key columns, and that Spark has its Kafka connector."""
        super().open(context)
        for name in self.key or ():
            if name not in context.schema.names:
                raise PlanError(
                    f"The key column {name!r} is not in the output.", hint=f"It has {', '.join(context.schema.names)}."
                )
        require_connector(context.spark, "kafka", "org.apache.spark.sql.kafka010.KafkaSourceProvider")

    def take(self, df: DataFrame, receipt: Receipt) -> None:
        names = df.columns
        # A row's position in the staged files never changes, so it can number the records.
        part = F.regexp_extract("_metadata.file_name", r"part-(\d+)", 1)
        place = F.concat(part, F.lit("-"), F.col("_metadata.row_index").cast("string"))
        headers = {
            "flow": F.lit(self.context.flow),
            "flow_id": F.lit(self.owner.flow_id),
            "batch": F.lit(str(receipt["batch"])),
            "attempt": F.lit(receipt["directory"].partition("-")[2]),
            "sequence": place,
        }
        pairs = [F.struct(F.lit(k).alias("key"), v.cast("binary").alias("value")) for k, v in headers.items()]
        columns = [F.to_json(F.struct(*(F.col(quoted(name)) for name in names))).alias("value")]
        if self.key is not None:
            columns.append(F.to_json(F.struct(*(F.col(quoted(name)) for name in self.key))).alias("key"))
        records = df.select(*columns, F.array(*pairs).alias("headers"))
        writer = records.write.format("kafka").options(**self._options).option("includeHeaders", "true")
        writer.option("kafka.bootstrap.servers", self.servers).option("topic", self.topic).save()


def require_connector(spark: object, name: str, class_name: str) -> None:
    """Refuse to start if Spark lacks a connector's jar; the error says how to get it."""
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()  # type: ignore[attr-defined]
    try:
        loader.loadClass(class_name)
    except Exception as error:
        raise PlanError(
            f"Spark has no connector for {name} ({class_name} is not there).",
            hint="Run make jars and pass --jars, or give Spark the package with --conf spark.jars.packages=...",
        ) from error


def kafka(
    servers: str, topic: str, *, key: str | Sequence[str] | None = None, options: Mapping[str, str] | None = None
) -> KafkaSink:
    """Send every row, as JSON, to a topic: at least once.

    After a crash the last micro-batch may be sent again, with the same headers ``flow_id``, ``batch``, ``attempt`` and
    ``sequence``, so a reader that remembers those of the last micro-batch can skip them. After an older copy of the
    checkpoint was restored, rows may come again with another attempt: nothing is lost, but a reader cannot recognise
    them.

    Parameters
    ----------
    servers
        ``host:port``, several separated by commas.
    topic
        The topic.
    key
        Columns whose values, as JSON, are a record's key.
    options
        Options of Spark's Kafka sink, such as ``kafka.acks``, ``kafka.security.protocol`` or
        ``kafka.sasl.jaas.config``. They are in no plan, log or error message of ours.

    Examples
    --------
    >>> kafka("localhost:9092", "orders")
    KafkaSink(servers='localhost:9092', topic='orders')
    """
    return KafkaSink(servers, topic, [key] if isinstance(key, str) else key, options or {})
