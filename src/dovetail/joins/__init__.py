"""The semi-stream joins: a fast stream with a relation far larger than memory, exactly and within a budget."""

from collections.abc import Callable

from dovetail.joins.auto import AutoJoin
from dovetail.joins.balanced import BalancedJoin
from dovetail.joins.conditions import AllOf, BatchPredicate, Comparison, Condition, Range
from dovetail.joins.engine import SemiStreamOperator
from dovetail.joins.hybrid import HybridJoin
from dovetail.joins.index_nested_loop import IndexNestedLoopJoin
from dovetail.joins.lookup import LookupJoin
from dovetail.joins.mesh import MeshJoin
from dovetail.joins.protocol import Snapshot
from dovetail.joins.shedding import LeastJoinedFirst, OldestFirst, Random
from dovetail.joins.spec import JoinSpec, JoinType, join_spec

SemiStreamJoin = SemiStreamOperator
"""The type of every operator."""

OPERATORS: dict[str, Callable[..., SemiStreamOperator]] = {
    operator.kind: operator
    for operator in (MeshJoin, HybridJoin, BalancedJoin, IndexNestedLoopJoin, LookupJoin, AutoJoin)
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
    "LookupJoin",
    "MeshJoin",
    "OldestFirst",
    "Random",
    "Range",
    "SemiStreamJoin",
    "SemiStreamOperator",
    "Snapshot",
    "join_spec",
]
