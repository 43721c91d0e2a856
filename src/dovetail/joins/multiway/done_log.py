"""Stores done bits so that a commit writes those that were set since the last one.

A row becomes done at most once, so a log of rows is proportional to what arrived. A stored table has one entry per
chunk or piece: the places of rows, as int32, or bits for all of its rows, whichever is smaller. The bits of a chunk are
the union of its entries. Four tables of about the same size are merged into one, without the entries of chunks that are
gone, so an entry is written a logarithmic number of times.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import UInt8Array
from dovetail.joins.multiway.chunk import Chunk, get_bits, set_bits
from dovetail.joins.multiway.spill import Fetch, Piece
from dovetail.joins.multiway.state import JoinState

__all__ = ["FIRST", "DoneBits", "done_tables", "log_of", "mark_stored"]

FIRST = "done"
"""The table of a snapshot that refers to no earlier one."""

_MERGED_TOGETHER = 4


class DoneBits:
    """The bits of chunks and pieces, by name, as stored tables give them."""

    def __init__(self, tables: Iterable[pa.Table]) -> None:
        self._entries: dict[str, list[tuple[bool, bytes]]] = {}
        for table in tables:
            for name, is_rows, content in _entries_of(table):
                self._entries.setdefault(name, []).append((is_rows, content))

    def restore(self, name: str, item: Chunk | Piece) -> None:
        """Set the bits of a chunk or piece."""
        if item.done is None:
            return
        for is_rows, content in self._entries.get(name, ()):
            _apply(item.done, is_rows, content)
        assert item.saved_done is not None
        item.saved_done[:] = item.done

    def merged(self, live: Mapping[str, Chunk | Piece]) -> Iterator[tuple[str, bool, bytes]]:
        """The entries of chunks and pieces that are still there, one each."""
        for name, entries in self._entries.items():
            item = live.get(name)
            if item is not None and item.done is not None:
                bits = np.zeros_like(item.done)
                for is_rows, content in entries:
                    _apply(bits, is_rows, content)
                yield _entry(name, bits)


def done_tables(state: JoinState, have: frozenset[str], fetch: Fetch | None) -> tuple[dict[str, pa.Table], list[str]]:
    """The tables to write, and the names of all that hold the bits; `have` are stored already."""
    live = dict(_live(state))
    log = state.done_log
    if not log or fetch is None or not log.keys() <= have:
        entries = [_entry(name, item.done) for name, item in live.items() if item.done is not None and item.done.any()]
        name = _next_name([*log, *have])
        # A runtime does not store empty tables.
        return {name: _table(entries)}, [name] if entries else []
    fresh = [_entry(name, new) for name, item in live.items() if (new := _new_bits(item)) is not None]
    if not fresh:
        return {}, list(log)
    size, names, absorbed = _size(fresh), list(log), list[str]()
    while True:
        similar = [name for name in names[-(_MERGED_TOGETHER - 1) :] if _level(log[name]) <= _level(size)]
        if len(similar) < _MERGED_TOGETHER - 1:
            break
        names, absorbed = names[: -len(similar)], [*similar, *absorbed]
        size += sum(log[name] for name in similar)
    if absorbed:
        parts = DoneBits([*map(fetch, absorbed), _table(fresh)])
        fresh = list(parts.merged(live))
    new_name = _next_name([*log, *have])
    return {new_name: _table(fresh)}, [*names, new_name]


def mark_stored(state: JoinState, tables: Mapping[str, pa.Table], names: Iterable[str]) -> None:
    """Remember that everything is stored, in these tables, of which the new ones are given."""
    state.done_log = {name: state.done_log[name] if name in state.done_log else log_of(tables[name]) for name in names}
    for _, item in _live(state):
        if item.done is not None:
            assert item.saved_done is not None
            item.saved_done[:] = item.done


def log_of(table: pa.Table) -> int:
    """The size of a stored table, for the choice of what to merge."""
    return _size(_entries_of(table))


def _live(state: JoinState) -> Iterator[tuple[str, Chunk | Piece]]:
    for i in range(len(state.memory)):
        if not state.spec.preserved[i]:
            continue
        for chunk in (*state.memory[i], *state.direct[i]):
            yield f"{i}-{chunk.serial}", chunk
        for domain in state.domains:
            for piece in domain.pieces[i]:
                yield f"{i}-{piece.serial}", piece


def _new_bits(item: Chunk | Piece) -> UInt8Array | None:
    """The bits set since they were last stored; None if there are none."""
    if item.done is None:
        return None
    assert item.saved_done is not None
    new: UInt8Array = item.done & ~item.saved_done
    return new if new.any() else None


def _entry(name: str, bits: UInt8Array) -> tuple[str, bool, bytes]:
    rows = np.flatnonzero(get_bits(bits, None, 8 * len(bits))).astype(np.int32)
    is_rows = rows.nbytes < bits.nbytes
    return name, is_rows, rows.tobytes() if is_rows else bits.tobytes()


def _apply(bits: UInt8Array, is_rows: bool, content: bytes) -> None:
    if is_rows:
        set_bits(bits, np.frombuffer(content, np.int32))
    else:
        np.bitwise_or(bits, np.frombuffer(content, np.uint8), out=bits)


def _entries_of(table: pa.Table) -> list[tuple[str, bool, bytes]]:
    # Earlier versions had bits only.
    has_rows = "is_rows" in table.column_names
    are_rows = table["is_rows"].to_pylist() if has_rows else [False] * table.num_rows
    return list(zip(table["chunk"].to_pylist(), are_rows, table["bits"].to_pylist(), strict=True))


def _table(entries: Iterable[tuple[str, bool, bytes]]) -> pa.Table:
    entries = list(entries)
    names, are_rows, contents = zip(*entries, strict=True) if entries else ((), (), ())
    columns = [pa.array(names, pa.string()), pa.array(are_rows, pa.bool_()), pa.array(contents, pa.binary())]
    return pa.table(columns, names=["chunk", "is_rows", "bits"])


def _size(entries: Iterable[tuple[str, bool, bytes]]) -> int:
    return sum(len(content) for _, _, content in entries)


def _level(size: int) -> int:
    return size.bit_length() // 2


def _next_name(known: Iterable[str]) -> str:
    numbers = [int(number or 0) for kind, _, number in (name.partition(".") for name in known) if kind == FIRST]
    return f"{FIRST}.{max(numbers) + 1}" if numbers else FIRST
