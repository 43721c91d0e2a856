"""Small JSON files of a flow's state: created exactly once, durable before anything depends on them, checked on read.

Each contains the format version and a digest of its content, so damage and files of a newer Dovetail are reported as
such.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.core.errors import DovetailError, StateError
from dovetail.core.faultpoints import fault_point
from dovetail.storage.digests import canonical, digest_of
from dovetail.storage.interface import Storage
from dovetail.storage.local import LOCAL

FORMAT_VERSION = 2
"""1: no ids, epochs or offsets. 2: a flow's documents name the flow, the driver's epoch and Spark's offsets."""

_FULL_OR_BROKEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})


@contextmanager
def storage_errors(place: Path) -> Iterator[None]:
    """Convert disk errors into a `StateError` that says what to do."""
    try:
        yield
    except DovetailError:
        raise
    except OSError as error:
        if error.errno in _FULL_OR_BROKEN:
            raise StateError(
                f"The flow's state cannot be written to {place}: {os.strerror(error.errno)}. Nothing was lost.",
                hint="Free some space and start the flow again with the same checkpoint.",
            ) from None
        if error.errno in _FORBIDDEN:
            raise StateError(
                f"The flow's state cannot be written to {place}: {os.strerror(error.errno)}. Nothing was lost.",
                hint="Give this user write permission there and start the flow again.",
            ) from None
        if error.errno == errno.ENOENT:
            raise StateError(
                f"{error.filename or place} no longer exists: it was moved or deleted while the flow was running.",
                hint="Start the flow again from where its checkpoint is now.",
            ) from None
        raise


def create_document(path: Path, body: Mapping[str, Any], moment: str, storage: Storage = LOCAL) -> bool:
    """Create a document durably. Returns False if it already exists.

    ``moment`` names the fault points: ``<moment>.before``, ``<moment>.linked``, ``<moment>.after``.
    """
    content = {"format": FORMAT_VERSION, **body}
    text = json.dumps({**content, "digest": digest_of(canonical(content))}, indent=1)
    fault_point(f"{moment}.before")
    try:
        with storage_errors(path.parent):
            storage.create(path, text.encode(), f"{moment}.linked")
    except FileExistsError:
        return False
    fault_point(f"{moment}.after")
    return True


def read_document(path: Path, storage: Storage = LOCAL) -> dict[str, Any] | None:
    """Read the body passed to `create_document`, or None if there is no such document."""
    try:
        text = storage.read(path).decode("utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise _damaged(path, "it is not text") from None
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise _damaged(path, f"it is not JSON ({error.msg} at line {error.lineno})") from None
    if not isinstance(document, dict) or not isinstance(document.get("format"), int):
        raise _damaged(path, "it has no format version")
    if document["format"] > FORMAT_VERSION:
        raise StateError(
            f"{path} has format {document['format']}, this version of Dovetail reads up to {FORMAT_VERSION}.",
            hint="Run the flow with the version of Dovetail that wrote it, or a newer one.",
        )
    recorded = document.pop("digest", None)
    if recorded != digest_of(canonical(document)):
        raise _damaged(path, "it does not match its own digest")
    del document["format"]
    return document


def require_fields(path: Path, document: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    """Refuse a document that lacks a field which every format has, or has something else there."""
    for name, kind in fields.items():
        if not isinstance(document.get(name), kind):
            found = "it is missing" if name not in document else f"it is {document[name]!r}"
            raise _damaged(path, f"the field {name!r} must be of type {kind.__name__}, but {found}")


def _damaged(path: Path, why: str) -> StateError:
    return StateError(
        f"{path} is damaged: {why}.",
        hint="Restore the checkpoint from a copy, or start the flow with a new one.",
    )
