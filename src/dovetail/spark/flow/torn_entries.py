"""Removes entries of Spark's logs that a power cut has torn, if nothing depends on them.

Spark flushes nothing that it writes to a checkpoint, and does not start a query whose newest entry is torn. We flush
what an intent depends on, before it. So an entry of micro-batch b may be torn

- in ``offsets``, if there is no intent of b: nobody has seen its rows, and Spark plans it again;
- in ``commits``, if we have committed b: Spark runs it again, and it is known to be done;
- in ``metadata``, if there is no intent at all.

And Spark does not start at its first micro-batch if ``offsets`` or ``commits`` has a draft of a driver that was killed.

Any other torn entry is damage, and is left for Spark and us to refuse.
"""

import json
import re
from pathlib import Path

from dovetail.storage.interface import Storage

__all__ = ["drop_torn_entries"]

_DRAFT = re.compile(r"\..*\.(tmp|crc)")
"""What Hadoop leaves beside an entry that was not written to its end."""


def drop_torn_entries(checkpoint: Path, storage: Storage, intended: int | None, committed: int | None) -> None:
    """Remove torn entries, given our newest intent and our newest commit."""
    offsets, commits = checkpoint / "offsets", checkpoint / "commits"
    planned = _numbers(storage, offsets)
    if not planned and intended is None and committed is None:
        for directory in (offsets, commits):
            _drop_drafts(storage, directory)
    if planned and planned[-1] > max(_or_none(intended), _or_none(committed)):
        before = _lines(storage, offsets / str(planned[-1] - 1)) or []
        text = _lines(storage, offsets / str(planned[-1]))
        if text is not None and (not _is_whole(text) or len(text) < len(before)):
            _drop(storage, offsets, str(planned[-1]))
    for number in reversed(_numbers(storage, commits)):
        text = _lines(storage, commits / str(number))
        if number > _or_none(committed) or (text is not None and _is_whole(text)):
            break
        _drop(storage, commits, str(number))
    if intended is None and committed is None:
        text = _lines(storage, checkpoint / "metadata")
        if text is not None and not _is_json("".join(text)):
            _drop(storage, checkpoint, "metadata")


def _drop_drafts(storage: Storage, directory: Path) -> None:
    for name in storage.names(directory):
        if _DRAFT.fullmatch(name):
            storage.delete(directory / name)


def _is_whole(lines: list[str]) -> bool:
    """Whether an entry can be complete: a version, a document, and one line for each source."""
    return len(lines) > 1 and all(_is_json(line) for number, line in enumerate(lines) if number == 1 or line[:1] == "{")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _lines(storage: Storage, path: Path) -> list[str] | None:
    """The lines of an entry; None if there is none, perhaps because another driver has just removed it."""
    try:
        return storage.read(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None


def _numbers(storage: Storage, directory: Path) -> list[int]:
    return sorted(int(name) for name in storage.names(directory) if name.isdigit())


def _drop(storage: Storage, directory: Path, name: str) -> None:
    # Hadoop keeps a checksum beside it.
    for part in (name, f".{name}.crc"):
        storage.delete(directory / part)


def _or_none(number: int | None) -> int:
    return -1 if number is None else number
