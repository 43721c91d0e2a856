"""Small JSON files of a flow's state: created exactly once, durable before anything relies on them, checked when read.

Each carries the format's version and a digest of its own content, so that damage and files of a newer Dovetail are told
apart from everything else.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dovetail.errors import DovetailError, StateError
from dovetail.faultpoints import fault_point
from dovetail.relation.files import create_exclusively
from dovetail.relation.format import digest_of

FORMAT_VERSION = 1

_FULL_OR_BROKEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})


@contextmanager
def storage_errors(place: Path) -> Iterator[None]:
    """Turn what a disk refuses into a `StateError` that says what to do."""
    try:
        yield
    except DovetailError:
        raise
    except OSError as error:
        if error.errno in _FULL_OR_BROKEN:
            raise StateError(
                f"The flow's state cannot be written to {place}: {os.strerror(error.errno)}. Nothing was lost.",
                hint="Make room and start the flow again with the same checkpoint.",
            ) from None
        if error.errno in _FORBIDDEN:
            raise StateError(
                f"The flow's state cannot be written to {place}: {os.strerror(error.errno)}. Nothing was lost.",
                hint="Give this user the right to write there and start the flow again.",
            ) from None
        raise


def create_document(path: Path, body: Mapping[str, Any], moment: str) -> bool:
    """Create a document durably; False if somebody else had created it first.

    Parameters
    ----------
    path
        Its name; the directory exists.
    body
        What JSON can hold.
    moment
        What the fault points are called: ``<moment>.before``, ``<moment>.linked``, ``<moment>.after``.
    """
    content = {"format": FORMAT_VERSION, **body}
    text = json.dumps({**content, "digest": digest_of(_canonical(content))}, indent=1)
    fault_point(f"{moment}.before")
    try:
        with storage_errors(path.parent):
            create_exclusively(path, text, point=f"{moment}.linked")
    except FileExistsError:
        return False
    fault_point(f"{moment}.after")
    return True


def read_document(path: Path) -> dict[str, Any] | None:
    """What `create_document` was given, or None if there is no such document."""
    try:
        text = path.read_text(encoding="utf-8")
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
    if recorded != digest_of(_canonical(document)):
        raise _damaged(path, "it does not match its own digest")
    del document["format"]
    return document


def _damaged(path: Path, why: str) -> StateError:
    return StateError(
        f"{path} is damaged: {why}.",
        hint="Restore the checkpoint from a copy, or start the flow with a new one.",
    )


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
