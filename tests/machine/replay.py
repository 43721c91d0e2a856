"""One driver, one storage call at a time, from any point that it has been at before.

A driver's code between two storage calls depends only on what earlier calls have answered. So a point in its life is
the state at the last boundary between two micro-batches, and the answers since then. To take one more step, the code
runs again from the boundary with the old answers, and one new call reaches the disk.
"""

import copy
import itertools
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from modelled_driver import Driver, ignore
from modelled_spark import Source, SparkRefusal

from dovetail.core.errors import DovetailError
from dovetail.spark.flow import flow_time, ownership, protocol, store
from dovetail.storage.simulated import SimulatedStorage
from dovetail.storage.simulated_disk import SimulatedDisk

__all__ = ["Life", "advance", "begun", "frozen_clocks"]


class Paused(BaseException):
    """The driver has had its step."""


class Tape:
    """A storage that gives recorded answers, then lets one call through."""

    def __init__(self) -> None:
        self.play((), SimulatedDisk(), False)

    def __reduce__(self) -> str:
        return "TAPE"  # there is one

    def play(self, answers: tuple[Any, ...], disk: SimulatedDisk, glues: bool) -> None:
        self.answers, self.disk, self._glues = answers, disk, glues
        self._has_changed, self._next, self._may_call = False, 0, True

    def _call(self, verb: str, *arguments: Any, **named: Any) -> Any:
        if self._next == len(self.answers):
            if not self._belongs_to_the_step_before(verb, arguments[0]):
                if not self._may_call:
                    raise Paused
                self._may_call = False
            if verb not in ("read", "exists", "names", "sync") and not self._has_changed:
                self.disk, self._has_changed = self.disk.copy(), True
            try:
                answer = getattr(SimulatedStorage(self.disk), verb)(*arguments, **named)
            except OSError as error:
                answer = error
            self.answers = (*self.answers, answer)
        answer = self.answers[self._next]
        self._next += 1
        if isinstance(answer, OSError):
            raise answer
        return copy.copy(answer)

    def _belongs_to_the_step_before(self, verb: str, path: Any) -> bool:
        """Whether a call needs no step of its own, because others do not see it, or cannot change its answer."""
        if verb == "sync":
            return True
        if not self._glues:
            return False
        # What exists stays as it is, for as long as it exists; a probe is nobody else's.
        return (verb in ("read", "make_directory") and self.disk.exists(path)) or path.name.startswith(".probe-")

    def read(self, path: Path) -> bytes:
        return bytes(self._call("read", path))

    def exists(self, path: Path) -> bool:
        return bool(self._call("exists", path))

    def names(self, directory: Path) -> list[str]:
        return list(self._call("names", directory))

    def create(self, path: Path, data: bytes, moment: str | None = None) -> None:
        self._call("create", path, data)

    def rename(self, old: Path, new: Path) -> None:
        self._call("rename", old, new)

    def delete(self, path: Path) -> None:
        self._call("delete", path)

    def remove_directory(self, path: Path) -> bool:
        return bool(self._call("remove_directory", path))

    def make_directory(self, path: Path) -> None:
        self._call("make_directory", path)

    def sync(self, paths: Iterable[Path]) -> None:
        self._call("sync", list(paths))

    def write(self, path: Path, data: bytes, *, exclusively: bool = False) -> None:
        self._call("write", path, data, exclusively=exclusively)


TAPE = Tape()


@dataclass(frozen=True)
class Life:
    """A point in the life of a driver."""

    name: str  # of this start of the driver: ids are made from it
    driver: bytes  # as it was at the boundary, pickled
    boundary: str  # what tells it from other boundaries
    answers: tuple[Any, ...] = ()
    end: str | None = None  # "idle", or why it was refused

    @property
    def key(self) -> object:
        if self.end is not None:
            return self.name, self.end
        return self.name, self.boundary, tuple(repr(a) if isinstance(a, list | OSError) else a for a in self.answers)


def begun(name: str, checkpoint: Path, target: Path, source: Source) -> Life:
    """A driver that has not done anything yet."""
    driver = Driver(checkpoint, target, source, TAPE)  # type: ignore[arg-type]
    return Life(name, pickle.dumps(driver), "start")


def advance(life: Life, disk: SimulatedDisk, on_done: Callable[..., None], glues: bool) -> tuple[Life, SimulatedDisk]:
    """Let a driver make one storage call; what it is then, and the disk."""
    driver = pickle.loads(life.driver)  # noqa: S301 -- our own
    driver.on_done = on_done
    TAPE.play(life.answers, disk, glues)
    end, is_over = None, True
    with _ids_of(life):
        try:
            if life.boundary == "start":
                driver.start()
            else:
                plan = driver.next_plan()
                if plan is None:
                    end = "idle"
                else:
                    driver.run(plan)
        except Paused:
            is_over = False
        except (DovetailError, SparkRefusal) as error:
            end = str(error)
    if end is not None:
        return Life(life.name, b"", "ended", (), end), TAPE.disk
    if is_over:
        driver.on_done = ignore
        return Life(life.name, pickle.dumps(driver), repr(driver.local_state())), TAPE.disk
    return Life(life.name, life.driver, life.boundary, TAPE.answers), TAPE.disk


@contextmanager
def _ids_of(life: Life) -> Iterator[None]:
    """The same ids whenever the same code runs again."""
    numbers, space = itertools.count(), hash((life.name, life.boundary)) & (2**96 - 1)
    real, uuid.uuid4 = uuid.uuid4, lambda: uuid.UUID(int=(space << 32) + next(numbers))
    try:
        yield
    finally:
        uuid.uuid4 = real


@contextmanager
def frozen_clocks() -> Iterator[None]:
    """Time stands still, so that it does not tell states apart."""
    still = SimpleNamespace(time=lambda: 1_000.0, monotonic=lambda: 0.0)
    patches = [mock.patch.object(module, "time", still) for module in (protocol, ownership, flow_time)]
    # Marks of checked files are in the host's own temporary directory.
    patches.append(mock.patch.object(store, "forget_marks"))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
