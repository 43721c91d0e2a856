"""Cost models of the papers, calibration, tuners, and the plans that operators explain themselves with."""

from dovetail.model.access import CachedIndexModel
from dovetail.model.balanced import BalancedModel, is_better_cached, optimal_cache_share
from dovetail.model.calibrate import calibrate
from dovetail.model.costs import CostFactors, Curve, LoopCost
from dovetail.model.dynamic import DynamicTuner
from dovetail.model.explain import Plan
from dovetail.model.hybrid import HybridModel, best_ratio_to_mesh, ratio_to_mesh_bound, slowdown_constant
from dovetail.model.inl import IndexNestedLoopModel
from dovetail.model.mesh import MeshModel
from dovetail.model.profile import HitCurve, JoinProfile, as_hit_curve
from dovetail.model.tune import minimum_budget, tune

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
    "calibrate",
    "is_better_cached",
    "minimum_budget",
    "optimal_cache_share",
    "ratio_to_mesh_bound",
    "slowdown_constant",
    "tune",
]
