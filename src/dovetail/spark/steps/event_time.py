"""How far event time has come in a multi-way join, over all its inputs, shards and joins of a tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.joins.multiway import TimeWindow
from dovetail.spark.flow.step import BatchClock, StepRecord

__all__ = ["EventTime"]


@dataclass(frozen=True)
class EventTime:
    """Decides the watermark of a micro-batch from what the commit before says of the inputs."""

    window: TimeWindow  # what the windows of all joins have in common
    steps: Mapping[str, str]  # for each input, the step that it goes into
    lower: tuple[str, ...] = ()  # steps whose results go into another one
    idle_after_ms: int | None = None  # a silent input holds the watermark back for this long; None: for good
    _begun_ms: list[int] = field(default_factory=list, compare=False)  # the first micro-batch of this process

    def decide(
        self, previous: Mapping[str, StepRecord] | None, clock: BatchClock, step: str = "", below: Sequence[str] = ()
    ) -> dict[str, Any]:
        """For the intent: the watermark and, where inputs may be idle, when rows of each were last seen.

        `below` are the steps whose results `step`, one of a cascade, joins. They emit rows with times before the
        watermark of the inputs, up to which it must not purge; that of the inputs still tells which rows are late.
        """
        decided: dict[str, Any] = {}
        idle = None
        if self.idle_after_ms is not None:
            seen = self._seen(previous, clock)
            idle = self._idle(seen, clock)
            decided = {"seen": seen, "idle": idle}
        watermark = None if previous is None else self.watermark(previous, idle)
        if not below:
            return {"watermark": watermark, **decided}
        held = self._held(watermark, previous or {}, step, below)
        return {"watermark": held, "late_before": watermark, **decided}

    def _held(
        self, watermark: int | None, previous: Mapping[str, StepRecord], step: str, below: Sequence[str]
    ) -> int | None:
        """The time before which no result of the steps below comes any more; it never goes back."""
        before = previous[step].reports[0]["watermark"] if step in previous else None
        completed = [report["completed"] for each in below for report in previous[each].reports] if previous else []
        if watermark is None or None in completed or not completed:
            return before
        held = int(min([watermark, *completed]))
        return held if before is None else max(held, before)

    def watermark(self, previous: Mapping[str, StepRecord], idle: list[str] | None = None) -> int | None:
        """What the next micro-batch goes by: the slowest input that is not idle counts, and it never goes back.

        Results that a lower join still owes meet tuples that must not be purged before, so these hold it back.
        """
        before = [previous[step].reports[0]["watermark"] for step in self.steps.values()]
        latest = [
            max((report["latest"][name] for report in previous[step].reports if name in report["latest"]), default=None)
            for name, step in self.steps.items()
            if name not in (idle or ())
        ]
        reached = [time - self.window.lateness for time in latest if time is not None]
        reached += [
            report["pending_low"]
            for step in self.lower
            for report in previous[step].reports
            if report["pending_low"] is not None
        ]
        known = [watermark for watermark in before if watermark is not None]
        has_reached = latest and None not in latest
        return max([*known, *([min(reached)] if has_reached else [])], default=None)

    def _seen(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, list[int]]:
        """Of each input, how many rows have come, and when the last ones had been taken in."""
        if previous is None:
            return {name: [0, clock.time_ms] for name in self.steps}
        seen = {}
        for name, step in self.steps.items():
            reports = previous[step].reports
            rows = sum(report["counters"]["tuples_in"].get(name, 0) for report in reports)
            # A commit of a flow that did not look for idle inputs says nothing of them.
            rows_before, time_ms = (reports[0].get("seen") or {}).get(name, [None, clock.time_ms])
            seen[name] = [rows, time_ms if rows == rows_before else clock.time_ms]
        return seen

    def _idle(self, seen: Mapping[str, list[int]], clock: BatchClock) -> list[str]:
        """The inputs without rows for too long. The time while no driver ran does not count."""
        if not self._begun_ms:
            self._begun_ms.append(clock.time_ms)
        assert self.idle_after_ms is not None
        since = clock.time_ms - self.idle_after_ms
        return [name for name, (_, time_ms) in seen.items() if max(time_ms, self._begun_ms[0]) < since]
