"""One life of a driver: some of its workers are killed while it runs, then it is killed itself."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil
from kills import AT_RANDOM, DRIVER, WORKER, Kill, Kills
from scenes import Scene

from dovetail.core.faultpoints import FAULT_ORDERS_VARIABLE
from dovetail.testing.faults import running_driver

__all__ = ["Plan", "Points", "Session"]

# A task whose worker dies is tried again this often before the flow fails.
MASTER = "local[2,50]"
PATIENCE_S = 15.0
LONGEST_S = 300.0
_POLL_S = 0.02


@dataclass
class Points:
    """Where the processes of a flow pass, and who: what a campaign has learnt."""

    start: set[str] = field(default_factory=set)  # by the driver, before the flow runs
    driver: set[str] = field(default_factory=set)
    worker: set[str] = field(default_factory=set)

    def update(self, others: "Points") -> None:
        self.start |= others.start
        self.driver |= others.driver
        self.worker |= others.worker

    def all(self) -> set[str]:
        return self.start | self.driver | self.worker


@dataclass(frozen=True)
class Plan:
    """Where a session kills: workers one after the other, then the driver, perhaps while it still starts."""

    workers: Sequence[str]
    driver: str
    is_early: bool


class Session:
    """Kills by order, which whoever reaches a point first takes, or at random.

    An order that nobody takes for a while is withdrawn: not every point is reached in every micro-batch.
    """

    def __init__(self, scene: Scene, number: int, kills: Kills, chance: random.Random) -> None:
        self.scene, self.number, self.kills, self._chance = scene, number, kills, chance
        self.not_taken: list[str] = []
        self.points = Points()
        self._orders = scene.root / "orders"

    def run(self, plan: Plan) -> int:
        """Run the driver and kill; the exit code, or minus the signal that ended the driver."""
        shutil.rmtree(self._orders, ignore_errors=True)
        self._orders.mkdir()
        log_before = self.scene.log.stat().st_size if self.scene.log.exists() else 0
        env = {
            FAULT_ORDERS_VARIABLE: str(self._orders),
            "DOVETAIL_VICTIM_MASTER": MASTER,
        }
        with running_driver(self.scene.command, self.scene.log, env) as process:
            give_up_at = time.monotonic() + LONGEST_S

            def goes_on() -> bool:
                assert time.monotonic() < give_up_at, f"the driver hangs: {self.scene.said()}"
                return process.poll() is None

            if plan.is_early and plan.driver != AT_RANDOM:
                (self._orders / plan.driver).touch()
            while goes_on() and b"started" not in self.scene.log.read_bytes()[log_before:]:
                time.sleep(_POLL_S)
            self._note_taken(plan.driver, process.pid)
            self.points.start = {name for name, _ in self._passed()}
            for point in plan.workers:
                if goes_on():
                    self._kill_worker(point, process, goes_on)
            if goes_on():
                self._kill_driver(plan.driver, process, goes_on)
            code = process.wait()
        for name, pid in self._passed():
            if pid != process.pid:
                self.points.worker.add(name)
            elif name not in self.points.start:
                self.points.driver.add(name)
        return code

    def _passed(self) -> list[tuple[str, int]]:
        """The points that processes have reached, and which."""
        path = self._orders / "passed"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(name, int(pid)) for name, _, pid in (line.partition(" ") for line in lines)]

    def _kill_worker(self, point: str, process: "subprocess.Popen[bytes]", goes_on: Callable[[], bool]) -> None:
        if point != AT_RANDOM:
            self._order(point, process, goes_on)
            return
        time.sleep(self._chance.random())
        give_up_at = time.monotonic() + PATIENCE_S
        while goes_on() and time.monotonic() < give_up_at:
            workers = _workers(process.pid)
            if workers:
                os.kill(self._chance.choice(workers), signal.SIGKILL)
                self._note(WORKER, AT_RANDOM)
                return
            time.sleep(_POLL_S)

    def _kill_driver(self, point: str, process: "subprocess.Popen[bytes]", goes_on: Callable[[], bool]) -> None:
        if point != AT_RANDOM:
            self._order(point, process, goes_on)
        else:
            time.sleep(2 * self._chance.random())
        if goes_on():
            process.kill()
            self._note(DRIVER, AT_RANDOM)

    def _order(self, point: str, process: "subprocess.Popen[bytes]", goes_on: Callable[[], bool]) -> None:
        """Have the next process that reaches a point killed."""
        order = self._orders / point
        order.touch()
        give_up_at = time.monotonic() + PATIENCE_S
        while goes_on() and order.exists() and time.monotonic() < give_up_at:
            time.sleep(_POLL_S)
        if not self._note_taken(point, process.pid):
            self.not_taken.append(point)

    def _note_taken(self, point: str, driver: int) -> bool:
        """Withdraw an order, or note who has taken it; whether somebody has."""
        (self._orders / point).unlink(missing_ok=True)
        taken = list(self._orders.glob(f"{point}:*"))
        for order in taken:
            order.unlink()
            self._note(DRIVER if order.name == f"{point}:{driver}" else WORKER, point)
        return bool(taken)

    def _note(self, who: str, point: str) -> None:
        self.kills.note(Kill(type(self.scene).__name__, self.number, who, point))


def _workers(driver: int) -> list[int]:
    """The Python workers of a driver: what the daemon has forked."""
    try:
        processes = psutil.Process(driver).children(recursive=True)
        daemons = {one.pid for one in processes if "warm_daemon" in one.cmdline()}
        return sorted(one.pid for one in processes if one.ppid() in daemons)
    except psutil.NoSuchProcess:
        return []  # one has ended while we looked
