"""The identity of a flow, and which driver may commit for it.

A flow has an id, created with its checkpoint. It is in every commit, receipt and published name, so the target of a
sink knows which rows belong to which flow, wherever the checkpoint is.

A driver takes an *epoch* when it starts: the next number, by exclusive create. A driver with a lower epoch was
replaced, whether it knows it or not: it may have been suspended in the middle of a micro-batch. Checking the epoch and
then acting is a race, so the check comes after the exclusive create of a commit and before it is published, and every
sink has its own fence at its target.
"""

import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from dovetail.core.errors import StateError
from dovetail.storage.documents import create_document, read_document
from dovetail.storage.interface import Storage

__all__ = ["Epoch", "Owner", "document_numbers", "newest_epoch", "read_or_make_id", "require_newest", "take_epoch"]

_KEPT_EPOCHS = 3


@dataclass(frozen=True)
class Epoch:
    """One start of one driver."""

    number: int
    token: str  # tells apart the same epoch of two copies of a checkpoint
    host: str
    pid: int
    started_ms: int


@dataclass(frozen=True)
class Owner:
    """A driver of a flow, as known to sinks and their targets."""

    flow_id: str
    epoch: Epoch


def read_or_make_id(root: Path, storage: Storage, committed: str | None = None) -> str:
    """The id of the flow whose state is below ``root``; created if missing, also for checkpoints without one.

    ``committed`` is the id in the newest commit. A flow with a new id would not find its own rows in any target, and
    would publish them again.
    """
    path = root / "identity.json"
    saved = read_document(path, storage)
    if saved is None:
        create_document(path, {"id": committed or uuid.uuid4().hex}, "flow.identity", storage)
        saved = read_document(path, storage)
    if saved is None or not isinstance(saved.get("id"), str):
        raise StateError(f"{path} does not name a flow.", hint="Restore the checkpoint from a copy.")
    if committed is not None and saved["id"] != committed:
        raise StateError(
            f"{path} names the flow {saved['id']}, its newest commit {committed}: they were not made together.",
            hint="Restore the whole checkpoint directory from one copy, or start the flow with a new checkpoint.",
        )
    return str(saved["id"])


def take_epoch(root: Path, storage: Storage) -> Epoch:
    """Become the newest driver of the flow."""
    number = newest_epoch(root, storage) + 1
    while True:
        epoch = Epoch(number, uuid.uuid4().hex[:12], socket.gethostname(), os.getpid(), int(time.time() * 1000))
        if create_document(_path(root, number), asdict(epoch), "flow.epoch", storage):
            break
        number += 1
    for old in document_numbers(root / "epochs", storage)[:-_KEPT_EPOCHS]:
        storage.delete(_path(root, old))
    return epoch


def newest_epoch(root: Path, storage: Storage) -> int:
    """The highest epoch that a driver took; 0 if none did."""
    return max(document_numbers(root / "epochs", storage), default=0)


def require_newest(root: Path, storage: Storage, own: Epoch) -> None:
    """Stop a driver that was replaced."""
    newest = newest_epoch(root, storage)
    other = read_document(_path(root, newest), storage) or {}
    # The number is not enough: after an older copy was restored, numbers are reused.
    if newest == own.number and other.get("token") == own.token:
        return
    who = f"process {other['pid']} on {other['host']}" if other else "another driver"
    raise StateError(
        f"This driver was replaced: {who} has taken over the flow with epoch {newest}, this one has {own.number}. "
        "What this one did was not published.",
        hint="Let the other driver run. To run the flow here, stop the other one and start the flow again.",
    )


def document_numbers(directory: Path, storage: Storage) -> list[int]:
    """The numbers of the documents ``<number>.json`` in a directory, ascending."""
    names = storage.names(directory)
    return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())


def _path(root: Path, number: int) -> Path:
    return root / "epochs" / f"{number:06d}.json"
