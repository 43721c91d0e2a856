"""Builds result batches from row references.

Columns follow Spark's ``join(..., on=[...])``: the join columns once, named as in the first input that has them, then
the other columns of each input.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int32Array, Int64Array
from dovetail.joins.multiway.chunk import Chunk
from dovetail.joins.multiway.spec import MJoinSpec

__all__ = ["MultiOutput", "RowRefs", "take_values"]


@dataclass(frozen=True)
class RowRefs:
    """Rows of one input: row ``rows[i]`` of ``chunks[source[i]]``. `source` is None if there is one chunk."""

    chunks: Sequence[Chunk]
    source: Int32Array | None
    rows: Int32Array

    def take(self, picked: npt.NDArray[np.signedinteger] | BoolArray | slice) -> "RowRefs":
        return RowRefs(self.chunks, None if self.source is None else self.source[picked], self.rows[picked])

    def values(self, arrays: Sequence[Int64Array]) -> Int64Array:
        """The values of the rows, from one array per chunk."""
        return take_values(arrays, self.source, self.rows)

    def gather(self, columns: Sequence[int]) -> list[pa.Array]:
        """Columns of the rows, in the order of the references."""
        if not columns:
            return []
        if self.source is None or len(self.chunks) == 1:
            places = pa.array(self.rows)
            return [self.chunks[0].rows.column(number).take(places) for number in columns]
        order = None
        if (np.diff(self.source) < 0).any():
            order = np.argsort(self.source, kind="stable")
        source = self.source if order is None else self.source[order]
        rows = self.rows if order is None else self.rows[order]
        bounds = np.searchsorted(source, np.arange(len(self.chunks) + 1))
        used = [number for number in range(len(self.chunks)) if bounds[number] < bounds[number + 1]]
        if not used:
            return [self.chunks[0].rows.column(number).slice(0, 0) for number in columns]
        places = [pa.array(rows[bounds[number] : bounds[number + 1]]) for number in used]
        back = None
        if order is not None:
            inverse = np.empty(order.size, np.int64)
            inverse[order] = np.arange(order.size)
            back = pa.array(inverse)
        gathered = []
        for number in columns:
            parts = [self.chunks[c].rows.column(number).take(p) for c, p in zip(used, places, strict=True)]
            column = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
            gathered.append(column if back is None else column.take(back))
        return gathered


def take_values(arrays: Sequence[Int64Array], source: Int32Array | None, rows: Int32Array) -> Int64Array:
    """Values at ``rows[i]`` of ``arrays[source[i]]``."""
    if source is None or len(arrays) == 1:
        return arrays[0][rows]
    values = np.empty(rows.size, np.int64)
    for number in np.unique(source).tolist():
        mine = source == number
        values[mine] = arrays[number][rows[mine]]
    return values


class MultiOutput:
    """The schema of the results, and how their batches are built."""

    def __init__(self, spec: MJoinSpec) -> None:
        self._spec = spec
        names = spec.carried
        keys: dict[str, list[tuple[int, int]]] = {}
        taken: set[tuple[str, str]] = set()
        for attribute in spec.attributes:
            for place, column in enumerate(attribute.columns[attribute.inputs[0]]):
                holders = [(n, attribute.columns[n][place]) for n in attribute.inputs if n in names]
                taken.update((n, attribute.columns[n][place]) for n in attribute.inputs)
                if holders:
                    keys[column] = [(spec.names.index(n), spec.schemas[n].get_field_index(c)) for n, c in holders]
        self._keys = list(keys.values())
        self._others = [
            (i, number)
            for i, name in enumerate(spec.names)
            if name in names
            for number, column in enumerate(spec.schemas[name].names)
            if (name, column) not in taken
        ]
        nullable = {spec.names.index(name) for name in spec.nullable}
        fields = []
        for column, places in keys.items():
            first = spec.schemas[spec.names[places[0][0]]].field(places[0][1])
            fields.append(first.with_name(column).with_nullable(first.nullable or bool(nullable)))
        for i, number in self._others:
            column_field = spec.schemas[spec.names[i]].field(number)
            fields.append(column_field.with_nullable(True) if i in nullable else column_field)
        self.schema: pa.Schema = pa.schema(fields)
        self.columns_per_input = [
            sorted(
                {n for j, n in self._others if j == i} | {h[1] for holders in self._keys for h in holders if h[0] == i}
            )
            for i in range(len(spec.names))
        ]

    def batch(self, refs: dict[int, RowRefs], count: int) -> pa.RecordBatch:
        """One result row per reference; NULLs for inputs without references."""
        wanted: dict[int, list[int]] = {i: [] for i in refs}
        sources: list[tuple[int, int] | None] = []
        for holders in self._keys:
            sources.append(next((holder for holder in holders if holder[0] in refs), None))
        sources += [(i, number) if i in refs else None for i, number in self._others]
        for source in sources:
            if source is not None and source[1] not in wanted[source[0]]:
                wanted[source[0]].append(source[1])
        gathered = {
            (i, number): column
            for i, numbers in wanted.items()
            for number, column in zip(numbers, refs[i].gather(numbers), strict=True)
        }
        columns = [
            pa.nulls(count, column_field.type) if source is None else gathered[source]
            for column_field, source in zip(self.schema, sources, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def nulls_around(self, i: int, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of input i as results without a match."""
        columns = []
        for column_field, holders in zip(self.schema, [*self._keys, *([other] for other in self._others)], strict=True):
            number = next((holder[1] for holder in holders if holder[0] == i), None)
            columns.append(pa.nulls(rows.num_rows, column_field.type) if number is None else rows.column(number))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
