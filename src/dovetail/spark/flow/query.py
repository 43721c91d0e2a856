"""A running flow: the names of Spark's ``StreamingQuery``, and what only a flow can tell."""

import threading
import time
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from dovetail.errors import StateError
from dovetail.spark.commit import Commit, CommitProtocol
from dovetail.spark.progress import FlowProgress, progress_of

__all__ = ["FlowQuery"]

_MOST_TEXT = 300
_POLL_SECONDS = 0.1
# What Spark looks for in the text of a Python error to tell a stop from a failure.
_INTERRUPTED = "py4j.protocol.Py4JJavaError: An error occurred while calling a job: java.lang.InterruptedException"
_SIGNS_OF_A_STOP = ("InterruptedException", "InterruptedIOException", "ClosedByInterruptException", "cancelled")


def _one_line(text: str) -> str:
    """What matters most of an error's text: of a traceback its last line, else the first."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    place = -1 if any(line.startswith("Traceback") for line in lines) else 0
    return lines[place].strip()[:_MOST_TEXT]


class _BatchFailed(Exception):  # noqa: N818 -- never caught by name: Spark prints it
    """One line for Spark: it runs a regular expression over the error's text that a long one would be too much for."""


class FlowQuery:
    """A flow that runs; made by ``Flow.write``.

    It has the names of Spark's own ``StreamingQuery`` (``id``, ``runId``, ``name``, ``isActive``, ``status``,
    ``lastProgress``, ``recentProgress``, ``awaitTermination``, ``processAllAvailable``, ``stop``, ``exception``), and
    `progress`.
    """

    def __init__(self, protocol: CommitProtocol, name: str) -> None:
        self._protocol, self._name = protocol, name
        self._query: StreamingQuery | None = None
        self._failure: BaseException | None = None
        self._commits: tuple[Commit, Commit | None] | None = None
        self._drained = threading.Event()
        self._is_settled = False
        protocol.on_commit = self._note

    # ================================================================ inside

    def attach(self, query: StreamingQuery) -> None:
        """Take Spark's query; called once, when it has started."""
        self._query = query

    def run_batch(self, df: DataFrame, batch: int) -> None:
        """Process one micro-batch; what ``foreachBatch`` calls."""
        try:
            self._protocol.run(df, batch)
        except BaseException as error:  # noqa: BLE001 -- whatever it was, Spark must get one line of it
            self._failure, text = error, str(error)
            was_stopped = any(sign in text for sign in _SIGNS_OF_A_STOP)
            # Spark looks at this text only while it stops; the error itself is kept for `exception`.
            failed = _BatchFailed(_INTERRUPTED if was_stopped else f"{type(error).__name__}: {_one_line(text)}")
        else:
            return
        raise failed

    def _note(self, commit: Commit, previous: Commit | None, is_new: bool) -> None:
        self._commits = (commit, previous)
        if self._protocol.drain_requested and commit["drain"]:
            self._drained.set()

    @property
    def _spark(self) -> StreamingQuery:
        assert self._query is not None, "the query has not started"
        return self._query

    # ================================================================ Spark's names

    @property
    def id(self) -> str:
        """The query's id, the same after every restart from this checkpoint."""
        return str(self._spark.id)

    @property
    def runId(self) -> str:  # noqa: N802 -- Spark's name
        """The id of this run."""
        return str(self._spark.runId)

    @property
    def name(self) -> str:
        """The flow's name."""
        return self._name

    @property
    def isActive(self) -> bool:  # noqa: N802 -- Spark's name
        """Whether it runs."""
        return bool(self._spark.isActive)

    @property
    def status(self) -> dict[str, Any]:
        """What Spark says it is doing."""
        return dict(self._spark.status)

    @property
    def lastProgress(self) -> Any:  # noqa: N802 -- Spark's name
        """Spark's last progress report."""
        return self._spark.lastProgress

    @property
    def recentProgress(self) -> list[Any]:  # noqa: N802 -- Spark's name
        """Spark's last progress reports."""
        return list(self._spark.recentProgress)

    def processAllAvailable(self) -> None:  # noqa: N802 -- Spark's name
        """Refused: a flow has something new at every trigger, so this would never return."""
        raise StateError(
            "processAllAvailable would wait for ever: a flow ticks at every trigger.",
            hint='Use trigger="available-now", or stop(drain=True).',
        )

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802 -- Spark's name
        """Wait until it has ended, at most ``timeout`` seconds, and raise what it ended with.

        Returns
        -------
        bool or None
            With a timeout, whether it has ended.
        """
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while self._spark.isActive:
            left = _POLL_SECONDS * 10 if give_up_at is None else give_up_at - time.monotonic()
            if left <= 0:
                return False
            try:
                # Spark counts in whole milliseconds, and takes none for a mistake.
                self._spark.awaitTermination(min(max(left, 0.001), 1.0))
            except Exception:
                if self.exception() is None:
                    raise
        failure = self.exception()
        if failure is not None:
            raise failure
        self._settle()
        return None if timeout is None else True

    def exception(self) -> BaseException | None:
        """What it ended with, if it failed: the error of the micro-batch itself where there is one, else Spark's."""
        if self._spark.isActive:
            return None
        sparks = self._spark.exception()
        if sparks is None:
            return None
        return sparks if self._failure is None else self._failure

    def stop(self, drain: bool = False, timeout: float = 600.0) -> None:
        """End it.

        Parameters
        ----------
        drain
            False: now; a micro-batch that is under way is given up and done again at the next start, what waits stays
            in the checkpoint. True: after one more micro-batch that lets nothing wait.
        timeout
            How many seconds to wait for that micro-batch.

        Raises
        ------
        StateError
            If it failed, or did not drain in time; then it is still running.
        """
        if drain and self._spark.isActive:
            self._protocol.drain_requested = True
            give_up_at = time.monotonic() + timeout
            while self._spark.isActive and not self._drained.wait(_POLL_SECONDS):
                if time.monotonic() > give_up_at:
                    self._protocol.drain_requested = False
                    raise StateError(f"The flow did not drain within {timeout:g} s, and runs on.")
        self._spark.stop()
        self._settle()

    def _settle(self) -> None:
        """Leave no file behind that no commit names; once, when it has ended well."""
        if not self._is_settled and self._spark.exception() is None:
            self._is_settled = True
            self._protocol.clean()

    # ================================================================ ours

    @property
    def progress(self) -> FlowProgress | None:
        """The flow after its last micro-batch; None before the first."""
        commits = self._commits
        return None if commits is None else progress_of(*commits, now_ms=int(time.time() * 1000))
