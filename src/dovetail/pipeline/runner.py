"""Building a flow on Spark from a checked pipeline."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.errors import DovetailError, PlanError, RelationNotFound
from dovetail.pipeline import models
from dovetail.pipeline.checks import CheckedPipeline
from dovetail.pipeline.documents import Location
from dovetail.pipeline.problems import PipelineError
from dovetail.pipeline.secrets import Secret
from dovetail.pipeline.small_tables import read_if_small
from dovetail.pipeline.steps import apply_step, join_streams
from dovetail.relation import Relation
from dovetail.spark import sinks, sources
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.flow.sink import Sink
from dovetail.spark.plan.codes import quoted
from dovetail.spark.plan.spark_errors import explain_spark
from dovetail.spark.sinks.kafka import require_connector
from dovetail.spark.sources.bursty import register_bursty
from dovetail.spark.steps.stream import Flow, stream

__all__ = ["PlannedPipeline", "plan_pipeline"]

Announce = Callable[[str], Callable[[int, int], None] | None]

_MALFORMED, _FILE, _BYTES, _REASON = "__malformed", "__file", "__bytes", "__reason"


@dataclass(frozen=True)
class PlannedPipeline:
    """A pipeline planned by Spark, not yet running."""

    checked: CheckedPipeline
    flow: Flow
    sink: Sink

    def budgets(self) -> dict[str, int]:
        return self.flow.budgets()

    def start(self, trigger: str | None = None, resume_from: str | None = None) -> FlowQuery:
        """Start the flow, or resume it from its checkpoint or from that of an older form of it."""
        pipeline = self.checked.pipeline
        return self.flow.write(
            self.sink,
            checkpoint=self.checked.path(pipeline.checkpoint),
            trigger=trigger or pipeline.trigger,
            keep_commits=pipeline.keep_commits,
            resume_from=resume_from,
        )


def plan_pipeline(
    spark: SparkSession, checked: CheckedPipeline, announce: Announce = lambda _: None
) -> PlannedPipeline:
    """Open the sources and relations of the pipeline, build missing relations, and assemble the flow.

    ``announce`` is called with a message before each operation that may take long; what it returns is called with
    (parts done, total parts). A `PipelineError` has the line of what Spark or a join refuses.
    """
    return _Planner(spark, checked, announce).plan()


class _Planner:
    def __init__(self, spark: SparkSession, checked: CheckedPipeline, announce: Announce) -> None:
        self.spark, self.checked, self.announce = spark, checked, announce
        self.pipeline, self.document = checked.pipeline, checked.document

    def plan(self) -> PlannedPipeline:
        relations = {name: self._relation(name) for name in self.pipeline.relations}
        chain = self.checked.chain
        frames = {name: self._at(("sources", name), partial(self._source, name)) for name in chain.inputs}
        steps = list(chain.steps)
        first = self.pipeline.steps[steps[0]].multi_join if steps else None
        if first is not None:
            joining = partial(join_streams, self.pipeline.name, frames, first, self.checked.path)
            flow = self._at(("steps", steps[0]), joining)
            steps = steps[1:]
        else:
            (name,) = chain.inputs
            flow = self._at(("sources", name), lambda: self._flow_of(name, frames[name]))
        for number in steps:
            step = self.pipeline.steps[number]
            flow = self._at(("steps", number, step.kind), partial(apply_step, flow, step, relations, self.checked.path))
        sink = self._at(("sink",), lambda: self._sink(self.pipeline.sink))
        labels = tuple(f"{name} ({self.pipeline.sources[name].format})" for name in chain.inputs)
        return PlannedPipeline(self.checked, replace(flow, _labels=labels), sink)

    def _at(self, location: Location, work: Callable[[], Any]) -> Any:
        """Run `work`; report its errors with the line."""
        try:
            return work()
        except PipelineError:
            raise
        except DovetailError as error:
            problem = self.document.problem(location, error.message, error.hint or "")
        except (PySparkException, Py4JJavaError) as error:
            problem = self.document.problem(location, explain_spark(error))
        raise PipelineError(self.document.path, [problem])

    # ---------------------------------------------------------------- sources

    def _source(self, name: str) -> DataFrame:
        source = self.pipeline.sources[name]
        if isinstance(source, models.RateSource):
            rate = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", source.rows_per_batch)
            df = rate.load()
        elif isinstance(source, models.BurstySource):
            df = self._bursty(source)
        elif isinstance(source, models.KafkaSource):
            df = self._sized(name, source, self._kafka(source))
        elif isinstance(source, models.FileSource):
            df = self._sized(name, source, self._files(source))
        else:
            df = self._feed(source)
        if source.watermark is not None:
            df = df.withWatermark(source.watermark.column, source.watermark.delay)
        kept = [_MALFORMED, _FILE, _REASON] if getattr(source, "dead_letter", None) is not None else []
        if source.where is not None:
            df = df.where(f"({source.where}) OR {_MALFORMED} IS NOT NULL" if kept else source.where)
        return df if source.select is None else df.selectExpr(*source.select, *kept)

    def _files(self, source: models.FileSource) -> DataFrame:
        reader = self.spark.readStream.format(source.format).options(**_plain(source.options))
        if source.max_files_per_trigger is not None:
            reader = reader.option("maxFilesPerTrigger", source.max_files_per_trigger)
        if source.row_tag is not None:
            reader = reader.option("rowTag", source.row_tag)
        path = self.checked.path(source.path)
        if source.columns is None:
            columns = self.spark.read.format(source.format).load(path).schema
        else:
            columns = T.StructType.fromDDL(source.columns)
        if source.format in ("json", "csv", "xml"):
            modes = {"error": "FAILFAST", "drop": "DROPMALFORMED", "dead-letter": "PERMISSIVE"}
            reader = reader.option("mode", modes[source.malformed])
        if source.format == "csv":
            reader = reader.option("enforceSchema", "false")
        if source.malformed != "dead-letter":
            return reader.schema(columns).load(path)
        with_text = columns.add(_MALFORMED, T.StringType())
        df = reader.option("columnNameOfCorruptRecord", _MALFORMED).schema(with_text).load(path)
        return df.select("*", F.col("_metadata.file_path").alias(_FILE))

    def _bursty(self, source: models.BurstySource) -> DataFrame:
        register_bursty(self.spark)
        options = {
            "keys": source.keys,
            "exponent": source.exponent,
            "order": source.order,
            "tuplesPerStep": source.tuples_per_step,
            "stepMillis": source.step_millis,
            "stepsPerBatch": source.steps_per_batch,
            "steps": source.steps,
            "seed": source.seed,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return self.spark.readStream.format("dovetail.bursty").options(**given).load()

    def _feed(self, source: models.DebeziumSource | models.DeltaSource | models.IcebergSource) -> DataFrame:
        """The changes of a table."""
        if isinstance(source, models.DeltaSource):
            path = self.checked.path(source.path)
            return sources.delta(path, versions_per_trigger=source.versions_per_trigger, spark=self.spark)
        if isinstance(source, models.IcebergSource):
            return sources.iceberg(source.table, catalog=source.catalog, properties=source.properties, spark=self.spark)
        if source.servers is not None:
            require_connector(self.spark, "kafka", "org.apache.spark.sql.kafka010.KafkaSourceProvider")
        return sources.debezium(
            None if source.path is None else self.checked.path(source.path),
            schema=source.columns,
            sequence=source.sequence,
            servers=source.servers,
            topic=source.topic,
            options=_plain(source.options),
            spark=self.spark,
        )

    def _kafka(self, source: models.KafkaSource) -> DataFrame:
        require_connector(self.spark, "kafka", "org.apache.spark.sql.kafka010.KafkaSourceProvider")
        reader = (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", source.servers)
            .option("subscribe", source.topic)
            .option("startingOffsets", source.starting)
            .options(**_plain(source.options))
        )
        if source.max_records_per_trigger is not None:
            reader = reader.option("maxOffsetsPerTrigger", source.max_records_per_trigger)
        records = reader.load()
        columns = T.StructType.fromDDL(source.columns)
        names = list(columns.names)
        modes = {"error": "FAILFAST", "drop": "PERMISSIVE", "dead-letter": "PERMISSIVE"}
        options = {"mode": modes[source.malformed]}
        if source.malformed != "error":
            columns = columns.add(_MALFORMED, T.StringType())
            options["columnNameOfCorruptRecord"] = _MALFORMED
        size = F.octet_length("value").alias(_BYTES)
        # A record that is too long is not parsed.
        most = source.max_record_bytes
        text = F.col("value") if most is None else F.when(F.octet_length("value") <= most, F.col("value"))
        place = F.format_string("%s, partition %d, offset %d", F.col("topic"), F.col("partition"), F.col("offset"))
        parsed = records.select(
            F.from_json(text.cast("string"), columns, options).alias("row"), place.alias(_FILE), size, "value"
        )
        if source.malformed == "error":
            return parsed.select("row.*", _BYTES)
        cut = F.when(F.col(_BYTES) > (most or 0), F.substring(F.col("value").cast("string"), 1, most or 0))
        text = F.col(f"row.{_MALFORMED}")
        malformed = text if most is None else F.coalesce(text, cut)
        rows = parsed.select(
            *(F.col(f"row.{quoted(name)}") for name in names), malformed.alias(_MALFORMED), _FILE, _BYTES
        )
        if source.malformed == "drop":
            return rows.where(F.col(_MALFORMED).isNull()).select(*names, _BYTES)
        return rows

    def _sized(self, name: str, source: models.FileSource | models.KafkaSource, df: DataFrame) -> DataFrame:
        """Treat rows that are too long as `malformed` says."""
        hidden = (_MALFORMED, _FILE, _BYTES)
        columns = [F.col(quoted(column)) for column in df.columns if column not in hidden]
        is_aside = source.malformed == "dead-letter"
        most = source.max_record_bytes
        if most is None:
            return df.drop(_BYTES).withColumn(_REASON, F.lit(None).cast("string")) if is_aside else df.drop(_BYTES)
        text = F.to_json(F.struct(*columns))
        size = F.col(_BYTES) if _BYTES in df.columns else F.octet_length(text)
        reason = f"longer than the {most} bytes of max_record_bytes of source {name}"
        is_too_long = F.coalesce(size > most, F.lit(False))
        if source.malformed == "error":
            return df.where(F.assert_true(~is_too_long, f"A record is {reason}.").isNull()).drop(_BYTES)
        if not is_aside:
            return df.where(~is_too_long).drop(_BYTES)
        shown = F.coalesce(F.col(_MALFORMED), F.substring(text, 1, most))
        return df.withColumns(
            {
                _REASON: F.when(is_too_long, F.lit(reason)),
                _MALFORMED: F.when(is_too_long, shown).otherwise(F.col(_MALFORMED)),
            }
        ).drop(_BYTES)

    def _flow_of(self, name: str, df: DataFrame) -> Flow:
        flow = stream(df, self.pipeline.name)
        letters = getattr(self.pipeline.sources[name], "dead_letter", None)
        if letters is None:
            return flow
        kind = self.pipeline.sources[name].format
        columns = [
            f"{_MALFORMED} AS malformed",
            f"coalesce({_REASON}, 'not {kind} of the schema of source {name}') AS reason",
            f"{_FILE} AS origin",
        ]
        to = sinks.parquet(self.checked.path(letters.path))
        return flow.divert(f"{_MALFORMED} IS NOT NULL", to, columns=columns, drop=[_MALFORMED, _FILE, _REASON])

    # ---------------------------------------------------------------- relations

    def _relation(self, name: str) -> Relation | str:
        """The relation, built if necessary; its path, if a step of the pipeline creates it."""
        entry = self.pipeline.relations[name]
        path = self.checked.path(entry.path)
        try:
            return Relation.open(path)
        except RelationNotFound:
            if entry.build is None:
                return path
        build = entry.build
        report = self.announce(f"Building relation {name}")

        def built() -> Relation:
            rows: Any = self._table(build)
            if isinstance(build, models.TableFiles):
                rows = read_if_small(rows)
            return Relation.build(rows, path, on=build.on, shards=build.shards, unique=build.unique, progress=report)

        relation: Relation = self._at(("relations", name, "build"), built)
        return relation

    def _table(self, build: models.TableFiles | models.JdbcTable) -> DataFrame:
        if isinstance(build, models.JdbcTable):
            login = {} if build.user is None else {"user": build.user}
            if build.password is not None:
                login["password"] = build.password.read().get_secret_value()
            if build.url.startswith("jdbc:postgresql:"):
                require_connector(self.spark, "PostgreSQL", "org.postgresql.Driver")
                login["driver"] = "org.postgresql.Driver"
            reader = self.spark.read.format("jdbc").options(**_plain(build.options))
            return reader.option("url", build.url).option("dbtable", build.table).options(**login).load()
        reader = self.spark.read.format(build.format).options(**_plain(build.options))
        if build.format in ("json", "csv", "xml"):
            reader = reader.option("mode", "FAILFAST")
        if build.row_tag is not None:
            reader = reader.option("rowTag", build.row_tag)
        if build.columns is not None:
            reader = reader.schema(build.columns)
        return reader.load(self.checked.path(build.path))

    # ---------------------------------------------------------------- sink

    def _sink(self, sink: Any) -> Sink:
        match sink:
            case models.ParquetSink():
                return sinks.parquet(self.checked.path(sink.path), sink.compression)
            case models.DeltaSink():
                return sinks.delta(self.checked.path(sink.path), **_lake_options(sink))
            case models.IcebergSink():
                properties = _plain(sink.properties)
                return sinks.iceberg(sink.table, catalog=sink.catalog, properties=properties, **_lake_options(sink))
            case models.ConsoleSink():
                return sinks.console(sink.rows)
            case models.NoopSink():
                return sinks.noop()
            case models.KafkaSink():
                return sinks.kafka(sink.servers, sink.topic, key=sink.key, options=_plain(sink.options))
            case models.PostgresSink():
                return postgres_sink(sink, self.checked.path)
        raise PlanError(f"There is no sink {sink!r}.")


def postgres_sink(sink: models.PostgresSink, path: Callable[[str], str]) -> sinks.PostgresSink:
    """The sink that a file describes; ``path`` resolves paths of the file."""

    def file(name: str | None) -> str | None:
        return name if name is None or name == "system" else path(name)

    return sinks.postgres(
        sink.table,
        host=sink.host,
        port=sink.port,
        database=sink.database,
        user=sink.user,
        password=None if sink.password is None else sink.password.read().get_secret_value(),
        key=sink.key,
        order_by=sink.order_by,
        sslmode=sink.sslmode,
        sslrootcert=file(sink.sslrootcert),
        sslcert=file(sink.sslcert),
        sslkey=file(sink.sslkey),
    )


def _lake_options(sink: models.DeltaSink | models.IcebergSink) -> dict[str, Any]:
    return sink.model_dump(include={"key", "order_by", "partition_by", "add_columns", "compression", "budget"})


def _plain(options: Mapping[str, Any]) -> dict[str, str]:
    """Convert options to Spark's form, reading secrets."""
    return {name: _text(value) for name, value in options.items()}


def _text(value: Any) -> str:
    if isinstance(value, Secret):
        return value.read().get_secret_value()
    return str(value).lower() if isinstance(value, bool) else str(value)
