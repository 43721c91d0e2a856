"""Which version of a relation a micro-batch is joined with, agreed on by all its tasks and by a replay of it.

The first task of a micro-batch writes the newest version's number into a file that it creates exclusively under the
relation's directory, ``pins/<query id>/<batch id>.json``; every other task, and every later run of the same
micro-batch, reads it there. Spark can replay as many micro-batches as it keeps offsets for, 100 unless told otherwise,
so pins older than twice that are removed.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from pyspark import TaskContext

from dovetail.errors import InternalError, RelationCorrupt, RelationNotFound, RelationReadOnly
from dovetail.relation.files import create_exclusively, storage_errors
from dovetail.relation.relation import Relation
from dovetail.spark.join_recipe import JoinRecipe

__all__ = ["BATCH_ID_PROPERTY", "QUERY_ID_PROPERTY", "check_can_pin", "pinned_version"]

QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"
_KEPT_PINS = 200


def check_can_pin(relation: Relation) -> None:
    """Refuse, at planning, a relation whose directory cannot hold pins."""
    if relation.filesystem is None and not os.path.isdir(relation.path):
        raise RelationNotFound(f"{relation.path} does not exist any more.", hint="Build the relation again.")
    if relation.filesystem is not None or not os.access(relation.path, os.W_OK):
        raise RelationReadOnly(
            f"{relation.path} cannot be written: with refresh='batch' the version of each micro-batch is noted there.",
            hint="Use refresh='query', or a relation in a directory that tasks can write.",
        )


def pinned_version(recipe: JoinRecipe) -> int:
    """The version for the micro-batch that this task is part of; outside a streaming query, the planned one."""
    context = TaskContext.get()
    if context is None:
        raise InternalError("a version can be pinned inside a Spark task only.")
    query, batch = (context.getLocalProperty(name) for name in (QUERY_ID_PROPERTY, BATCH_ID_PROPERTY))
    if query is None or batch is None:
        return recipe.version
    return pin(recipe, query, int(batch))


def pin(recipe: JoinRecipe, query: str, batch: int) -> int:
    """The version that micro-batch ``batch`` of a query is joined with; the first caller decides."""
    directory = Path(recipe.path) / "pins" / query
    path = directory / f"{batch}.json"
    with suppress(FileNotFoundError):
        return _read(path)
    newest = Relation.open(recipe.path)
    recipe.check(newest)
    with storage_errors(Path(recipe.path)):
        directory.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            create_exclusively(path, json.dumps({"version": newest.version}))
            (directory / f"{batch - _KEPT_PINS}.json").unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> int:
    text = path.read_text()
    try:
        return int(json.loads(text)["version"])
    except (ValueError, KeyError, TypeError):
        raise RelationCorrupt(
            f"{path} does not name a version: it was damaged.", hint="Remove it and start the query again."
        ) from None
