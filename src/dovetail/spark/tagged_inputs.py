"""Several inputs as the rows of one DataFrame: each row says which input it is of, and inputs share columns of a type.

A micro-batch is one DataFrame, so the inputs of a multi-way join travel as one. A column of their own for every column
of every input would mostly carry NULLs through the shuffle; instead there are *slots*, as many of each type as the
input that has the most columns of that type needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.relation.format import CODE_COLUMN, CodeKind
from dovetail.spark.codes import code_column, quoted
from dovetail.spark.payload import encode, encoded_schema

__all__ = ["INPUT_COLUMN", "SlotLayout", "tagged_union"]

INPUT_COLUMN = "__input"
"""The number of the input that a row is of."""


@dataclass(frozen=True)
class SlotLayout:
    """Which slot holds which column.

    Attributes
    ----------
    types
        The type of every slot, as it travels.
    places
        For each input, the slot of each of its columns, in order.

    Examples
    --------
    >>> a = T.StructType().add("k", "long").add("x", "string")
    >>> b = T.StructType().add("y", "string").add("z", "string").add("k", "long")
    >>> SlotLayout.of([a, b]).places
    ((0, 1), (1, 2, 0))
    """

    types: tuple[T.DataType, ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, schemas: Sequence[T.StructType]) -> "SlotLayout":
        """Slots for inputs of these columns."""
        types: list[T.DataType] = []
        places = []
        for schema in schemas:
            free = dict(enumerate(types))
            of_input = []
            for field in encoded_schema(schema):
                slot = next((number for number, kind in free.items() if kind == field.dataType), None)
                if slot is None:
                    slot = len(types)
                    types.append(field.dataType)
                else:
                    del free[slot]
                of_input.append(slot)
            places.append(tuple(of_input))
        return cls(tuple(types), tuple(places))

    @property
    def names(self) -> list[str]:
        """The slots' columns."""
        return [f"__slot{number}" for number in range(len(self.types))]


def tagged_union(
    inputs: Mapping[str, DataFrame], keys: Mapping[str, Sequence[str]], kind: CodeKind, layout: SlotLayout
) -> DataFrame:
    """The rows of all inputs, each with its input's number, its code and its columns in their slots."""
    parts = []
    for number, (name, df) in enumerate(inputs.items()):
        code = code_column(df.schema, keys[name], kind)
        coded = encode(df.select("*", code.alias(CODE_COLUMN)))
        values: list[Column] = [F.lit(None).cast(slot_type) for slot_type in layout.types]
        for field, slot in zip(df.schema, layout.places[number], strict=True):
            values[slot] = F.col(quoted(field.name))
        slots = [value.alias(slot) for value, slot in zip(values, layout.names, strict=True)]
        parts.append(coded.select(F.lit(number).alias(INPUT_COLUMN), F.col(CODE_COLUMN), *slots))
    rows = parts[0]
    for part in parts[1:]:
        rows = rows.union(part)
    return rows
