"""The journal of a flow: a line of JSON per micro-batch, start, end and failure, for people who look at the flow.

::

    <checkpoint>/dovetail/journal/<n>.jsonl      the first line has the format

It only describes: a flow never reads it to decide anything, lines are not flushed to the disk one by one, and a disk
that cannot take them does not stop the flow. The newest `KEPT_SEGMENTS` files are kept, at least 10,000 lines. One
process writes, the one that holds the flow's lock; any number of others may read at the same time, since a line counts
when its line feed is there.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.core.errors import StateError

__all__ = ["Journal", "JournalReader"]

FORMAT_VERSION = 1
LINES_PER_SEGMENT = 2_500
BYTES_PER_SEGMENT = 8_000_000
KEPT_SEGMENTS = 5
_SUFFIX = ".jsonl"
_LOG = logging.getLogger("dovetail.flow")


class Journal:
    """Appends to the journal below the state directory ``root`` of a flow.

    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> Journal(root).append({"kind": "started"})
    >>> Journal(root).append({"kind": "batch", "batch": 0})
    >>> JournalReader(root).read_new()
    (True, [{'kind': 'started'}, {'kind': 'batch', 'batch': 0}])
    """

    def __init__(self, root: Path) -> None:
        self._directory = root / "journal"
        self._number: int | None = None
        self._lines = self._bytes = 0
        self._has_failed = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record. A failure of the disk is logged once, and later records are tried again."""
        try:
            if self._number is None:
                self._find_end()
            if self._lines >= LINES_PER_SEGMENT or self._bytes >= BYTES_PER_SEGMENT:
                self._begin(self._number_in_use + 1)
            self._write(record)
        except OSError as error:
            if not self._has_failed:
                _LOG.warning("The journal %s cannot be written: %s.", self._directory, error.strerror)
            self._has_failed, self._number = True, None

    @property
    def _number_in_use(self) -> int:
        assert self._number is not None, "no segment was begun"
        return self._number

    def _find_end(self) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        numbers = _numbers(self._directory)
        if not numbers:
            self._begin(1)
            return
        path = self._directory / f"{numbers[-1]:06d}{_SUFFIX}"
        text = path.read_bytes()
        if not text or _format_of(text.partition(b"\n")[0]) != FORMAT_VERSION:
            self._begin(numbers[-1] + 1)  # of another version, or cut off by a kill
            return
        self._number, self._lines, self._bytes = numbers[-1], text.count(b"\n"), len(text)
        if not text.endswith(b"\n"):
            self._put(b"\n")

    def _begin(self, number: int) -> None:
        self._number, self._lines, self._bytes = number, 0, 0
        self._write({"kind": "journal", "format": FORMAT_VERSION})
        for old in _numbers(self._directory)[:-KEPT_SEGMENTS]:
            (self._directory / f"{old:06d}{_SUFFIX}").unlink(missing_ok=True)

    def _write(self, record: Mapping[str, Any]) -> None:
        self._put(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def _put(self, line: bytes) -> None:
        path = self._directory / f"{self._number_in_use:06d}{_SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        self._lines, self._bytes = self._lines + 1, self._bytes + len(line)


class JournalReader:
    """Reads a journal as it grows."""

    def __init__(self, root: Path) -> None:
        self._directory = root / "journal"
        self._number = self._offset = 0

    def read_new(self) -> tuple[bool, list[dict[str, Any]]]:
        """The records since the last call, and whether they are the whole journal: at the first call, and if what was
        read before is no longer there.

        A `StateError` if a newer version of Dovetail has written it.
        """
        numbers = _numbers(self._directory)
        is_whole = self._number == 0 or self._is_another(numbers)
        if is_whole:
            self._number = self._offset = 0
        found: list[dict[str, Any]] = []
        for number in numbers:
            if number >= self._number:
                found += self._read_segment(number)
        return is_whole, found

    def _is_another(self, numbers: list[int]) -> bool:
        """Whether an older copy of the checkpoint was restored, or everything that was read is gone."""
        if self._number not in numbers:
            return True
        try:
            return (self._directory / f"{self._number:06d}{_SUFFIX}").stat().st_size < self._offset
        except OSError:
            return True

    def _read_segment(self, number: int) -> list[dict[str, Any]]:
        path = self._directory / f"{number:06d}{_SUFFIX}"
        offset = self._offset if number == self._number else 0
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                text = file.read()
        except FileNotFoundError:
            return []  # removed since the directory was listed
        whole = text[: text.rfind(b"\n") + 1]
        self._number, self._offset = number, offset + len(whole)
        lines = whole.split(b"\n")[:-1]
        if offset == 0 and lines:
            version = _format_of(lines.pop(0))
            if version is not None and version > FORMAT_VERSION:
                raise StateError(
                    f"{path} has format {version}, this version of Dovetail reads up to {FORMAT_VERSION}.",
                    hint="Look at the flow with the version of Dovetail that runs it, or a newer one.",
                )
        return [record for line in lines if (record := _parsed(line)) is not None]


def _numbers(directory: Path) -> list[int]:
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name[: -len(_SUFFIX)]) for name in names if name.endswith(_SUFFIX) and name[:-6].isdigit())


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A record; None for a line that a kill or a full disk has cut off."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def _format_of(line: bytes) -> int | None:
    version = (_parsed(line) or {}).get("format")
    return version if isinstance(version, int) else None
