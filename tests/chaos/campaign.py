"""The lives of a flow: sessions in which its processes are killed, then a run to the end that must be exact."""

import json
import os
import random
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path

from kills import AT_RANDOM, DRIVER, WORKER, Kills
from scenes import Scene
from session import Plan, Points, Session

__all__ = ["SEED", "Campaign"]

SESSIONS_PER_LIFE = 8
WORKERS_EVERY = 4
"""In every so many sessions workers are killed, many of them; in the others the driver only."""
WORKERS_KILLED, FILES_FOR_WORKERS, FILES_FOR_DRIVER = 18, 16, 2
LEAST_PER_POINT = 3
MOST_EXTRA_LIVES = 6
SEED = 73_009


class Campaign:
    """All lives of one kind of flow."""

    def __init__(self, kind: type[Scene], directory: Path, kills: Kills, drivers: int, workers: int) -> None:
        self.kind, self.kills, self._drivers, self._workers = kind, kills, drivers, workers
        self._directory = directory / kind.__name__
        self._directory.mkdir(parents=True, exist_ok=True)
        self._state = self._directory / "state.json"
        state = json.loads(self._state.read_text()) if self._state.exists() else {}
        self.lives: int = state.get("lives", 0)
        self._sessions: int = state.get("sessions", 0)
        known = state.get("points", {})
        self._points = Points(*(set(known.get(name, [])) for name in ("start", "driver", "worker")))
        self._beginning: set[str] = set(state.get("beginning", []))  # reached only while a flow is new
        self._in_vain: Counter[str] = Counter(state.get("in_vain", {}))

    def run(self, is_stopped: threading.Event) -> None:
        """Live until enough was killed, and until every point that this flow reaches was the place often enough."""
        extra = 0
        while not is_stopped.is_set():
            if self._has_enough():
                if not self._missing() or extra == MOST_EXTRA_LIVES:
                    return
                extra += 1
            self._live(is_stopped)

    def begin_again(self) -> None:
        """Forget a life that was not ended."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._sessions = 0
        self._keep()

    def points(self) -> set[str]:
        """All points that were reached."""
        return self._points.all() | self._beginning

    def _has_enough(self) -> bool:
        name = self.kind.__name__
        return self.kills.count(DRIVER, name) >= self._drivers and self.kills.count(WORKER, name) >= self._workers

    def _missing(self) -> set[str]:
        hits = self.kills.by_point()
        return {point for point in self.points() if hits[point] < LEAST_PER_POINT}

    @property
    def _root(self) -> Path:
        return self._directory / f"life{self.lives:03d}"

    def _live(self, is_stopped: threading.Event) -> None:
        root = self._root
        scene = self.kind(root)
        if self._sessions == 0:
            scene.add(scene.files_before)
        while self._sessions < SESSIONS_PER_LIFE:
            if is_stopped.is_set():
                return
            self._one_session(scene)
            self._sessions += 1
            self._keep()
            scene.check_so_far()
        code = scene.run()
        assert code == scene.victim.DONE, f"{root}: the last run ended with {code}\n{scene.said()}"
        scene.check_end()
        shutil.rmtree(root)
        self.lives, self._sessions = self.lives + 1, 0
        self._keep()
        self._say(f"life {self.lives} is exact")

    def _one_session(self, scene: Scene) -> None:
        name = self.kind.__name__
        number = self.lives * SESSIONS_PER_LIFE + self._sessions
        chance = random.Random(f"{SEED} {name} {number}")
        session = Session(scene, number, self.kills, chance)
        plan = self._plan(chance)
        scene.add(FILES_FOR_WORKERS if plan.workers else FILES_FOR_DRIVER)
        code = session.run(plan)
        known = (-signal.SIGKILL, scene.victim.FAILED, scene.victim.DONE)
        assert code in known, f"{scene.root}: {plan} ended with {code}\n{scene.said()}"
        self._in_vain.update(session.not_taken)
        if self._sessions == 0:
            self._beginning |= session.points.start
        else:
            self._points.update(session.points)
        self._say(f"session {number} ended with {code}")

    def _plan(self, chance: random.Random) -> Plan:
        """Points that were seldom the place come first; those where an order was given in vain come later."""
        hits = self.kills.by_point()

        def by_need(points: set[str]) -> list[str]:
            return sorted(points, key=lambda point: (hits[point] + self._in_vain[point], chance.random()))

        if (self._sessions + 1) % WORKERS_EVERY == 0:
            named = by_need(self._points.worker)[: WORKERS_KILLED // 2]
            workers = named + [AT_RANDOM] * (WORKERS_KILLED - len(named))
            chance.shuffle(workers)
            return Plan(workers, AT_RANDOM, is_early=False)
        starting = self._beginning if self._sessions == 0 else self._points.start
        for points, is_early in ((starting, True), (self._points.driver, False)):
            needed = [point for point in by_need(points) if hits[point] < LEAST_PER_POINT]
            if needed:
                return Plan([], needed[0], is_early)
        known = by_need(self._points.driver)
        at_random = not known or chance.random() < 0.5
        return Plan([], AT_RANDOM if at_random else known[0], is_early=False)

    def _keep(self) -> None:
        state = {
            "lives": self.lives,
            "sessions": self._sessions,
            "points": {name: sorted(points) for name, points in vars(self._points).items()},
            "beginning": sorted(self._beginning),
            "in_vain": dict(self._in_vain),
        }
        draft = self._state.with_suffix(".draft")
        draft.write_text(json.dumps(state))
        os.replace(draft, self._state)

    def _say(self, what: str) -> None:
        name = self.kind.__name__
        drivers, workers = self.kills.count(DRIVER, name), self.kills.count(WORKER, name)
        print(f"{name}: {what}; killed {drivers} drivers, {workers} workers", flush=True)
