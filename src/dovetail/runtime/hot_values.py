"""The values that a host was asked for most, kept beyond the application, so that a restarted query begins with them.

Only codes and how often they were asked for are kept, not rows: rows are read again, of the version that is joined
then. So a file that is old, damaged or of another version costs a few reads and never a wrong row. It is one Arrow IPC
stream of at most 2 MB per relation, set of columns and shard, in this user's private directory for temporary files. It
is removed when it was not renewed for a month.
"""

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.storage.verified import private_directory

__all__ = ["MOST_VALUES", "load_hot_values", "store_hot_values"]

MOST_VALUES = 1 << 17
_FORMAT = b"1"
_MOST_AGE_S = 30 * 86_400
_SCHEMA = pa.schema({"code": pa.int64(), "tuples": pa.int64()}, {"format": _FORMAT})


def store_hot_values(name: str, codes: Int64Array, tuples: Int64Array) -> None:
    """Keep the values that were asked for most; a directory that cannot be written is no reason to fail."""
    directory = private_directory("hot")
    if directory is None:
        return
    most = np.argsort(-tuples, kind="stable")[:MOST_VALUES]
    batch = pa.record_batch([pa.array(codes[most]), pa.array(tuples[most])], schema=_SCHEMA)
    draft = directory / f"{name}.{uuid.uuid4().hex}.draft"
    try:
        with pa.OSFile(str(draft), "wb") as file, pa.ipc.new_stream(file, _SCHEMA) as stream:
            stream.write_batch(batch)
        os.rename(draft, directory / name)
        _remove_old(directory)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def load_hot_values(name: str) -> tuple[Int64Array, Int64Array]:
    """The values that were kept under this name, and how often they were asked for; none if there are none."""
    nothing = np.empty(0, np.int64), np.empty(0, np.int64)
    directory = private_directory("hot")
    if directory is None:
        return nothing
    try:
        with pa.OSFile(str(directory / name), "rb") as file, pa.ipc.open_stream(file) as stream:
            if not stream.schema.equals(_SCHEMA, check_metadata=True):
                return nothing
            batch = stream.read_next_batch()
        batch.validate(full=True)
    except (OSError, pa.ArrowInvalid, StopIteration):
        return nothing
    codes, first = np.unique(batch.column("code").to_numpy(), return_index=True)
    return codes, np.clip(batch.column("tuples").to_numpy()[first], 1, 1 << 30)


def _remove_old(directory: Path) -> None:
    now_s = time.time()
    for entry in os.scandir(directory):
        with suppress(FileNotFoundError):
            if now_s - entry.stat().st_mtime > _MOST_AGE_S:
                os.unlink(entry.path)
