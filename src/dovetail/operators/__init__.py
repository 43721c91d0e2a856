"""The semi-stream joins: a fast stream with a relation far larger than memory, exactly and within a budget."""

from dovetail.operators.auto import AutoJoin
from dovetail.operators.balanced import BalancedJoin
from dovetail.operators.base import SemiStreamOperator
from dovetail.operators.conditions import AllOf, BatchPredicate, Comparison, Condition, Range
from dovetail.operators.hybrid import HybridJoin
from dovetail.operators.inl import IndexNestedLoopJoin
from dovetail.operators.mesh import MeshJoin
from dovetail.operators.protocol import SemiStreamJoin, Snapshot
from dovetail.operators.shedding import LeastJoinedFirst, OldestFirst, Random
from dovetail.operators.spec import JoinSpec, JoinType, join_spec

OPERATORS: dict[str, type[SemiStreamOperator]] = {
    operator.kind: operator for operator in (MeshJoin, HybridJoin, BalancedJoin, IndexNestedLoopJoin, AutoJoin)
}
"""Every operator by its `kind`. The contract suite and the oracle tests run over all of them."""

__all__ = [
    "OPERATORS",
    "AllOf",
    "AutoJoin",
    "BalancedJoin",
    "BatchPredicate",
    "Comparison",
    "Condition",
    "HybridJoin",
    "IndexNestedLoopJoin",
    "JoinSpec",
    "JoinType",
    "LeastJoinedFirst",
    "MeshJoin",
    "OldestFirst",
    "Random",
    "Range",
    "SemiStreamJoin",
    "SemiStreamOperator",
    "Snapshot",
    "join_spec",
]
