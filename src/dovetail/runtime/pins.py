"""Which version of a relation a micro-batch is joined with, agreed on by all its tasks and by a replay of it.

The first task of a micro-batch writes the newest version's number into a file that it creates exclusively under the
relation's directory, ``pins/<query id>/<batch id>.json``; every other task, and every later run of the same
micro-batch, reads it there. Spark can replay as many micro-batches as it keeps offsets for, 100 by default,
so pins older than twice that are removed. A vacuum keeps the versions of the last two micro-batches, see
`dovetail.relation.pins`.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from dovetail.core.errors import RelationNotFound, RelationReadOnly
from dovetail.relation.pins import FORMAT_VERSION, damaged, read_pin
from dovetail.relation.relation import Relation
from dovetail.runtime.join_recipe import JoinRecipe
from dovetail.storage.files import storage_errors
from dovetail.storage.local import LOCAL

__all__ = ["check_can_pin", "pin"]

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


def pin(recipe: JoinRecipe, query: str, batch: int) -> int:
    """The version that micro-batch ``batch`` of a query is joined with; the first caller decides."""
    directory = Path(recipe.path) / "pins" / query
    path = directory / f"{batch}.json"
    known = _read(path)
    if known is not None:
        return known
    newest = Relation.open(recipe.path)
    recipe.check(newest)
    with storage_errors(Path(recipe.path)):
        LOCAL.make_directory(directory)
        # The version's writer may have been killed before it was durable; a replay must find the same one.
        LOCAL.sync([Path(recipe.path) / "versions"])
        with suppress(FileExistsError):
            document = {"format": FORMAT_VERSION, "version": newest.version}
            LOCAL.create(path, json.dumps(document).encode(), "relation.pin.linked")
            LOCAL.delete(directory / f"{batch - _KEPT_PINS}.json")
    created = _read(path)
    if created is None:
        raise RelationNotFound(f"{path} was removed at once.", hint="Start the query again.")
    return created


def _read(path: Path) -> int | None:
    found = read_pin(path)
    try:
        return None if found is None else int(found["version"])
    except (KeyError, TypeError, ValueError):
        raise damaged(path) from None
