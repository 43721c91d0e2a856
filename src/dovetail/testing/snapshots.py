"""Write a snapshot to storage and read it back, as a restart does."""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from dovetail.joins.protocol import Snapshot

__all__ = ["through_storage"]


def through_storage(snapshot: Snapshot) -> Snapshot:
    """The snapshot as read back from Arrow IPC and JSON: equal, but sharing no memory with the operator.

    Raises `TypeError` for anything that JSON or Arrow cannot store, instead of failing at the first restart of a flow.
    """
    return Snapshot(
        snapshot.kind,
        _through_json(snapshot.fingerprint),
        {name: _through_ipc(table) for name, table in snapshot.tables.items()},
        _through_json(snapshot.values),
    )


def _through_json(values: Mapping[str, Any]) -> dict[str, Any]:
    restored: dict[str, Any] = json.loads(json.dumps(dict(values)))
    return restored


def _through_ipc(table: pa.Table) -> pa.Table:
    stored = pa.BufferOutputStream()
    with pa.ipc.new_stream(stored, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(stored.getvalue()).read_all()
