"""The multi-way joins: any number of streams joined with each other, exactly and within a budget."""

from dovetail.operators.mjoin.binary import SymmetricHashJoin, XJoin
from dovetail.operators.mjoin.metrics import MJoinMetrics
from dovetail.operators.mjoin.mjoin import MJoin
from dovetail.operators.mjoin.spec import MJoinSpec, MultiJoinType, TimeWindow, TupleWindow, mjoin_spec
from dovetail.operators.mjoin.tree import MJoinTree

__all__ = [
    "MJoin",
    "MJoinMetrics",
    "MJoinSpec",
    "MJoinTree",
    "MultiJoinType",
    "SymmetricHashJoin",
    "TimeWindow",
    "TupleWindow",
    "XJoin",
    "mjoin_spec",
]
