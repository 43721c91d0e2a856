"""The two that join the same orders, each a process group, and what a reader sees of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlparse

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq

from retail.data import CHANGED_SEGMENT

__all__ = ["Arrivals", "Contender", "cache_bytes", "dovetail_files", "spark_files", "tasks_of_each"]

Float64Array = npt.NDArray[np.float64]
_EXIT_SECONDS = 20


def tasks_of_each() -> int:
    """How many Spark tasks each may run at once: half as many as there are cores."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


class Contender:
    """A process group that can be started, killed, and started again; what it prints goes to a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.log = name, log
        self._variables = {**os.environ, **(variables or {})}
        self._command = [sys.executable, *command]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._variables,
                start_new_session=True,
            )

    def require_running(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise SystemExit(f"{self.name} ended with exit code {self._process.returncode}:\n{tail}")

    def kill(self) -> None:
        """``kill -9``: the process, its JVM and its Python workers."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """As Ctrl-C does; by force if that takes too long."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)
            self._process.wait()


def cache_bytes(local: Path) -> int:
    """The size of the cache that the workers share: files below Spark's local directory, which they map."""
    total = 0
    for path in local.glob("**/dovetail-cache/**/*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # replaced meanwhile
            continue
    return total


def dovetail_files(root: Path) -> list[Path]:
    """What a reader of Dovetail's target sees."""
    return sorted((root / "warehouse").glob("batch-*.parquet"))


def spark_files(root: Path) -> list[Path]:
    """What a reader of Spark's target sees: the files that its log names."""
    target = root / "spark-warehouse"
    found: dict[Path, None] = {}
    for log in sorted((target / "_spark_metadata").glob("[0-9]*")):
        if log.suffix in ("", ".compact"):
            for line in log.read_text().splitlines()[1:]:
                found[Path(unquote(urlparse(json.loads(line)["path"]).path))] = None
    return list(found)


class Arrivals:
    """Looks into a target as a reader would, and notes when orders appear there and how old they are by then."""

    def __init__(self) -> None:
        self.loaded = 0
        self.points: list[tuple[float, int, float]] = []
        """When files appeared, how many orders are visible by then, and the median age of the new ones, in seconds."""
        self.first_changed_at: float | None = None
        """When the first order appeared that was joined with a changed customer."""
        self._seen: set[Path] = set()
        self._ages: list[Float64Array] = []
        self._counts: list[npt.NDArray[np.int64]] = []

    def look(self, files: Iterable[Path]) -> None:
        new = [file for file in files if file not in self._seen]
        now = time.time()
        ages, counts = [], []
        for file in new:
            rows = pq.read_table(file, columns=["landed_at", "segment"])
            landed, count = np.unique(rows.column("landed_at").cast("timestamp[us]").to_numpy(), return_counts=True)
            ages.append(now - landed.astype("datetime64[us]").astype(np.int64) / 1e6)
            counts.append(count)
            self.loaded += rows.num_rows
            if self.first_changed_at is None and pc.any(pc.equal(rows.column("segment"), CHANGED_SEGMENT)).as_py():
                self.first_changed_at = now
            self._seen.add(file)
        if sum(map(len, counts)):
            self._ages += ages
            self._counts += counts
            median = float(np.median(np.repeat(np.concatenate(ages), np.concatenate(counts))))
            self.points.append((now, self.loaded, median))

    def latencies(self) -> Float64Array:
        """Seconds from landing to being visible, of every order."""
        if not self._ages:
            return np.array([])
        return np.repeat(np.concatenate(self._ages), np.concatenate(self._counts))

    def rate(self, seconds: float = 8.0) -> float:
        """Orders per second, lately."""
        since = time.time() - seconds
        before = next((count for at, count, _ in reversed(self.points) if at < since), 0)
        return (self.loaded - before) / seconds
