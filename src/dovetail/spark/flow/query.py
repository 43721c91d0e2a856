"""A running flow: the interface of Spark's ``StreamingQuery``, and the flow's own progress."""

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from dovetail.core.errors import StateError
from dovetail.core.memory import format_bytes
from dovetail.core.notebook import html_table
from dovetail.spark.flow.commit import CommitProtocol
from dovetail.spark.flow.flow_time import flow_now_ms
from dovetail.spark.flow.progress import FlowProgress, progress_of
from dovetail.spark.flow.protocol import Commit
from dovetail.spark.flow.recording import FlowRecorder
from dovetail.storage.running import RunnerLock
from dovetail.storage.stop_request import StopRequest, forget_stop_request, stop_request

__all__ = ["FlowQuery"]

_MOST_TEXT = 300
_POLL_SECONDS = 0.1
_REQUEST_SECONDS = 0.5
# Spark searches the text of a Python error for this to tell a stop from a failure.
_INTERRUPTED = "py4j.protocol.Py4JJavaError: An error occurred while calling a job: java.lang.InterruptedException"
_SIGNS_OF_A_STOP = ("InterruptedException", "InterruptedIOException", "ClosedByInterruptException", "cancelled")


def _one_line(text: str) -> str:
    """The most useful line of an error's text: the last of a traceback, else the first."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    place = -1 if any(line.startswith("Traceback") for line in lines) else 0
    return lines[place].strip()[:_MOST_TEXT]


def _not_drained(timeout_s: float) -> StateError:
    return StateError(f"The flow did not drain within {timeout_s:g} s, and runs on.")


class _BatchFailed(Exception):  # noqa: N818 -- never caught by name: Spark prints it
    """One line for Spark, which runs a regular expression over the text that is too slow for a long one."""


class FlowQuery:
    """A running flow; made by ``Flow.write``.

    It has the methods of Spark's own ``StreamingQuery`` (``id``, ``runId``, ``name``, ``isActive``, ``status``,
    ``lastProgress``, ``recentProgress``, ``awaitTermination``, ``processAllAvailable``, ``stop``, ``exception``), and
    `progress`, `checkpoint` and `was_asked_to_stop`.
    """

    def __init__(self, protocol: CommitProtocol, name: str, lock: RunnerLock, recorder: FlowRecorder) -> None:
        self._protocol, self._name, self._lock, self._recorder = protocol, name, lock, recorder
        self._batch_began = 0.0
        self._asked: StopRequest | None = None
        self._query: StreamingQuery | None = None
        self._failure: BaseException | None = None
        self._commits: tuple[Commit, Commit | None] | None = None
        self._drained, self._ended = threading.Event(), threading.Event()
        self._is_settled = False
        self._settling = threading.Lock()
        self._failure_at_end: BaseException | None = None
        protocol.on_commit = self._note

    # ================================================================ inside

    def attach(self, query: StreamingQuery) -> None:
        """Take Spark's query; called once, when it has started."""
        self._query = query
        for work in (self._release_at_end, self._obey_requests):
            threading.Thread(target=work, name=f"dovetail {self._name}", daemon=True).start()

    def _release_at_end(self) -> None:
        """Let others run the flow as soon as this query has ended, for whatever reason."""
        with suppress(Exception):  # what it ended with is reported by `exception`
            self._spark.awaitTermination()
        self._settle()

    def _obey_requests(self) -> None:
        """Stop if another process asks for it, see `dovetail.storage.stop_request`."""
        drains_until = 0.0
        while not self._ended.wait(_REQUEST_SECONDS):
            request = stop_request(self.checkpoint)
            if request is not None and request != self._asked:
                self._asked, drains_until = request, time.monotonic() + request.timeout_s
                self._recorder.asked_to_stop(request.drain)
                self._protocol.drain_requested = request.drain
            if self._asked is None:
                continue
            if not self._asked.drain or self._drained.is_set():
                with suppress(Exception):  # what it ended with is reported by `exception`
                    self._spark.stop()
            elif time.monotonic() > drains_until:
                self._protocol.drain_requested = False
                self._recorder.drain_failed(_not_drained(self._asked.timeout_s))
                self._asked = None
                forget_stop_request(self.checkpoint)

    def run_batch(self, df: DataFrame, batch: int) -> None:
        """Process one micro-batch; called by ``foreachBatch``."""
        self._batch_began = time.monotonic()
        try:
            self._protocol.run(df, batch)
        except BaseException as error:  # noqa: BLE001 -- Spark must get one line of any error
            self._failure, text = error, str(error)
            was_stopped = any(sign in text for sign in _SIGNS_OF_A_STOP)
            # Spark reads this text only while it stops; the error itself is kept for `exception`.
            failed = _BatchFailed(_INTERRUPTED if was_stopped else f"{type(error).__name__}: {_one_line(text)}")
        else:
            return
        raise failed

    def note_plan(self, text: str) -> None:
        """Keep what `explain` said about the flow with this run, for those who look at it."""
        self._recorder.planned(text)

    def _note(self, commit: Commit, previous: Commit | None, is_new: bool) -> None:
        self._commits = (commit, previous)
        took_ms = int(1000 * (time.monotonic() - self._batch_began))
        self._recorder.batch(commit, previous, took_ms, self._records_behind())
        if self._protocol.drain_requested and commit["drain"]:
            self._drained.set()

    def _records_behind(self) -> int | None:
        """How far the source was behind when Spark last said so: the most records of any Kafka partition."""
        with suppress(Exception):  # while it is being stopped, Spark may not answer; the micro-batch is through
            last = None if self._query is None else self._query.lastProgress
            metrics = [source.metrics or {} for source in ([] if last is None else last.sources)]
            reported = [one["maxOffsetsBehindLatest"] for one in metrics if "maxOffsetsBehindLatest" in one]
            return max((int(float(number)) for number in reported), default=None)
        return None

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
        """Whether it runs, or its last changes are not yet visible to others, see `stop`."""
        if self._spark.isActive:
            return True
        self._settle()
        return False

    @property
    def status(self) -> dict[str, Any]:
        """Spark's status of the query."""
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
        """Refused: a flow has new input at every trigger, so this would never return."""
        raise StateError(
            "processAllAvailable would wait for ever: a flow ticks at every trigger.",
            hint='Use trigger="available-now", or stop(drain=True).',
        )

    def awaitTermination(self, timeout: float | None = None) -> bool | None:  # noqa: N802 -- Spark's name
        """Wait until it has ended, at most ``timeout`` seconds, and raise its error, if any. With a timeout: whether it
        has ended.
        """
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while self._spark.isActive:
            left = _POLL_SECONDS * 10 if give_up_at is None else give_up_at - time.monotonic()
            if left <= 0:
                return False
            try:
                # Spark counts in whole milliseconds, and refuses 0.
                self._spark.awaitTermination(min(max(left, 0.001), 1.0))
            except Exception:
                # Spark raises what ended the query as soon as that is known, and maybe before the query has ended.
                with suppress(Exception):
                    self._spark.awaitTermination()
                if self.exception() is None:
                    raise
        failure = self.exception()
        if failure is not None:
            raise failure
        return None if timeout is None else True

    def exception(self) -> BaseException | None:
        """The error that ended it, if any: that of the micro-batch if there is one, else Spark's."""
        if self._spark.isActive:
            return None
        sparks = self._spark.exception()
        self._settle()
        if sparks is None:
            return self._failure_at_end
        return sparks if self._failure is None else self._failure

    def stop(self, drain: bool = False, timeout: float = 600.0) -> None:
        """Stop the flow. Then everything that it committed to its kept relations is visible to others.

        Parameters
        ----------
        drain
            False: stop now; the current micro-batch is abandoned and repeated at the next start, and waiting rows stay
            in the checkpoint. True: stop after one more micro-batch that leaves nothing waiting.
        timeout
            How many seconds to wait for that micro-batch.

        Raises
        ------
        StateError
            If it failed, or did not drain in time; then it is still running.
        RelationConflict
            If it has ended, but another writer kept it from writing to a kept relation.
        """
        if drain and self._spark.isActive:
            self._protocol.drain_requested = True
            give_up_at = time.monotonic() + timeout
            while self._spark.isActive and not self._drained.wait(_POLL_SECONDS):
                if time.monotonic() > give_up_at:
                    self._protocol.drain_requested = False
                    raise _not_drained(timeout)
        self._spark.stop()
        self._settle()
        if self._failure_at_end is not None:
            raise self._failure_at_end

    def _settle(self) -> None:
        """Make commits visible, remove files that no commit names, and let others run the flow; once."""
        with self._settling:
            if self._is_settled:
                return
            self._is_settled = True
            sparks = None
            try:
                with suppress(Exception):  # what it ended with follows
                    # A query that another thread is stopping is no longer active, but may be in a micro-batch.
                    self._spark.awaitTermination()
                sparks = self._spark.exception()
                if sparks is None:
                    self._protocol.settle()
            except Exception as error:  # noqa: BLE001 -- `exception` and `stop` report it
                self._failure_at_end = error
            finally:
                self._ended.set()
                self._recorder.ended(self._failure_at_end if sparks is None else self._failure or sparks)
                forget_stop_request(self.checkpoint)
                self._lock.release()

    # ================================================================ ours

    @property
    def checkpoint(self) -> Path:
        """The flow's checkpoint."""
        return self._protocol.checkpoint

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether another process has asked it to stop, by `dovetail stop` or the live page."""
        return self._asked is not None

    def __repr__(self) -> str:
        progress = self.progress
        where = (
            "no micro-batch yet" if progress is None else f"micro-batch {progress.batch}, {progress.pending} waiting"
        )
        return f"FlowQuery({self._name!r}, {'running' if self.isActive else 'ended'}: {where})"

    def _repr_html_(self) -> str:
        """For notebooks: the last micro-batch as a table."""
        progress = self.progress
        operators = () if progress is None else progress.operators
        rows = [
            (
                one.name,
                f"{one.tuples_per_second:,.0f}",
                f"{one.rows_per_second:,.0f}",
                f"{one.hit_ratio:.0%}",
                f"{one.pending:,}",
                format_bytes(sum(one.memory_bytes.values())),
            )
            for one in operators
        ]
        return html_table(repr(self), ["operator", "in/s", "out/s", "hits", "waiting", "memory"], rows)

    @property
    def progress(self) -> FlowProgress | None:
        """The flow after its last micro-batch; None before the first."""
        if self._commits is None:
            return None
        return progress_of(*self._commits, now_ms=flow_now_ms(self._commits[0], int(time.time() * 1000)))
