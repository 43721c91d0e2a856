"""A window of chunks saved so that a micro-batch writes what it changed, not what it holds.

A window is a table whose rows lie in chunks, each known by the arrival that it began with. Rows only ever leave a
chunk, so one that has as many rows as when it was written is still what was written: its file is named again. What
changes in place, the flags of which tuples have found a match, is a narrow table of its own, written anew each time.

Files are compacted where less than half of their rows are still needed, and all together when there are many.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.errors import StateError
from dovetail.state.state_files import StateFile

__all__ = ["ROWS", "SavedWindow", "load_window", "save_window"]

ROWS, FLAGS = "window", "flags"
_FLAG_COLUMN = "__matched"
_MOST_FILES = 12

Chunk = Sequence[int]
"""Of an operator's snapshot: how many tuples, the first one's arrival, the deadline."""


@dataclass(frozen=True)
class SavedWindow:
    """What is to be written and kept.

    Attributes
    ----------
    kept
        Files of the last state that are named again; they come first among the new state's files.
    tables
        Tables to write, which come next, in this order.
    places
        For each chunk: the number of its file among the new state's, and the row that it begins with there.
    """

    kept: tuple[StateFile, ...]
    tables: tuple[tuple[str, pa.Table], ...]
    places: tuple[tuple[int, int], ...]


def save_window(
    window: pa.Table,
    chunks: Sequence[Chunk],
    last_files: Sequence[StateFile] = (),
    last_chunks: Sequence[Chunk] = (),
    last_places: Sequence[Sequence[int]] = (),
) -> SavedWindow:
    """Decide what to write of a window, given how it was saved last.

    Examples
    --------
    >>> first = pa.table({"k": [1, 2, 3, 4], "__matched": [0, 0, 0, 0]})
    >>> saved = save_window(first, [(4, 0, 9)])
    >>> file = StateFile("1-enrich/00000/00000000-a.arrow", "window", 0, 100, 4, "digest")
    >>> second = pa.table({"k": [1, 2, 3, 4, 5], "__matched": [0, 0, 0, 0, 0]})
    >>> again = save_window(second, [(4, 0, 9), (1, 4, 9)], [file], [(4, 0, 9)], saved.places)
    >>> again.kept == (file,), [table.num_rows for _, table in again.tables], again.places
    (True, [1], ((0, 0), (1, 0)))
    """
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
    """Put a window together from its files, as `save_window` was given it.

    Parameters
    ----------
    files
        All files of the state.
    tables
        Their content, by number.
    chunks, places
        As saved.
    """
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
    # The operators' own order: the flags follow the code.
    place = names.index("__code") + 1 if "__code" in names else len(names)
    return window.add_column(place, _FLAG_COLUMN, found)


def _has_flags(window: pa.Table) -> bool:
    flags = window.column(_FLAG_COLUMN)
    return any(chunk.to_numpy(zero_copy_only=False).any() for chunk in flags.chunks)
