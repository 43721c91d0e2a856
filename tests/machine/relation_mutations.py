"""The guards of a relation's commits, pins and vacuums, each taken out: the machine must notice."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from mutations import GUARDS as FLOW_GUARDS
from mutations import Found
from relation_machine import run_relation_machine
from relation_world import RelationTally

from dovetail.relation import version_log
from dovetail.relation.pins import pinned_versions
from dovetail.relation.version_log import VersionLog
from dovetail.storage.interface import Storage
from dovetail.storage.simulated import SimulatedStorage

__all__ = ["EXPLORED_GUARDS", "RELATION_GUARDS", "relation_found_without"]

_sync, _flush_content = SimulatedStorage.sync, SimulatedStorage._flush_content


def _no_pins(*arguments: Any) -> set[int]:
    return set()


def _look_away(root: Path, storage: Storage) -> set[int]:
    pinned_versions(root, storage)  # which also removes those that have expired
    return set()


def _flush_content_but_for(left_out: str) -> Callable[..., None]:
    def flush(self: SimulatedStorage, path: Path, verb: str) -> None:
        if verb != left_out:
            _flush_content(self, path, verb)

    return flush


def _sync_but_for(left_out: str) -> Callable[..., None]:
    def sync(self: SimulatedStorage, paths: Iterable[Path]) -> None:
        _sync(self, [path for path in paths if path.name != left_out])

    return sync


@contextmanager
def _no_lock(self: SimulatedStorage, path: Path, mode: int = 0) -> Iterator[None]:
    if not self.exists(path):
        self.write(path, b"")
    yield


RELATION_GUARDS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "flush of a directory after create": FLOW_GUARDS["flush of a directory after create"],
    "flush of a directory by sync": FLOW_GUARDS["flush of a directory by sync"],
    "compare-and-set": FLOW_GUARDS["compare-and-set"],
    "flush of segments before the commit": (SimulatedStorage, "_flush_content", _flush_content_but_for("sync")),
    "flush of a pin's content": (SimulatedStorage, "_flush_content", _flush_content_but_for("put")),
    "flush of versions by a vacuum and by a pin": (SimulatedStorage, "sync", _sync_but_for("versions")),
    "look at the pins": (version_log, "pinned_versions", _look_away),
    "second look at the pins": (VersionLog, "_pinned_meanwhile", _no_pins),
    "writer's lock": (SimulatedStorage, "lock", _no_lock),
}
"""What is replaced, and by what."""

EXPLORED_GUARDS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "flush of the shards' names before the commit": (SimulatedStorage, "sync", _sync_but_for("data")),
    "flush of the marker before anything else": (SimulatedStorage, "sync", _sync_but_for("r")),
}
"""Those that matter in a few moments of a first build only: the explorations come by there, lives at random seldom."""


def relation_found_without(guard: str | None, seed: int, examples: int, actions: int) -> Found | None:
    """The first failure of the machine without a guard; None: it does not fail. No guard: the control run."""
    with mock.patch.object(*RELATION_GUARDS[guard]) if guard is not None else nullcontext():
        try:
            run_relation_machine(seed, examples, actions)
        except Exception as error:
            tally: RelationTally | None = getattr(error, "tally", None)
            if tally is None or tally.failed_after is None:
                raise  # not what the machine looks for
            return Found(*tally.failed_after, str(error).splitlines()[0])
    return None
