"""Chooses the cheaper way to answer tuples: a lookup or a scan.

Both are priced with the costs of this host, corrected by observed times. A lookup costs per tuple. A scan costs a cycle
over the relation, shared by all tuples that wait meanwhile: as many as the window holds, unless the caller knows
better.
"""

import math
import resource
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from dovetail.core.waiting import seconds_ready
from dovetail.costs.costs import CostFactors
from dovetail.joins.explaining import BATCH_ROWS, DEVICE_READ_S, lookup_cost
from dovetail.joins.protocol import RelationShard
from dovetail.joins.state import JoinState
from dovetail.kernels.pages import PAGE_BYTES

__all__ = ["Choice", "Observed", "timed"]

Returned = TypeVar("Returned")
_EARLY_STEPS = 1.5  # the cost of finding the tuples of a block that may leave, in steps
_WEIGHT = 0.2  # of the newest observation: one slow read does not flip a plan
_FADING = 0.01  # per operation of the other kind: what is avoided because it was slow once is tried again
_MOST_CORRECTED = 16.0
_WORTH_TIMING_S = 5e-5  # below this the clock dominates
_ABSENT_SHARE = 0.1  # of a shard that is not in memory, from which on lookups wait for a device
_CHOICES_PER_SAMPLE = 16  # of what is in memory


@dataclass
class Observed:
    """How much longer an operation takes than predicted: an exponentially weighted mean."""

    ratio: float = 1.0

    def note(self, seconds: float, predicted_s: float) -> None:
        """Record an operation."""
        if predicted_s > 0.0 and max(seconds, predicted_s) >= _WORTH_TIMING_S:
            found = min(max(seconds / predicted_s, 1 / _MOST_CORRECTED), _MOST_CORRECTED)
            self.ratio = math.exp((1 - _WEIGHT) * math.log(self.ratio) + _WEIGHT * math.log(found))

    def fade(self) -> None:
        """Trust the correction a little less: nothing was observed while the other way was taken."""
        self.ratio **= 1 - _FADING


class _Stopwatch:
    """Seconds of work: CPU time and waits for a device, but not time in which other processes ran."""

    def __init__(self, may_wait: bool) -> None:
        self.seconds = 0.0
        self._may_wait = may_wait  # if not, what seconds_ready costs is too much

    def __enter__(self) -> None:
        self._wall, self._cpu, self._waits = time.perf_counter(), time.thread_time(), _device_waits()
        self._ready_s = seconds_ready() if self._may_wait else 0.0

    def __exit__(self, *error: object) -> None:
        has_waited = _device_waits() != self._waits
        wall_s, cpu_s = time.perf_counter() - self._wall, time.thread_time() - self._cpu
        if has_waited and self._may_wait:
            wall_s = max(cpu_s, wall_s - (seconds_ready() - self._ready_s))
        self.seconds += wall_s if has_waited else cpu_s


def _device_waits() -> tuple[int, int]:
    """Page faults and reads of this thread that went to a device."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_majflt, usage.ru_inblock


def timed(
    work: Generator[pa.RecordBatch, None, Returned], note: Callable[[float], None], *, may_wait: bool = False
) -> Generator[pa.RecordBatch, None, Returned]:
    """Run work as it is consumed, and report its own seconds; `may_wait`: for a device."""
    watch = _Stopwatch(may_wait)
    while True:
        try:
            with watch:
                batch = next(work)
        except StopIteration as end:
            note(watch.seconds)
            return end.value  # type: ignore[no-any-return]
        yield batch
        del batch  # the consumer may have freed it


@dataclass
class Choice:
    """Prices lookups and scans of one join."""

    state: JoinState
    factors: CostFactors
    expected: float | None = None  # tuples that will share a cycle, if the caller knows
    seen: float | None = None  # recent number of waiting tuples when they had to be answered; None: a full window
    observes: bool = True  # whether costs are corrected by observed times
    lookups: Observed = field(default_factory=Observed)
    scans: Observed = field(default_factory=Observed)
    leaves_early: bool = False  # whether tuples leave a scan as soon as they have met all their rows
    cycles_waited: float = 1.0
    absent: float = 0.0  # the share of the shard that is not in memory
    _choices: int = 0

    def __post_init__(self) -> None:
        self._look_around()

    def _look_around(self) -> None:
        """From time to time, find out how much of the shard is in memory."""
        if self.observes and self._choices % _CHOICES_PER_SAMPLE == 0:
            self.absent = self._shard.absent_share()
        self._choices += 1

    @property
    def _pages(self) -> float:
        return self._shard.num_rows * self._shard.row_bytes / PAGE_BYTES

    @property
    def _shard(self) -> RelationShard:
        return self.state.spec.shard

    def note_lookup(self, seconds: float, predicted_s: float) -> None:
        """Record the time of a lookup."""
        if self.observes:
            self.lookups.note(seconds, predicted_s)
            self.scans.fade()

    def note_scan(self, seconds: float, predicted_s: float) -> None:
        """Record the time of a scan step."""
        if self.observes:
            self.scans.note(seconds, predicted_s)
            self.lookups.fade()

    @property
    def page_seconds(self) -> float:
        """The cost of a random page read."""
        return self.factors.read_seconds(PAGE_BYTES, sequential=False)

    @property
    def waits_for_device(self) -> bool:
        """Whether a lookup's reads wait for a device: pages of codes and rows that are not in memory."""
        return self.page_seconds > DEVICE_READ_S or self.absent > _ABSENT_SHARE

    def lookup_read_seconds(self, tuples: float) -> float:
        """The cost of reading what this many tuples need and is not in memory."""
        costs, pages = self._shard.read_costs, self._pages
        if costs is None or not self.absent or pages <= 0.0:
            return 0.0
        together = min(tuples, float(BATCH_ROWS))
        wanted = -pages * math.expm1(-together / pages)
        return tuples / max(1.0, together) * costs.seconds(self.absent * wanted, pages)

    def scan_read_seconds(self) -> float:
        """The cost of reading what a cycle over the relation needs and is not in memory."""
        costs = self._shard.read_costs
        return 0.0 if costs is None else self.absent * self._pages * costs.page_s

    # ---------------------------------------------------------------- scan

    def cycle_seconds(self, block_rows: int, window_tuples: float) -> float:
        """The cost of one cycle over the relation, whatever waits."""
        rows, factors = self._shard.num_rows, self.factors
        steps = -(-rows // block_rows)
        read_s = rows * self._shard.row_bytes / factors.bandwidth_bytes_per_s + self.scan_read_seconds()
        return read_s + rows * factors.probe_s.at(window_tuples) + steps * (factors.read_call_s + factors.step_s)

    def step_seconds(self, rows: int, waiting: int, left: int) -> float:
        """The model's cost of a step that read `rows` rows and released `left` tuples."""
        factors = self.factors
        own = factors.output_s + (factors.remove_s if self.leaves_early else factors.expire_s).at(max(1, waiting))
        share = rows / max(1, self._shard.num_rows)
        return share * self.cycle_seconds(self.state.memory.block_rows, waiting) + left * own

    def scan_seconds(self, leaves_early: bool, sharing: float) -> float:
        """The scan cost per tuple if this many share a cycle."""
        sharing, factors = max(1.0, sharing), self.factors
        block_rows = self.state.memory.block_rows
        own = factors.append_s.at(sharing) + factors.output_s
        cycle_s = self.cycle_seconds(block_rows, sharing)
        if not leaves_early:
            return self.scans.ratio * (own + factors.expire_s.at(sharing) + cycle_s / sharing)
        steps = -(-self._shard.num_rows // block_rows)
        finding_s = _EARLY_STEPS * factors.step_s * steps
        return self.scans.ratio * (own + factors.remove_s.at(sharing) + (cycle_s + finding_s) / sharing / 2)

    def pass_seconds(self, waiting: int) -> float:
        """The cost of answering all waiting tuples by a scan: a whole cycle, for the tuple whose rows come last."""
        factors = self.factors
        own = factors.output_s + (factors.remove_s if self.leaves_early else factors.expire_s).at(max(1, waiting))
        return self.scans.ratio * (self.cycle_seconds(self.state.memory.block_rows, waiting) + waiting * own)

    # ---------------------------------------------------------------- lookup

    def lookup_seconds(self, tuples: float) -> float:
        """The model's cost of looking up this many tuples together."""
        return lookup_cost(self._shard, self.factors, tuples).seconds + self.lookup_read_seconds(tuples)

    def corrected_lookup_seconds(self, tuples: float) -> float:
        """The same, corrected by observed times."""
        return self.lookups.ratio * self.lookup_seconds(tuples)

    # ---------------------------------------------------------------- which

    def choose_scan(self) -> None:
        """Compare the two ways of leaving a scan, with the current division of memory."""
        capacity = self.state.window_capacity
        can_leave_early = self._shard.num_segments == 1 and not self.state.spec.ordered
        whole_s = self.scan_seconds(False, capacity)
        half_s = self.scan_seconds(True, capacity) if can_leave_early else math.inf
        self.leaves_early = half_s < whole_s
        self.cycles_waited = 0.5 if self.leaves_early else 1.0

    def looks_up(self, offered: int) -> bool:
        """Whether tuples offered now are better looked up than left to wait for a scan."""
        self._look_around()
        capacity = self.state.window_capacity
        known = self.seen if self.expected is None else self.expected
        sharing = capacity if known is None else min(capacity, max(known, self.state.pending + offered))
        scan_s = self.scan_seconds(self.leaves_early, sharing)
        return self.corrected_lookup_seconds(offered) < offered * scan_s

    def prefers_lookup(self, waiting: int) -> bool:
        """Whether the waiting tuples are better looked up than scanned for; if so, expect few again."""
        self._look_around()
        is_better = self.corrected_lookup_seconds(waiting) < self.pass_seconds(waiting)
        self.seen = float(waiting) if is_better else None
        return is_better
