"""A relation built from a DataFrame for a flow, kept in the flow's checkpoint.

The relation that `relation_of` builds lasts as long as the application. A flow needs it after a restart, because rows
may wait for a version of it. So a step copies it to ``<checkpoint>/dovetail/relations/<step>`` when the flow starts. If
the DataFrame has other rows by then, the copy gets a new version; waiting rows are still joined with theirs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dovetail.relation.copies import copy_to
from dovetail.spark.flow.store import FlowStore
from dovetail.spark.plan.join_plan import JoinPlan
from dovetail.spark.steps.named_versions import named_versions

__all__ = ["OF_A_DATAFRAME", "kept_in_checkpoint", "was_of_a_dataframe"]

OF_A_DATAFRAME = "of a DataFrame"
"""In a fingerprint, instead of the relation's path."""

_TEMPORARY = "/dovetail-relations/"


def kept_in_checkpoint(plan: JoinPlan, store: FlowStore, step: str) -> JoinPlan:
    """The plan with the copy of its relation in the checkpoint; removes versions that are no longer needed."""
    copy = copy_to(plan.relation, store.root / "relations" / step)
    named = named_versions(store, step)
    if named is not None:
        copy.vacuum(keep=1, also=named)
    recipe = replace(plan.recipe, path=copy.path, relation_id=copy.relation_id, version=copy.version)
    return replace(plan, relation=copy, recipe=recipe)


def was_of_a_dataframe(saved: Mapping[str, Any]) -> bool:
    """Whether a fingerprint, written before such copies existed, names a relation built from a DataFrame."""
    return _TEMPORARY in str(saved.get("relation"))
