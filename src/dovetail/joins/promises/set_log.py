"""Stores a growing set of integers so that a commit writes what was added since the last one.

The set is the union of its stored tables. Tables of about the same size are merged, so a value is written a logarithmic
number of times. After values were removed, or where the whole set is not much more than what was added, it is written
anew.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from dovetail.joins.multiway.spill import Fetch
from dovetail.joins.promises.intervals import IntervalSet

__all__ = ["SetLog", "set_of"]

_MERGED_TOGETHER = 4
_FEW_PARTS = 64


class SetLog:
    """What of one set is stored, and what was added since; remembers at most `limit_bytes` of it."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self._name, self._limit_bytes = name, limit_bytes
        self._tables: dict[str, int] = {}
        # None: it must be written anew.
        self._added: list[IntervalSet] | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._added or ())

    @property
    def names(self) -> frozenset[str]:
        """The stored tables."""
        return frozenset(self._tables)

    def add(self, part: IntervalSet) -> None:
        """Note what was added to the set."""
        if self._added is None:
            return
        self._added.append(part)
        if len(self._added) > _FEW_PARTS:
            self._added = [_union(self._added)]
        if self.nbytes > self._limit_bytes:
            self._added = None

    def write_anew(self) -> None:
        """Note that values were removed."""
        self._added = None

    def tables(
        self, whole: IntervalSet, have: frozenset[str], fetch: Fetch | None
    ) -> tuple[dict[str, pa.Table], list[str]]:
        """The table to write, if any, and the names of all that hold the set; `have` are stored already."""
        known = self._tables
        if self._added is None or fetch is None or not known or not known.keys() <= have:
            return self._anew(whole, have)
        added = _union(self._added)
        if not len(added):
            return {}, list(known)
        if len(whole) <= _MERGED_TOGETHER * len(added):
            return self._anew(whole, have)
        size, kept, absorbed = len(added), list(known), list[str]()
        while True:
            similar = [name for name in kept[-(_MERGED_TOGETHER - 1) :] if _level(known[name]) <= _level(size)]
            if len(similar) < _MERGED_TOGETHER - 1:
                break
            kept, absorbed = kept[: -len(similar)], [*similar, *absorbed]
            size += sum(known[name] for name in similar)
        if absorbed and not kept:
            return self._anew(whole, have)
        added = _union([*(set_of(fetch(name)) for name in absorbed), added])
        name = self._next_name(have)
        return {name: _table(added)}, [*kept, name]

    def mark_stored(self, tables: Mapping[str, pa.Table], names: Iterable[str]) -> None:
        """Remember that the whole set is stored, in these tables, of which the new ones are given."""
        self._tables = {name: self._tables[name] if name in self._tables else tables[name].num_rows for name in names}
        self._added = []

    def restored(self, tables: Mapping[str, pa.Table], are_stored: bool) -> IntervalSet:
        """The set that tables hold; the next commit refers to them if they are stored."""
        self._tables = {name: table.num_rows for name, table in tables.items()} if are_stored else {}
        self._added = [] if are_stored else None
        return _union([set_of(table) for table in tables.values()])

    def _anew(self, whole: IntervalSet, have: frozenset[str]) -> tuple[dict[str, pa.Table], list[str]]:
        # A runtime does not store empty tables.
        name = self._next_name(have)
        return ({name: _table(whole)}, [name]) if len(whole) else ({}, [])

    def _next_name(self, have: frozenset[str]) -> str:
        parts = [name.partition(".") for name in {*self._tables, *have}]
        numbers = [int(number or 0) for name, _, number in parts if name == self._name]
        return f"{self._name}.{max(numbers) + 1}" if numbers else self._name


def set_of(table: pa.Table) -> IntervalSet:
    """The set in a stored table; a copy, which does not keep the table's memory."""
    return IntervalSet(np.array(table["low"].to_numpy()), np.array(table["high"].to_numpy()))


def _table(values: IntervalSet) -> pa.Table:
    return pa.table({"low": values.lows, "high": values.highs})


def _union(parts: Iterable[IntervalSet]) -> IntervalSet:
    return IntervalSet.union_of(list(parts))


def _level(size: int) -> int:
    return size.bit_length() // 2
