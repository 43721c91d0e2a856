"""The micro-batches of a flow as a few hundred points, however many there were.

Points are made from buckets of successive micro-batches: rates over the whole bucket, and the largest duration,
backlog and memory in it, so that a peak is seen in a long history as well.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.durations import parse_duration_ms
from dovetail.core.errors import PlanError

__all__ = ["MOST_BATCHES", "History"]

MOST_BATCHES = 10_000
MOST_POINTS = 240
_RECENT = 20


@dataclass(frozen=True, slots=True)
class _Point:
    """One micro-batch."""

    time_ms: int
    elapsed_ms: int
    took_ms: int
    taken: int
    rows: int
    hits: int
    pending: int
    memory_bytes: int
    behind: int | None


class History:
    """The last `MOST_BATCHES` micro-batches of a flow, from the records of its journal."""

    def __init__(self) -> None:
        self._points: deque[_Point] = deque(maxlen=MOST_BATCHES)
        self.recent: deque[Mapping[str, Any]] = deque(maxlen=_RECENT)
        self.side_rows: dict[int, int] = {}
        self._last_batch = -1
        self._is_first_of_run, self._trigger_ms = True, 0

    def __len__(self) -> int:
        return len(self._points)

    def started(self, trigger: str | None) -> None:
        """A new run begins: the time since the last micro-batch was not spent on the next one."""
        self._is_first_of_run = True
        try:
            self._trigger_ms = 0 if trigger is None else parse_duration_ms("trigger", trigger)
        except PlanError:  # available-now
            self._trigger_ms = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a micro-batch; one that is known already, since a start repeats the last one, changes nothing."""
        if record["batch"] <= self._last_batch:
            return
        operators, elapsed_ms = record["operators"], record["elapsed_ms"]
        if elapsed_ms is None or self._is_first_of_run:
            elapsed_ms = max(record["took_ms"], self._trigger_ms)
        rows = int(record["rows"] or 0)
        first = operators[0] if operators else {}
        self._points.append(
            _Point(
                time_ms=record["wall_ms"],
                elapsed_ms=max(1, elapsed_ms),
                took_ms=record["took_ms"],
                taken=int(first.get("in", rows)),
                rows=rows,
                hits=sum(operator["hits"] + operator["absent"] for operator in operators[:1]),
                pending=sum(operator["pending"] for operator in operators),
                memory_bytes=sum(operator["memory"] for operator in operators),
                behind=record.get("behind"),
            )
        )
        for number, count in enumerate(record["side"]):
            self.side_rows[number] = self.side_rows.get(number, 0) + int(count or 0)
        self.recent.append(record)
        self._last_batch, self._is_first_of_run = record["batch"], False

    def series(self, most: int = MOST_POINTS) -> dict[str, list[float | None]]:
        """Columns of at most ``most`` points, oldest first."""
        points = list(self._points)
        size = max(1, -(-len(points) // most))
        columns: dict[str, list[float | None]] = {name: [] for name in _COLUMNS}
        # Buckets begin at multiples of their size from the newest end, so that a new micro-batch moves few of them.
        first = len(points) % size or size
        bounds = [0, *range(first, len(points) + 1, size)] if points else [0]
        for begin, end in itertools.pairwise(bounds):
            for name, value in _bucket(points[begin:end]).items():
                columns[name].append(value)
        return columns

    def rates(self, most: int = 5) -> dict[str, float]:
        """Tuples in and rows out per second over the last few micro-batches."""
        points = list(self._points)[-most:]
        seconds = sum(point.elapsed_ms for point in points) / 1000 or 1.0
        return {
            "in": sum(point.taken for point in points) / seconds,
            "out": sum(point.rows for point in points) / seconds,
        }


_COLUMNS = ("time_ms", "in", "out", "took_ms", "pending", "hit", "memory", "behind")


def _bucket(points: list[_Point]) -> dict[str, float | None]:
    seconds = sum(point.elapsed_ms for point in points) / 1000
    taken = sum(point.taken for point in points)
    behind = [point.behind for point in points if point.behind is not None]
    return {
        "time_ms": points[-1].time_ms,
        "in": round(taken / seconds, 3),
        "out": round(sum(point.rows for point in points) / seconds, 3),
        "took_ms": max(point.took_ms for point in points),
        "pending": max(point.pending for point in points),
        "hit": round(sum(point.hits for point in points) / taken, 4) if taken else None,
        "memory": max(point.memory_bytes for point in points),
        "behind": max(behind, default=None),
    }
