"""A flow as people see it, read from its checkpoint: running or not, its micro-batches, its errors. No Spark is needed.

A view is one JSON-serializable document. Everything in it comes from files that the flow writes anyway, so a page can
be opened for any flow, on any host that mounts the checkpoint, while it runs and afterwards.
"""

import hashlib
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.core.errors import DovetailError, RelationError, StateError
from dovetail.relation import Relation
from dovetail.spark.flow.progress import FlowProgress, progress_of
from dovetail.spark.flow.store import FlowStore
from dovetail.storage.documents import read_document
from dovetail.storage.journal import JournalReader
from dovetail.storage.running import who_runs
from dovetail.storage.stop_request import stop_request
from dovetail.web.history import History

__all__ = ["FlowReader"]

_MOST_EVENTS = 50
_ENDS = ("stopped", "failed")


class FlowReader:
    """Follows one flow. `refresh` reads what is new, `view` describes the whole; not thread-safe."""

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        self.store = FlowStore(checkpoint)
        self.checkpoint = self.store.checkpoint
        self._journal = JournalReader(self.store.root)
        self._forget()
        self._runner: dict[str, Any] | None = None
        self._is_asked_to_stop = False
        self._problem: DovetailError | None = None
        self._relations: dict[tuple[str, int], dict[str, Any]] = {}
        self._progress: FlowProgress | None = None
        self.changes = 0
        """Counts the refreshes that found something new."""

    def _forget(self) -> None:
        self.history = History()
        self._events: deque[Mapping[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self._start: Mapping[str, Any] = {}
        self._plan: str | None = None

    @property
    def id(self) -> str:
        """The name of the flow in addresses: the same for a checkpoint wherever the page runs."""
        return hashlib.sha256(str(self.checkpoint).encode()).hexdigest()[:12]

    @property
    def picture(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._start.get("picture", {"nodes": [], "edges": []})
        return found

    # ================================================================ reading

    def refresh(self) -> bool:
        """Read what is new; whether there was anything."""
        try:
            is_new = self._read_journal()
            problem = None
        except DovetailError as error:
            is_new, problem = False, error
        runner = who_runs(self.checkpoint)
        is_asked = runner is not None and stop_request(self.checkpoint) is not None
        now = (runner, is_asked, None if problem is None else problem.message)
        before = (self._runner, self._is_asked_to_stop, None if self._problem is None else self._problem.message)
        self._runner, self._is_asked_to_stop, self._problem = runner, is_asked, problem
        if is_new or now != before or not self.changes:
            self._read_commits()
            self.changes += 1
            return True
        return False

    def _read_journal(self) -> bool:
        is_whole, records = self._journal.read_new()
        if is_whole:
            self._forget()
        for record in records:
            if record["kind"] == "batch":
                self.history.add(record)
                continue
            if record["kind"] == "plan":
                self._plan = record["text"]
                continue
            if record["kind"] == "started":
                self._start = record
                self.history.started(record.get("trigger"))
            self._events.append({name: value for name, value in record.items() if name not in ("picture", "budgets")})
        return bool(records)

    def _read_commits(self) -> None:
        """The last micro-batch in detail; the one before stays if a cleanup or a damaged file is in the way."""
        try:
            batch = self.store.last_batch()
            commit = None if batch is None else self.store.commit(batch)
            if commit is None or batch is None:
                return
            previous = self.store.commit(batch - 1) if batch else None
        except DovetailError as error:
            self._problem = self._problem or error
            return
        self._progress = progress_of(commit, previous, commit["time_ms"])

    # ================================================================ the view

    def state(self) -> str:
        """``running``, ``starting``, ``stopping``, ``stopped``, ``failed``, ``killed``, ``unreadable`` or ``new``."""
        if self._problem is not None:
            return "unreadable"
        last = self._events[-1]["kind"] if self._events else None
        if self._runner is not None:
            if self._is_asked_to_stop:
                return "stopping"
            return "running" if last is not None and last not in _ENDS else "starting"
        ended = next((event["kind"] for event in reversed(self._events) if event["kind"] in (*_ENDS, "started")), None)
        if ended is None:
            return "stopped" if self._progress is not None else "new"
        return "killed" if ended == "started" else str(ended)

    def flow_name(self) -> str:
        """The flow's name; that of the directory if it has not run yet, or is another thing."""
        name = self._start.get("flow")
        if name is None:
            try:
                name = (read_document(self.store.root / "flow.json") or {}).get("flow")
            except DovetailError:
                name = None
        return str(name or self.checkpoint.name)

    def summary(self) -> dict[str, Any]:
        """The flow in a few words, for lists."""
        progress = self._progress
        rates = self.history.rates()
        return {
            "id": self.id,
            "flow": self.flow_name(),
            "checkpoint": str(self.checkpoint),
            "state": self.state(),
            "running": self._runner,
            "batch": None if progress is None else progress.batch,
            "time_ms": self._time_ms(),
            "now_ms": int(time.time() * 1000),
            "rates": rates,
            "took_ms": self.history.recent[-1]["took_ms"] if self.history.recent else None,
            "pending": 0 if progress is None else progress.pending,
            "oldest_wait_ms": None if progress is None else progress.oldest_wait_ms,
            "memory_bytes": 0 if progress is None else sum(map(_held_bytes, progress.operators)),
            "budget_bytes": sum(self._budgets().values()) or None,
            "hit_ratio": None if progress is None or not progress.operators else _hit_ratio(progress),
            "problem": None if self._problem is None else _error(self._problem),
        }

    def view(self) -> dict[str, Any]:
        """The flow in full."""
        return {
            **self.summary(),
            "trigger": self._start.get("trigger"),
            "dovetail": self._start.get("dovetail"),
            "started_ms": self._start.get("at_ms"),
            "operators": [] if self._progress is None else [self._operator(one) for one in self._progress.operators],
            "picture": self._pictured(),
            "plan": self._plan,
            "events": list(self._events)[::-1],
            "side_rows": self.history.side_rows,
            "series": self.history.series(),
            "batches": list(self.history.recent)[::-1],
            "history": len(self.history),
        }

    def require_flow(self) -> None:
        """Refuse a directory that is not the checkpoint of a flow."""
        has_flow = (self.store.root / "flow.json").exists()
        if not has_flow and who_runs(self.checkpoint) is None:
            raise StateError(
                f"{self.checkpoint} is not the checkpoint of a flow: no flow has run there yet.",
                hint="Name a pipeline file, or the checkpoint directory of a flow.",
            )

    def _time_ms(self) -> int | None:
        """When the last micro-batch began, by the wall clock."""
        if self.history.recent:
            return int(self.history.recent[-1]["wall_ms"])
        return None if self._progress is None else self._progress.time_ms

    def _budgets(self) -> Mapping[str, int]:
        budgets: Mapping[str, int] = self._start.get("budgets", {})
        return budgets

    def _operator(self, one: Any) -> dict[str, Any]:
        return {
            "name": one.name,
            "in_per_s": one.tuples_per_second,
            "out_per_s": one.rows_per_second,
            "hit_ratio": one.hit_ratio,
            "negative_ratio": one.negative_ratio,
            "pending": one.pending,
            "oldest_wait_ms": one.oldest_wait_ms,
            "memory": {name: size for name, size in one.memory_bytes.items() if size},
            "memory_bytes": _held_bytes(one),
            "budget_bytes": self._budgets().get(one.name),
            "relation_version": one.relation_version,
            "state_rows": dict(one.state_rows),
            "state_bytes": one.state_bytes,
            "totals": one.totals.as_dict(),
            "details": dict(one.details),
        }

    def _pictured(self) -> dict[str, Any]:
        """The picture, its relations with the version in use and what is known of it."""
        versions = (
            {} if self._progress is None else {one.name: one.relation_version for one in self._progress.operators}
        )
        nodes = [dict(node) for node in self.picture["nodes"]]
        users = dict(self.picture["edges"])
        for node in nodes:
            if node["kind"] == "relation":
                version = versions.get(users.get(node["id"], ""))
                node["version"] = None if version is None else self._version(node["detail"], version)
        return {"nodes": nodes, "edges": self.picture["edges"]}

    def _version(self, path: str, version: int) -> dict[str, Any]:
        """A version of a relation: when it was made, its size. Without them if it cannot be read from here."""
        if (path, version) not in self._relations:
            known: dict[str, Any] = {"version": version}
            if Path(path).is_dir():
                try:
                    info = Relation.open(path, version).version_info
                    known |= {"created_at": info.created_at, "rows": info.rows, "bytes": info.bytes}
                except (RelationError, OSError):
                    known["is_gone"] = True
            self._relations = {key: value for key, value in self._relations.items() if key[0] != path}
            self._relations[path, version] = known
        return self._relations[path, version]


def _held_bytes(operator: Any) -> int:
    return sum(operator.memory_bytes.values())


def _hit_ratio(progress: FlowProgress) -> float:
    first = progress.operators[0]
    return first.hit_ratio + first.negative_ratio


def _error(error: DovetailError) -> dict[str, Any]:
    return {"class": type(error).__name__, "message": error.message, "hint": error.hint}
