"""The guards of the protocol, each taken out: the machine must notice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from protocol_machine import run_machine
from world import Tally

from dovetail.spark.flow import counting
from dovetail.spark.flow.protocol import BatchProtocol
from dovetail.spark.flow.spark_half import SparkHalf
from dovetail.spark.flow.store import FlowStore
from dovetail.spark.sinks.parquet_target import ParquetTarget
from dovetail.storage.simulated import SimulatedStorage
from dovetail.storage.simulated_disk import SimulatedDisk

__all__ = ["GUARDS", "Found", "found_without", "without"]

_flush_names, _link = SimulatedStorage._flush_names, SimulatedDisk.link


def _nothing(*arguments: Any, **named: Any) -> None:
    return None


def _flush_but_for(left_out: str) -> Callable[..., None]:
    def flush(self: SimulatedStorage, directory: Path, verb: str) -> None:
        if verb != left_out:
            _flush_names(self, directory, verb)

    return flush


def _replace(self: SimulatedDisk, old: Path, new: Path) -> None:
    if self.exists(new):
        self.unlink(new)
    _link(self, old, new)


GUARDS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "flush of a directory after create": (SimulatedStorage, "_flush_names", _flush_but_for("create")),
    "flush of a directory by sync": (SimulatedStorage, "_flush_names", _flush_but_for("sync")),
    "epoch check": (FlowStore, "require_newest", _nothing),
    "offset check": (BatchProtocol, "_require_same_rows", _nothing),
    "count check": (counting, "require_counts", _nothing),
    "compare-and-set": (SimulatedDisk, "link", _replace),
    "flush of Spark's offsets": (SparkHalf, "make_durable", _nothing),
    "claim at the target": (ParquetTarget, "require_not_replaced", _nothing),
    "target ahead of the checkpoint": (ParquetTarget, "_require_known", _nothing),
}
"""What is replaced, and by what."""


@contextmanager
def without(guard: str) -> Iterator[None]:
    """Take a guard out for a while."""
    place, name, replacement = GUARDS[guard]
    with mock.patch.object(place, name, replacement):
        yield


@dataclass(frozen=True)
class Found:
    """After how much a run has failed, and what it saw."""

    examples: int
    actions: int
    violation: str


def found_without(guard: str | None, seed: int, examples: int, actions: int) -> Found | None:
    """The first failure of the machine without a guard; None: it does not fail. No guard: the control run."""
    with without(guard) if guard is not None else nullcontext():
        try:
            run_machine(seed, examples, actions)
        except Exception as error:
            tally: Tally | None = getattr(error, "tally", None)
            if tally is None or tally.failed_after is None:
                raise  # not what the machine looks for
            return Found(*tally.failed_after, str(error).splitlines()[0])
    return None
