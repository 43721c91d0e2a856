"""Folding: committed changes of a flow become a new version of its kept relation.

A fold upserts the changes of one commit. It may be done at any time after that commit, and again after a crash: the
version records whose changes it holds (`Origin`), so a second fold of the same changes finds the first.

A fold is a compare-and-set on the latest version. If another writer or a vacuum comes first, it starts again from the
latest version. A driver that is behind the relation is refused: its rows would replace newer ones.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pyarrow as pa

from dovetail.core.errors import RelationConflict, StateError
from dovetail.core.faultpoints import fault_point
from dovetail.relation import Relation
from dovetail.relation.change_set import DELETED_COLUMN, ChangeSet

__all__ = ["Origin", "fold", "is_folded"]

PATIENCE_S = 60.0
"""How long a fold waits for other writers before it gives up."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose changes a version holds, as recorded in its manifest.

    ``changes`` identifies the shards' states that held them. A fold of several parts makes several versions; only the
    last one ``is_complete``.
    """

    flow: str
    step: str
    batch: int
    changes: str
    is_complete: bool = True

    @classmethod
    def of(cls, relation: Relation) -> "Origin | None":
        """The origin that a version records; None if it was not made by a fold."""
        recorded = relation.origin
        if recorded is None or "changes" not in recorded:
            return None
        return cls(**{part.name: recorded[part.name] for part in fields(cls) if part.name in recorded})

    def as_dict(self) -> Mapping[str, Any]:
        return asdict(self)


def is_folded(relation: Relation, origin: Origin) -> bool:
    """Whether a version holds these changes and no later ones of the flow.

    A `StateError` if it holds later changes of the same step, or other changes of the same micro-batch.
    """
    found = Origin.of(relation)
    if found is None or (found.flow, found.step) != (origin.flow, origin.step) or found.batch < origin.batch:
        return False
    if found.batch > origin.batch or found.changes != origin.changes:
        own = f"micro-batch {origin.batch}" if origin.batch >= 0 else "no micro-batch"
        raise StateError(
            f"The relation at {relation.path} holds changes of this flow up to micro-batch {found.batch}, but the "
            f"checkpoint, which is at {own}, does not: another driver runs the flow, or an older copy of the "
            "checkpoint was restored.",
            hint="Stop the other driver, or restore the relation from a copy of the same time, or start the flow with "
            "a new checkpoint. Nothing was changed.",
        )
    return found.is_complete


def fold(
    path: str,
    origin: Origin,
    parts: Sequence[Callable[[], pa.Table]],
    check: Callable[[Relation], None],
    patience_s: float = PATIENCE_S,
    also: Mapping[str, Any] | None = None,
) -> Relation:
    """Make a version that holds the changes of ``origin``, unless there is one, and return it.

    ``parts`` are rows that replace those of their keys, applied in order; with a column ``__deleted``, those for which
    it is true remove their keys. ``check`` refuses a relation that does not fit. ``also`` is recorded with the origin.
    """
    give_up_at = time.monotonic() + patience_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return _fold_once(path, origin, parts, check, also or {})
        except RelationConflict as error:
            if time.monotonic() + pause_s > give_up_at:
                raise RelationConflict(
                    f"The changes of micro-batch {origin.batch} could not be written to {path} within {patience_s:g} "
                    f"s: {error}",
                    hint="Nothing was lost: let the other writer or vacuum end, and start the flow again.",
                ) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _fold_once(
    path: str,
    origin: Origin,
    parts: Sequence[Callable[[], pa.Table]],
    check: Callable[[Relation], None],
    also: Mapping[str, Any],
) -> Relation:
    relation = Relation.open(path)
    check(relation)
    if is_folded(relation, origin):
        return relation
    fault_point("kept.fold.before")
    for number, part in enumerate(parts, start=1):
        rows = part()
        if DELETED_COLUMN in rows.column_names:
            changes: Any = ChangeSet(rows, relation.schema)
        else:
            changes = rows.select(relation.schema.names).cast(relation.schema)
        recorded = {**also, **replace(origin, is_complete=number == len(parts)).as_dict()}
        relation = relation.upsert_if_latest(changes, recorded)
        fault_point("kept.fold.part")
    fault_point("kept.fold.after")
    return relation
