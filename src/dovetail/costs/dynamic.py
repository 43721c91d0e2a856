"""Follow the arrival rate: new parameters when the stream outgrows the plan, or falls well below it.

The tuner reads no clock: it is told how many tuples were offered over how many seconds, so the same
observations give the same proposals in a replay.
"""

import math
from typing import Any, Self

from dovetail.errors import PlanError, StateError
from dovetail.memory import Budget
from dovetail.model.costs import CostFactors
from dovetail.model.explain import Plan, Strategy
from dovetail.model.profile import JoinProfile
from dovetail.model.tune import tune

__all__ = ["ArrivalRate", "DynamicTuner"]


class ArrivalRate:
    """Tuples per second, smoothed: what was seen t seconds ago counts with weight exp(-t / time constant).

    Parameters
    ----------
    time_constant_s
        How long the past counts. A step in the rate is followed to 63 % after one time constant, 95 % after
        three.

    Examples
    --------
    >>> rate = ArrivalRate(time_constant_s=10.0)
    >>> rate.tuples_per_s is None
    True
    >>> rate.observe(500, elapsed_s=1.0)
    >>> rate.tuples_per_s
    500.0
    >>> rate.observe(20_000, elapsed_s=10.0)
    >>> round(rate.tuples_per_s)
    1448
    """

    def __init__(self, time_constant_s: float = 10.0) -> None:
        if not (math.isfinite(time_constant_s) and time_constant_s > 0):
            raise PlanError(f"time_constant_s={time_constant_s}: it must be a positive number of seconds.")
        self.time_constant_s = time_constant_s
        self.tuples_per_s: float | None = None
        self._untimed_tuples = 0

    def observe(self, offered_tuples: int, elapsed_s: float) -> None:
        """Take in that so many tuples were offered within so many seconds since the last observation."""
        if offered_tuples < 0 or not (math.isfinite(elapsed_s) and elapsed_s >= 0):
            raise PlanError(f"{offered_tuples} tuples in {elapsed_s} s cannot have been observed.")
        self._untimed_tuples += offered_tuples
        if elapsed_s == 0.0:
            # A clock too coarse for the batch: these tuples belong to the next interval.
            return
        seen = self._untimed_tuples / elapsed_s
        self._untimed_tuples = 0
        if self.tuples_per_s is None:
            self.tuples_per_s = seen
        else:
            self.tuples_per_s += -math.expm1(-elapsed_s / self.time_constant_s) * (seen - self.tuples_per_s)


class DynamicTuner:
    """Proposes the plan with the least memory that serves the observed rate, within a budget.

    A faster stream gets a new plan when it has used up half of the present plan's `headroom`; a
    slower one only when it has fallen clearly below what the plan was made for, so that a rate that wavers
    around a limit does not make the parameters waver with it. A stream that outruns the budget gets the
    fastest plan within it.

    Parameters
    ----------
    strategy, profile, factors
        As for `tune`.
    budget
        The most memory a proposed plan may take.
    time_constant_s
        How long the past counts, see `ArrivalRate`.
    headroom
        Plans are made for the observed rate times this factor.
    hysteresis
        A slower stream gets a new plan when the rate has fallen by this share of what the plan was made for.
    block_rows
        Keep this block size and propose only new chunk sizes, for an operator in mid-cycle.

    Examples
    --------
    >>> profile = JoinProfile.declared(relation_rows=3_500_000)
    >>> tuner = DynamicTuner("mesh", profile=profile, factors=CostFactors.of_papers(), budget="42MB")
    >>> tuner.plan.total_bytes > 41_000_000                    # nothing is known yet: all of the budget
    True
    >>> tuner.observe(10_000, elapsed_s=1.0)
    >>> slower = tuner.propose()
    >>> slower.total_bytes < 3_000_000, slower.service_rate >= 12_000
    (True, True)
    >>> tuner.observe(10_200, elapsed_s=1.0)                   # well within what the plan serves
    >>> tuner.propose() is None
    True
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        profile: JoinProfile,
        factors: CostFactors,
        budget: str | int | Budget,
        time_constant_s: float = 10.0,
        headroom: float = 1.2,
        hysteresis: float = 0.3,
        block_rows: int | None = None,
    ) -> None:
        if not (math.isfinite(headroom) and headroom >= 1.0):
            raise PlanError(f"headroom={headroom}: plans must be made for the observed rate or more.")
        if not 0.0 < hysteresis < 1.0:
            raise PlanError(f"hysteresis={hysteresis}: it is a share between 0 and 1.")
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
        """Whether more arrives than the fastest plan within the budget serves."""
        observed = self.arrivals.tuples_per_s
        return observed is not None and observed > self._fastest.service_rate

    def observe(self, offered_tuples: int, elapsed_s: float) -> None:
        """Take in that so many tuples were offered within so many seconds since the last observation."""
        self.arrivals.observe(offered_tuples, elapsed_s)

    def propose(self) -> Plan | None:
        """A new plan, which becomes `plan`; None while the present one fits the observed rate."""
        observed = self.arrivals.tuples_per_s
        if observed is None:
            return None
        # A stream at rest still needs a plan that serves something.
        wanted = max(observed * self._headroom, 1.0)
        planned = self.plan.required_rate
        # Half of the headroom, in proportion, is there to be used before the next plan.
        is_faster = observed * math.sqrt(self._headroom) > self.plan.service_rate
        is_slower = wanted < (1.0 - self._hysteresis) * (planned or self.plan.service_rate)
        if not (is_faster or is_slower):
            return None
        proposed = self._tune_for_rate(wanted)
        if _parameters(proposed) == _parameters(self.plan):
            return None
        self.plan = proposed
        return proposed

    def as_dict(self) -> dict[str, Any]:
        """What a snapshot must keep: the smoothed rate and what the present plan was made for; JSON-able.

        Examples
        --------
        >>> tuner = DynamicTuner("mesh", profile=JoinProfile.declared(relation_rows=1000),
        ...                      factors=CostFactors.of_papers(), budget="50kB")
        >>> tuner.as_dict()
        {'tuples_per_s': None, 'untimed_tuples': 0, 'planned_rate': None}
        """
        return {
            "tuples_per_s": self.arrivals.tuples_per_s,
            "untimed_tuples": self.arrivals._untimed_tuples,
            "planned_rate": self.plan.required_rate,
        }

    def restore(self, state: dict[str, Any]) -> Self:
        """Go on from what `as_dict` gave; the plan is computed again, and is the same for the same machine.

        Examples
        --------
        >>> tuner = DynamicTuner("mesh", profile=JoinProfile.declared(relation_rows=1000),
        ...                      factors=CostFactors.of_papers(), budget="50kB")
        >>> tuner.restore({"tuples_per_s": 5.0, "untimed_tuples": 0, "planned_rate": None}).arrivals.tuples_per_s
        5.0
        """
        if set(state) != {"tuples_per_s", "untimed_tuples", "planned_rate"}:
            raise StateError(f"This is not the state of a dynamic tuner: it has {sorted(state)}.")
        self.arrivals.tuples_per_s = None if state["tuples_per_s"] is None else float(state["tuples_per_s"])
        self.arrivals._untimed_tuples = int(state["untimed_tuples"])
        planned = state["planned_rate"]
        self.plan = self._fastest if planned is None else self._tune_for_rate(float(planned))
        return self

    def _tune_for_rate(self, rate: float) -> Plan:
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
