"""A plan: the choice of a tuner, its predicted cost and its bottleneck, for people and programs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dovetail.core.memory import format_bytes

__all__ = ["Bottleneck", "Objective", "Plan", "Strategy"]

Strategy = Literal["mesh", "hybrid", "balanced", "index_nested_loop", "lookup", "auto"]
Objective = Literal["rate", "memory"]
Bottleneck = Literal["disk", "cpu", "memory"]

_STRATEGY_TITLES = {
    "mesh": "mesh (MESHJOIN: cyclic scan, window of chunks)",
    "hybrid": "hybrid (HYBRIDJOIN: the oldest waiting tuple picks the block)",
    "balanced": "balanced (SSBJ: cache of frequent join values, cyclic scan for the rest)",
    "index_nested_loop": "index_nested_loop (one lookup per tuple, buffer pool)",
    "lookup": "lookup (each batch looked up in the index at once)",
    "auto": "auto (cache of frequent join values, scan or index for the rest)",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Parameters of a semi-stream join and the predictions of the cost model.

    >>> plan = Plan(strategy="mesh", objective="rate", access="scan", block_rows=100, chunk_tuples=5,
    ...             window_tuples=50, cache_rows=0, hit_ratio=0.0,
    ...             memory_bytes={"block_buffer": 12_000, "window": 1_000}, budget_bytes=13_000,
    ...             required_rate=None, service_rate=25_000.0, loop_seconds=2e-4, loop_terms={"read": 2e-4},
    ...             binds="disk", why="The disk takes all of the time.", gains={"disk": 2.0})
    >>> plan.total_bytes, plan.as_dict()["block_rows"]
    (13000, 100)
    >>> print(plan.text())
    strategy      mesh (MESHJOIN: cyclic scan, window of chunks)
    objective     rate, within a budget of 13 kB
    block         100 rows per disk step (scan)
    chunk         5 stream tuples per disk step, 50 waiting at most
    memory        13 kB
      block_buffer  12 kB
      window         1 kB
    predicted     25 000 tuples/s, one step in 0.2 ms (read 100 %)
    binds         disk: The disk takes all of the time.
    """

    strategy: Strategy
    objective: Objective
    access: Literal["scan", "index"]
    block_rows: int  # b: rows of R per disk step (a page of the pool for index_nested_loop)
    chunk_tuples: int  # w: stream tuples that a disk step takes in and expires; for SSBJ those of the disk phase (w_S)
    window_tuples: int  # maximum number of waiting stream tuples
    cache_rows: int  # relation rows kept in memory
    hit_ratio: float  # fraction of the stream that the cache serves
    memory_bytes: Mapping[str, int]  # per component
    budget_bytes: int | None  # as requested, for objective "rate"
    required_rate: float | None  # as requested, for objective "memory"
    service_rate: float  # mu: predicted stream tuples per second
    loop_seconds: float  # c_loop
    loop_terms: Mapping[str, float]  # of c_loop
    binds: Bottleneck
    why: str  # the reason for the bottleneck, in words
    gains: Mapping[str, float] = field(default_factory=dict)  # of service rate, if disk, CPU or memory were doubled

    @property
    def total_bytes(self) -> int:
        return sum(self.memory_bytes.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "objective": self.objective,
            "access": self.access,
            "block_rows": self.block_rows,
            "chunk_tuples": self.chunk_tuples,
            "window_tuples": self.window_tuples,
            "cache_rows": self.cache_rows,
            "hit_ratio": self.hit_ratio,
            "memory_bytes": dict(self.memory_bytes),
            "total_bytes": self.total_bytes,
            "budget_bytes": self.budget_bytes,
            "required_rate": self.required_rate,
            # JSON has no infinity, and a loop without cost has no meaningful rate.
            "service_rate": self.service_rate if math.isfinite(self.service_rate) else None,
            "loop_seconds": self.loop_seconds,
            "loop_terms": dict(self.loop_terms),
            "binds": self.binds,
            "why": self.why,
            "gains": dict(self.gains),
        }

    def text(self) -> str:
        """The plan as text for a terminal or log."""
        lines = [
            ("strategy", _STRATEGY_TITLES[self.strategy]),
            ("objective", self._objective_line()),
            ("block", f"{_grouped(self.block_rows)} rows per disk step ({self.access})"),
            ("chunk", self._chunk_line()),
        ]
        if self.cache_rows:
            cached = f"{_grouped(self.cache_rows)} rows, serving {self.hit_ratio:.1%} of the stream"
            lines.append(("cache", cached.replace("%", " %")))
        lines.append(("memory", format_bytes(self.total_bytes)))
        texts = [f"{name:<13} {value}" for name, value in lines]
        held = {name: format_bytes(size) for name, size in self.memory_bytes.items() if size}
        width = max((len(size) for size in held.values()), default=0)
        texts += [f"  {name:<12}  {size:>{width}}" for name, size in held.items()]
        texts.append(f"{'predicted':<13} {self._prediction_line()}")
        texts.append(f"{'binds':<13} {self.binds}: {self.why}")
        return "\n".join(texts)

    def _objective_line(self) -> str:
        if self.objective == "rate":
            return f"rate, within a budget of {format_bytes(self.budget_bytes or 0)}"
        return f"memory, for {_grouped(self.required_rate or 0)} tuples/s"

    def _chunk_line(self) -> str:
        if not self.window_tuples:
            return "no stream tuple waits"
        waiting = f"{_grouped(self.window_tuples)} waiting at most"
        return f"{_grouped(self.chunk_tuples)} stream tuples per disk step, {waiting}"

    def _prediction_line(self) -> str:
        total = sum(self.loop_terms.values())
        shares = sorted(self.loop_terms.items(), key=lambda term: -term[1])
        parts = [f"{name} {cost / total:.0%}".replace("%", " %") for name, cost in shares if cost > 0.005 * total]
        rate = f"{_grouped(self.service_rate)} tuples/s" if math.isfinite(self.service_rate) else "no limit"
        return f"{rate}, one step in {self.loop_seconds * 1e3:.3g} ms ({', '.join(parts)})"


def _grouped(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")
