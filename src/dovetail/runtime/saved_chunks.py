"""Saves a window of chunks so that a micro-batch writes what it changed, not what it holds.

A window is a table of chunks, each identified by its first arrival. Rows only ever leave a chunk, so a chunk with as
many rows as when it was written is unchanged, and its file is referenced again. The flags that tell which tuples have
matched do change; they are a narrow table, written anew each time.

A file is compacted if less than half of its rows are still needed; all are when there are many.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.core.errors import StateError
from dovetail.storage.state_files import StateFile

__all__ = ["ROWS", "SavedWindow", "load_window", "save_window"]

ROWS, FLAGS = "window", "flags"
_FLAG_COLUMN = "__matched"
_MOST_FILES = 12

Chunk = Sequence[int]
"""Columns of an operator's snapshot: number of tuples, first arrival, deadline."""


@dataclass(frozen=True)
class SavedWindow:
    """What to write and what to keep."""

    kept: tuple[StateFile, ...]  # files of the last state that are referenced again; they come first in the new state
    tables: tuple[tuple[str, pa.Table], ...]  # to write; they come next, in this order
    places: tuple[tuple[int, int], ...]  # per chunk, the number of its file in the new state and its first row there


def save_window(
    window: pa.Table,
    chunks: Sequence[Chunk],
    last_files: Sequence[StateFile] = (),
    last_chunks: Sequence[Chunk] = (),
    last_places: Sequence[Sequence[int]] = (),
) -> SavedWindow:
    """Decide what to write of a window, given how it was saved last."""
    known = {
        int(chunk[1]): (int(chunk[0]), int(place[0]), int(place[1]))
        for chunk, place in zip(last_chunks, last_places, strict=True)
    }
    unchanged: dict[int, tuple[int, int]] = {}
    still_needed: dict[int, int] = {}
    for number, chunk in enumerate(chunks):
        rows, file, start = known.get(int(chunk[1]), (-1, -1, -1))
        if rows == int(chunk[0]):
            unchanged[number] = (file, start)
            still_needed[file] = still_needed.get(file, 0) + rows
    worth_keeping = [file for file, rows in still_needed.items() if 2 * rows >= last_files[file].rows]
    if len(worth_keeping) >= _MOST_FILES:
        worth_keeping = []
    numbers = {file: number for number, file in enumerate(sorted(worth_keeping))}
    places: list[tuple[int, int]] = []
    parts: list[pa.Table] = []
    begin = written = 0
    rows_table = window.drop_columns([name for name in (_FLAG_COLUMN,) if name in window.column_names])
    for number, chunk in enumerate(chunks):
        file, start = unchanged.get(number, (-1, -1))
        if file in numbers:
            places.append((numbers[file], start))
        else:
            places.append((len(numbers), written))
            parts.append(rows_table.slice(begin, int(chunk[0])))
            written += int(chunk[0])
        begin += int(chunk[0])
    tables = [(ROWS, pa.concat_tables(parts).combine_chunks())] if written else []
    if _FLAG_COLUMN in window.column_names and _has_flags(window):
        tables.append((FLAGS, window.select([_FLAG_COLUMN])))
    return SavedWindow(tuple(last_files[file] for file in sorted(worth_keeping)), tuple(tables), tuple(places))


def load_window(
    files: Sequence[StateFile], tables: Mapping[int, pa.Table], chunks: Sequence[Chunk], places: Sequence[Sequence[int]]
) -> pa.Table:
    """The inverse of `save_window`; `tables` has the contents of `files` by number."""
    parts = []
    for chunk, (file, start) in zip(chunks, places, strict=True):
        part = tables[int(file)].slice(int(start), int(chunk[0]))
        if part.num_rows != int(chunk[0]):
            raise StateError(
                f"The state file {files[int(file)].name} lacks rows of a chunk.",
                hint="Restore the checkpoint from a copy, or start the flow with a new one.",
            )
        parts.append(part)
    window = pa.concat_tables(parts)
    flags = [tables[number] for number, file in enumerate(files) if file.table == FLAGS]
    found: Any = flags[0].column(_FLAG_COLUMN) if flags else pa.array(np.zeros(window.num_rows, np.uint8))
    names = window.column_names
    # The operators' own column order: the flags follow the code.
    place = names.index("__code") + 1 if "__code" in names else len(names)
    return window.add_column(place, _FLAG_COLUMN, found)


def _has_flags(window: pa.Table) -> bool:
    flags = window.column(_FLAG_COLUMN)
    return any(chunk.to_numpy(zero_copy_only=False).any() for chunk in flags.chunks)
