"""Choose block size, chunk size and the split of memory, for either of MESHJOIN's two objectives.

`objective="rate"` maximises the service rate within a budget; `objective="memory"` minimises the memory for a given
rate. All strategies share the search over block sizes; each has its own tuner for a given block size.
"""

import math
from collections.abc import Callable
from typing import get_args

from dovetail.core.errors import BudgetError, PlanError
from dovetail.core.memory import Budget, format_bytes
from dovetail.costs._tuners import (
    UNLIMITED_BYTES,
    BalancedTuner,
    CachedIndexTuner,
    HybridTuner,
    IndexNestedLoopTuner,
    MeshTuner,
    Setting,
    Tuner,
)
from dovetail.costs.costs import CostFactors
from dovetail.costs.explain import Bottleneck, Objective, Plan, Strategy
from dovetail.costs.profile import JoinProfile
from dovetail.costs.search import maximise_integer

__all__ = ["minimum_budget", "tune"]

# Components are rounded up to whole bytes individually.
_ROUNDING_BYTES = 4
# Memory is reported as the bottleneck if doubling it brings this much more than doubling the disk's speed.
_CLEARLY_MORE = 1.1
_TUNERS: dict[Strategy, tuple[Callable[[JoinProfile, CostFactors], Tuner], ...]] = {
    "mesh": (MeshTuner,),
    "hybrid": (HybridTuner,),
    "balanced": (BalancedTuner,),
    "index_nested_loop": (IndexNestedLoopTuner,),
    "auto": (BalancedTuner, CachedIndexTuner),
}


def tune(
    strategy: Strategy,
    *,
    profile: JoinProfile,
    factors: CostFactors,
    objective: Objective = "rate",
    budget: str | int | Budget | None = None,
    rate: float | None = None,
    block_rows: int | None = None,
    max_block_rows: int | None = None,
) -> Plan:
    """Plan a semi-stream join: its parameters and the predictions of the model.

    ``objective="rate"`` finds the highest service rate within `budget`; ``"memory"`` the least memory, within `budget`
    if given, that serves `rate` stream tuples per second. Blocks have `block_rows` rows if given, else at most
    `max_block_rows`. Raises a `BudgetError` that names the minimum if the budget is too small for the strategy, and a
    `PlanError` that names the highest possible rate if no memory is enough.

    >>> profile = JoinProfile.declared(relation_rows=3_500_000)  # the MESHJOIN paper's setting: 1 % of R
    >>> factors = CostFactors.of_papers(probe_s=1e-7, output_s=1e-7, append_s=2e-7, expire_s=2e-7)
    >>> plan = tune("mesh", profile=profile, factors=factors, budget="4.2MB")
    >>> plan.binds, plan.total_bytes <= 4_200_000, round(plan.service_rate, -3)
    ('disk', True, 28000.0)
    """
    tuners = _tuners_of(strategy, profile, factors)
    blocks = _block_range(tuners[0], profile, block_rows, max_block_rows)
    if objective == "rate":
        if budget is None:
            raise PlanError("objective='rate' needs a memory budget.", hint="Pass budget=...")
        if rate is not None:
            raise PlanError("rate=... belongs to objective='memory'.", hint="Leave it out, or change the objective.")
        budget_bytes = Budget.parse(budget).total_bytes
        setting, tuner = _fastest(tuners, blocks, budget_bytes)
        if setting is None:
            raise _too_small(strategy, tuners, blocks, budget_bytes)
        return _plan(strategy, objective, setting, tuner, budget_bytes, None)
    if objective == "memory":
        if rate is None or not (math.isfinite(rate) and rate > 0):
            raise PlanError(f"objective='memory' needs a positive rate, not {rate}.", hint="Pass rate=...")
        setting, tuner = _smallest(tuners, blocks, rate)
        if setting is None:
            best, _ = _fastest(tuners, blocks, UNLIMITED_BYTES)
            most = best.cost.service_rate if best else 0.0
            raise PlanError(
                f"No memory is enough for {rate:,.0f} tuples/s with strategy {strategy!r}: the CPU alone takes "
                f"longer than that.",
                hint=f"At most about {math.floor(most):,} tuples/s can be served by one shard; use more shards.",
            )
        limit = None if budget is None else Budget.parse(budget).total_bytes
        if limit is not None and setting.total_bytes > limit:
            raise BudgetError(
                f"{rate:,.0f} tuples/s need {format_bytes(setting.total_bytes)} with strategy {strategy!r}, more "
                f"than the budget of {format_bytes(limit)}.",
                hint=f"Raise the budget to at least {setting.total_bytes} bytes, or ask for objective='rate'.",
                minimum_bytes=setting.total_bytes,
            )
        return _plan(strategy, objective, setting, tuner, limit, rate)
    raise PlanError(f"objective={objective!r} is not an objective.", hint="Use 'rate' or 'memory'.")


def minimum_budget(
    strategy: Strategy, *, profile: JoinProfile, factors: CostFactors, block_rows: int | None = None
) -> int:
    """The smallest budget, in bytes, with which the strategy works."""
    tuners = _tuners_of(strategy, profile, factors)
    return _minimum(tuners, _block_range(tuners[0], profile, block_rows, None))


def _tuners_of(strategy: Strategy, profile: JoinProfile, factors: CostFactors) -> list[Tuner]:
    if strategy not in _TUNERS:
        raise PlanError(
            f"strategy={strategy!r} is not a strategy.", hint=f"Use one of {', '.join(get_args(Strategy))}."
        )
    return [make_tuner(profile, factors) for make_tuner in _TUNERS[strategy]]


def _block_range(
    tuner: Tuner, profile: JoinProfile, block_rows: int | None, max_block_rows: int | None
) -> tuple[int, int]:
    if block_rows is not None:
        if block_rows < 1:
            raise PlanError(f"block_rows={block_rows}: a block has at least one row.")
        block_rows = min(block_rows, profile.relation_rows)
        return block_rows, block_rows
    low, high = tuner.block_rows_range()
    if max_block_rows is not None:
        if max_block_rows < 1:
            raise PlanError(f"max_block_rows={max_block_rows}: a block has at least one row.")
        high = min(high, max_block_rows)
    return min(low, high), high


def _fastest(tuners: list[Tuner], blocks: tuple[int, int], budget_bytes: float) -> tuple[Setting | None, Tuner]:
    budget_bytes -= _ROUNDING_BYTES

    def best(tuner: Tuner) -> Setting | None:
        def rate(block_rows: int) -> float:
            setting = tuner.for_budget(block_rows, budget_bytes)
            if setting is None:
                # The search must find the block sizes that fit, however few: closer to fitting is better.
                return -float(tuner.minimum_bytes(block_rows))
            return setting.cost.service_rate

        return tuner.for_budget(maximise_integer(rate, *blocks, is_staircase=tuner.is_staircase), budget_bytes)

    found = [(best(tuner), tuner) for tuner in tuners]
    return max(found, key=lambda pair: -1.0 if pair[0] is None else pair[0].cost.service_rate)


def _smallest(tuners: list[Tuner], blocks: tuple[int, int], rate: float) -> tuple[Setting | None, Tuner]:
    def best(tuner: Tuner) -> Setting | None:
        def saving(block_rows: int) -> float:
            setting = tuner.for_rate(block_rows, rate)
            return -math.inf if setting is None else -float(setting.total_bytes)

        return tuner.for_rate(maximise_integer(saving, *blocks, is_staircase=tuner.is_staircase), rate)

    found = [(best(tuner), tuner) for tuner in tuners]
    return min(found, key=lambda pair: math.inf if pair[0] is None else pair[0].total_bytes)


def _minimum(tuners: list[Tuner], blocks: tuple[int, int]) -> int:
    def least(tuner: Tuner) -> int:
        return tuner.minimum_bytes(maximise_integer(lambda rows: -tuner.minimum_bytes(rows), *blocks))

    return _ROUNDING_BYTES + min(least(tuner) for tuner in tuners)


def _too_small(strategy: Strategy, tuners: list[Tuner], blocks: tuple[int, int], budget_bytes: int) -> BudgetError:
    minimum = _minimum(tuners, blocks)
    return BudgetError(
        f"A budget of {format_bytes(budget_bytes)} is below the minimum of strategy {strategy!r} here.",
        hint=f"Raise it to at least {minimum} bytes.",
        minimum_bytes=minimum,
    )


def _plan(
    strategy: Strategy,
    objective: Objective,
    setting: Setting,
    tuner: Tuner,
    budget_bytes: int | None,
    rate: float | None,
) -> Plan:
    gains = _gains(setting, tuner)
    binds, why = _bottleneck(setting, gains)
    return Plan(
        strategy=strategy,
        objective=objective,
        access=setting.access,
        block_rows=setting.block_rows,
        chunk_tuples=setting.chunk_tuples,
        window_tuples=setting.window_tuples,
        cache_rows=setting.cache_rows,
        hit_ratio=setting.hit_ratio,
        memory_bytes=setting.memory_bytes,
        budget_bytes=budget_bytes,
        required_rate=rate,
        service_rate=setting.cost.service_rate,
        loop_seconds=setting.cost.seconds,
        loop_terms=dict(setting.cost.terms),
        binds=binds,
        why=why,
        gains=gains,
    )


def _gains(setting: Setting, tuner: Tuner) -> dict[str, float]:
    """Service rate with disk, CPU or memory doubled, relative to the current one, with the same block size."""
    factors = tuner.factors
    changed = {
        "disk": (factors.with_faster(disk=2.0), 1),
        "cpu": (factors.with_faster(cpu=2.0), 1),
        "memory": (factors, 2),
    }
    now = setting.cost.service_rate
    gains = {}
    for name, (changed_factors, multiple) in changed.items():
        better = tuner.with_factors(changed_factors).for_budget(setting.block_rows, multiple * setting.total_bytes)
        gains[name] = better.cost.service_rate / now if better and math.isfinite(now) else 1.0
    return gains


def _bottleneck(setting: Setting, gains: dict[str, float]) -> tuple[Bottleneck, str]:
    cost = setting.cost
    disk_share = cost.disk_seconds / cost.seconds if cost.seconds > 0 else 0.0
    if disk_share < 0.5:
        largest = max((name for name in cost.terms if name != "read"), key=lambda name: cost.terms[name])
        return "cpu", (
            f"computing takes {_percent(1 - disk_share)} of a step, most of it in '{largest}'; a CPU twice as fast "
            f"would give {gains['cpu']:.2f} times the rate."
        )
    if gains["memory"] > _CLEARLY_MORE * gains["disk"]:
        buffer_share = setting.memory_bytes.get("block_buffer", 0) / max(1, setting.total_bytes)
        reason = f"the block buffer takes {_percent(buffer_share)} of it; " if buffer_share > 0.2 else ""
        return "memory", (
            f"{reason}twice as much would give {gains['memory']:.2f} times the rate, a disk twice as fast only "
            f"{gains['disk']:.2f} times."
        )
    return "disk", (
        f"reading takes {_percent(disk_share)} of a step; a disk twice as fast would give {gains['disk']:.2f} times "
        f"the rate, twice the memory {gains['memory']:.2f} times."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
