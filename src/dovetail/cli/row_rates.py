"""Rows, their rate, and the time left, from counts that are looked at now and then."""

import time
from collections import deque
from dataclasses import dataclass

__all__ = ["RowRates", "RowsDone", "Shown"]

_WINDOW_SECONDS = 10.0


@dataclass(frozen=True)
class RowsDone:
    """How far a write is: ``read`` rows of the source, of which ``sorted`` have reached their shard.

    ``of`` is the number of rows of the source, once all are read.
    """

    read: int
    sorted: int = 0
    of: int | None = None


@dataclass(frozen=True)
class Shown:
    """What a bar shows: the fraction done (None of it is known: ``total`` is 0), and a text."""

    fraction: float
    total: float
    text: str


class RowRates:
    """Turns counts into text; the rate is that of the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, RowsDone]] = deque()

    @property
    def has_rows(self) -> bool:
        return bool(self._seen)

    def add(self, done: RowsDone, now_s: float | None = None) -> Shown:
        """
        >>> rates = RowRates()
        >>> rates.add(RowsDone(0), 0.0).text
        '0 rows read'
        >>> rates.add(RowsDone(1_000_000), 2.0).text
        '1,000,000 rows read, 500,000/s'
        >>> rates.add(RowsDone(2_000_000, 0, 2_000_000), 4.0).text
        '0 of 2,000,000 rows'
        >>> rates.add(RowsDone(2_000_000, 500_000, 2_000_000), 5.0)
        Shown(fraction=0.25, total=1.0, text='500,000 of 2,000,000 rows, 500,000/s, 3 s left')
        """
        now = time.monotonic() if now_s is None else now_s
        if self._seen and (self._seen[-1][1].of is None) != (done.of is None):
            self._seen.clear()  # another part of the work, at another rate
        self._seen.append((now, done))
        while now - self._seen[0][0] > _WINDOW_SECONDS:
            self._seen.popleft()
        since, first = self._seen[0]
        elapsed = now - since
        if done.of is None:
            rate = (done.read - first.read) / elapsed if elapsed else 0.0
            return Shown(0.0, 0.0, f"{done.read:,} rows read" + (f", {rate:,.0f}/s" if rate > 0 else ""))
        rate = (done.sorted - first.sorted) / elapsed if elapsed else 0.0
        left = f", {rate:,.0f}/s, {(done.of - done.sorted) / rate:,.0f} s left" if rate > 0 else ""
        fraction = done.sorted / done.of if done.of else 1.0
        return Shown(fraction, 1.0, f"{done.sorted:,} of {done.of:,} rows{left}")
