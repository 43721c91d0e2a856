"""Explains an operator as a `Plan`: its current parameters and memory, and its costs by the paper's model."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dovetail.costs.balanced import BalancedModel
from dovetail.costs.costs import CostFactors, Curve, LoopCost
from dovetail.costs.explain import Bottleneck, Plan, Strategy
from dovetail.costs.host import HostCosts
from dovetail.costs.hybrid import HybridModel
from dovetail.costs.inl import IndexNestedLoopModel
from dovetail.costs.mesh import MeshModel
from dovetail.costs.profile import JoinProfile
from dovetail.joins.protocol import RelationShard
from dovetail.kernels.pages import PAGE_BYTES
from dovetail.relation.io import SimulatedDisk

if TYPE_CHECKING:
    from dovetail.joins.engine import SemiStreamOperator

__all__ = [
    "BATCH_ROWS",
    "DEVICE_READ_S",
    "expect_read_costs",
    "explain_operator",
    "factors_for",
    "lookup_cost",
    "plan_of",
]

_DIRECT_READ_S = 1e-4
_MEMORY_BYTES_PER_S = 20e9
_TAKE_S = 2e-5  # taking rows from one record batch, in addition to the cost per row
_USUAL_LOOKUPS = 65_536
BATCH_ROWS = 65_536
"""Typical rows per record batch of a relation, and the maximum number of tuples per lookup."""
DEVICE_READ_S = 1e-6
"""A page read that takes longer is not from memory."""


_USUAL_COSTS = CostFactors(
    seek_s=1e-4,
    bandwidth_bytes_per_s=1e9,
    read_call_s=2e-5,
    probe_s=Curve(((1 << 12, 8e-9), (1 << 20, 25e-9))),
    cache_probe_s=Curve.constant(30e-9),
    output_s=150e-9,
    expire_s=Curve.constant(60e-9),
    remove_s=Curve.constant(360e-9),
    stream_read_s=10e-9,
    append_s=Curve.constant(80e-9),
    lookup_s=300e-9,
    lookup_call_s=3e-4,
    gather_s=700e-9,
    step_s=3e-4,
    index_step_s=4e-4,
)


def factors_for(shard: RelationShard, host: HostCosts | None = None) -> CostFactors:
    """Cost factors of a shard: of this host's processor, or a typical one, and of the disk it is read from."""
    disk = shard.disk
    if host is not None and disk is None and shard.io_mode != "map":
        return host.direct if shard.io_mode == "direct" else host.cached
    cpu = _USUAL_COSTS if host is None else host.cached
    if isinstance(disk, SimulatedDisk):
        return cpu.with_disk(seek_s=disk.seek_s, bandwidth_bytes_per_s=disk.bandwidth_bytes_per_s)
    if disk is None and shard.io_mode == "map":
        # Mapped pages are read in place: no call, no copy.
        return cpu.with_disk(seek_s=0.0, bandwidth_bytes_per_s=_MEMORY_BYTES_PER_S)
    if shard.io_mode == "direct":
        # A block takes one read for its codes and one or two per column; each waits for the disk.
        return replace(cpu, read_call_s=_DIRECT_READ_S * (1 + len(shard.schema)))
    return cpu


def expect_read_costs(shard: RelationShard, host: HostCosts | None) -> None:
    """Let a shard's reads begin with the costs that were measured on this host, if any were."""
    costs = shard.read_costs
    if host is None or costs is None:
        return
    deepest_s = min((read_s for _, read_s in host.direct.page_read_s.points), default=0.0)
    page_s = PAGE_BYTES / host.direct.bandwidth_bytes_per_s
    if deepest_s > 0.0:
        # A read takes its transfer besides; on a loaded machine, the difference may come out too small.
        costs.begin_with(max(deepest_s - page_s, page_s), page_s)


def lookup_cost(shard: RelationShard, factors: CostFactors, tuples: float) -> LoopCost:
    """The cost of looking up this many distinct tuples of a shard together."""
    calls = max(1.0, tuples / BATCH_ROWS)
    batches = min(tuples, calls * shard.num_rows / BATCH_ROWS)
    page_s = factors.read_seconds(PAGE_BYTES, sequential=False)
    terms = {
        # A page of codes and a page of rows, if they are not in memory.
        "read": 2 * tuples * page_s if page_s > DEVICE_READ_S else 0.0,
        "lookup": calls * factors.lookup_call_s + tuples * factors.lookup_s,
        "gather": batches * _TAKE_S + tuples * factors.gather_s,
        "output": tuples * factors.output_s,
    }
    return LoopCost(terms, stream_tuples=tuples)


def explain_operator(operator: "SemiStreamOperator", factors: CostFactors) -> Plan:
    """What one of the papers' operators does now, and the cost its paper's model predicts."""
    metrics, shard = operator.metrics, operator.spec.shard
    served = max(1, metrics.stream_tuples_in)
    hits = metrics.cache_hits + metrics.negative_hits
    hit_ratio = min(hits / served, 1.0 - 1e-9)
    cache = getattr(operator, "cache", None)
    cached_rows = 0 if cache is None else cache.num_rows
    left = max(1, metrics.tuples_left)
    profile = JoinProfile.with_overhead(
        relation_rows=max(1, shard.num_rows),
        relation_row_bytes=max(1.0, shard.row_bytes),
        stream_tuple_bytes=max(1.0, operator.stream_tuple_bytes),
        matches_per_tuple=metrics.output_rows / left if metrics.tuples_left else 1.0,
        hit_curve=lambda rows: hit_ratio if rows else 0.0,
    )
    block_rows, window = operator.block_rows, operator.window_capacity
    steps = profile.blocks(block_rows)
    chunk = max(1, operator.spec.chunk_rows or window // steps) if window else 0
    strategy: Strategy
    if operator.kind == "hybrid":
        strategy, cost = "hybrid", HybridModel(profile, factors).loop(block_rows, max(1, window))
        chunk = max(1, round(cost.stream_tuples))
    elif operator.kind == "balanced":
        strategy, cost = "balanced", BalancedModel(profile, factors).loop(block_rows, cached_rows, chunk)
    elif operator.kind == "lookup":
        strategy, cost = "lookup", lookup_cost(shard, factors, _USUAL_LOOKUPS)
        chunk = window = 0
    elif operator.kind == "index_nested_loop":
        pool_pages = operator.budget.total_bytes / (block_rows * profile.relation_row_bytes)
        strategy, cost = "index_nested_loop", IndexNestedLoopModel(profile, factors).loop(block_rows, pool_pages)
        chunk = window = 0
    else:
        strategy, cost = "mesh", MeshModel(profile, factors).loop(block_rows, chunk)
    access = "index" if operator.kind in ("hybrid", "index_nested_loop", "lookup") else "scan"
    why = (
        f"The disk takes {cost.disk_seconds / cost.seconds:.0%} of the time." if cost.seconds else "Nothing costs time."
    )
    return plan_of(operator, strategy, access, cost, why, chunk, window, cached_rows, hits / served)


def plan_of(
    operator: "SemiStreamOperator",
    strategy: Strategy,
    access: str,
    cost: LoopCost,
    why: str,
    chunk: int,
    window: int,
    cached_rows: int,
    hit_ratio: float,
) -> Plan:
    """A plan of the operator's current state, with a predicted cost."""
    binds: Bottleneck = "disk" if cost.disk_seconds > cost.seconds / 2 else "cpu"
    return Plan(
        strategy=strategy,
        objective=getattr(operator, "objective", "rate"),
        access="index" if access == "index" else "scan",
        block_rows=operator.block_rows,
        chunk_tuples=chunk,
        window_tuples=window,
        cache_rows=cached_rows,
        hit_ratio=hit_ratio,
        memory_bytes=operator.sizes(),
        budget_bytes=operator.budget.total_bytes,
        required_rate=None,
        service_rate=cost.service_rate if cost.seconds else math.inf,
        loop_seconds=cost.seconds,
        loop_terms=dict(cost.terms),
        binds=binds,
        why=why,
    )
