"""Spark's half of a checkpoint: which query it belongs to, and which rows a micro-batch has.

Spark writes ``offsets/<b>`` before it calls us, and never flushes it. For a file source the offset is only a number in
its own log, so that log entry is part of the offsets. They are flushed before anything of ours depends on them, and
compared with those of the intent: a commit is valid only for the rows it was made from.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.core.errors import StateError
from dovetail.storage.digests import digest_of
from dovetail.storage.documents import storage_errors
from dovetail.storage.interface import Storage

__all__ = ["Offsets", "SparkHalf"]

_RESTORE = "Restore the whole checkpoint directory from one copy, or start the flow with a new checkpoint."


@dataclass(frozen=True)
class Offsets:
    """Which rows a micro-batch has: the text of Spark's file, and digests of the source logs that it refers to."""

    text: str
    logs: dict[str, str]

    @property
    def digest(self) -> str:
        """The same for the same rows."""
        # The second line holds the time of planning and Spark's settings; the sources' positions follow it.
        lines = self.text.splitlines()
        return digest_of(json.dumps([lines[2:], self.logs], sort_keys=True).encode())

    def as_dict(self) -> dict[str, Any]:
        return {"text": self.text, "logs": self.logs, "digest": self.digest}


class SparkHalf:
    """Reads Spark's files in a checkpoint."""

    def __init__(self, checkpoint: Path, storage: Storage) -> None:
        self._checkpoint, self._storage = checkpoint, storage

    def query_id(self) -> str | None:
        """Spark's id of the query; None if Spark has not started one here."""
        path = self._checkpoint / "metadata"
        try:
            return str(json.loads(self._storage.read(path))["id"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError) as error:
            raise StateError(f"{path} cannot be read ({error}).", hint=_RESTORE) from None

    def require_query_id(self) -> str:
        found = self.query_id()
        if found is None:
            raise StateError(f"{self._checkpoint} has lost Spark's part of the checkpoint.", hint=_RESTORE)
        return found

    def newest(self) -> int | None:
        """The newest micro-batch that Spark has planned."""
        names = self._storage.names(self._checkpoint / "offsets")
        return max((int(name) for name in names if name.isdigit()), default=None)

    def has_committed(self) -> bool:
        """Whether Spark has committed any micro-batch, which it does after us."""
        return any(name.isdigit() for name in self._storage.names(self._checkpoint / "commits"))

    def offsets(self, batch: int) -> Offsets | None:
        """The rows of a micro-batch that Spark has planned."""
        try:
            text = self._storage.read(self._checkpoint / "offsets" / str(batch)).decode()
        except FileNotFoundError:
            return None
        logs = {}
        for path in self._logs(text):
            logs[str(path.relative_to(self._checkpoint))] = digest_of(self._storage.read(path))
        return Offsets(text, logs)

    def make_durable(self, batch: int) -> None:
        """Flush Spark's plan of a micro-batch."""
        file = self._checkpoint / "offsets" / str(batch)
        with storage_errors(self._checkpoint):
            logs = self._logs(self._storage.read(file).decode())
            directories = dict.fromkeys([file.parent, *(path.parent for path in logs)])
            self._storage.sync([file, *logs, *directories])

    def make_identity_durable(self) -> None:
        """Flush Spark's metadata and directories; once, when the first micro-batch runs."""
        present = [self._checkpoint / "metadata", self._checkpoint, self._checkpoint / "sources"]
        with storage_errors(self._checkpoint):
            self._storage.sync([path for path in present if self._storage.exists(path)])

    def _logs(self, text: str) -> list[Path]:
        """The entries of file sources' logs that the lines of an offset file refer to."""
        found = []
        for number, line in enumerate(text.splitlines()[2:]):
            try:
                entry = json.loads(line)["logOffset"]
            except (ValueError, KeyError, TypeError):
                continue  # not a file source
            directory = self._checkpoint / "sources" / str(number)
            for name in (str(entry), f"{entry}.compact"):
                if self._storage.exists(directory / name):
                    found.append(directory / name)
        return found
