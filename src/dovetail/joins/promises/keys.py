"""Join keys of rows, and exact sets of keys whose codes are hashes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.multiway.chunk import Chunk
from dovetail.relation.keys import compute_codes, keys_equal

__all__ = ["KeyPoints", "KeyReader", "Keys", "is_whole"]


class Keys(NamedTuple):
    """The codes of rows and, if codes are hashes, the key columns, which decide."""

    codes: Int64Array
    columns: tuple[pa.Array, ...] = ()

    def take(self, picked: npt.NDArray[np.signedinteger] | BoolArray) -> "Keys":
        if not self.columns:
            return Keys(self.codes[picked])
        places = np.flatnonzero(picked) if picked.dtype == np.bool_ else picked
        indices = pa.array(places, pa.int64())
        return Keys(self.codes[places], tuple(column.take(indices) for column in self.columns))

    def ids(self) -> Int64Array:
        """A number per row, equal only for equal keys."""
        if not self.columns:
            return self.codes
        ids = np.zeros(len(self.codes), np.int64)
        for column in self.columns:
            if pa.types.is_floating(column.type):
                column = pa.compute.add(column, pa.scalar(0.0, column.type))  # one zero
            encoded = column.dictionary_encode()
            numbers = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
            _, ids = np.unique(ids * max(1, len(encoded.dictionary)) + numbers, return_inverse=True)
        return ids

    def equal(self, rows: Int64Array, other: "Keys", other_rows: Int64Array) -> BoolArray:
        """Pairwise, whether the keys are equal; the codes of each pair are."""
        if not self.columns:
            return np.ones(len(rows), np.bool_)
        ours, theirs = pa.array(rows), pa.array(other_rows)
        return keys_equal([c.take(ours) for c in self.columns], [c.take(theirs) for c in other.columns])


class KeyReader:
    """Reads the keys of one input's rows."""

    def __init__(self, schema: pa.Schema, columns: Sequence[str], is_hashed: bool) -> None:
        self.schema, self.columns, self.is_hashed = schema, tuple(columns), is_hashed
        self._places = [schema.get_field_index(name) for name in columns] if is_hashed else []

    def of_chunk(self, chunk: Chunk) -> Keys:
        """The keys of a chunk's rows, by the first attribute."""
        return self.of_rows(chunk.codes[0], chunk.rows)

    def of_rows(self, codes: Int64Array, rows: pa.RecordBatch) -> Keys:
        return Keys(codes, tuple(rows.column(place) for place in self._places))

    def of_values(self, values: pa.RecordBatch) -> Keys:
        """The keys formed by values of the key columns."""
        codes = compute_codes(values, self.columns).to_numpy(zero_copy_only=False)
        return Keys(codes.astype(np.int64), tuple(values.column(name) for name in self.columns if self.is_hashed))


class KeyPoints:
    """Keys whose codes are hashes, in code order, each with a flag whether it is done."""

    __slots__ = ("codes", "columns", "is_done", "numbers")

    def __init__(self, codes: Int64Array, columns: tuple[pa.Array, ...], is_done: BoolArray, numbers: Int64Array):
        self.codes, self.columns, self.is_done, self.numbers = codes, columns, is_done, numbers

    @classmethod
    def empty(cls, kinds: Sequence[pa.DataType]) -> "KeyPoints":
        """No keys, of columns of these types."""
        columns = tuple(pa.array([], kind) for kind in kinds)
        return cls(np.zeros(0, np.int64), columns, np.zeros(0, np.bool_), np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def keys(self) -> Keys:
        """The keys, in code order."""
        return Keys(self.codes, self.columns)

    @property
    def nbytes(self) -> int:
        held = sum(int(column.get_total_buffer_size()) for column in self.columns)
        return held + self.codes.nbytes + self.is_done.nbytes + self.numbers.nbytes

    def locate(self, keys: Keys) -> Int64Array:
        """The position of each key; -1 if absent."""
        found = np.full(len(keys.codes), -1)
        if not len(self.codes):
            return found
        first = np.searchsorted(self.codes, keys.codes, side="left")
        last = np.searchsorted(self.codes, keys.codes, side="right")
        open_rows = np.flatnonzero(first < last)
        while open_rows.size:
            same = keys.equal(open_rows, self.keys, first[open_rows])
            found[open_rows[same]] = first[open_rows[same]]
            open_rows = open_rows[~same]
            # Another key may have the same hash.
            first[open_rows] += 1
            open_rows = open_rows[first[open_rows] < last[open_rows]]
        return found

    def done_among(self, keys: Keys) -> BoolArray:
        """Which keys are present and done."""
        places = self.locate(keys)
        found = places >= 0
        found[found] = self.is_done[places[found]]
        return found

    def added(self, keys: Keys, first_number: int) -> "KeyPoints":
        """This set with more keys; existing ones are unchanged."""
        _, once = np.unique(keys.ids(), return_index=True)
        once = np.sort(once)
        keys = keys.take(once)
        new = np.flatnonzero(self.locate(keys) < 0)
        if not new.size:
            return self
        keys = keys.take(new)
        codes = np.concatenate([self.codes, keys.codes])
        order = np.argsort(codes, kind="stable")
        columns = tuple(
            pa.concat_arrays([ours, theirs]).take(pa.array(order))
            for ours, theirs in zip(self.columns, keys.columns, strict=True)
        )
        is_done = np.concatenate([self.is_done, np.zeros(new.size, np.bool_)])[order]
        numbers = np.concatenate([self.numbers, first_number + np.arange(new.size)])[order]
        return KeyPoints(codes[order], columns, is_done, numbers)

    def keep(self, mask: BoolArray) -> "KeyPoints":
        kept = self.keys.take(np.flatnonzero(mask))
        return KeyPoints(kept.codes, kept.columns, self.is_done[mask], self.numbers[mask])

    def as_table(self, names: Sequence[str]) -> pa.Table:
        columns = {"__code": self.codes, "__done": self.is_done, "__number": self.numbers}
        return pa.table({**columns, **dict(zip(names, self.columns, strict=True))})

    @classmethod
    def from_table(cls, table: pa.Table, names: Sequence[str]) -> "KeyPoints":
        """The inverse of `as_table`."""
        # Copies: the set must not depend on the table's memory.
        codes, numbers = (np.array(table[name].to_numpy(), np.int64) for name in ("__code", "__number"))
        columns = tuple(table[name].combine_chunks() for name in names)
        return cls(codes, columns, np.array(table["__done"].to_numpy(), np.bool_), numbers)


def is_whole(rows: pa.RecordBatch) -> BoolArray:
    """Which rows have no NULL."""
    found: BoolArray = np.ones(rows.num_rows, np.bool_)
    for column in rows.columns:
        found &= column.is_valid().to_numpy(zero_copy_only=False)
    return found
