"""The time of micro-batches: it advances like a wall clock, but never jumps with one.

Deadlines, pace and waiting times are differences of batch times. Within a process they follow the monotonic clock.
Between processes only the wall clock tells how much time has passed; if it went back, none has.
"""

import time
from collections.abc import Mapping
from typing import Any

__all__ = ["FlowTime", "flow_now_ms"]


class FlowTime:
    """The clock of one driver.

    >>> clock = FlowTime()
    >>> clock.of_batch(1_000, None)
    1000
    >>> later = clock.of_batch(31_536_000_000, {"batch": 0, "time_ms": 1_000, "wall_ms": 1_000})  # a year ahead
    >>> later < 2_000
    True
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def of_batch(self, wall_ms: int, previous: Mapping[str, Any] | None) -> int:
        """The time of a new micro-batch after the commit `previous`."""
        now = time.monotonic()
        if previous is None:
            time_ms = wall_ms
        elif self._last is not None and self._last[0] == previous["time_ms"]:
            time_ms = self._last[0] + int(1000 * (now - self._last[1]))
        else:
            time_ms = flow_now_ms(previous, wall_ms)
        self._last = (time_ms, now)
        return time_ms


def flow_now_ms(commit: Mapping[str, Any], wall_ms: int) -> int:
    """The flow's time now, by its last commit and the wall clock.

    >>> flow_now_ms({"time_ms": 5_000, "wall_ms": 9_000}, 9_700), flow_now_ms({"time_ms": 5_000}, 4_000)
    (5700, 5000)
    """
    return int(commit["time_ms"]) + max(0, wall_ms - int(commit.get("wall_ms", commit["time_ms"])))
