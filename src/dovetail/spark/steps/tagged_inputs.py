"""Several inputs as the rows of one DataFrame: each row has the number of its input, and inputs share columns by type.

A micro-batch is one DataFrame, so the inputs of a multi-way join travel as one. Separate columns for every input would
mostly carry NULLs through the shuffle. Instead there are *slots*: for each type, as many as the input with the most
columns of that type needs. A join column that is its own code needs no slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.relation.format import CODE_COLUMN, CodeKind
from dovetail.spark.plan.codes import INTEGRAL, code_column, quoted
from dovetail.spark.plan.payload import encode, encoded_schema

__all__ = ["INPUT_COLUMN", "Member", "SlotLayout", "code_names", "tagged", "tagged_union"]

INPUT_COLUMN = "__input"
"""The number of the input that a row is of."""


def code_names(count: int) -> list[str]:
    """The columns of a row's codes; first that of the attribute it is routed by."""
    return [CODE_COLUMN, *(f"{CODE_COLUMN}{number}" for number in range(1, count))]


@dataclass(frozen=True)
class Member:
    """A member of a join: an input, or the results of another join."""

    number: int  # the tag of its rows
    schema: T.StructType
    keys: tuple[tuple[tuple[str, ...], CodeKind], ...]  # columns and code per join attribute; first the one routed by

    def code_of(self, column: str) -> int | None:
        """The number of the code that equals a column, or None."""
        for number, (columns, kind) in enumerate(self.keys):
            if columns == (column,) and kind == "value" and isinstance(self.schema[column].dataType, INTEGRAL):
                return number
        return None


@dataclass(frozen=True)
class SlotLayout:
    """Which slot holds which column.

    >>> a = T.StructType().add("k", "long").add("x", "string").add("n", "long")
    >>> b = T.StructType().add("y", "string").add("z", "string").add("k", "long")
    >>> key = ((("k",), "value"),)
    >>> SlotLayout.of([Member(0, a, key), Member(1, b, key)]).places
    ((-1, 0, 1), (0, 2, -1))
    """

    types: tuple[T.DataType, ...]  # of every slot, as encoded
    places: tuple[tuple[int, ...], ...]  # per input, the slot of each column; -1 - n: the column is code number n

    @classmethod
    def of(cls, members: Sequence[Member]) -> "SlotLayout":
        """Slots for the columns of the members, in the order of their numbers."""
        types: list[T.DataType] = []
        places = []
        for member in members:
            free = dict(enumerate(types))
            of_input = []
            for field in encoded_schema(member.schema):
                code = member.code_of(field.name)
                if code is not None:
                    of_input.append(-1 - code)
                    continue
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
        return [f"__slot{number}" for number in range(len(self.types))]


def tagged(df: DataFrame, member: Member, layout: SlotLayout, codes: int) -> DataFrame:
    """The rows of one member with its number, its codes, and its columns in their slots."""
    found = [code_column(df.schema, columns, kind) for columns, kind in member.keys]
    found += [F.lit(None).cast("long")] * (codes - len(found))
    names = code_names(codes)
    coded = encode(df.select("*", *(code.alias(name) for code, name in zip(found, names, strict=True))))
    values: list[Column] = [F.lit(None).cast(slot_type) for slot_type in layout.types]
    for field, slot in zip(df.schema, layout.places[member.number], strict=True):
        if slot >= 0:
            values[slot] = F.col(quoted(field.name))
    slots = [value.alias(slot) for value, slot in zip(values, layout.names, strict=True)]
    return coded.select(F.lit(member.number).alias(INPUT_COLUMN), *map(F.col, names), *slots)


def tagged_union(
    inputs: Mapping[str, DataFrame], members: Mapping[str, Member], layout: SlotLayout, codes: int
) -> DataFrame:
    parts = [tagged(df, members[name], layout, codes) for name, df in inputs.items()]
    rows = parts[0]
    for part in parts[1:]:
        rows = rows.union(part)
    return rows
