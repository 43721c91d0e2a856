"""The models of a pipeline file. The reference and the JSON schema are generated from the descriptions of the keys."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from dovetail.pipeline.secrets import Secret
from dovetail.pipeline.step_models import BudgetText, Columns, Duration, Step, Strict, duration

__all__ = [
    "ConsoleSink",
    "DeadLetter",
    "DebeziumSource",
    "DeltaSink",
    "DeltaSource",
    "FileSource",
    "IcebergSink",
    "IcebergSource",
    "JdbcTable",
    "KafkaSink",
    "KafkaSource",
    "NoopSink",
    "ParquetSink",
    "Pipeline",
    "PostgresSink",
    "RateSource",
    "RelationEntry",
    "Sink",
    "Source",
    "TableFiles",
    "Watermark",
]

Options = dict[str, str | int | float | bool | Secret]
FileFormat = Literal["json", "csv", "parquet", "xml", "orc"]


_FLOW_NAME = re.compile(r"[\w.-]+")


def _flow_name(name: str) -> str:
    if not _FLOW_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a flow name: use only letters, digits, '_', '-' and '.'.")
    return name


def _trigger(value: str) -> str:
    return value if value == "available-now" else duration(value)


# ==================================================================== sources


class Watermark(Strict):
    """How late rows may be, by their event time."""

    column: str = Field(description="The event-time column, a timestamp.")
    delay: Duration = Field(description="How far a row may be behind the latest, such as `10 minutes`.")


class DeadLetter(Strict):
    """Where malformed rows go."""

    path: str = Field(description="A directory. Parquet files with the original row, the reason and the source.")


class _SourceBase(Strict):
    select: Columns | None = Field(None, description="Columns or SQL expressions (`expression AS name`) to keep.")
    where: str | None = Field(None, description="A SQL condition. Other rows are dropped.")
    watermark: Watermark | None = Field(None, description="Event time, for steps that need it.")


class FileSource(_SourceBase):
    """New files in a directory."""

    format: FileFormat = Field(description="The file format.")
    path: str = Field(description="A directory, or a pattern of files.")
    columns: str | None = Field(
        None,
        alias="schema",
        description="Names and types, such as `id bigint, name string`. Optional for Parquet and ORC files.",
    )
    row_tag: str | None = Field(None, description="XML: the element that is a row.")
    max_files_per_trigger: int | None = Field(None, ge=1, description="At most this many new files per micro-batch.")
    options: Options = Field(default_factory=dict, description="Options of Spark's reader.")
    malformed: Literal["error", "dead-letter", "drop"] = Field(
        "error",
        description="What to do with malformed rows: fail, write them to `dead_letter`, or drop them.",
    )
    max_record_bytes: int | None = Field(
        None, ge=1, description="A record longer than this, as JSON, is malformed. No limit by default."
    )
    dead_letter: DeadLetter | None = Field(None, description="Where malformed rows go.")

    @model_validator(mode="after")
    def _fits(self) -> "FileSource":
        if self.format == "xml" and self.row_tag is None:
            raise ValueError("XML files need row_tag: the element that is a row.")
        if self.format != "xml" and self.row_tag is not None:
            raise ValueError(f"row_tag is for xml, not for {self.format}.")
        if self.columns is None and self.format in ("json", "csv", "xml"):
            raise ValueError(f"A stream of {self.format} files needs schema: names and types of its columns.")
        if (self.malformed == "dead-letter") != (self.dead_letter is not None):
            raise ValueError("malformed: dead-letter requires dead_letter: {path: ...}, and the reverse.")
        if self.malformed != "error" and self.format in ("parquet", "orc"):
            raise ValueError(f"malformed is for json, csv and xml: a {self.format} file cannot have malformed rows.")
        return self


class KafkaSource(_SourceBase):
    """A Kafka topic of JSON records."""

    format: Literal["kafka"]
    servers: str = Field(description="`host:port`, comma-separated.")
    topic: str = Field(description="The topic, or several, comma-separated.")
    columns: str = Field(alias="schema", description="Names and types of the fields of a record's value.")
    starting: Literal["earliest", "latest"] = Field("earliest", description="Where the first run starts.")
    max_records_per_trigger: int | None = Field(None, ge=1, description="At most this many records per micro-batch.")
    options: Options = Field(default_factory=dict, description="Options of Spark's Kafka source, including `kafka.*`.")
    malformed: Literal["error", "dead-letter", "drop"] = Field(
        "error", description="What to do with records that are not JSON of the schema."
    )
    max_record_bytes: int | None = Field(
        None, ge=1, description="A record with more bytes than this is malformed. No limit by default."
    )
    dead_letter: DeadLetter | None = Field(None, description="Where malformed records go.")

    @model_validator(mode="after")
    def _fits(self) -> "KafkaSource":
        if (self.malformed == "dead-letter") != (self.dead_letter is not None):
            raise ValueError("malformed: dead-letter requires dead_letter: {path: ...}, and the reverse.")
        return self


class RateSource(_SourceBase):
    """Rows generated by Spark, for experiments: `timestamp` and `value`."""

    format: Literal["rate"]
    rows_per_batch: int = Field(1000, ge=1, description="Rows per micro-batch.")


class BurstySource(_SourceBase):
    """Rows of Dovetail's generator, bursts of skewed keys: `k`, `v` and `ts`. The same rows after every start."""

    format: Literal["bursty"]
    keys: int = Field(1_000_000, ge=1, description="The number of distinct keys.")
    exponent: float = Field(1.0, ge=0, le=2, description="Exponent of the Zipf distribution of keys; 0: uniform.")
    order: Literal["shuffled", "ranked"] = Field("shuffled", description="`ranked`: key 1 is the most frequent.")
    tuples_per_step: float | None = Field(None, gt=0, description="Mean number of rows per step, 1,023 by default.")
    step_millis: float = Field(1.0, ge=0, description="Duration of a step; 0: as fast as possible.")
    steps_per_batch: int | None = Field(None, ge=1, description="At most this many steps per micro-batch.")
    steps: int | None = Field(None, ge=1, description="Length of the stream; required for `available-now`.")
    seed: int = Field(0, ge=0, description="Seed of the generator.")

    @model_validator(mode="after")
    def _fits(self) -> "BurstySource":
        if self.step_millis == 0 and self.steps_per_batch is None:
            raise ValueError("step_millis: 0 requires steps_per_batch, otherwise a micro-batch would never end.")
        return self


class DebeziumSource(_SourceBase):
    """Debezium's change events, in a Kafka topic or in files with an envelope per line. For `follow`."""

    format: Literal["debezium"]
    path: str | None = Field(None, description="A directory of files, or:")
    servers: str | None = Field(None, description="Kafka: `host:port`, comma-separated.")
    topic: str | None = Field(None, description="Kafka: the topic.")
    columns: str = Field(alias="schema", description="Names and types of the table's columns.")
    sequence: str = Field("source.lsn", description="The envelope's field that orders the changes of a key.")
    options: Options = Field(default_factory=dict, description="Options of Spark's reader.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.path is None) == (self.servers is None) or (self.servers is None) != (self.topic is None):
            raise ValueError("debezium takes either path, or servers and topic.")
        return self


class DeltaSource(_SourceBase):
    """The changes of a Delta table: its rows first, then what each version changes. For `follow`."""

    format: Literal["delta"]
    path: str = Field(description="The table's directory.")
    versions_per_trigger: int | None = Field(None, ge=1, description="At most this many versions per micro-batch.")


class IcebergSource(_SourceBase):
    """The changes of an Iceberg table: its rows first, then what later snapshots change. For `follow`."""

    format: Literal["iceberg"]
    table: str = Field(description="`namespace.table`.")
    catalog: str = Field("default", description="The catalog's name.")
    properties: dict[str, str] = Field(
        default_factory=dict, description="Properties of the catalog; secrets belong into `~/.pyiceberg.yaml`."
    )


Source = Annotated[
    FileSource | KafkaSource | RateSource | BurstySource | DebeziumSource | DeltaSource | IcebergSource,
    Field(discriminator="format"),
]


# ==================================================================== relations


class TableFiles(Strict):
    """Files to build a relation from."""

    format: FileFormat = Field(description="The file format.")
    path: str = Field(description="A file, a directory or a pattern.")
    columns: str | None = Field(None, alias="schema", description="Names and types; by default those of the files.")
    row_tag: str | None = Field(None, description="XML: the element that is a row.")
    options: Options = Field(default_factory=dict, description="Options of Spark's reader.")
    on: Columns = Field(description="The key: a column or several.")
    shards: int = Field(8, ge=1, le=65_536, description="Number of shards; as a rule, twice the cores that join it.")
    unique: bool = Field(False, description="Whether no two rows have the same key.")


class JdbcTable(Strict):
    """A database table to build a relation from."""

    format: Literal["jdbc"]
    url: str = Field(description="`jdbc:postgresql://host:port/database`.")
    table: str = Field(description="The table, or a query in parentheses with an alias.")
    user: str | None = Field(None, description="The user.")
    password: Secret | None = Field(None, description="`{env: NAME}` or `{file: PATH}`.")
    options: Options = Field(default_factory=dict, description="Options of Spark's JDBC source.")
    on: Columns = Field(description="The key: a column or several.")
    shards: int = Field(8, ge=1, le=65_536, description="Number of shards; as a rule, twice the cores that join it.")
    unique: bool = Field(False, description="Whether no two rows have the same key.")


class RelationEntry(Strict):
    """A relation that steps join with or keep."""

    path: str = Field(description="Its directory.")
    build: Annotated[TableFiles | JdbcTable, Field(discriminator="format")] | None = Field(
        None, description="The source to build it from if there is none at `path`."
    )


# ==================================================================== sinks


class ParquetSink(Strict):
    """A directory of Parquet files. Exactly once."""

    format: Literal["parquet"]
    path: str = Field(description="The directory.")
    compression: Literal["snappy", "zstd", "gzip", "lz4", "none"] = Field("snappy", description="Compression codec.")


class _LakeSink(Strict):
    key: Columns | None = Field(
        None, description="Upsert: a row replaces the row with the same key. Default: append all rows."
    )
    order_by: str | None = Field(
        None, description="With `key`: of rows with the same key in a micro-batch, the greatest by this column wins."
    )
    partition_by: Columns | None = Field(None, description="The columns that a new table is partitioned by.")
    add_columns: bool = Field(False, description="Add columns that the table lacks, instead of refusing them.")
    compression: Literal["snappy", "zstd", "gzip", "lz4", "none"] = Field("snappy", description="Of appended files.")
    budget: BudgetText = Field("256MB", description="With `key`: the rows of a micro-batch that the driver may hold.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.order_by is not None and self.key is None:
            raise ValueError("order_by requires key.")
        return self


class DeltaSink(_LakeSink):
    """A Delta table. Exactly once. Needs the package `deltalake`."""

    format: Literal["delta"]
    path: str = Field(description="The table's directory; the table is made if there is none.")


class IcebergSink(_LakeSink):
    """A table of an Iceberg catalog, in a local directory. Exactly once. Needs the package `pyiceberg`."""

    format: Literal["iceberg"]
    table: str = Field(description="`namespace.table`; made if there is none.")
    catalog: str = Field("default", description="The catalog's name.")
    properties: dict[str, str | Secret] = Field(
        default_factory=dict, description="Properties of the catalog, in addition to those of `~/.pyiceberg.yaml`."
    )


class ConsoleSink(Strict):
    """The terminal."""

    format: Literal["console"]
    rows: int = Field(20, ge=1, description="At most this many rows are printed per micro-batch.")


class NoopSink(Strict):
    """No output: rows are computed and discarded."""

    format: Literal["noop"]


class PostgresSink(Strict):
    """A table of a PostgreSQL database. Exactly once."""

    format: Literal["postgres"]
    host: str = Field("localhost", description="The server.")
    port: int = Field(5432, ge=1, le=65_535, description="Its port.")
    database: str = Field(description="The database.")
    table: str = Field(description="The table, as `schema.table` if it is not in the search path. It must exist.")
    user: str = Field(description="The user.")
    password: Secret | None = Field(None, description="`{env: NAME}` or `{file: PATH}`.")
    key: Columns | None = Field(
        None,
        description="Columns of a unique index: a row replaces the row with the same key. Default: append all rows.",
    )

    order_by: str | None = Field(
        None, description="With `key`: of rows with the same key in a micro-batch, the greatest by these columns wins."
    )
    sslmode: Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] | None = Field(
        None, description="TLS, as PostgreSQL's own option. Default: TLS if the server offers it."
    )
    sslrootcert: str | None = Field(None, description="PEM file of the certificates to trust, or `system`.")
    sslcert: str | None = Field(None, description="PEM file of the client's certificate.")
    sslkey: str | None = Field(None, description="PEM file of the client's key.")

    @model_validator(mode="after")
    def _fits(self) -> "PostgresSink":
        if self.order_by is not None and self.key is None:
            raise ValueError("order_by requires key.")
        return self


class KafkaSink(Strict):
    """A Kafka topic. At least once, with headers that let a reader detect duplicates."""

    format: Literal["kafka"]
    servers: str = Field(description="`host:port`, comma-separated.")
    topic: str = Field(description="The topic.")
    key: Columns | None = Field(None, description="Columns whose values, as JSON, are the record's key.")
    options: Options = Field(default_factory=dict, description="Options of Spark's Kafka sink, including `kafka.*`.")


Sink = Annotated[
    ParquetSink | DeltaSink | IcebergSink | ConsoleSink | NoopSink | PostgresSink | KafkaSink,
    Field(discriminator="format"),
]


# ==================================================================== the file


class Pipeline(Strict):
    """A pipeline: sources, relations, steps, a sink, and a trigger."""

    name: Annotated[str, AfterValidator(_flow_name)] = Field(
        description="The name of the flow, stored in its checkpoint: letters, digits, `_`, `-` and `.`."
    )
    checkpoint: str = Field(description="A directory on a disk, used only by this flow, from which it resumes.")
    trigger: Annotated[str, AfterValidator(_trigger)] | None = Field(
        None,
        description="Interval of micro-batches, such as `5 seconds`; `available-now`: process what is there and stop.",
    )
    keep_commits: int = Field(10, ge=2, description="The number of commits, with their state, that are kept.")
    sources: dict[str, Source] = Field(min_length=1, description="Streams, by name.")
    relations: dict[str, RelationEntry] = Field(default_factory=dict, description="Relations, by name.")
    steps: list[Step] = Field(default_factory=list, description="Processing steps, in order.")
    sink: Sink = Field(description="Where the rows go.")
    spark: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Spark settings; overridden by `--conf` on the command line."
    )
