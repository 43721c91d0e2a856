"""``follow``: a flow that keeps a relation current with a table, from a stream of the table's changes."""

import os
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import DataFrame

from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.relation import Relation
from dovetail.spark.flow.noop import noop
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.steps.kept import open_kept
from dovetail.spark.steps.stream import stream
from dovetail.spark.steps.warehouse import FOLD_EVERY, KEEP_TOMBSTONES

__all__ = ["follow"]


def follow(
    relation: Relation | str | os.PathLike[str],
    source: DataFrame,
    *,
    keys: str | Sequence[str] | None = None,
    sequence_by: str | None = None,
    apply_as_deletes: str | None = None,
    columns: Sequence[str] | None = None,
    checkpoint: str | os.PathLike[str],
    trigger: str | None = None,
    keep_tombstones: str = KEEP_TOMBSTONES,
    budget: str | int | Budget = "64MB",
    shards: int | None = None,
    fold_every: str = FOLD_EVERY,
    name: str | None = None,
) -> FlowQuery:
    """Keep a relation current with a table, from a stream of the table's changes.

    Parameters
    ----------
    relation
        The relation, or its path. It is created if there is none, and this flow is its only writer.
    source
        A streaming DataFrame with a row per change, such as those of `dovetail.sources`.
    keys
        The key; by default that of the relation.
    sequence_by
        A column or SQL expression that orders the changes of a key: a whole number, a timestamp or a date. A change
        that is not after the last one of its key is dropped, and counted as late. By default the source's own.
    apply_as_deletes
        SQL: which changes delete their key, as ``"op = 'd'"``. All others write their row. By default the source's own.
    columns
        The columns to keep besides the key: by default those of the relation, or all if there is none.
    checkpoint, trigger
        As for ``Flow.write``.
    keep_tombstones
        How long a deleted key is remembered, so that older changes that come late do not bring it back.
    budget, shards, fold_every
        As for ``Flow.upsert``.
    name
        The flow's name; by default the relation's with ``follow-`` before it.

    Raises
    ------
    StateError
        If another flow follows a table with this relation, or the checkpoint is not that of this one.
    """
    path = relation.path if isinstance(relation, Relation) else os.fspath(relation)
    if keys is None:
        found = relation if isinstance(relation, Relation) else open_kept(path)
        if found is None:
            raise PlanError(f"There is no relation at {path} yet.", hint="Pass keys=, the columns of its key.")
        keys = found.key
    if not isinstance(source, DataFrame) or not source.isStreaming:
        raise PlanError(
            f"follow takes a streaming DataFrame, not {type(source).__name__}.", hint="Use one of dovetail.sources."
        )
    flow = stream(source, name or f"follow-{Path(path).name}").follow(
        path,
        keys=keys,
        sequence_by=sequence_by,
        apply_as_deletes=apply_as_deletes,
        columns=columns,
        keep_tombstones=keep_tombstones,
        budget=budget,
        shards=shards,
        fold_every=fold_every,
    )
    return flow.write(noop(), checkpoint=checkpoint, trigger=trigger)
