"""The multi-way joins: any number of streams joined with each other, exactly and within a budget."""

from dovetail.operators.mjoin.metrics import MJoinMetrics
from dovetail.operators.mjoin.mjoin import MJoin
from dovetail.operators.mjoin.spec import MJoinSpec, MultiJoinType, TimeWindow, TupleWindow, mjoin_spec
from dovetail.operators.mjoin.spill import SpillError

__all__ = [
    "MJoin",
    "MJoinMetrics",
    "MJoinSpec",
    "MultiJoinType",
    "SpillError",
    "TimeWindow",
    "TupleWindow",
    "mjoin_spec",
]
