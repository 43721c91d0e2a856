"""Stores the bits of rows so that a commit writes those that were set since the last one.

There are two kinds: which rows of a preserved input are done, and which rows in memory are gone, that is, purged and
not copied out yet. Both are set at most once per row, so a log of rows is proportional to what arrived or was closed.
A stored table has one entry per chunk or piece: the places of rows, as int32, or bits for all of its rows, whichever is
smaller. The bits of a chunk are the union of its entries. Four tables of about the same size are merged into one,
without the entries of chunks that have left, so an entry is written a logarithmic number of times.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import UInt8Array
from dovetail.joins.multiway.chunk import Chunk, get_bits, set_bits
from dovetail.joins.multiway.spill import Fetch, Piece
from dovetail.joins.multiway.state import JoinState

__all__ = ["KINDS", "Kind", "StoredBits", "bit_tables", "mark_stored", "size_of"]

Kind = Literal["done", "gone"]
KINDS: tuple[Kind, ...] = ("done", "gone")

_MERGED_TOGETHER = 4


class StoredBits:
    """The bits of one kind, of chunks and pieces by name, as stored tables give them."""

    def __init__(self, kind: Kind, tables: Iterable[pa.Table]) -> None:
        self._kind = kind
        self._entries: dict[str, list[tuple[bool, bytes]]] = {}
        for table in tables:
            for name, is_rows, content in _entries_of(table):
                self._entries.setdefault(name, []).append((is_rows, content))

    def restore(self, name: str, item: Chunk | Piece) -> None:
        """Set the bits of a chunk or piece."""
        entries = self._entries.get(name, ())
        if self._kind == "gone" and isinstance(item, Chunk) and entries:
            item.mark_gone(get_bits(self._union(entries, -(-len(item) // 8)), None, len(item)))
        now, saved = _bits_of(item, self._kind)
        if now is None or saved is None:
            return
        if self._kind == "done":
            now |= self._union(entries, len(now))
        saved[:] = now

    def _union(self, entries: Iterable[tuple[bool, bytes]], size: int) -> UInt8Array:
        bits = np.zeros(size, np.uint8)
        for is_rows, content in entries:
            if is_rows:
                set_bits(bits, np.frombuffer(content, np.int32))
            else:
                np.bitwise_or(bits, np.frombuffer(content, np.uint8), out=bits)
        return bits

    def merged(self, live: Mapping[str, Chunk | Piece]) -> Iterator[tuple[str, bool, bytes]]:
        """The entries of chunks and pieces that are still there, one each."""
        for name, entries in self._entries.items():
            now = _bits_of(live[name], self._kind)[0] if name in live else None
            if now is not None:
                yield _entry(name, self._union(entries, len(now)))


def bit_tables(
    state: JoinState, kind: Kind, have: frozenset[str], fetch: Fetch | None
) -> tuple[dict[str, pa.Table], list[str]]:
    """The tables to write, and the names of all that hold the bits; `have` are stored already."""
    live = dict(_live(state, kind))
    log = state.bit_logs.get(kind, {})
    new_name = _next_name(kind, [*log, *have])
    if not log or fetch is None or not log.keys() <= have:
        whole = ((name, _bits_of(item, kind)[0]) for name, item in live.items())
        entries = [_entry(name, bits) for name, bits in whole if bits is not None and bits.any()]
        return ({new_name: _table(entries)}, [new_name]) if entries else ({}, [])
    fresh = [_entry(name, new) for name, item in live.items() if (new := _new_bits(item, kind)) is not None]
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
        fresh = list(StoredBits(kind, [*map(fetch, absorbed), _table(fresh)]).merged(live))
    return {new_name: _table(fresh)}, [*names, new_name]


def mark_stored(state: JoinState, kind: Kind, tables: Mapping[str, pa.Table], names: Iterable[str]) -> None:
    """Remember that everything is stored, in these tables, of which the new ones are given."""
    log = state.bit_logs.get(kind, {})
    state.bit_logs[kind] = {name: log[name] if name in log else size_of(tables[name]) for name in names}
    for _, item in _live(state, kind):
        now, saved = _bits_of(item, kind)
        if now is not None and saved is not None:
            saved[:] = now


def size_of(table: pa.Table) -> int:
    """The size of a stored table, for the choice of what to merge."""
    return _size(_entries_of(table))


def _live(state: JoinState, kind: Kind) -> Iterator[tuple[str, Chunk | Piece]]:
    for i in range(len(state.memory)):
        if kind == "done" and not state.spec.preserved[i]:
            continue
        for chunk in (*state.memory[i], *state.direct[i]):
            yield f"{i}-{chunk.serial}", chunk
        for domain in state.domains if kind == "done" else ():
            for piece in domain.pieces[i]:
                yield f"{i}-{piece.serial}", piece


def _bits_of(item: Chunk | Piece, kind: Kind) -> tuple[UInt8Array | None, UInt8Array | None]:
    """The bits of a chunk or piece, and which of them are stored."""
    if kind == "done":
        return item.done, item.saved_done
    return (item.gone, item.saved_gone) if isinstance(item, Chunk) else (None, None)


def _new_bits(item: Chunk | Piece, kind: Kind) -> UInt8Array | None:
    """The bits set since they were last stored; None if there are none."""
    now, saved = _bits_of(item, kind)
    if now is None or saved is None:
        return None
    new: UInt8Array = now & ~saved
    return new if new.any() else None


def _entry(name: str, bits: UInt8Array) -> tuple[str, bool, bytes]:
    rows = np.flatnonzero(get_bits(bits, None, 8 * len(bits))).astype(np.int32)
    is_rows = rows.nbytes < bits.nbytes
    return name, is_rows, rows.tobytes() if is_rows else bits.tobytes()


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


def _next_name(kind: Kind, known: Iterable[str]) -> str:
    numbers = [int(number or 0) for found, _, number in (name.partition(".") for name in known) if found == kind]
    return f"{kind}.{max(numbers) + 1}" if numbers else kind
