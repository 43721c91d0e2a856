"""`explain` of a flow: each operator with its memory and what it is predicted to serve, before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.memory import Budget
from dovetail.spark.enrich_task import OperatorTask
from dovetail.spark.explain import JoinExplanation, explained
from dovetail.spark.flow_step import EnrichStep
from dovetail.spark.steps import Step

__all__ = ["FlowExplanation", "OperatorExplanation", "explain_flow"]


@dataclass(frozen=True)
class OperatorExplanation:
    """One operator of a flow.

    Attributes
    ----------
    name, kind, shards
        Which, what it does, and in how many slices.
    settings
        What else its state depends on.
    join
        Memory and predicted rate, of a join with a relation.
    """

    name: str
    kind: str
    shards: int
    settings: dict[str, Any]
    join: JoinExplanation | None

    def text(self) -> str:
        """Lines for a terminal."""
        title = f"{self.name}: {self.kind}, {self.shards} shards"
        if self.join is not None:
            return f"{title}\n{self.join.text()}"
        return "\n".join([title, *(f"{name:<14} {_told(value)}" for name, value in self.settings.items())])


@dataclass(frozen=True)
class FlowExplanation:
    """All operators of a flow, in order; prints as text."""

    flow: str
    operators: tuple[OperatorExplanation, ...]

    def as_dict(self) -> dict[str, Any]:
        """The explanation as JSON-able data."""
        return {
            "flow": self.flow,
            "operators": [
                {**vars(operator), "join": None if operator.join is None else operator.join.as_dict()}
                for operator in self.operators
            ],
        }

    def text(self) -> str:
        """The explanation as lines for a terminal."""
        if not self.operators:
            return f"{self.flow}: no stateful operator; rows go from the source to the sink."
        return "\n\n".join(operator.text() for operator in self.operators)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def explain_flow(name: str, steps: Sequence[Step]) -> FlowExplanation:
    """Explain the operators of a flow."""
    return FlowExplanation(name, tuple(map(_operator, steps)))


def _operator(step: Step) -> OperatorExplanation:
    fingerprint = step.fingerprint()
    known = ("name", "kind", "shards", "input", "output", "hash")
    settings = {name: value for name, value in fingerprint.items() if name not in known and value is not None}
    join = _join(step) if isinstance(step, EnrichStep) else None
    return OperatorExplanation(step.name, str(fingerprint["kind"]), step.shards, settings, join)


def _join(step: EnrichStep) -> JoinExplanation:
    plan = step.plan
    strategy = plan.strategy if plan.has_equality else "mesh"
    budget = Budget(max(1, plan.budget.total_bytes // step.shards))
    return explained(OperatorTask(plan.recipe, step.refresh, step.name, strategy, plan.objective, budget), plan)


def _told(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
