"""The versions of its relation that a step may still need: those named by its checkpoint's commits and intents."""

from pathlib import Path
from typing import Any

from dovetail.core.errors import StateError
from dovetail.spark.flow.store import FlowStore
from dovetail.storage.documents import read_document

__all__ = ["named_versions"]


def named_versions(store: FlowStore, step: str) -> set[int] | None:
    """The versions of a step's relation that commits and intents name; None if one of them cannot be read."""
    found: set[int] = set()
    try:
        for commit in _documents(store.root / "commits"):
            values = [shard["values"] for shard in commit["operators"].get(step, ())]
            found |= {int(value["version"]) for value in values if "version" in value}
        for intent in _documents(store.root / "intents"):
            decided = intent["operators"].get(step, {})
            found |= {int(decided["version"])} if "version" in decided else set()
    except StateError:
        return None
    return found


def _documents(directory: Path) -> list[dict[str, Any]]:
    found = [read_document(path) for path in sorted(directory.glob("[0-9]*.json"))]
    # A cleanup may remove a file after it was listed.
    return [document for document in found if document is not None]
