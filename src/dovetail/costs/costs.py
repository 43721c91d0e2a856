"""Cost factors: the cost of elementary operations, which the papers' cost models multiply.

All costs are in seconds, all sizes in bytes. The table maps our names to the papers' symbols.

=====================  =========  ================================================================
field                  symbol     cost of
=====================  =========  ================================================================
`read_seconds(n)`      c_I/O      reading a block of n bytes: call + seek, if any, + n / bandwidth
`page_read_s`          (ours)     reading one random page, by the number of reads under way together
`probe_s`              c_H        looking up one relation row in the window (H, H_S)
`cache_probe_s`        c_H        looking up one stream tuple in the cache (H_R)
`output_s`             c_O        creating one result tuple
`expire_s`             c_E        removing the oldest tuple from window and queue (MESHJOIN, SSBJ)
`remove_s`             c_E        removing one tuple from their middle (HYBRIDJOIN)
`stream_read_s`        c_S        reading one tuple from the stream buffer
`append_s`             c_A        adding one tuple to window and queue
`switch_s`             c_B        switching one relation row into the cache
`lookup_s`             (ours)     finding one code's rows in the index
`lookup_call_s`        (ours)     looking up a batch of codes, whatever it holds
`gather_s`             (ours)     fetching one relation row at a known position, its page in memory
`step_s`               (ours)     starting one iteration
`index_step_s`         (ours)     the same for one that finds its block by the index (HYBRIDJOIN)
=====================  =========  ================================================================

The papers assume zero for the last five and a single number for c_H. But MESHJOIN's table 1 defines c_H for "a hash
table of size w N_R / b", so costs that depend on the size of a table are a `Curve` over its entries. c_E is one symbol
for two costs: tuples that leave by age are adjacent, while those of a block's codes are scattered, and so are the
positions they free for later tuples. `remove_s` includes that.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

from dovetail.core.errors import PlanError

__all__ = ["PAPER_DISK_BANDWIDTH_BYTES_PER_S", "PAPER_DISK_SEEK_S", "CostFactors", "Curve", "LoopCost"]

PAPER_DISK_SEEK_S = 8e-3
PAPER_DISK_BANDWIDTH_BYTES_PER_S = 60e6

# The terms of an iteration that depend on the block it reads, not on the stream tuples it serves.
FIXED_TERMS = frozenset({"read", "probe", "switch", "lookup", "step"})


@dataclass(frozen=True)
class Curve:
    """A cost measured at several table sizes, interpolated on a logarithmic axis of sizes.

    Below the smallest and above the largest size, the cost is constant.

    >>> probe = Curve(((1_000, 10e-9), (100_000, 30e-9)))
    >>> [round(probe.at(entries) * 1e9) for entries in (0, 1_000, 10_000, 100_000, 10**9)]
    [10, 10, 20, 30, 30]
    """

    points: tuple[tuple[float, float], ...]  # (entries, seconds), entries positive and increasing

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] <= 0 or any(a >= b for a, b in pairwise(sizes)):
            raise PlanError(f"A cost curve needs positive, increasing table sizes, not {sizes}.")
        if any(not (math.isfinite(cost) and cost >= 0.0) for _, cost in self.points):
            raise PlanError(f"A cost must be a number of seconds from 0 upwards; the curve is {self.points}.")

    @classmethod
    def constant(cls, seconds: float) -> Self:
        """A cost that does not depend on the size."""
        return cls(((1.0, float(seconds)),))

    def at(self, entries: float) -> float:
        """Cost per operation on a table of `entries` entries."""
        points = self.points
        after = bisect_right(points, entries, key=lambda point: point[0])
        if after == 0:
            return points[0][1]
        if after == len(points):
            return points[-1][1]
        (low, low_cost), (high, high_cost) = points[after - 1], points[after]
        share = math.log(entries / low) / math.log(high / low)
        return low_cost + share * (high_cost - low_cost)

    def scaled(self, factor: float) -> Self:
        return type(self)(tuple((size, cost * factor) for size, cost in self.points))


_ZERO = Curve.constant(0.0)


@dataclass(frozen=True, kw_only=True)
class CostFactors:
    """The cost factors of one machine and one disk; see the module's table for the papers' symbols."""

    seek_s: float
    bandwidth_bytes_per_s: float
    read_call_s: float = 0.0
    page_read_s: Curve = _ZERO
    probe_s: Curve = _ZERO
    cache_probe_s: Curve = _ZERO
    output_s: float = 0.0
    expire_s: Curve = _ZERO
    remove_s: Curve = _ZERO
    stream_read_s: float = 0.0
    append_s: Curve = _ZERO
    switch_s: float = 0.0
    lookup_s: float = 0.0
    lookup_call_s: float = 0.0
    gather_s: float = 0.0
    step_s: float = 0.0
    index_step_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Curve):
                continue
            if not (math.isfinite(value) and value >= 0.0):
                raise PlanError(f"{field.name}={value}: a cost factor must be a finite number from 0 upwards.")
        if self.bandwidth_bytes_per_s == 0.0:
            raise PlanError("bandwidth_bytes_per_s=0: the bandwidth must be above 0.")

    @classmethod
    def of_papers(
        cls,
        *,
        seek_s: float = PAPER_DISK_SEEK_S,
        bandwidth_bytes_per_s: float = PAPER_DISK_BANDWIDTH_BYTES_PER_S,
        probe_s: float = 0.0,
        output_s: float = 0.0,
        expire_s: float = 0.0,
        stream_read_s: float = 0.0,
        append_s: float = 0.0,
        switch_s: float = 0.0,
    ) -> Self:
        """Factors as in the papers: one number per symbol, one c_H for both tables, one c_E."""
        return cls(
            seek_s=seek_s,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            probe_s=Curve.constant(probe_s),
            cache_probe_s=Curve.constant(probe_s),
            output_s=output_s,
            expire_s=Curve.constant(expire_s),
            remove_s=Curve.constant(expire_s),
            stream_read_s=stream_read_s,
            append_s=Curve.constant(append_s),
            switch_s=switch_s,
        )

    def read_seconds(self, size_bytes: float, *, sequential: bool) -> float:
        """c_I/O: time to read a block; a sequential read continues where the last one ended."""
        seek_s = 0.0 if sequential else self.seek_s
        return self.read_call_s + seek_s + size_bytes / self.bandwidth_bytes_per_s

    def with_disk(self, *, seek_s: float, bandwidth_bytes_per_s: float, read_call_s: float = 0.0) -> Self:
        """Keep the CPU costs and replace the disk, for example with a simulated one."""
        return replace(
            self,
            seek_s=seek_s,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            read_call_s=read_call_s,
            page_read_s=_ZERO,
        )

    def with_faster(self, *, disk: float = 1.0, cpu: float = 1.0) -> Self:
        """Divide the costs of disk and CPU, to predict the effect of faster ones."""
        changed: dict[str, Any] = {
            "seek_s": self.seek_s / disk,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s * disk,
            "read_call_s": self.read_call_s / disk,
            "page_read_s": self.page_read_s.scaled(1.0 / disk),
        }
        for field in fields(self):
            if field.name not in changed:
                value = getattr(self, field.name)
                changed[field.name] = value.scaled(1.0 / cpu) if isinstance(value, Curve) else value / cpu
        return type(self)(**changed)

    def as_dict(self) -> dict[str, Any]:
        """The factors as JSON-serializable data; curves as lists of [entries, seconds]."""
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            data[field.name] = [list(point) for point in value.points] if isinstance(value, Curve) else value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the output of `as_dict`; unknown or missing names and wrong types are refused."""
        known = {field.name for field in fields(cls)}
        if set(data) != known:
            odd = ", ".join(sorted(set(data) ^ known))
            raise PlanError(f"Stored cost factors have missing or unknown entries: {odd}.")
        values: dict[str, Any] = {}
        try:
            for name, value in data.items():
                if isinstance(value, Sequence) and not isinstance(value, str):
                    values[name] = Curve(tuple((float(size), float(cost)) for size, cost in value))
                else:
                    values[name] = float(value)
        except (TypeError, ValueError) as error:
            raise PlanError(f"Stored cost factors cannot be read: {error}") from error
        curves = {field.name for field in fields(cls) if isinstance(field.default, Curve)}
        if wrong := [name for name, value in values.items() if isinstance(value, Curve) != (name in curves)]:
            raise PlanError(f"Stored cost factors have the wrong shape: {', '.join(wrong)}.")
        return cls(**values)


@dataclass(frozen=True)
class LoopCost:
    """c_loop: the cost of one iteration, term by term, and the number of stream tuples it serves."""

    terms: Mapping[str, float]
    stream_tuples: float

    @property
    def disk_seconds(self) -> float:
        return self.terms.get("read", 0.0)

    @property
    def cpu_seconds(self) -> float:
        return sum(cost for name, cost in self.terms.items() if name != "read")

    @property
    def fixed_seconds(self) -> float:
        """The part that does not depend on the number of stream tuples served."""
        return sum(cost for name, cost in self.terms.items() if name in FIXED_TERMS)

    @property
    def seconds_per_tuple(self) -> float:
        """The rest, per stream tuple served."""
        rest = sum(cost for name, cost in self.terms.items() if name not in FIXED_TERMS)
        return rest / self.stream_tuples if self.stream_tuples > 0 else 0.0

    @property
    def seconds(self) -> float:
        """c_loop. Disk and CPU add up: they do not overlap in the papers' loops, nor in ours."""
        return self.disk_seconds + self.cpu_seconds

    @property
    def service_rate(self) -> float:
        """mu: stream tuples served per second."""
        seconds = self.seconds
        if seconds > 0.0:
            return self.stream_tuples / seconds
        return math.inf if self.stream_tuples > 0 else 0.0
