"""Dynamic tuning: new parameters when the stream outgrows the plan or falls well below it.

The tuner uses no clock. It is passed counts of tuples and elapsed seconds, so a replay of the same observations gives
the same proposals.
"""

import math
from typing import Any, Self

from dovetail.core.errors import PlanError, StateError
from dovetail.core.memory import Budget
from dovetail.costs.costs import CostFactors
from dovetail.costs.explain import Plan, Strategy
from dovetail.costs.profile import JoinProfile
from dovetail.costs.tune import tune

__all__ = ["ArrivalRate", "DynamicTuner"]


class ArrivalRate:
    """Tuples per second, smoothed: an observation t seconds ago has weight exp(-t / time constant).

    After a step in the rate, the estimate has followed 63 % of it after one time constant, and 95 % after three.
    """

    def __init__(self, time_constant_s: float = 10.0) -> None:
        if not (math.isfinite(time_constant_s) and time_constant_s > 0):
            raise PlanError(f"time_constant_s={time_constant_s}: it must be a positive number of seconds.")
        self.time_constant_s = time_constant_s
        self.tuples_per_s: float | None = None
        self._untimed_tuples = 0

    def observe(self, offered_tuples: int, elapsed_s: float) -> None:
        """`offered_tuples` arrived within `elapsed_s` seconds since the last observation."""
        if offered_tuples < 0 or not (math.isfinite(elapsed_s) and elapsed_s >= 0):
            raise PlanError(f"{offered_tuples} tuples in {elapsed_s} s is not a possible observation.")
        self._untimed_tuples += offered_tuples
        if elapsed_s == 0.0:
            # The clock is too coarse for the batch: count these tuples in the next interval.
            return
        seen = self._untimed_tuples / elapsed_s
        self._untimed_tuples = 0
        if self.tuples_per_s is None:
            self.tuples_per_s = seen
        else:
            self.tuples_per_s += -math.expm1(-elapsed_s / self.time_constant_s) * (seen - self.tuples_per_s)


class DynamicTuner:
    """Proposes the plan with the least memory that serves the observed rate, within a budget.

    A faster stream gets a new plan when it has used up half of the current plan's `headroom`. A slower stream gets one
    only when it has fallen clearly below the rate that the plan was made for, so that a fluctuating rate does not make
    the parameters fluctuate. A stream that is too fast for the budget gets the fastest plan within it.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        profile: JoinProfile,
        factors: CostFactors,
        budget: str | int | Budget,
        time_constant_s: float = 10.0,  # see `ArrivalRate`
        headroom: float = 1.2,  # plans are made for the observed rate times this factor
        hysteresis: float = 0.3,  # replan a slower stream when the rate fell by this fraction of the planned rate
        block_rows: int | None = None,  # keep this block size, for an operator in the middle of a cycle
    ) -> None:
        if not (math.isfinite(headroom) and headroom >= 1.0):
            raise PlanError(f"headroom={headroom}: plans must be made for the observed rate or more.")
        if not 0.0 < hysteresis < 1.0:
            raise PlanError(f"hysteresis={hysteresis}: it must be a fraction between 0 and 1.")
        self.arrivals = ArrivalRate(time_constant_s)
        self._strategy: Strategy = strategy
        self._profile = profile
        self._factors = factors
        self._budget = Budget.parse(budget)
        self._headroom = headroom
        self._hysteresis = hysteresis
        self._block_rows = block_rows
        self._fastest = self._tune_for_budget()
        self.plan: Plan = self._fastest

    @property
    def is_overloaded(self) -> bool:
        """Whether more tuples arrive than the fastest plan within the budget can serve."""
        observed = self.arrivals.tuples_per_s
        return observed is not None and observed > self._fastest.service_rate

    def observe(self, offered_tuples: int, elapsed_s: float) -> None:
        """See `ArrivalRate.observe`."""
        self.arrivals.observe(offered_tuples, elapsed_s)

    def propose(self) -> Plan | None:
        """A new plan, which becomes `plan`; None while the current one fits the observed rate."""
        observed = self.arrivals.tuples_per_s
        if observed is None:
            return None
        # An idle stream still needs a plan with a positive rate.
        wanted = max(observed * self._headroom, 1.0)
        planned = self.plan.required_rate
        # Replan when half of the headroom, as a factor, is used up.
        is_faster = observed * math.sqrt(self._headroom) > self.plan.service_rate
        is_slower = wanted < (1.0 - self._hysteresis) * (planned or self.plan.service_rate)
        if not (is_faster or is_slower):
            return None
        proposed = self.plan_for(wanted)
        if _parameters(proposed) == _parameters(self.plan):
            return None
        self.plan = proposed
        return proposed

    def as_dict(self) -> dict[str, Any]:
        """The state for a snapshot: the smoothed rate and the rate planned for; JSON-serializable."""
        return {
            "tuples_per_s": self.arrivals.tuples_per_s,
            "untimed_tuples": self.arrivals._untimed_tuples,
            "planned_rate": self.plan.required_rate,
        }

    def restore(self, state: dict[str, Any]) -> Self:
        """Continue from the output of `as_dict`. The plan is computed again: on the same machine it is the same."""
        if set(state) != {"tuples_per_s", "untimed_tuples", "planned_rate"}:
            raise StateError(f"This is not the state of a dynamic tuner: it has {sorted(state)}.")
        self.arrivals.tuples_per_s = None if state["tuples_per_s"] is None else float(state["tuples_per_s"])
        self.arrivals._untimed_tuples = int(state["untimed_tuples"])
        planned = state["planned_rate"]
        self.plan = self._fastest if planned is None else self.plan_for(float(planned))
        return self

    def plan_for(self, rate: float) -> Plan:
        """The plan with the least memory that serves a rate; the fastest within the budget if none does."""
        if rate >= self._fastest.service_rate:
            return self._fastest
        plan = tune(
            self._strategy,
            profile=self._profile,
            factors=self._factors,
            objective="memory",
            rate=rate,
            block_rows=self._block_rows,
        )
        return plan if plan.total_bytes <= self._budget.total_bytes else self._fastest

    def _tune_for_budget(self) -> Plan:
        return tune(
            self._strategy,
            profile=self._profile,
            factors=self._factors,
            budget=self._budget,
            block_rows=self._block_rows,
        )


def _parameters(plan: Plan) -> tuple[int, ...]:
    return plan.block_rows, plan.chunk_tuples, plan.window_tuples, plan.cache_rows
