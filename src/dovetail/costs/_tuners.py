"""One small tuner per strategy: the best setting for a given block size, within a budget or for a rate."""

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from dovetail.costs.access import CachedIndexModel
from dovetail.costs.balanced import BalancedModel
from dovetail.costs.costs import CostFactors, LoopCost
from dovetail.costs.hybrid import HybridModel
from dovetail.costs.inl import IndexNestedLoopModel
from dovetail.costs.mesh import MeshModel
from dovetail.costs.profile import JoinProfile
from dovetail.costs.search import maximise, maximise_integer

_POOL_PAGE_BYTES = 8192
_MOST_BLOCKS = 1 << 15
# The rate is flat around its maximum: an error of this size in the split is not measurable.
_SPLIT_PRECISION = 1e-3
# More than any machine has: the best rate that no memory could improve.
UNLIMITED_BYTES = 2.0**60


@dataclass(frozen=True)
class Setting:
    """A choice of parameters, its memory and its cost."""

    block_rows: int
    chunk_tuples: int
    window_tuples: int
    cache_rows: int
    hit_ratio: float
    memory: Mapping[str, float]
    cost: LoopCost
    access: Literal["scan", "index"]

    @property
    def memory_bytes(self) -> dict[str, int]:
        return {name: math.ceil(size) for name, size in self.memory.items()}

    @property
    def total_bytes(self) -> int:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True)
class Tuner(ABC):
    """The part of tuning that differs between strategies."""

    profile: JoinProfile
    factors: CostFactors

    # Whether rounding to whole tuples makes the rate jump from one block size to the next.
    is_staircase: ClassVar[bool] = False

    def with_factors(self, factors: CostFactors) -> Self:
        return replace(self, factors=factors)

    def block_rows_range(self) -> tuple[int, int]:
        """The block sizes to consider, inclusive."""
        return 1, self.profile.relation_rows

    @abstractmethod
    def for_budget(self, block_rows: int, budget_bytes: float) -> Setting | None:
        """The fastest setting within the budget, or None if none fits."""

    @abstractmethod
    def for_rate(self, block_rows: int, rate: float) -> Setting | None:
        """The smallest setting that serves the rate, or None if none does."""

    @abstractmethod
    def minimum_bytes(self, block_rows: int) -> int:
        """The smallest budget for which `for_budget` finds a setting."""


@dataclass(frozen=True)
class MeshTuner(Tuner):
    is_staircase = True

    def for_budget(self, block_rows: int, budget_bytes: float) -> Setting | None:
        chunk = math.floor(MeshModel(self.profile, self.factors).chunk_for_budget(block_rows, budget_bytes))
        return self._setting(block_rows, chunk) if chunk >= 1 else None

    def for_rate(self, block_rows: int, rate: float) -> Setting | None:
        chunk = MeshModel(self.profile, self.factors).chunk_for_rate(block_rows, rate)
        return None if math.isinf(chunk) else self._setting(block_rows, max(1, math.ceil(chunk)))

    def minimum_bytes(self, block_rows: int) -> int:
        return self._setting(block_rows, 1).total_bytes

    def _setting(self, block_rows: int, chunk_tuples: int) -> Setting:
        model = MeshModel(self.profile, self.factors)
        return Setting(
            block_rows=block_rows,
            chunk_tuples=chunk_tuples,
            window_tuples=chunk_tuples * self.profile.blocks(block_rows),
            cache_rows=0,
            hit_ratio=0.0,
            memory=model.memory(block_rows, chunk_tuples),
            cost=model.loop(block_rows, chunk_tuples),
            access="scan",
        )


@dataclass(frozen=True)
class HybridTuner(Tuner):
    def block_rows_range(self) -> tuple[int, int]:
        low, high = super().block_rows_range()
        # Blocks of known popularity are evaluated one by one: below a few rows there would be millions.
        return (low if self.profile.storage_curve is None else max(low, high // _MOST_BLOCKS)), high

    def for_budget(self, block_rows: int, budget_bytes: float) -> Setting | None:
        model = HybridModel(self.profile, self.factors)
        window = math.floor(model.window_for_budget(block_rows, budget_bytes))
        return self._setting(block_rows, window) if window >= 1 else None

    def for_rate(self, block_rows: int, rate: float) -> Setting | None:
        window = HybridModel(self.profile, self.factors).window_for_rate(block_rows, rate)
        return None if math.isinf(window) else self._setting(block_rows, max(1, math.ceil(window)))

    def minimum_bytes(self, block_rows: int) -> int:
        return self._setting(block_rows, 1).total_bytes

    def _setting(self, block_rows: int, window_tuples: int) -> Setting:
        model = HybridModel(self.profile, self.factors)
        cost = model.loop(block_rows, window_tuples)
        return Setting(
            block_rows=block_rows,
            chunk_tuples=max(1, round(cost.stream_tuples)),
            window_tuples=window_tuples,
            cache_rows=0,
            hit_ratio=0.0,
            memory=model.memory(block_rows, window_tuples),
            cost=cost,
            access="index",
        )


@dataclass(frozen=True)
class BalancedTuner(Tuner):
    def for_budget(self, block_rows: int, budget_bytes: float) -> Setting | None:
        profile = self.profile
        model = BalancedModel(profile, self.factors)
        candidates = []
        if profile.relation_rows * profile.cache_entry_bytes <= budget_bytes:
            candidates.append(self._setting(block_rows, profile.relation_rows, 0))
        # What remains besides the block buffer and a window of one tuple per step.
        window_bytes = profile.blocks(block_rows) * profile.window_entry_bytes
        rest = budget_bytes - block_rows * profile.relation_row_bytes - window_bytes
        most_cached = min(rest / profile.cache_entry_bytes, profile.relation_rows - 1)

        def rate(cached_rows: float) -> float:
            disk_tuples = model.disk_tuples_for_budget(block_rows, cached_rows, budget_bytes)
            return model.loop(block_rows, cached_rows, disk_tuples).service_rate

        if most_cached >= 0:
            cached = maximise(rate, 0.0, most_cached, precision=_SPLIT_PRECISION)
            disk_tuples = max(1, math.floor(model.disk_tuples_for_budget(block_rows, cached, budget_bytes)))
            # The remainder of rounding the chunk down goes to the cache.
            left = rest - (disk_tuples - 1) * window_bytes
            full = min(math.floor(left / profile.cache_entry_bytes), profile.relation_rows - 1)
            candidates.append(self._setting(block_rows, max(math.floor(cached), full), disk_tuples))
        return max(candidates, key=lambda setting: setting.cost.service_rate, default=None)

    def for_rate(self, block_rows: int, rate: float) -> Setting | None:
        profile = self.profile
        model = BalancedModel(profile, self.factors)

        def memory(cached_rows: int) -> float:
            disk_tuples = model.disk_tuples_for_rate(block_rows, cached_rows, rate)
            if math.isinf(disk_tuples):
                return math.inf
            return sum(model.memory(block_rows, cached_rows, disk_tuples).values())

        # Starts at 1, because the search is over logarithms; no cache is represented by 1.
        cached = (
            maximise_integer(lambda rows: -memory(rows - 1), 1, profile.relation_rows + 1, precision=_SPLIT_PRECISION)
            - 1
        )
        disk_tuples = model.disk_tuples_for_rate(block_rows, cached, rate)
        if math.isinf(disk_tuples):
            return None
        if cached >= profile.relation_rows:
            return self._setting(block_rows, cached, 0)
        # A chunk is an integer; the cache size compensates for rounding.
        candidates = [
            self._setting(block_rows, least_cached, chunk)
            for chunk in {max(1, math.floor(disk_tuples)), max(1, math.ceil(disk_tuples))}
            if (least_cached := self._least_cached(block_rows, chunk, rate)) is not None
        ]
        return min(candidates, key=lambda setting: setting.total_bytes, default=None)

    def _least_cached(self, block_rows: int, disk_tuples: int, rate: float) -> int | None:
        """The smallest number of cached rows, less than all, with which chunks of this size serve the rate."""
        model = BalancedModel(self.profile, self.factors)
        rows = range(self.profile.relation_rows)
        found = bisect_left(rows, rate, key=lambda cached: model.loop(block_rows, cached, disk_tuples).service_rate)
        return found if found < len(rows) else None

    def minimum_bytes(self, block_rows: int) -> int:
        return self._setting(block_rows, 0, 1).total_bytes

    def _setting(self, block_rows: int, cached_rows: int, disk_tuples: int) -> Setting:
        model = BalancedModel(self.profile, self.factors)
        is_whole = cached_rows >= self.profile.relation_rows
        return Setting(
            block_rows=block_rows,
            chunk_tuples=disk_tuples,
            window_tuples=0 if is_whole else disk_tuples * self.profile.blocks(block_rows),
            cache_rows=cached_rows,
            hit_ratio=self.profile.hit_ratio(cached_rows),
            memory=model.memory(block_rows, cached_rows, disk_tuples),
            cost=model.loop(block_rows, cached_rows, disk_tuples),
            access="scan",
        )


@dataclass(frozen=True)
class CachedIndexTuner(Tuner):
    def for_budget(self, block_rows: int, budget_bytes: float) -> Setting | None:
        profile = self.profile
        model = CachedIndexModel(profile, self.factors)
        rest = budget_bytes - block_rows * profile.relation_row_bytes
        most_cached = min((rest - profile.window_entry_bytes) / profile.cache_entry_bytes, profile.relation_rows - 1)
        if rest < profile.window_entry_bytes:
            return None

        def window(cached_rows: float) -> float:
            return max(1.0, (rest - cached_rows * profile.cache_entry_bytes) / profile.window_entry_bytes)

        def rate(cached_rows: float) -> float:
            return model.loop(block_rows, cached_rows, window(cached_rows)).service_rate

        cached = math.floor(maximise(rate, 0.0, max(0.0, most_cached), precision=_SPLIT_PRECISION))
        return self._setting(block_rows, cached, math.floor(window(cached)))

    def for_rate(self, block_rows: int, rate: float) -> Setting | None:
        profile = self.profile
        model = CachedIndexModel(profile, self.factors)

        def window(cached_rows: int) -> float:
            return least(lambda tuples: model.loop(block_rows, cached_rows, tuples).service_rate, rate)

        def memory(cached_rows: int) -> float:
            return sum(model.memory(block_rows, cached_rows, window(cached_rows)).values())

        cached = (
            maximise_integer(lambda rows: -memory(rows - 1), 1, profile.relation_rows, precision=_SPLIT_PRECISION) - 1
        )
        needed = window(cached)
        return None if math.isinf(needed) else self._setting(block_rows, cached, math.ceil(needed))

    def minimum_bytes(self, block_rows: int) -> int:
        return self._setting(block_rows, 0, 1).total_bytes

    def _setting(self, block_rows: int, cached_rows: int, window_tuples: int) -> Setting:
        model = CachedIndexModel(self.profile, self.factors)
        return Setting(
            block_rows=block_rows,
            chunk_tuples=window_tuples,
            window_tuples=window_tuples,
            cache_rows=cached_rows,
            hit_ratio=self.profile.hit_ratio(cached_rows),
            memory=model.memory(block_rows, cached_rows, window_tuples),
            cost=model.loop(block_rows, cached_rows, window_tuples),
            access="index",
        )


@dataclass(frozen=True)
class IndexNestedLoopTuner(Tuner):
    def block_rows_range(self) -> tuple[int, int]:
        page_rows = max(1, round(_POOL_PAGE_BYTES / self.profile.relation_row_bytes))
        page_rows = min(page_rows, self.profile.relation_rows)
        return page_rows, page_rows

    def for_budget(self, block_rows: int, budget_bytes: float) -> Setting | None:
        pages = math.floor(budget_bytes / (block_rows * self.profile.relation_row_bytes))
        pages = min(pages, self.profile.blocks(block_rows))
        return self._setting(block_rows, pages) if pages >= 1 else None

    def for_rate(self, block_rows: int, rate: float) -> Setting | None:
        model = IndexNestedLoopModel(self.profile, self.factors)
        most = self.profile.blocks(block_rows)
        pages = least(lambda pages: model.loop(block_rows, pages).service_rate, rate, most)
        return None if math.isinf(pages) else self._setting(block_rows, math.ceil(pages))

    def minimum_bytes(self, block_rows: int) -> int:
        return self._setting(block_rows, 1).total_bytes

    def _setting(self, page_rows: int, pool_pages: int) -> Setting:
        model = IndexNestedLoopModel(self.profile, self.factors)
        return Setting(
            block_rows=page_rows,
            chunk_tuples=1,
            window_tuples=0,
            cache_rows=min(pool_pages * page_rows, self.profile.relation_rows),
            hit_ratio=model.pool_hit_ratio(page_rows, pool_pages),
            memory=model.memory(page_rows, pool_pages),
            cost=model.loop(page_rows, pool_pages),
            access="index",
        )


def least(function: Callable[[float], float], target: float, most: float = 1e15) -> float:
    """The smallest number from 1 to `most`, to 1 in 1000, at which an increasing function reaches the target, or
    infinity.
    """
    if function(1.0) >= target:
        return 1.0
    if function(most) < target:
        return math.inf
    low, high = 1.0, min(8.0, most)
    while function(high) < target:
        low, high = high, min(8.0 * high, most)
    while high - low > max(1e-3 * high, 1e-3):
        middle = 0.5 * (low + high)
        if function(middle) < target:
            low = middle
        else:
            high = middle
    return high
