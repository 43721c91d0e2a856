"""What the elementary operations cost: the factors that the papers' cost models multiply.

All costs are seconds, all sizes bytes. The table gives our names for the papers' symbols.

=====================  =========  ================================================================
field                  symbol     cost of
=====================  =========  ================================================================
`read_seconds(n)`      c_I/O      reading a block of n bytes: call + seek, if any, + n / bandwidth
`probe_s`              c_H        looking up one relation row in the window (H, H_S)
`cache_probe_s`        c_H        looking up one stream tuple in the cache (H_R)
`output_s`             c_O        making one result tuple
`expire_s`             c_E        removing the oldest tuple from window and queue (MESHJOIN, SSBJ)
`remove_s`             c_E        removing one tuple from their middle (HYBRIDJOIN)
`stream_read_s`        c_S        reading one tuple from the stream buffer
`append_s`             c_A        adding one tuple to window and queue
`switch_s`             c_B        switching one relation row into the cache
`lookup_s`             (ours)     finding one code's rows in the index
`gather_s`             (ours)     fetching one relation row at a known position, its page in memory
`step_s`               (ours)     starting one iteration, whatever it does
`index_step_s`         (ours)     the same for one that finds its block by the index (HYBRIDJOIN)
=====================  =========  ================================================================

The papers take the last four as nothing and c_H as one number; MESHJOIN's table 1 does say that c_H belongs
to "a hash table of size w N_R / b", so costs that depend on a table's size are a `Curve` over its entries. c_E is
one symbol for two things: tuples that leave by age lie next to each other, those of a block's codes lie anywhere, and
so do the places that they leave to the next to come, which `remove_s` includes.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Self

from dovetail.errors import PlanError

__all__ = ["PAPER_DISK_BANDWIDTH_BYTES_PER_S", "PAPER_DISK_SEEK_S", "CostFactors", "Curve", "LoopCost"]

PAPER_DISK_SEEK_S = 8e-3
PAPER_DISK_BANDWIDTH_BYTES_PER_S = 60e6

# The terms of an iteration that depend on the block it reads, not on the stream tuples it serves.
FIXED_TERMS = frozenset({"read", "probe", "switch", "lookup", "step"})


@dataclass(frozen=True)
class Curve:
    """A cost measured at a few table sizes, interpolated between them on a logarithmic axis of sizes.

    Below the smallest size and above the largest, the cost stays what it is there.

    Parameters
    ----------
    points
        Pairs of (entries, seconds), entries positive and increasing. One pair makes a constant.

    Examples
    --------
    >>> probe = Curve(((1_000, 10e-9), (100_000, 30e-9)))
    >>> [round(probe.at(entries) * 1e9) for entries in (0, 1_000, 10_000, 100_000, 10**9)]
    [10, 10, 20, 30, 30]
    >>> Curve.constant(5e-9).at(123)
    5e-09
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes[0] <= 0 or any(a >= b for a, b in pairwise(sizes)):
            raise PlanError(f"A cost curve needs positive, increasing table sizes, not {sizes}.")
        if any(not (math.isfinite(cost) and cost >= 0.0) for _, cost in self.points):
            raise PlanError(f"A cost is a number of seconds from 0 upwards; the curve is {self.points}.")

    @classmethod
    def constant(cls, seconds: float) -> Self:
        """Make a cost that does not depend on the size.

        Examples
        --------
        >>> Curve.constant(1e-9).points
        ((1.0, 1e-09),)
        """
        return cls(((1.0, float(seconds)),))

    def at(self, entries: float) -> float:
        """Cost per operation on a table of this many entries.

        Examples
        --------
        >>> Curve(((10, 1.0), (1000, 2.0))).at(100)
        1.5
        """
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
        """Multiply the cost at every size.

        Examples
        --------
        >>> Curve.constant(2.0).scaled(0.5).at(1)
        1.0
        """
        return type(self)(tuple((size, cost * factor) for size, cost in self.points))


_ZERO = Curve.constant(0.0)


@dataclass(frozen=True, kw_only=True)
class CostFactors:
    """The cost factors of one machine and one disk; see the module's table for the papers' symbols.

    Examples
    --------
    A disk of the papers' day reads a block of 480 kB in 8 ms, and seeks as long.

    >>> factors = CostFactors.of_papers(probe_s=50e-9, output_s=100e-9, append_s=200e-9, expire_s=150e-9)
    >>> factors.read_seconds(480_000, sequential=True), factors.read_seconds(480_000, sequential=False)
    (0.008, 0.016)
    >>> factors.with_disk(seek_s=0.0, bandwidth_bytes_per_s=1e9).read_seconds(480_000, sequential=False)
    0.00048
    """

    seek_s: float
    bandwidth_bytes_per_s: float
    read_call_s: float = 0.0
    probe_s: Curve = _ZERO
    cache_probe_s: Curve = _ZERO
    output_s: float = 0.0
    expire_s: Curve = _ZERO
    remove_s: Curve = _ZERO
    stream_read_s: float = 0.0
    append_s: Curve = _ZERO
    switch_s: float = 0.0
    lookup_s: float = 0.0
    gather_s: float = 0.0
    step_s: float = 0.0
    index_step_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Curve):
                continue
            if not (math.isfinite(value) and value >= 0.0):
                raise PlanError(f"{field.name}={value}: a cost factor is a finite number from 0 upwards.")
        if self.bandwidth_bytes_per_s == 0.0:
            raise PlanError("bandwidth_bytes_per_s=0: nothing could ever be read.")

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
        """Make factors as the papers have them: one number per symbol, one c_H for both tables, one c_E.

        Examples
        --------
        >>> CostFactors.of_papers(probe_s=1e-7).cache_probe_s.at(10**6)
        1e-07
        """
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
        """c_I/O: time to read a block; a sequential read continues where the last one ended.

        Examples
        --------
        >>> CostFactors(seek_s=1.0, bandwidth_bytes_per_s=10.0).read_seconds(20, sequential=False)
        3.0
        """
        seek_s = 0.0 if sequential else self.seek_s
        return self.read_call_s + seek_s + size_bytes / self.bandwidth_bytes_per_s

    def with_disk(self, *, seek_s: float, bandwidth_bytes_per_s: float, read_call_s: float = 0.0) -> Self:
        """Keep this machine's CPU costs and replace its disk, for example by a simulated one.

        Examples
        --------
        >>> here = CostFactors(seek_s=1e-4, bandwidth_bytes_per_s=1e9, output_s=1e-7)
        >>> here.with_disk(seek_s=8e-3, bandwidth_bytes_per_s=60e6).output_s
        1e-07
        """
        return replace(self, seek_s=seek_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s, read_call_s=read_call_s)

    def with_faster(self, *, disk: float = 1.0, cpu: float = 1.0) -> Self:
        """Divide the disk's and the CPU's costs, to ask what faster ones would bring.

        Examples
        --------
        >>> twice = CostFactors(seek_s=8e-3, bandwidth_bytes_per_s=60e6, output_s=1e-7).with_faster(disk=2, cpu=4)
        >>> twice.seek_s, twice.bandwidth_bytes_per_s, twice.output_s
        (0.004, 120000000.0, 2.5e-08)
        """
        changed: dict[str, Any] = {
            "seek_s": self.seek_s / disk,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s * disk,
            "read_call_s": self.read_call_s / disk,
        }
        for field in fields(self):
            if field.name not in changed:
                value = getattr(self, field.name)
                changed[field.name] = value.scaled(1.0 / cpu) if isinstance(value, Curve) else value / cpu
        return type(self)(**changed)

    def as_dict(self) -> dict[str, Any]:
        """Give the factors as JSON-able data; curves as lists of [entries, seconds].

        Examples
        --------
        >>> CostFactors(seek_s=0.0, bandwidth_bytes_per_s=1.0).as_dict()["probe_s"]
        [[1.0, 0.0]]
        """
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            data[field.name] = [list(point) for point in value.points] if isinstance(value, Curve) else value
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `as_dict` gave; unknown or missing names and wrong types are refused.

        Examples
        --------
        >>> factors = CostFactors(seek_s=0.0, bandwidth_bytes_per_s=1.0, probe_s=Curve.constant(2.0))
        >>> CostFactors.from_dict(factors.as_dict()) == factors
        True
        """
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
    """c_loop: what one iteration costs, term by term, and how many stream tuples it serves.

    Examples
    --------
    >>> cost = LoopCost(terms={"read": 0.008, "probe": 0.002}, stream_tuples=100)
    >>> cost.disk_seconds, cost.cpu_seconds, cost.seconds, cost.service_rate
    (0.008, 0.002, 0.01, 10000.0)
    """

    terms: Mapping[str, float]
    stream_tuples: float

    @property
    def disk_seconds(self) -> float:
        """The disk's part: the term named ``read``."""
        return self.terms.get("read", 0.0)

    @property
    def cpu_seconds(self) -> float:
        """Everything but the disk's part."""
        return sum(cost for name, cost in self.terms.items() if name != "read")

    @property
    def fixed_seconds(self) -> float:
        """The part that an iteration costs however many stream tuples it serves."""
        return sum(cost for name, cost in self.terms.items() if name in FIXED_TERMS)

    @property
    def seconds_per_tuple(self) -> float:
        """The rest, for each stream tuple served."""
        rest = sum(cost for name, cost in self.terms.items() if name not in FIXED_TERMS)
        return rest / self.stream_tuples if self.stream_tuples > 0 else 0.0

    @property
    def seconds(self) -> float:
        """c_loop. Disk and CPU add up: the papers' loops do not overlap them, and neither do ours."""
        return self.disk_seconds + self.cpu_seconds

    @property
    def service_rate(self) -> float:
        """mu: stream tuples served per second."""
        seconds = self.seconds
        if seconds > 0.0:
            return self.stream_tuples / seconds
        return math.inf if self.stream_tuples > 0 else 0.0
