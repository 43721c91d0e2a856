"""Several inputs as the rows of one DataFrame: each row says which input it is of, and inputs share columns of a type.

A micro-batch is one DataFrame, so the inputs of a multi-way join travel as one. A column of their own for every column
of every input would mostly carry NULLs through the shuffle; instead there are *slots*, as many of each type as the
input that has the most columns of that type needs. A join column that is its own code takes none: the code tells it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.relation.format import CODE_COLUMN, CodeKind
from dovetail.spark.codes import INTEGRAL, code_column, quoted
from dovetail.spark.payload import encode, encoded_schema

__all__ = ["INPUT_COLUMN", "Member", "SlotLayout", "code_names", "tagged", "tagged_union"]

INPUT_COLUMN = "__input"
"""The number of the input that a row is of."""


def code_names(count: int) -> list[str]:
    """The columns of a row's codes, that of the attribute it is routed by first.

    Examples
    --------
    >>> code_names(2)
    ['__code', '__code1']
    """
    return [CODE_COLUMN, *(f"{CODE_COLUMN}{number}" for number in range(1, count))]


@dataclass(frozen=True)
class Member:
    """What is joined somewhere: an input, or what another join gives.

    Attributes
    ----------
    number
        What its rows are tagged with.
    schema
        Its columns, in Spark's types.
    keys
        The columns of each join attribute that it has where it is joined, and the kind of their code; the attribute
        that rows are routed by first.
    """

    number: int
    schema: T.StructType
    keys: tuple[tuple[tuple[str, ...], CodeKind], ...]

    def code_of(self, column: str) -> int | None:
        """The number of the code that a column can be read from; None where it cannot."""
        for number, (columns, kind) in enumerate(self.keys):
            if columns == (column,) and kind == "value" and isinstance(self.schema[column].dataType, INTEGRAL):
                return number
        return None


@dataclass(frozen=True)
class SlotLayout:
    """Which slot holds which column.

    Attributes
    ----------
    types
        The type of every slot, as it travels.
    places
        For each input, the slot of each of its columns, in order; -1 - n where code number n tells the column.

    Examples
    --------
    >>> a = T.StructType().add("k", "long").add("x", "string").add("n", "long")
    >>> b = T.StructType().add("y", "string").add("z", "string").add("k", "long")
    >>> key = ((("k",), "value"),)
    >>> SlotLayout.of([Member(0, a, key), Member(1, b, key)]).places
    ((-1, 0, 1), (0, 2, -1))
    """

    types: tuple[T.DataType, ...]
    places: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, members: Sequence[Member]) -> "SlotLayout":
        """Slots for the columns of these, in the order of their numbers."""
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
        """The slots' columns."""
        return [f"__slot{number}" for number in range(len(self.types))]


def tagged(df: DataFrame, member: Member, layout: SlotLayout, codes: int) -> DataFrame:
    """The rows of one member, each with the member's number, so many codes, and its columns in their slots."""
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
    """The rows of all inputs."""
    parts = [tagged(df, members[name], layout, codes) for name, df in inputs.items()]
    rows = parts[0]
    for part in parts[1:]:
        rows = rows.union(part)
    return rows
