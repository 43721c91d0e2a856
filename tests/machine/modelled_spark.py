"""A model of Spark's micro-batch execution: what it writes to a checkpoint, when, and what it makes of it at a restart.

It plans micro-batch b by adding ``offsets/<b>``, calls the flow, and adds ``commits/<b>``; it flushes nothing. At a
start it takes the newest ``offsets/<b>``: without ``commits/<b>`` it runs b again, else it goes on with b+1. It refuses
to start on a log entry that is torn or lacking, and ends when another driver has added an entry before it.

The source is a log of integers, so a micro-batch is a range of them; a second source ticks.
"""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dovetail.storage.simulated import SimulatedStorage

__all__ = ["ModelledSpark", "Plan", "Source", "SparkRefusal"]

T = TypeVar("T")


class SparkRefusal(Exception):  # noqa: N818 -- a refusal is no error of the test
    """Spark's own error: it does not start the query, or ends it."""


@dataclass
class Source:
    """What there is to read at the moment."""

    rows: int = 0
    ticks: int = 0

    def positions(self, end: int) -> tuple[int, int]:
        """Up to where a micro-batch reads that comes after ``end`` rows."""
        return self.rows, self.ticks


@dataclass(frozen=True)
class Plan:
    """The rows of a micro-batch."""

    batch: int
    start: int
    end: int
    tick: int

    @property
    def text(self) -> bytes:
        """The content of ``offsets/<b>``."""
        positions = [json.dumps({"rows": self.end}), json.dumps({"ticks": self.tick})]
        lines = ["v1", json.dumps({"batchTimestampMs": self.batch}), *positions]
        return "\n".join(lines).encode()


class ModelledSpark:
    """One run of a query."""

    def __init__(self, checkpoint: Path, storage: SimulatedStorage, source: Source) -> None:
        self._checkpoint, self._storage, self._source = checkpoint, storage, source
        self._end = self._tick = self._next = 0

    def start(self) -> Plan | None:
        """Read the checkpoint; gives the micro-batch to run again, if there is one."""
        metadata = self._checkpoint / "metadata"
        if not self._storage.exists(metadata):
            self._add("metadata", json.dumps({"id": str(uuid.uuid4())}).encode())
        self._read("metadata", lambda text: json.loads(text)["id"])
        newest = self._newest("offsets")
        if newest is None:
            if self._storage.names(self._checkpoint / "offsets"):
                raise SparkRefusal("offsets should be empty on the first micro-batch")
            return None
        end, tick = self._positions(newest)
        start, _ = self._positions(newest - 1) if newest else (0, 0)
        self._end, self._tick, self._next = end, tick, newest + 1
        committed = self._newest("commits")
        if committed is not None:
            self._read(f"commits/{committed}", lambda text: json.loads(text.splitlines()[1]))
        return None if committed == newest else Plan(newest, start, end, tick)

    def plan(self) -> Plan | None:
        """Plan the next micro-batch, if there is something for it."""
        rows, ticks = self._source.positions(self._end)
        if (rows, ticks) == (self._end, self._tick):
            return None
        plan = Plan(self._next, self._end, rows, ticks)
        self._add(f"offsets/{plan.batch}", plan.text)
        self._end, self._tick, self._next = plan.end, plan.tick, plan.batch + 1
        return plan

    def commit(self, batch: int) -> None:
        """Note that a micro-batch is done."""
        self._add(f"commits/{batch}", b'v1\n{"nextBatchWatermarkMs":0}')

    @property
    def position(self) -> tuple[int, int, int]:
        """How far it has planned."""
        return self._end, self._tick, self._next

    def _add(self, name: str, content: bytes) -> None:
        try:
            self._storage.write(self._checkpoint / name, content, exclusively=True)
        except FileExistsError:
            raise SparkRefusal(f"concurrent update of {name.partition('/')[0]}") from None

    def _newest(self, log: str) -> int | None:
        names = self._storage.names(self._checkpoint / log)
        return max((int(name) for name in names if name.isdigit()), default=None)

    def _positions(self, batch: int) -> tuple[int, int]:
        def parse(text: str) -> tuple[int, int]:
            _, _, end, tick = text.splitlines()
            return int(json.loads(end)["rows"]), int(json.loads(tick)["ticks"])

        return self._read(f"offsets/{batch}", parse)

    def _read(self, name: str, parse: Callable[[str], T]) -> T:
        kind = name.partition("/")[0]
        try:
            return parse(self._storage.read(self._checkpoint / name).decode())
        except FileNotFoundError:
            raise SparkRefusal(f"an entry of {kind} is lacking") from None
        except (ValueError, KeyError, IndexError):
            raise SparkRefusal(f"an entry of {kind} is torn") from None
