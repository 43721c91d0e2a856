"""Debezium's change events as a feed: JSON envelopes in a Kafka topic or in files, one per line.

An envelope has ``before``, ``after``, ``op`` (c, r and u write a row, d deletes it) and ``source``. With JSON schemas
enabled, Debezium puts it into a field ``payload``; both forms are read, also mixed. A record without a value is the
tombstone that follows a delete for the sake of Kafka's compaction, and is skipped.
"""

import os
import re
from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.errors import PlanError
from dovetail.spark.plan.codes import quoted
from dovetail.spark.plan.feed_columns import FEED_COLUMNS, OPERATION, PROBLEM, SEQUENCE

__all__ = ["debezium"]

_BAD = "__malformed"
_PATH = re.compile(r"(source\.)?[A-Za-z_]\w*")
_MOST_SHOWN = 120
_UNAVAILABLE = "__debezium_unavailable_value"  # PostgreSQL does not log a long value that a change leaves as it is


def debezium(
    source: DataFrame | str | os.PathLike[str] | None = None,
    *,
    schema: str | T.StructType,
    sequence: str = "source.lsn",
    servers: str | None = None,
    topic: str | None = None,
    options: Mapping[str, str] | None = None,
    spark: SparkSession | None = None,
) -> DataFrame:
    """Debezium's change events, from files, a Kafka topic, or any streaming DataFrame with a column ``value``.

    The result is a streaming DataFrame with the table's columns and ``_operation``, ``_sequence`` and ``_problem``,
    which `dovetail.follow` understands.

    Parameters
    ----------
    source
        A directory of files with an envelope per line, or a streaming DataFrame whose ``value`` is an envelope.
    schema
        The table's columns and types, as Debezium writes them in ``before`` and ``after``.
    sequence
        The envelope's field that orders the changes of a key, a whole number: ``"source.lsn"`` for PostgreSQL,
        ``"source.ts_ms"`` or ``"ts_ms"`` where no finer one is there. Changes of a key with equal numbers are taken for
        the same change.
    servers, topic
        Instead of `source`: a Kafka topic.
    options
        Options of Spark's reader of the files or of Kafka, such as ``maxFilesPerTrigger``.
    spark
        The session; by default the active one.

    Examples
    --------
    In a Spark session::

        changes = dt.sources.debezium("topics/customers", schema="id bigint, city string")
        dt.follow("relations/customers", changes, keys="id", checkpoint="checkpoints/customers")
    """
    columns = T.StructType.fromDDL(schema) if isinstance(schema, str) else schema
    taken = [name for name in columns.names if name in FEED_COLUMNS]
    if taken:
        raise PlanError(f"The table has a column {taken[0]!r}, a name that this source uses.", hint="Rename it.")
    if not _PATH.fullmatch(sequence):
        raise PlanError(f"sequence={sequence!r} is no field of an envelope.", hint="Name one, such as source.lsn.")
    values = _values(source, servers, topic, dict(options or {}), spark)
    options_of_json = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BAD}
    parsed = values.select("value", F.from_json("value", _envelope(columns, sequence), options_of_json).alias("e"))
    # An envelope with a schema is in the field payload; both have `op`.
    where = F.when(F.col("e.payload.op").isNotNull(), F.lit("payload")).otherwise(F.lit("plain"))
    parsed = parsed.withColumn("place", where)
    op = _either("op")
    is_delete = op == "d"
    # Debezium reads a deleted row from `before`, which has at least the key.
    rows = [
        F.when(is_delete, _either(f"before.{quoted(name)}")).otherwise(_either(f"after.{quoted(name)}")).alias(name)
        for name in columns.names
    ]
    image = F.when(is_delete, _either("before").isNull()).otherwise(_either("after").isNull())
    texts = [name for name in columns.names if isinstance(columns[name].dataType, T.StringType)]
    lacks_value = F.lit(False)
    for name in texts:
        lacks_value = lacks_value | F.coalesce(_either(f"after.{quoted(name)}") == _UNAVAILABLE, F.lit(False))
    shown = F.substring("value", 1, _MOST_SHOWN)
    problem = (
        F.when(F.col("e").isNull() | op.isNull(), F.concat(F.lit("a record that is no envelope of Debezium: "), shown))
        .when(~op.isin("c", "r", "u", "d"), F.concat(F.lit("an unknown operation '"), op, F.lit("': "), shown))
        .when(F.col(f"e.{_BAD}").isNotNull(), F.concat(F.lit("a change that is not of the schema: "), shown))
        .when(image, F.concat(F.lit("a change without its row: "), shown))
        .when(
            lacks_value & ~is_delete,
            F.concat(F.lit("a change without the value of a long column (set REPLICA IDENTITY FULL): "), shown),
        )
        .when(_either(sequence).isNull(), F.concat(F.lit(f"a change without {sequence}: "), shown))
    )
    return parsed.select(*rows, op.alias(OPERATION), _either(sequence).alias(SEQUENCE), problem.alias(PROBLEM))


def _either(path: str) -> Column:
    return F.when(F.col("place") == "payload", F.col(f"e.payload.{path}")).otherwise(F.col(f"e.{path}"))


def _envelope(columns: T.StructType, sequence: str) -> T.StructType:
    # Debezium drops nothing, so every column may be NULL: a before image may have the key only.
    row = T.StructType([T.StructField(f.name, f.dataType, True) for f in columns])
    plain = T.StructType().add("before", row).add("after", row).add("op", T.StringType())
    head, _, name = sequence.rpartition(".")
    plain = plain.add("source", T.StructType().add(name, T.LongType())) if head else plain.add(name, T.LongType())
    return T.StructType([*plain, T.StructField("payload", plain), T.StructField(_BAD, T.StringType())])


def _values(
    source: DataFrame | str | os.PathLike[str] | None,
    servers: str | None,
    topic: str | None,
    options: dict[str, str],
    spark: SparkSession | None,
) -> DataFrame:
    """The envelopes as text, without tombstones."""
    given = [source is not None, servers is not None]
    if sum(given) != 1 or (servers is None) != (topic is None):
        raise PlanError("debezium takes either a source, or servers= and topic=.", hint="Pass one of them.")
    if isinstance(source, DataFrame):
        if "value" not in source.columns:
            raise PlanError(
                f"The DataFrame has no column 'value'; it has {', '.join(source.columns)}.",
                hint="Select the envelope AS value.",
            )
        rows = source
    else:
        session = spark or SparkSession.getActiveSession()
        if session is None:
            raise PlanError("There is no active Spark session.", hint="Pass spark=.")
        if servers is not None:
            reader = session.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
            rows = reader.option("subscribe", topic).option("startingOffsets", "earliest").options(**options).load()
        else:
            rows = session.readStream.format("text").options(**options).load(os.fspath(source))  # type: ignore[arg-type]
    text = F.trim(F.col("value").cast("string"))
    # A file has tombstones as an empty line or as JSON's null.
    return rows.select(text.alias("value")).where("value IS NOT NULL AND value NOT IN ('', 'null')")
