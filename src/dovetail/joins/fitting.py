"""How much memory an operator needs for a rate, by its cost model.

`tune` returns block, window and cache of the least memory that serves a rate. The operator's other needs (output in
flight, learning what to cache) are added here, so that window and cache are as large as planned.
"""

import math
from dataclasses import dataclass, replace

from dovetail.core.errors import BudgetError
from dovetail.core.memory import Budget, format_bytes
from dovetail.costs.costs import CostFactors
from dovetail.costs.dynamic import DynamicTuner
from dovetail.costs.explain import Plan, Strategy
from dovetail.costs.profile import JoinProfile
from dovetail.joins.engine import SemiStreamOperator
from dovetail.joins.matching import matcher_for
from dovetail.joins.phases.scan import reads_in_place
from dovetail.joins.spec import JoinSpec
from dovetail.joins.window.stream_window import StreamWindow

__all__ = ["Fitted", "RateFitting"]

_BESIDES = 1.25  # window and cache get four fifths of the budget above the minimum, output and learning the rest
_MANY = 1 << 16
# Minimum results per batch: with fewer, calls would take more time than the model assumes.
_FEWEST_RESULTS, _OUTPUT_SHARE, _PAIR_BYTES = 256, 16, 32


@dataclass(frozen=True)
class Fitted:
    """Memory for a rate."""

    plan: Plan  # of the cost model: block, window, cache, predicted rate, and what binds
    budget_bytes: int  # of the operator; never above the budget it was fitted within
    block_rows: int | None  # b; None: the operator's default


class RateFitting:
    """Fits the memory of one shard's operator to a rate, within its budget.

    `strategy` is ``"mesh"`` or ``"balanced"``; `auto` needs no fitting. `operator` has the whole budget and is only
    inspected. Raises a `BudgetError` if the budget leaves the cost model no choice.
    """

    def __init__(self, strategy: Strategy, operator: SemiStreamOperator, factors: CostFactors) -> None:
        self._operator, self._spec = operator, operator.spec
        shard, tuple_bytes = self._spec.shard, max(1.0, operator.stream_tuple_bytes)
        columns = self._spec.stream_columns
        held_bytes = StreamWindow.bytes_for(columns, _MANY) / _MANY + matcher_for(self._spec).bytes_per_tuple
        profile = JoinProfile.with_overhead(
            relation_rows=max(1, shard.num_rows),
            relation_row_bytes=max(1.0, shard.row_bytes),
            stream_tuple_bytes=tuple_bytes,
            window_overhead_bytes=max(0.0, held_bytes - tuple_bytes),
        )
        self._has_free_blocks = strategy == "mesh" and reads_in_place(self._spec)
        # A block that is a view takes no memory, so its length is not a choice.
        self._fixed_rows = operator.block_rows if self._has_free_blocks else None
        free_bytes = math.ceil((self._fixed_rows or 0) * profile.relation_row_bytes)
        self.tuner = DynamicTuner(
            strategy,
            profile=profile,
            factors=factors,
            budget=Budget(self._spec.budget.total_bytes + free_bytes),
            block_rows=self._fixed_rows,
        )

    def for_rate(self, rate: float) -> Fitted:
        """The least memory that serves this many tuples per second, or all of it if that is not enough."""
        plan = self.tuner.plan_for(rate)
        if plan.required_rate is None:
            served = plan.service_rate
            why = f"{format_bytes(self._spec.budget.total_bytes)} serve about {served:,.0f} tuples/s. {plan.why}"
            plan = replace(plan, objective="memory", required_rate=rate, why=why if served < rate else plan.why)
            return Fitted(plan, self._spec.budget.total_bytes, None)
        return self.of(plan)

    def of(self, plan: Plan) -> Fitted:
        """The memory with which the operator has the window and the cache of a plan."""
        if plan.required_rate is None:
            return Fitted(plan, self._spec.budget.total_bytes, None)
        # With everything cached blocks could be minimal, but the cache has to be filled first.
        block_rows = None if self._has_free_blocks or not plan.window_tuples else plan.block_rows
        held = sum(size for name, size in plan.memory_bytes.items() if name != "block_buffer")
        result_bytes = self._operator.results.plan.row_bytes + _PAIR_BYTES
        fewest_bytes = _FEWEST_RESULTS * _OUTPUT_SHARE * result_bytes
        budget_bytes = self._least_bytes(block_rows) + math.ceil(max(_BESIDES * held, fewest_bytes))
        if budget_bytes >= self._spec.budget.total_bytes:
            return Fitted(plan, self._spec.budget.total_bytes, None)
        return Fitted(plan, budget_bytes, block_rows)

    def _least_bytes(self, block_rows: int | None) -> int:
        """The smallest budget of an operator with these blocks."""
        tiny: JoinSpec = replace(self._spec, budget=Budget(1), block_rows=block_rows)
        try:
            type(self._operator)(tiny)  # type: ignore[arg-type]
        except BudgetError as error:
            return error.minimum_bytes or self._spec.budget.total_bytes
        return 1
