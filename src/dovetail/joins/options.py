"""The options of a join with a relation, checked together: pipeline files and flows accept the same ones.

They are checked before any data moves. Python raises an error; a pipeline file reports the option's line.
"""

import math
from dataclasses import dataclass
from typing import Any, get_args

from dovetail.core.errors import PlanError
from dovetail.costs.explain import Objective, Strategy
from dovetail.joins.shedding import SHEDDING, SheddingPolicy

__all__ = ["FITTED_STRATEGIES", "WITH_OBJECTIVE", "FlowOptions", "JoinOptions", "OptionProblem"]

WITH_OBJECTIVE = ("mesh", "balanced", "auto")
"""The strategies that support ``objective="memory"``."""
FITTED_STRATEGIES = ("mesh", "balanced")
"""The strategies whose memory is fitted to a rate; `auto` uses a window only if a scan is cheaper than lookups."""
_WITHOUT_WINDOW = ("lookup", "index_nested_loop")
_WITHOUT_EQUALITY = ("auto", "mesh")


@dataclass(frozen=True)
class OptionProblem:
    """An invalid option, why it is invalid, and what would work."""

    option: str
    message: str
    hint: str

    def error(self) -> PlanError:
        return PlanError(self.message, hint=self.hint)


@dataclass(frozen=True)
class FlowOptions:
    """Options of flows, whose tuples may wait."""

    max_delay: Any = None  # how long tuples may wait; None: no longer than their micro-batch
    shed: Any = None  # a policy, or its name: what to drop when more arrives than may wait; None: nothing
    has_shed_sink: bool = False  # whether dropped rows go to a side output

    @property
    def policy(self) -> SheddingPolicy | None:
        """The shedding policy; requires checked options."""
        return SHEDDING[self.shed] if isinstance(self.shed, str) else self.shed


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """The options of a join besides the tables and the key; by default of an inner join with a key."""

    strategy: Any = "auto"
    objective: Any = "rate"
    rate: Any = None
    how: str = "inner"
    has_equality: bool = True
    has_condition: bool = False
    flow: FlowOptions | None = None  # for operators of a flow, which can observe their rate and let tuples wait

    def require_possible(self) -> None:
        """Raise a `PlanError` for the first invalid option."""
        problem = self.problem()
        if problem is not None:
            raise problem.error()

    def problem(self) -> OptionProblem | None:
        """The first invalid option; None if all are valid.

        Examples
        --------
        >>> JoinOptions(strategy="mesh").problem() is None
        True
        >>> JoinOptions(objective="rate", rate=5).problem().option
        'rate'
        """
        checks = self._unknown, self._without_equality, self._objective, self._rate, self._shed
        return next((found for check in checks if (found := check()) is not None), None)

    def _unknown(self) -> OptionProblem | None:
        known: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
            ("strategy", self.strategy, get_args(Strategy)),
            ("objective", self.objective, get_args(Objective)),
        )
        for name, value, allowed in known:
            if value not in allowed:
                hint = f"Use {', '.join(allowed[:-1])} or {allowed[-1]}."
                return OptionProblem(name, f"{name}={value!r} is not known.", hint)
        return None

    def _without_equality(self) -> OptionProblem | None:
        if self.has_equality:
            return None
        if not self.has_condition:
            return OptionProblem(
                "on",
                "a join needs key columns, a condition, or both.",
                "Pass on= or condition=; in a file, on: or condition:.",
            )
        if self.how != "inner":
            return OptionProblem(
                "how",
                f"how={self.how!r} needs key columns: without them every shard sees every row of the stream, and no "
                "shard knows whether another has a match.",
                'Pass on=, or use how="inner".',
            )
        if self.strategy not in _WITHOUT_EQUALITY:
            return OptionProblem(
                "strategy", f"{self.strategy} joins on equal keys only.", 'Use strategy="mesh", or pass on=.'
            )
        return None

    def _objective(self) -> OptionProblem | None:
        if self.objective != "memory":
            return None
        if self.strategy not in WITH_OBJECTIVE:
            return OptionProblem(
                "objective",
                f'objective="memory" has no meaning for strategy={self.strategy!r}, which has no choice.',
                f"Use it with {', '.join(WITH_OBJECTIVE[:-1])} or {WITH_OBJECTIVE[-1]}, or leave it out.",
            )
        needs_rate = self.strategy == "mesh" or not self.has_equality
        if needs_rate and self.rate is None and self.flow is None:
            return OptionProblem(
                "objective",
                'objective="memory" needs a rate here: mesh holds the least memory that serves it, and a query without '
                "state observes none.",
                "Pass rate= in tuples per second, or use balanced.",
            )
        return None

    def _rate(self) -> OptionProblem | None:
        rate = self.rate
        if rate is None:
            return None
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not is_number or not math.isfinite(rate) or rate <= 0:
            return OptionProblem(
                "rate",
                f"rate={rate!r} is not a rate.",
                "Pass a number above 0: tuples per second over all shards.",
            )
        if self.objective != "memory":
            return OptionProblem(
                "rate",
                'rate= sets the rate to serve with the least memory, which is objective="memory".',
                'Pass objective="memory" as well, or leave rate= out.',
            )
        if self.strategy not in FITTED_STRATEGIES and self.has_equality:
            return OptionProblem(
                "rate",
                f"rate= has no meaning for strategy={self.strategy!r}, which holds what it needs at any rate.",
                f"Use it with {' or '.join(FITTED_STRATEGIES)}, or leave it out.",
            )
        return None

    def _shed(self) -> OptionProblem | None:
        shed = None if self.flow is None else self.flow.shed
        if self.flow is None or shed is None:
            if self.flow is not None and self.flow.has_shed_sink:
                return OptionProblem(
                    "shed_to", "shed_to= is for rows that are dropped, and none is.", "Pass shed= as well."
                )
            return None
        is_policy = isinstance(getattr(shed, "name", None), str) and callable(getattr(shed, "start", None))
        if shed not in SHEDDING if isinstance(shed, str) else not is_policy:
            return OptionProblem(
                "shed",
                f"shed={shed!r} is not known.",
                f"Use {', '.join(SHEDDING)}, or a policy of dovetail.operators: Random, OldestFirst, LeastJoinedFirst.",
            )
        if not self.has_equality:
            return OptionProblem(
                "shed",
                "shed= needs key columns: without them every shard holds every row of the stream, and one would drop "
                "what another keeps.",
                "Pass on=, or leave shed= out.",
            )
        if self.strategy in _WITHOUT_WINDOW:
            return OptionProblem(
                "shed",
                f"shed= has no meaning for strategy={self.strategy!r}: no tuple waits, so none can be dropped for lack "
                "of room.",
                "Use auto, mesh, balanced or hybrid with max_delay=, or leave shed= out.",
            )
        if self.strategy == "auto" and self.flow.max_delay is None:
            return OptionProblem(
                "shed",
                "shed= drops tuples that wait, and without max_delay= none does: each task looks its own rows up.",
                "Pass max_delay=, or name a strategy that scans: mesh, balanced or hybrid.",
            )
        return None
