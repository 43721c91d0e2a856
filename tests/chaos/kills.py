"""What was killed so far: a line per kill, so that a run which was stopped goes on where it was."""

import json
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["AT_RANDOM", "DRIVER", "WORKER", "Kill", "Kills"]

DRIVER, WORKER = "driver", "worker"
AT_RANDOM = "at random"


@dataclass(frozen=True)
class Kill:
    """One SIGKILL that has ended a process of a flow."""

    scene: str
    session: int
    who: str
    point: str


class Kills:
    """All kills of a directory, kept in a file. Scenes run side by side, so it is locked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        lines = path.read_text().splitlines() if path.exists() else []
        self._all = [Kill(**json.loads(line)) for line in lines]

    def note(self, kill: Kill) -> None:
        """Keep a kill."""
        with self._lock, open(self._path, "a", encoding="utf-8") as file:
            self._all.append(kill)
            file.write(json.dumps(asdict(kill)) + "\n")

    def count(self, who: str, scene: str | None = None) -> int:
        """How many drivers or workers were killed."""
        with self._lock:
            return sum(kill.who == who and scene in (None, kill.scene) for kill in self._all)

    def by_point(self) -> Counter[str]:
        """How often each point was the place."""
        with self._lock:
            return Counter(kill.point for kill in self._all)
