"""The data of the HYBRIDJOIN experiments, and shared names."""

from collections.abc import Callable
from functools import partial

from dovetail.core.memory import Budget
from dovetail_lab.experiment import Axis, Context
from dovetail_lab.semi_stream import (
    DISK_TITLES,
    NAMES,
    SERVICE_RATE,
)
from dovetail_lab.subjects import DiskName, Stream, Subject

PAPER = "HYBRIDJOIN (2011)"
DISKS: tuple[DiskName, ...] = ("simulated", "direct")
PAPER_DAY = DISK_TITLES["simulated"]
MESH, HYBRID, INL = NAMES["mesh"], NAMES["hybrid"], NAMES["index_nested_loop"]
SHUFFLED = f"{HYBRID}, hot keys anywhere"
ALL = ("hybrid", "mesh", "index_nested_loop")
LOG_RATE = Axis(SERVICE_RATE.label, SERVICE_RATE.unit, "log")
MEMORY = Axis("Memory", "MB")
PAGE_BYTES = 4096
MB = 1_000_000


def rows_of(context: Context) -> int:
    return context.pick(400_000, 2_000_000)


def memory_of(context: Context) -> Budget:
    """The paper's 50 MB: a fifth of R."""
    return Budget(context.pick(10 * MB, 50 * MB))


def ranked(subject: Subject, exponent: float = 1.0) -> Callable[[], Stream]:
    """The paper's stream: R is sorted by how often the stream requests its rows."""
    return partial(subject.stream, exponent, "ranked")


def sizes_of(context: Context) -> tuple[int, ...]:
    return context.pick((200_000, 400_000), (500_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000))
