"""The multi-way joins: any number of streams joined with each other, exactly and within a budget."""

from dovetail.joins.multiway.binary import SymmetricHashJoin, XJoin
from dovetail.joins.multiway.metrics import MJoinMetrics
from dovetail.joins.multiway.mjoin import MJoin
from dovetail.joins.multiway.pair_conditions import PairCondition, TimeDistance
from dovetail.joins.multiway.spec import MJoinSpec, MultiJoinType, mjoin_spec
from dovetail.joins.multiway.tree import MJoinTree
from dovetail.joins.multiway.windows import TimeBound, TimeWindow, TupleWindow

__all__ = [
    "MJoin",
    "MJoinMetrics",
    "MJoinSpec",
    "MJoinTree",
    "MultiJoinType",
    "PairCondition",
    "SymmetricHashJoin",
    "TimeBound",
    "TimeDistance",
    "TimeWindow",
    "TupleWindow",
    "XJoin",
    "mjoin_spec",
]
