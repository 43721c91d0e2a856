"""Durable, versioned state of flows: Arrow files that tasks write, and the manifests that name them."""

from dovetail.state.documents import FORMAT_VERSION
from dovetail.state.fingerprint import FlowFingerprint
from dovetail.state.state_files import StateFile, read_table, write_tables
from dovetail.state.store import FlowStore, ShardState

__all__ = [
    "FORMAT_VERSION",
    "FlowFingerprint",
    "FlowStore",
    "ShardState",
    "StateFile",
    "read_table",
    "write_tables",
]
