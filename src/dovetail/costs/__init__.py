"""Cost models of the papers, tuners, and the plans that operators report."""

from dovetail.costs.access import CachedIndexModel
from dovetail.costs.balanced import BalancedModel, is_better_cached, optimal_cache_share
from dovetail.costs.costs import CostFactors, Curve, LoopCost
from dovetail.costs.dynamic import DynamicTuner
from dovetail.costs.explain import Plan
from dovetail.costs.hybrid import HybridModel, best_ratio_to_mesh, ratio_to_mesh_bound, slowdown_constant
from dovetail.costs.inl import IndexNestedLoopModel
from dovetail.costs.mesh import MeshModel
from dovetail.costs.profile import HitCurve, JoinProfile, as_hit_curve
from dovetail.costs.tune import minimum_budget, tune

__all__ = [
    "BalancedModel",
    "CachedIndexModel",
    "CostFactors",
    "Curve",
    "DynamicTuner",
    "HitCurve",
    "HybridModel",
    "IndexNestedLoopModel",
    "JoinProfile",
    "LoopCost",
    "MeshModel",
    "Plan",
    "as_hit_curve",
    "best_ratio_to_mesh",
    "is_better_cached",
    "minimum_budget",
    "optimal_cache_share",
    "ratio_to_mesh_bound",
    "slowdown_constant",
    "tune",
]
