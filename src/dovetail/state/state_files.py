"""Arrow files of operator state: each written once under a name of its own, and read only when a commit names it."""

import os
import uuid
from collections.abc import Mapping
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

__all__ = ["StateFile", "read_table", "shard_directory", "write_table"]


@dataclass(frozen=True, slots=True)
class StateFile:
    """One file of one shard's state, as a commit names it.

    Attributes
    ----------
    name
        Its path below the flow's ``state`` directory: ``<operator>/<shard>/<batch>-<uuid>.arrow``.
    table
        What it holds, in the operator's words: ``"window"``, ...
    rows, bytes
        Its size.
    digest
        Of all its bytes.
    """

    name: str
    table: str
    rows: int
    bytes: int
    digest: str

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


def write_table(state_root: Path, operator: str, shard: int, batch: int, table_name: str, table: pa.Table) -> StateFile:
    """Write one table durably, under a new name.

    Examples
    --------
    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> (root / "1-enrich" / "00000").mkdir(parents=True)
    >>> file = write_table(root, "1-enrich", 0, 7, "window", pa.table({"k": [1, 2]}))
    >>> file.rows, read_table(root, file).to_pylist()
    (2, [{'k': 1}, {'k': 2}])
    """
    name = f"{shard_directory(operator, shard)}/{batch:08d}-{uuid.uuid4().hex}.arrow"
    path = state_root / name
    fault_point("state.file.before")
    with storage_errors(state_root):
        try:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
                fault_point("state.file.begun")
            with pa.memory_map(str(path)) as mapped:
                content = mapped.read_buffer()
            digest, size = digest_of(content), len(content)
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
    return StateFile(name, table_name, table.num_rows, size, digest)


def read_table(state_root: Path, file: StateFile) -> pa.Table:
    """Map a file that a commit names; the first reader on a host checks that it is what was written."""
    path = state_root / file.name
    try:
        with pa.memory_map(str(path)) as mapped:
            content = mapped.read_buffer()
    except FileNotFoundError:
        raise _unusable(path, "it is gone") from None
    except OSError as error:
        raise _unusable(path, f"it cannot be read ({error.strerror or error})") from None
    if len(content) != file.bytes:
        raise _unusable(path, f"it has {len(content)} bytes, its commit says {file.bytes}")
    marks = verification_marks([path], file.digest, 1)
    is_known = bool(marks[0])
    if not is_known and digest_of(content) != file.digest:
        raise _unusable(path, "it does not match its digest")
    try:
        table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        if not is_known:
            table.validate(full=True)
    except pa.ArrowException as error:
        raise _unusable(path, str(error).partition("\n")[0]) from None
    if table.num_rows != file.rows:
        raise _unusable(path, f"it has {table.num_rows} rows, its commit says {file.rows}")
    marks[0] = 1
    return table


def _unusable(path: Path, why: str) -> StateError:
    return StateError(
        f"The state file {path} cannot be used: {why}.",
        hint="Restore the checkpoint from a copy, or start the flow with a new one.",
    )
