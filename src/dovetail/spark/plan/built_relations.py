"""Resolves the relation given to `enrich`: a relation, a path, or a DataFrame, from which one is built.

A relation built from a DataFrame lies in the directory that Spark removes with the application. Later calls with the
same DataFrame, key and number of shards reuse it. DataFrames are the same if Spark says that they compute the same and
the local files they read are unchanged.
"""

import atexit
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from pyspark import SparkFiles
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from dovetail.core.errors import PlanError
from dovetail.joins.spec import KeyNames
from dovetail.relation import Relation

__all__ = ["is_dataframe", "relation_of"]


@dataclass(frozen=True)
class _Built:
    df: DataFrame
    files: tuple[tuple[str, int, int], ...]
    relation: Relation


_BUILT: dict[tuple[Any, ...], _Built] = {}
_LOCK = threading.Lock()


def relation_of(spark: SparkSession, relation: Any, on: KeyNames | None, shards: int | None) -> Relation:
    """Open or build the relation to join with."""
    if is_dataframe(relation):
        return _built(spark, relation, on, shards)
    if isinstance(relation, str | os.PathLike):
        relation = Relation.open(relation)
    if not isinstance(relation, Relation):
        raise PlanError(
            f"a {type(relation).__name__} is not a relation.",
            hint="Pass a Relation, the path of one, or a Spark DataFrame.",
        )
    if shards is not None and shards != relation.num_shards:
        raise PlanError(
            f"shards={shards}: {relation.path} was built with {relation.num_shards}.",
            hint="Leave shards out, or build the relation again.",
        )
    return relation


def is_dataframe(relation: Any) -> bool:
    """Whether it is a DataFrame, classic or of Connect, of which a relation has to be built."""
    return hasattr(relation, "isStreaming") and hasattr(relation, "sparkSession")


def _built(spark: SparkSession, df: DataFrame, on: KeyNames | None, shards: int | None) -> Relation:
    if df.isStreaming:
        raise PlanError(
            "the relation is a streaming DataFrame: enrich joins a stream with a table.",
            hint="Join two streams with dovetail.multi_join, or with Spark's own join.",
        )
    if not on:
        raise PlanError(
            "the relation is a DataFrame, which has no key of its own.",
            hint="Pass on=, or build a relation with dovetail.Relation.build.",
        )
    names = list(on.values()) if isinstance(on, Mapping) else [on] if isinstance(on, str) else list(on)
    count = shards or 2 * _parallelism(spark)
    with _LOCK:
        key = _application(spark), df.semanticHash(), tuple(names), count
        files = _local_files(df)
        known = _BUILT.get(key)
        if known is None or known.files != files or not known.df.sameSemantics(df) or not _is_there(known.relation):
            path = _directory(spark) / uuid.uuid4().hex
            known = _Built(df, files, Relation.build(df, path, on=names, shards=count))
            _BUILT[key] = known
        return known.relation


def _is_there(relation: Relation) -> bool:
    return Path(relation.path).is_dir()


def _local_files(df: DataFrame) -> tuple[tuple[str, int, int], ...]:
    """The local files that a DataFrame reads, with their sizes and times."""
    found = []
    for uri in df.inputFiles():
        parts = urlparse(uri)
        if parts.scheme in ("", "file"):
            with suppress(FileNotFoundError):
                info = os.stat(unquote(parts.path))
                found.append((uri, info.st_size, info.st_mtime_ns))
    return tuple(sorted(found))


def _parallelism(spark: SparkSession) -> int:
    context = _context(spark)
    return 4 if context is None else max(1, int(context.defaultParallelism))


def _application(spark: SparkSession) -> str:
    context = _context(spark)
    return spark.conf.get("spark.app.id") or "" if context is None else str(context.applicationId)


def _directory(spark: SparkSession) -> Path:
    """A directory that is removed with the application."""
    context = _context(spark)
    if context is None:
        # Spark Connect does not reveal the server's directories.
        directory = tempfile.mkdtemp(prefix="dovetail-relations-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        return Path(directory)
    return Path(SparkFiles.getRootDirectory()) / "dovetail-relations"


def _context(spark: SparkSession) -> Any:
    """The Spark context; None with Spark Connect."""
    try:
        return spark.sparkContext
    except PySparkException:
        return None
