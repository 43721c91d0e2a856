"""Arrow files of operator state: each written once under a unique name, and read only if a commit names it.

The tables that a shard writes in one micro-batch are concatenated in one file, because making a file durable costs
milliseconds regardless of its size. A commit names tables, each with its offset in its file.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dovetail.core.errors import StateError
from dovetail.core.faultpoints import fault_point
from dovetail.storage.digests import digest_of
from dovetail.storage.documents import storage_errors
from dovetail.storage.local import LOCAL
from dovetail.storage.verified import verification_marks

__all__ = ["ShardState", "StateFile", "read_table", "shard_directory", "write_tables"]

_ALIGNMENT = 64  # of the start of every table, so that its columns can be used directly from the mapped file


@dataclass(frozen=True, slots=True)
class StateFile:
    """One table of one shard's state, as named by a commit."""

    name: str  # of its file below the flow's ``state`` directory: ``<operator>/<shard>/<batch>-<uuid>.arrow``
    table: str  # chosen by the operator, such as "window"
    offset: int
    bytes: int
    rows: int
    digest: str

    @property
    def batch(self) -> int:
        """The micro-batch that wrote it."""
        return int(self.name.rpartition("/")[2].partition("-")[0])

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; the inverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "StateFile":
        """Read the output of `as_dict`."""
        return cls(**saved)


@dataclass(frozen=True)
class ShardState:
    """One shard's state after one micro-batch."""

    state_id: str  # unique: an operator in memory may continue only from exactly this state
    files: tuple[StateFile, ...] = ()  # unchanged files are listed again
    values: Mapping[str, Any] = field(default_factory=dict)  # the rest of the state, ready for JSON

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; the inverse of `from_dict`."""
        return {"id": self.state_id, "files": [f.as_dict() for f in self.files], "values": dict(self.values)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "ShardState":
        """Read the output of `as_dict`."""
        return cls(saved["id"], tuple(map(StateFile.from_dict, saved["files"])), saved["values"])


def shard_directory(operator: str, shard: int) -> str:
    """The directory of a shard's files, below the ``state`` directory."""
    return f"{operator}/{shard:05d}"


def write_tables(
    state_root: Path, operator: str, shard: int, batch: int, tables: Sequence[tuple[str, pa.Table]]
) -> list[StateFile]:
    """Write tables durably to one new file.

    Examples
    --------
    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> (root / "1-enrich" / "00000").mkdir(parents=True)
    >>> tables = [("window", pa.table({"k": [1, 2]})), ("flags", pa.table({"f": [True]}))]
    >>> files = write_tables(root, "1-enrich", 0, 7, tables)
    >>> files[1].rows, read_table(root, files[0]).to_pylist()
    (1, [{'k': 1}, {'k': 2}])
    """
    if not tables:
        return []
    name = f"{shard_directory(operator, shard)}/{batch:08d}-{uuid.uuid4().hex}.arrow"
    path = state_root / name
    fault_point("state.file.before")
    with storage_errors(state_root):
        try:
            places = []
            with pa.OSFile(str(path), "wb") as sink:
                for _, table in tables:
                    sink.write(bytes(-sink.tell() % _ALIGNMENT))
                    offset = sink.tell()
                    with pa.ipc.new_stream(sink, table.schema) as writer:
                        writer.write_table(table)
                        fault_point("state.file.begun")
                    places.append((offset, sink.tell() - offset))
            content = LOCAL.map(path)
            files = [
                StateFile(name, table_name, offset, size, table.num_rows, digest_of(content.slice(offset, size)))
                for (table_name, table), (offset, size) in zip(tables, places, strict=True)
            ]
            LOCAL.sync([path])
            fault_point("state.file.written")
            LOCAL.sync([path.parent])
        except OSError:
            # A partial file takes space on a disk that may be full, and no commit will ever name it.
            path.unlink(missing_ok=True)
            raise
    fault_point("state.file.after")
    return files


def read_table(state_root: Path, file: StateFile) -> pa.Table:
    """Map a table named by a commit. The first reader on a host verifies it against its digest."""
    path = state_root / file.name
    try:
        content = LOCAL.map(path)
    except FileNotFoundError:
        raise _unusable(path, "it does not exist") from None
    except OSError as error:
        raise _unusable(path, f"it cannot be read ({error.strerror or error})") from None
    if len(content) < file.offset + file.bytes:
        raise _unusable(path, f"it has {len(content)} bytes, but its commit needs {file.offset + file.bytes}")
    content = content.slice(file.offset, file.bytes)
    marks = verification_marks([path], file.digest, 1)
    is_known = bool(marks[0])
    if not is_known and digest_of(content) != file.digest:
        raise _unusable(path, "it does not match its digest")
    try:
        table = pa.ipc.open_stream(pa.BufferReader(content)).read_all()
        if not is_known:
            table.validate(full=True)
    except pa.ArrowException as error:
        raise _unusable(path, str(error).partition("\n")[0]) from None
    if table.num_rows != file.rows:
        raise _unusable(path, f"it has {table.num_rows} rows, but its commit says {file.rows}")
    marks[0] = 1
    return table


def _unusable(path: Path, why: str) -> StateError:
    return StateError(
        f"The state file {path} cannot be used: {why}.",
        hint="Restore the checkpoint from a copy, or start the flow with a new one.",
    )
