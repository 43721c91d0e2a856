"""What a pipeline file may say. Every key has a description, from which the reference and the JSON schema are made."""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from dovetail.pipeline.secrets import Secret
from dovetail.pipeline.step_models import Columns, Duration, Step, Strict, duration

__all__ = [
    "ConsoleSink",
    "DeadLetter",
    "FileSource",
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
        raise ValueError(f"{name!r} is not a name of a flow: use letters, digits, '_', '-' and '.' only.")
    return name


def _trigger(value: str) -> str:
    return value if value == "available-now" else duration(value)


# ==================================================================== sources


class Watermark(Strict):
    """How late rows may be, by their event time."""

    column: str = Field(description="The event-time column, a timestamp.")
    delay: Duration = Field(description="How far behind the latest a row may be, such as `10 minutes`.")


class DeadLetter(Strict):
    """Where rows go that cannot be read."""

    path: str = Field(description="A directory; Parquet files with the row as it was, the reason and the source.")


class _SourceBase(Strict):
    select: Columns | None = Field(None, description="Columns or SQL expressions (`expression AS name`) to keep.")
    where: str | None = Field(None, description="A SQL condition; other rows are left out.")
    watermark: Watermark | None = Field(None, description="Event time, for steps that need it.")


class FileSource(_SourceBase):
    """Files that arrive in a directory."""

    format: FileFormat = Field(description="The files' format.")
    path: str = Field(description="A directory, or a pattern of files.")
    columns: str | None = Field(
        None,
        alias="schema",
        description="Names and types, such as `id bigint, name string`. Parquet and ORC files may say it themselves.",
    )
    row_tag: str | None = Field(None, description="XML: the element that is a row.")
    max_files_per_trigger: int | None = Field(None, ge=1, description="The most new files per micro-batch.")
    options: Options = Field(default_factory=dict, description="Options of Spark's reader.")
    malformed: Literal["error", "dead-letter", "drop"] = Field(
        "error",
        description="What to do with rows that cannot be read: an error, set aside, or dropped.",
    )
    max_record_bytes: int | None = Field(
        None, ge=1, description="A record that is longer, written as JSON, is malformed; by default none is."
    )
    dead_letter: DeadLetter | None = Field(None, description="Where malformed rows go.")

    @model_validator(mode="after")
    def _fits(self) -> "FileSource":
        if self.format == "xml" and self.row_tag is None:
            raise ValueError("XML files need row_tag: the element that is a row.")
        if self.format != "xml" and self.row_tag is not None:
            raise ValueError(f"row_tag goes with xml, not with {self.format}.")
        if self.columns is None and self.format in ("json", "csv", "xml"):
            raise ValueError(f"A stream of {self.format} files needs schema: names and types of its columns.")
        if (self.malformed == "dead-letter") != (self.dead_letter is not None):
            raise ValueError("malformed: dead-letter goes with dead_letter: {path: ...}, and only with it.")
        if self.malformed != "error" and self.format in ("parquet", "orc"):
            raise ValueError(f"A {self.format} file is read whole or not at all: malformed is for json, csv and xml.")
        return self


class KafkaSource(_SourceBase):
    """A Kafka topic whose records hold JSON."""

    format: Literal["kafka"]
    servers: str = Field(description="`host:port`, several separated by commas.")
    topic: str = Field(description="The topic, or several separated by commas.")
    columns: str = Field(alias="schema", description="Names and types of the fields of a record's value.")
    starting: Literal["earliest", "latest"] = Field("earliest", description="Where the very first start begins.")
    max_records_per_trigger: int | None = Field(None, ge=1, description="The most new records per micro-batch.")
    options: Options = Field(default_factory=dict, description="Options of Spark's Kafka source, `kafka.*` included.")
    malformed: Literal["error", "dead-letter", "drop"] = Field(
        "error", description="What to do with records that are not such JSON."
    )
    max_record_bytes: int | None = Field(
        None, ge=1, description="A record that is longer, as Kafka has it, is malformed; by default none is."
    )
    dead_letter: DeadLetter | None = Field(None, description="Where malformed records go.")

    @model_validator(mode="after")
    def _fits(self) -> "KafkaSource":
        if (self.malformed == "dead-letter") != (self.dead_letter is not None):
            raise ValueError("malformed: dead-letter goes with dead_letter: {path: ...}, and only with it.")
        return self


class RateSource(_SourceBase):
    """Rows made by Spark, for trying things out: `timestamp` and `value`."""

    format: Literal["rate"]
    rows_per_batch: int = Field(1000, ge=1, description="Rows per micro-batch.")


class BurstySource(_SourceBase):
    """Rows of Dovetail's own generator, bursts of skewed keys: `k`, `v` and `ts`, the same ones after every start."""

    format: Literal["bursty"]
    keys: int = Field(1_000_000, ge=1, description="How many keys there are.")
    exponent: float = Field(1.0, ge=0, le=2, description="Of Zipf's law, by which keys are drawn; 0: all alike.")
    order: Literal["shuffled", "ranked"] = Field("shuffled", description="`ranked`: key 1 is the most frequent.")
    tuples_per_step: float | None = Field(None, gt=0, description="Rows per step in the mean, 1,023 by default.")
    step_millis: float = Field(1.0, ge=0, description="How long a step takes; 0: as fast as it is asked for.")
    steps_per_batch: int | None = Field(None, ge=1, description="The most steps in a micro-batch.")
    steps: int | None = Field(None, ge=1, description="Where the stream ends; `available-now` needs an end.")
    seed: int = Field(0, ge=0, description="Another seed, another stream.")

    @model_validator(mode="after")
    def _fits(self) -> "BurstySource":
        if self.step_millis == 0 and self.steps_per_batch is None:
            raise ValueError("step_millis: 0 goes with steps_per_batch, or a micro-batch would have no end.")
        return self


Source = Annotated[FileSource | KafkaSource | RateSource | BurstySource, Field(discriminator="format")]


# ==================================================================== relations


class TableFiles(Strict):
    """Files to build a relation from."""

    format: FileFormat = Field(description="The files' format.")
    path: str = Field(description="A file, a directory or a pattern.")
    columns: str | None = Field(None, alias="schema", description="Names and types; by default what the files say.")
    row_tag: str | None = Field(None, description="XML: the element that is a row.")
    options: Options = Field(default_factory=dict, description="Options of Spark's reader.")
    on: Columns = Field(description="The key: a column or several.")
    shards: int = Field(8, ge=1, le=65_536, description="Slices; as a rule twice the cores that will join it.")
    unique: bool = Field(False, description="Whether no two rows have the same key.")


class JdbcTable(Strict):
    """A database's table to build a relation from."""

    format: Literal["jdbc"]
    url: str = Field(description="`jdbc:postgresql://host:port/database`.")
    table: str = Field(description="The table, or a query in brackets with a name.")
    user: str | None = Field(None, description="Who logs in.")
    password: Secret | None = Field(None, description="`{env: NAME}` or `{file: PATH}`.")
    options: Options = Field(default_factory=dict, description="Options of Spark's JDBC source.")
    on: Columns = Field(description="The key: a column or several.")
    shards: int = Field(8, ge=1, le=65_536, description="Slices; as a rule twice the cores that will join it.")
    unique: bool = Field(False, description="Whether no two rows have the same key.")


class RelationEntry(Strict):
    """A relation that steps join with, or that they keep."""

    path: str = Field(description="Its directory.")
    build: Annotated[TableFiles | JdbcTable, Field(discriminator="format")] | None = Field(
        None, description="What to build it from when there is none at `path`."
    )


# ==================================================================== sinks


class ParquetSink(Strict):
    """A directory of Parquet files; every row exactly once."""

    format: Literal["parquet"]
    path: str = Field(description="The directory.")
    compression: Literal["snappy", "zstd", "gzip", "lz4", "none"] = Field("snappy", description="Of the files.")


class ConsoleSink(Strict):
    """The terminal."""

    format: Literal["console"]
    rows: int = Field(20, ge=1, description="The most rows to print per micro-batch.")


class NoopSink(Strict):
    """Nowhere: the rows are computed and thrown away."""

    format: Literal["noop"]


class PostgresSink(Strict):
    """A table of a PostgreSQL database; every row exactly once."""

    format: Literal["postgres"]
    host: str = Field("localhost", description="The server.")
    port: int = Field(5432, ge=1, le=65_535, description="Its port.")
    database: str = Field(description="The database.")
    table: str = Field(description="The table, `schema.table` where it is not in the search path. It must exist.")
    user: str = Field(description="Who logs in.")
    password: Secret | None = Field(None, description="`{env: NAME}` or `{file: PATH}`.")
    key: Columns | None = Field(
        None,
        description="Columns of a unique index: a row of an existing key replaces the old one. None: all are added.",
    )

    order_by: str | None = Field(
        None, description="With a key: of rows with the same key in a micro-batch, the greatest of these counts."
    )

    @model_validator(mode="after")
    def _fits(self) -> "PostgresSink":
        if self.order_by is not None and self.key is None:
            raise ValueError("order_by goes with key.")
        return self


class KafkaSink(Strict):
    """A Kafka topic; at least once, with headers by which a reader tells repetitions."""

    format: Literal["kafka"]
    servers: str = Field(description="`host:port`, several separated by commas.")
    topic: str = Field(description="The topic.")
    key: Columns | None = Field(None, description="The columns whose values, as JSON, are the record's key.")
    options: Options = Field(default_factory=dict, description="Options of Spark's Kafka sink, `kafka.*` included.")


Sink = Annotated[
    ParquetSink | ConsoleSink | NoopSink | PostgresSink | KafkaSink,
    Field(discriminator="format"),
]


# ==================================================================== the file


class Pipeline(Strict):
    """A pipeline: sources, relations, steps, a sink, and how often."""

    name: Annotated[str, AfterValidator(_flow_name)] = Field(
        description="The flow's name, to which its checkpoint belongs: letters, digits, `_`, `-` and `.`."
    )
    checkpoint: str = Field(description="A directory of the flow's own, on a disk: what it goes on from after a stop.")
    trigger: Annotated[str, AfterValidator(_trigger)] | None = Field(
        None,
        description="How often a micro-batch begins, such as `5 seconds`; `available-now`: take what is there.",
    )
    keep_commits: int = Field(10, ge=2, description="How many commits, with their state, the checkpoint keeps.")
    sources: dict[str, Source] = Field(min_length=1, description="Streams, by name.")
    relations: dict[str, RelationEntry] = Field(default_factory=dict, description="Relations, by name.")
    steps: list[Step] = Field(default_factory=list, description="What happens to the rows, in order.")
    sink: Sink = Field(description="Where the rows go.")
    spark: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Spark settings; `--conf` on the command line goes before them."
    )


def known_formats(kind: str) -> list[str]:
    """The formats of ``"source"``, ``"sink"`` or ``"build"``.

    Examples
    --------
    >>> known_formats("source")
    ['json', 'csv', 'parquet', 'xml', 'orc', 'kafka', 'rate', 'bursty']
    """
    models: dict[str, Any] = {
        "source": get_args(get_args(Source)[0]),
        "sink": get_args(get_args(Sink)[0]),
        "build": (TableFiles, JdbcTable),
    }
    return [name for model in models[kind] for name in get_args(model.model_fields["format"].annotation)]
