"""How many rows a running Spark job that writes a relation has read and sorted, from Spark's own counts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from dovetail.cli.row_rates import RowsDone

__all__ = ["watching_rows"]

_POLL_SECONDS = 0.5


@contextmanager
def watching_rows(spark: SparkSession, report: Callable[[RowsDone], None]) -> Iterator[None]:
    """Report the rows of the session's jobs for the duration of a block, from a thread."""
    stop = threading.Event()

    def watch() -> None:
        counts = _Counts(spark.sparkContext._jsc.sc().statusStore())
        while not stop.wait(_POLL_SECONDS):
            try:
                found = counts.look()
            except (Py4JError, OSError):  # the session is stopping, for a reason that is reported elsewhere
                return
            if found is not None:
                report(found)

    thread = threading.Thread(target=watch, name="dovetail rows", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class _Counts:
    """The rows of stages that began since this was made; Spark counts those of a task when the task ends."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._stages: set[int] = set()
        self._old = self._active()

    def _active(self) -> set[int]:
        stages = self._store.activeStages()
        return {int(stages.apply(number).stageId()) for number in range(stages.size())}

    def look(self) -> RowsDone | None:
        """One stage reads the source and shuffles its rows; the next has every row once more, sorted."""
        active = self._active() - self._old
        self._stages |= active
        read = received = 0
        is_reading = not self._stages
        for number in self._stages:
            stage = self._store.lastStageAttempt(number)
            shuffled = int(stage.shuffleWriteRecords())
            read += shuffled
            received += int(stage.shuffleReadRecords())
            is_reading |= bool(shuffled) and number in active
        if not read:
            return None
        return RowsDone(read) if is_reading or not active else RowsDone(read, received, read)
