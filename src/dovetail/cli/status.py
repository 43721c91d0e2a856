"""The status of a flow, read from its checkpoint."""

import time
from datetime import UTC, datetime
from typing import Any

from dovetail.cli.output import TextOutput
from dovetail.core.errors import StateError
from dovetail.core.memory import format_bytes

__all__ = ["show_status", "status_document"]


def status_document(checkpoint: str) -> dict[str, Any]:
    """The content of a checkpoint: the flow, its runner, its last micro-batch, its operators."""
    # Needs no Spark, although the progress classes live in the Spark package.
    from dovetail.spark.flow.flow_time import flow_now_ms
    from dovetail.spark.flow.progress import progress_of
    from dovetail.spark.flow.store import FlowStore
    from dovetail.storage.documents import read_document
    from dovetail.storage.running import who_runs

    store = FlowStore(checkpoint)
    flow = read_document(store.root / "flow.json")
    runner = who_runs(checkpoint)
    if flow is None:
        state = "a flow is being started there" if runner else "no flow has run there yet"
        raise StateError(f"{checkpoint} is not the checkpoint of a flow: {state}.")
    batch = store.last_batch()
    commit = None if batch is None else store.commit(batch)
    document: dict[str, Any] = {
        "checkpoint": checkpoint,
        "flow": flow["flow"],
        "running": runner,
        "batch": batch,
        "progress": None,
    }
    if commit is not None and batch is not None:
        previous = store.commit(batch - 1) if batch else None
        document["progress"] = progress_of(commit, previous, flow_now_ms(commit, int(time.time() * 1000))).as_dict()
    return document


def show_status(text: TextOutput, document: dict[str, Any]) -> None:
    runner, progress = document["running"], document["progress"]
    text.title(f"Flow {document['flow']}")
    pairs = {
        "checkpoint": document["checkpoint"],
        "state": "stopped" if runner is None else f"running, process {runner.get('pid')} on {runner.get('host')}",
        "last micro-batch": "none yet" if document["batch"] is None else f"{document['batch']}",
    }
    if progress is not None:
        pairs["started at"] = datetime.fromtimestamp(progress["time_ms"] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        pairs["waiting"] = f"{progress['pending']:,}"
    text.pairs(pairs)
    if progress is not None and progress["operators"]:
        text.table(
            {
                "operator": "left",
                "tuples in": "right",
                "rows out": "right",
                "waiting": "right",
                "memory": "right",
                "relation": "right",
            },
            [
                [
                    operator["name"],
                    f"{operator['totals']['stream_tuples_in']:,}",
                    f"{operator['totals']['output_rows']:,}",
                    f"{operator['pending']:,}",
                    format_bytes(sum(operator["memory_bytes"].values())),
                    "-" if operator["relation_version"] is None else f"version {operator['relation_version']}",
                ]
                for operator in progress["operators"]
            ],
        )
