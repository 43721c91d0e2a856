"""Evaluates the conditions between two inputs on candidates that agree in everything else."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int32Array
from dovetail.joins.conditions import Condition
from dovetail.joins.multiway.chunk import Chunk
from dovetail.joins.multiway.output import RowRefs
from dovetail.joins.multiway.pair_conditions import visible_columns
from dovetail.joins.multiway.spec import MJoinSpec

__all__ = ["Residuals"]


class _Bound(NamedTuple):
    """A condition with the columns it reads of its two inputs."""

    condition: Condition
    sides: tuple[int, int]
    columns: tuple[list[int], list[int]]


class Residuals:
    """The conditions of a join."""

    def __init__(self, spec: MJoinSpec) -> None:
        self._bound: list[_Bound] = []
        self._schemas = list(spec.schemas.values())
        for each in spec.conditions:
            sides = spec.names.index(each.left), spec.names.index(each.right)
            names = visible_columns(each, spec.schemas)
            left, right = (
                [self._schemas[i].get_field_index(n) for n in of] for i, of in zip(sides, names, strict=True)
            )
            self._bound.append(_Bound(each.condition, sides, (left, right)))

    def checked(
        self,
        refs: Mapping[int, RowRefs],
        queries: Int32Array,
        j: int,
        chunk: Chunk,
        rows: Int32Array,
        keep: BoolArray | None,
    ) -> BoolArray | None:
        """Which candidates, rows of input j for partial results, satisfy all conditions with the inputs bound so far.

        `keep` are those that satisfy everything else; None for all, in the result too.
        """
        for condition, sides, columns in self._bound:
            if j not in sides or not set(sides) <= {j, *refs}:
                continue
            # Columns are fetched only for the remaining candidates.
            live = np.arange(len(rows)) if keep is None else np.flatnonzero(keep)
            batches = []
            for i, numbers in zip(sides, columns, strict=True):
                of_side = RowRefs([chunk], None, rows[live]) if i == j else refs[i].take(queries[live])
                fields = [self._schemas[i].field(number) for number in numbers]
                batches.append(_batch(of_side.gather(numbers), fields, live.size))
            verdict = np.zeros(len(rows), np.bool_)
            if live.size:
                verdict[live] = condition.mask(*batches)
            keep = verdict
        return keep


def _batch(columns: list[pa.Array], fields: list[pa.Field], count: int) -> pa.RecordBatch:
    if columns:
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
    # A predicate may need no column of a side, and yet the number of pairs.
    return pa.record_batch({"": pa.nulls(count)}).select([])
