"""A flow's checkpoint as it is after many micro-batches, written without Spark: for tests of what people look at.

>>> import tempfile
>>> flow = WrittenFlow(tempfile.mkdtemp(), "orders")
>>> flow.run(batches=3)
>>> flow.batch
2
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.core.errors import DovetailError
from dovetail.core.metrics import OperatorMetrics
from dovetail.spark.flow.recording import FlowRecorder, batch_record
from dovetail.storage.documents import create_document, read_document
from dovetail.storage.journal import Journal

__all__ = ["WrittenFlow"]

_KEPT = 10
_BUDGET = 256_000_000


class WrittenFlow:
    """A flow with a source, a diversion, a lookup and a sink; what it reports is a fixed function of the batch."""

    def __init__(self, checkpoint: str | Path, name: str, relation: str = "relations/customers") -> None:
        self.checkpoint, self.name = Path(checkpoint), name
        self.root = self.checkpoint / "dovetail"
        self.batch = -1
        self._relation = relation
        self._metrics = OperatorMetrics()
        self._previous: dict[str, Any] | None = None
        (self.root / "commits").mkdir(parents=True, exist_ok=True)
        if read_document(self.root / "flow.json") is None:
            body = {"flow": name, "operators": [{"name": "1-enrich", "kind": "enrich lookup", "shards": 1}]}
            create_document(self.root / "flow.json", body, "flow.fingerprint")
        self.recorder = FlowRecorder(self.root, name)
        self._journal = Journal(self.root)

    def start(self, trigger: str | None = "2 seconds", side: str = "dead-letters") -> None:
        """Record a start, with a picture like that of a pipeline."""
        picture = {
            "nodes": [
                _node("source:orders (json)", "source", "orders (json)", "landing"),
                _node("stage:0", "divert", "divert", "rows that leave"),
                _node("side:0", "side", "parquet", side),
                _node("1-enrich", "step", "enrich", "lookup", {"on": ["customer_id = customer_id"], "how": "left"}),
                _node(f"relation:{self._relation}", "relation", "customers", self._relation),
                _node("sink", "sink", "parquet", "warehouse/orders"),
            ],
            "edges": [
                ["source:orders (json)", "stage:0"],
                ["stage:0", "side:0"],
                ["stage:0", "1-enrich"],
                [f"relation:{self._relation}", "1-enrich"],
                ["1-enrich", "sink"],
            ],
        }
        self.recorder.started({"trigger": trigger, "budgets": {"1-enrich": _BUDGET}, "picture": picture})

    def run(self, batches: int, interval_ms: int = 2_000, ends_at_ms: int | None = None) -> None:
        """Add micro-batches, the last of them now."""
        ends_at_ms = int(time.time() * 1000) if ends_at_ms is None else ends_at_ms
        for left in reversed(range(batches)):
            self._add(ends_at_ms - left * interval_ms, keeps_commit=left < _KEPT)

    def end(self, error: DovetailError | None = None) -> None:
        self.recorder.ended(error)

    def _add(self, time_ms: int, keeps_commit: bool) -> None:
        self.batch += 1
        wave = math.sin(self.batch / 17) + 0.4 * math.sin(self.batch / 5)
        tuples = int(21_000 + 6_000 * wave)
        before, self._metrics = self._metrics, self._metrics.copy()
        self._metrics.stream_tuples_in += tuples
        self._metrics.matched_tuples += tuples - tuples // 50
        self._metrics.unmatched_tuples += tuples // 50
        self._metrics.output_rows += tuples
        self._metrics.cache_hits += int(tuples * (0.85 - 0.5 * math.exp(-self.batch / 40)))
        assert not self._metrics.decreased_since(before)
        commit = self._commit(time_ms, tuples, wave)
        self._journal.append(batch_record(commit, self._previous, int(420 + 130 * wave + self.batch % 7 * 9), None))
        if keeps_commit:
            create_document(self.root / "commits" / f"{self.batch:08d}.json", commit, "flow.commit")
        self._previous = commit

    def _commit(self, time_ms: int, tuples: int, wave: float) -> dict[str, Any]:
        cache = int(180e6 * (1 - math.exp(-self.batch / 60)))
        report = {
            "pending": max(0, int(900 * wave)),
            "oldest_ms": time_ms - 700 if wave > 0 else None,
            "memory": {"cache": cache, "batches": 14_000_000, "index": 9_500_000},
            "metrics": self._metrics.as_dict(),
            "version": 1 + self.batch // 500,
        }
        return {
            "batch": self.batch,
            "query": "q",
            "time_ms": time_ms,
            "wall_ms": time_ms,
            "drain": False,
            "flow": "f",
            "sink": "parquet",
            "receipt": {"rows": tuples},
            "side": [{"sink": "parquet", "receipt": {"rows": self.batch % 11 // 9}}],
            "rows": {"1-enrich": tuples},
            "operators": {"1-enrich": [{"id": "s", "files": [], "values": {}, "report": report}]},
        }


def _node(identity: str, kind: str, title: str, detail: str, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"id": identity, "kind": kind, "title": title, "detail": detail, "facts": dict(facts or {})}
