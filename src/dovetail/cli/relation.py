"""``dovetail relation``: build, inspect and change relations.

The relation's PATH is the first argument of every command, followed by the data. Commands that only inspect a relation
or remove old versions never start Spark.
"""

import json as json_module
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.failures import Interrupted
from dovetail.cli.interrupts import noticing_interrupts
from dovetail.cli.options import (
    Debug,
    Format,
    Json,
    KeySources,
    Master,
    ReaderOptions,
    ReaderSchema,
    RelationPath,
    Sources,
    SparkSettings,
    key_values,
)
from dovetail.cli.output import Output
from dovetail.cli.progress import showing_activity
from dovetail.cli.reporting import reporting
from dovetail.cli.sources import Source, find_source, read_source
from dovetail.core.errors import RelationError

# Relation and Spark are imported by the commands that use them: --help and a mistyped option do not need them.
if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dovetail.relation import Relation

app = typer.Typer(
    no_args_is_help=True, help="Build, inspect and change relations: tables on disk that streams are joined with."
)

_DEFAULT_MASTER = "local[*]"


class Mode(StrEnum):
    """What a build does if the relation exists."""

    error = "error"
    overwrite = "overwrite"


# -------------------------------------------------------------------- commands that write


@app.command()
def build(
    path: RelationPath,
    source: Sources,
    on: Annotated[
        list[str],
        typer.Option("--on", metavar="COLUMN", help="A key column; repeat it for a composite key.", show_default=False),
    ],
    shards: Annotated[int, typer.Option(min=1, max=65_536, help="Number of shards, fixed for its life.")] = 8,
    mode: Annotated[
        Mode, typer.Option(help="If the relation exists: fail, or add a version with the new rows.")
    ] = Mode.error,
    unique: Annotated[bool, typer.Option("--unique", help="Declare that keys are unique; refuse duplicates.")] = False,
    format: Format = None,
    option: ReaderOptions = None,
    schema: ReaderSchema = None,
    master: Master = _DEFAULT_MASTER,
    conf: SparkSettings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Build a relation at PATH from the rows of SOURCE."""
    with reporting(json, debug) as output:
        from dovetail.relation import Relation

        rows = _Rows(find_source(source, format, key_values("--option", option), schema, is_local=_is_local(master)))
        spark = _Spark(master, key_values("--conf", conf))
        _check_can_build(path, mode)
        _write(
            output,
            path,
            rows,
            spark,
            lambda df, progress: Relation.build(
                df, path, on=on, shards=shards, mode=mode.value, unique=unique, progress=progress
            ),
        )


@app.command()
def append(
    path: RelationPath,
    source: Sources,
    format: Format = None,
    option: ReaderOptions = None,
    schema: ReaderSchema = None,
    master: Master = _DEFAULT_MASTER,
    conf: SparkSettings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Add the rows of SOURCE to the relation at PATH."""
    with reporting(json, debug) as output:
        rows = find_source(source, format, key_values("--option", option), schema, is_local=_is_local(master))
        _change(output, path, rows, _Spark(master, key_values("--conf", conf)), "append")


@app.command()
def upsert(
    path: RelationPath,
    source: Sources,
    format: Format = None,
    option: ReaderOptions = None,
    schema: ReaderSchema = None,
    master: Master = _DEFAULT_MASTER,
    conf: SparkSettings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Replace the rows of every key in SOURCE with its rows for that key, and add new keys."""
    with reporting(json, debug) as output:
        rows = find_source(source, format, key_values("--option", option), schema, is_local=_is_local(master))
        _change(output, path, rows, _Spark(master, key_values("--conf", conf)), "upsert")


@app.command()
def delete(
    path: RelationPath,
    keys_source: KeySources,
    format: Format = None,
    option: ReaderOptions = None,
    schema: ReaderSchema = None,
    master: Master = _DEFAULT_MASTER,
    conf: SparkSettings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete all rows of the keys in KEYS_SOURCE."""
    with reporting(json, debug) as output:
        keys = find_source(keys_source, format, key_values("--option", option), schema, is_local=_is_local(master))
        _change(output, path, keys, _Spark(master, key_values("--conf", conf)), "delete")


# -------------------------------------------------------------------- commands that need no Spark


@app.command()
def info(
    path: RelationPath,
    version: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The version to show; by default the latest.", show_default=False),
    ] = None,
    shards_detail: Annotated[bool, typer.Option("--shards-detail", help="Also show every shard.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a relation: its key, columns, counts and sizes."""
    with reporting(json, debug) as output:
        from dovetail.relation import Relation

        output.info(_info_document(Relation.open(path, version), shards_detail))


@app.command()
def versions(path: RelationPath, json: Json = False, debug: Debug = False) -> None:
    """List the versions that can be opened, oldest first."""
    with reporting(json, debug) as output:
        from dovetail.relation import Relation

        relation = Relation.open(path)
        history = [asdict(version) for version in relation.versions()]
        output.versions({"path": relation.path, "versions": history})


@app.command()
def vacuum(
    path: RelationPath,
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="The number of latest versions to keep.")] = 3,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove old versions, and files that no version uses."""
    with reporting(json, debug) as output:
        from dovetail.relation import Relation

        relation = Relation.open(path)
        before = _usage(relation)
        report = relation.vacuum(keep=keep)
        output.vacuumed(
            {
                "path": relation.path,
                "keep": keep,
                "before": before,
                "after": _usage(relation),
                "removed": asdict(report),
            }
        )


@app.command()
def erase(
    path: RelationPath,
    key: Annotated[
        list[str],
        typer.Option(
            "--key",
            metavar="VALUE",
            help="A key whose rows are erased; repeat it for more. Of several columns: a JSON array.",
            show_default=False,
        ),
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove the rows of keys from every version and every file, for good."""
    with reporting(json, debug) as output:
        from dovetail.relation import Relation

        relation = Relation.open(path)
        report = relation.erase(_keys_of(key, relation))
        document = {"path": relation.path, **asdict(report)}
        text = [
            f"{report.rows} rows of {report.keys} keys erased from {len(report.versions)} versions of {relation.path}: "
            f"{report.segments} segments written again ({report.bytes} bytes), {report.files_removed} files removed.",
            "Not erased, because it is not the relation's:",
            *(f"  {place}" for place in report.not_erased),
        ]
        output.show(document, lambda shown: shown.line("\n".join(text)))


def _keys_of(texts: list[str], relation: "Relation") -> "pa.Table":
    """The keys that are named on the command line, as the types of the relation's key."""
    import pyarrow as pa

    names = list(relation.key)
    rows = []
    for text in texts:
        values = [text]
        if len(names) > 1:
            try:
                values = json_module.loads(text)
            except ValueError:
                values = []
            if not isinstance(values, list) or len(values) != len(names):
                raise RelationError(
                    f"{text!r} is no key of {relation.path}.",
                    hint=f"Its key is ({', '.join(names)}): write a JSON array of that many values.",
                )
        rows.append([str(value) for value in values])
    try:
        columns = [
            pa.array(column).cast(relation.schema.field(name).type)
            for name, column in zip(names, zip(*rows, strict=True), strict=True)
        ]
    except pa.ArrowInvalid as error:
        raise RelationError(f"A value is not of the key's type: {error}.") from None
    return pa.table(dict(zip(names, columns, strict=True)))


# -------------------------------------------------------------------- writing


@dataclass(frozen=True)
class _Spark:
    master: str
    settings: dict[str, str]


@dataclass(frozen=True)
class _Rows:
    """Rows to read, for a relation that may already exist."""

    source: Source
    relation: "Relation | None" = None


def _change(output: Output, path: str, source: Source, spark: _Spark, operation: str) -> None:
    from dovetail.relation import Relation

    relation = Relation.open(path)
    write = getattr(relation, operation)
    _write(output, path, _Rows(source, relation), spark, lambda df, progress: write(df, progress=progress))


def _write(
    output: Output,
    path: str,
    rows: _Rows,
    spark: _Spark,
    write: "Callable[[DataFrame, Callable[[int, int], None]], Relation]",
) -> None:
    """Start Spark, read the rows, write them, and report the result."""
    started = time.perf_counter()
    with _reporting_interrupts(path), showing_activity(output.messages) as activity:
        activity.stage("Starting Spark")
        from dovetail.cli.session import spark_session
        from dovetail.cli.spark_rows import watching_rows
        from dovetail.spark.plan.relation_jobs import spark_schema

        with spark_session(spark.master, spark.settings) as session:
            activity.stage("Reading")
            types = None if rows.relation is None else spark_schema(rows.relation)
            df = read_source(session, rows.source, types)
            report = activity.stage("Writing")
            with watching_rows(session, activity.rows):
                made = write(df, report)
    before = None if rows.relation is None else rows.relation.stats.rows
    seconds = round(time.perf_counter() - started, 3)
    output.written({**_version_document(made), "rows_before": before, "seconds": seconds})


@contextmanager
def _reporting_interrupts(path: str) -> Iterator[None]:
    """Turn Ctrl-C into a message that says whether the new version was committed."""
    before = _newest_version(path)
    with noticing_interrupts() as was_interrupted:
        try:
            yield
            return
        except (KeyboardInterrupt, Exception) as error:
            # Ctrl-C cancels Spark's job first, and the resulting error may be the only sign of it.
            if not isinstance(error, KeyboardInterrupt) and not was_interrupted():
                raise
        after = _newest_version(path)
        if after != before:
            raise Interrupted(f"Interrupted, but version {after} of {path} was already committed.") from None
        if before is None:
            raise Interrupted(f"Interrupted: nothing was committed, {path} has no version yet.") from None
        raise Interrupted(f"Interrupted: nothing was committed, {path} is still at version {before}.") from None


def _newest_version(path: str) -> int | None:
    from dovetail.relation.version_log import VersionLog
    from dovetail.storage.files import RelationFiles

    return max(VersionLog(RelationFiles(path)).numbers(), default=None)


def _check_can_build(path: str, mode: Mode) -> None:
    """Check what `Relation.build` would refuse because of the path, before Spark is started."""
    from dovetail.relation.version_log import check_is_free
    from dovetail.storage.files import RelationFiles

    check_is_free(RelationFiles(path))
    newest = _newest_version(path)
    if newest is not None and mode is Mode.error:
        raise RelationError(
            f"{path} already holds a relation (version {newest}).",
            hint="Use --mode overwrite to replace its rows, append or upsert to add some, or another path.",
        )


def _is_local(master: str) -> bool:
    return master.startswith("local")


# -------------------------------------------------------------------- documents


def _info_document(relation: "Relation", shards_detail: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        **_version_document(relation),
        "created_at": relation.version_info.created_at,
        "index_bytes": relation.index_bytes,
        "schema": [{"name": f.name, "type": str(f.type), "nullable": f.nullable} for f in relation.schema],
    }
    if shards_detail:
        shards = enumerate(relation.stats.shards)
        document["shards_detail"] = [{"shard": number, **shard.as_dict()} for number, shard in shards]
    return document


def _version_document(relation: "Relation") -> dict[str, Any]:
    stats, made = relation.stats, relation.version_info
    return {
        "path": relation.path,
        "version": relation.version,
        "parent": made.parent,
        "operation": made.operation,
        "key": {"columns": list(relation.key), "code": relation.code_kind, "declared_unique": relation.is_unique_key},
        "rows": stats.rows,
        "bytes": stats.bytes,
        "distinct_codes": stats.distinct_codes,
        "max_multiplicity": stats.max_multiplicity,
        "is_unique": stats.is_unique,
        "null_key_rows": stats.null_key_rows,
        "shards": relation.num_shards,
    }


def _usage(relation: "Relation") -> dict[str, int]:
    """The size of a relation on disk, over all versions."""
    data = os.path.join(relation.path, "data")
    sizes = [os.path.getsize(os.path.join(directory, name)) for directory, _, names in os.walk(data) for name in names]
    return {"versions": len(relation.versions()), "files": len(sizes), "bytes": sum(sizes)}
