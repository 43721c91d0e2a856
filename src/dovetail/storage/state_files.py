"""Arrow files of operator state: each written once under a name of its own, and read only when a commit names it.

The tables that a shard writes in one micro-batch lie one after the other in one file, because what makes a file durable
costs milliseconds however little is in it. A commit names tables, each with its place in its file.
"""

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from dovetail.errors import StateError
from dovetail.faultpoints import fault_point
from dovetail.relation.files import sync_directory
from dovetail.relation.format import digest_of
from dovetail.relation.verified import verification_marks
from dovetail.state.documents import storage_errors

__all__ = ["StateFile", "read_table", "shard_directory", "write_tables"]

_ALIGNMENT = 64  # of the beginning of every table, so that its columns can be used where they are mapped


@dataclass(frozen=True, slots=True)
class StateFile:
    """One table of one shard's state, as a commit names it.

    Attributes
    ----------
    name
        The path of its file below the flow's ``state`` directory: ``<operator>/<shard>/<batch>-<uuid>.arrow``.
    table
        What it holds, in the operator's words: ``"window"``, ...
    offset, bytes
        Its place in the file.
    rows
        How many it has.
    digest
        Of its bytes.
    """

    name: str
    table: str
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
        """Read what `as_dict` gave."""
        return cls(**saved)


def shard_directory(operator: str, shard: int) -> str:
    """Where a shard's files lie, below the ``state`` directory."""
    return f"{operator}/{shard:05d}"


def write_tables(
    state_root: Path, operator: str, shard: int, batch: int, tables: Sequence[tuple[str, pa.Table]]
) -> list[StateFile]:
    """Write tables durably, under a new name.

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
            content = _mapped(path)
            files = [
                StateFile(name, table_name, offset, size, table.num_rows, digest_of(content.slice(offset, size)))
                for (table_name, table), (offset, size) in zip(tables, places, strict=True)
            ]
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            fault_point("state.file.written")
            sync_directory(path.parent)
        except OSError:
            # Half a file takes room on a disk that may be full, and no commit will ever name it.
            path.unlink(missing_ok=True)
            raise
    fault_point("state.file.after")
    return files


def read_table(state_root: Path, file: StateFile) -> pa.Table:
    """Map a table that a commit names; the first reader on a host checks that it is what was written."""
    path = state_root / file.name
    try:
        content = _mapped(path)
    except FileNotFoundError:
        raise _unusable(path, "it is gone") from None
    except OSError as error:
        raise _unusable(path, f"it cannot be read ({error.strerror or error})") from None
    if len(content) < file.offset + file.bytes:
        raise _unusable(path, f"it has {len(content)} bytes, its commit says {file.offset + file.bytes} or more")
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
        raise _unusable(path, f"it has {table.num_rows} rows, its commit says {file.rows}")
    marks[0] = 1
    return table


def _mapped(path: Path) -> pa.Buffer:
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def _unusable(path: Path, why: str) -> StateError:
    return StateError(
        f"The state file {path} cannot be used: {why}.",
        hint="Restore the checkpoint from a copy, or start the flow with a new one.",
    )
