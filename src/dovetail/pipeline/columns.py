"""Columns without Spark: the schema in a file, and the columns after a step if they can be derived."""

import re
from collections.abc import Mapping, Sequence

from dovetail.pipeline.problems import one_of

__all__ = ["KnownColumns", "parse_schema", "selected_names"]

KnownColumns = dict[str, str] | None
"""Names with types (empty if unknown), in order; None if even the names are unknown without Spark."""

_TYPES = (
    *("bigint", "long", "int", "integer", "smallint", "short", "tinyint", "byte"),
    *("double", "float", "real", "decimal", "dec", "numeric", "boolean"),
    *("string", "varchar", "char", "binary", "date", "timestamp", "timestamp_ntz", "timestamp_ltz"),
    *("array", "map", "struct", "variant", "interval"),
)
_COLUMN = re.compile(r"\s*(?:`((?:[^`]|``)+)`|(\w+))\s*:?\s+([A-Za-z_]+)(.*)", re.DOTALL)
_PLAIN = re.compile(r"`((?:[^`]|``)+)`|([A-Za-z_]\w*)")
_ALIAS = re.compile(r".*\bas\s+(?:`((?:[^`]|``)+)`|(\w+))\s*", re.IGNORECASE | re.DOTALL)


def parse_schema(text: str) -> dict[str, str]:
    """Parse a schema such as ``id bigint, name string`` into names and types; a `ValueError` names an invalid column.

    >>> parse_schema("id BIGINT, tags array<string>, price decimal(10, 2) NOT NULL")
    {'id': 'bigint', 'tags': 'array', 'price': 'decimal'}
    >>> parse_schema("id bigin")
    Traceback (most recent call last):
    ValueError: Column 'id' has an unknown type 'bigin'. Did you mean 'bigint'?
    """
    columns: dict[str, str] = {}
    for part in _parts(text):
        match = _COLUMN.fullmatch(part)
        if match is None:
            raise ValueError(f"{part.strip()!r} is not a name and a type. Write, for example: id bigint, name string.")
        name, kind = _unquoted(match[1], match[2]), match[3].lower()
        if kind not in _TYPES:
            raise ValueError(f"Column {name!r} has an unknown type {kind!r}. {one_of(kind, _TYPES)}")
        if name in columns:
            raise ValueError(f"Column {name!r} is given twice.")
        columns[name] = kind
    return columns


def selected_names(expressions: Sequence[str], known: Mapping[str, str]) -> tuple[KnownColumns, list[str]]:
    """The columns that a list of expressions selects, and the plain names in it that do not exist.

    >>> selected_names(["id", "upper(city) AS town", "nme"], {"id": "bigint", "city": "string"})
    ({'id': 'bigint', 'town': '', 'nme': ''}, ['nme'])
    """
    columns: dict[str, str] = {}
    missing: list[str] = []
    for expression in expressions:
        text = expression.strip()
        plain = _PLAIN.fullmatch(text)
        alias = _ALIAS.fullmatch(text)
        if text == "*":
            columns |= known
        elif plain is not None:
            name = _unquoted(plain[1], plain[2])
            if name.casefold() not in {other.casefold() for other in known}:
                missing.append(name)
            columns[name] = known.get(name, "")
        elif alias is not None:
            columns[_unquoted(alias[1], alias[2])] = ""
        else:
            return None, missing
    return columns, missing


def _unquoted(quoted: str | None, plain: str | None) -> str:
    return quoted.replace("``", "`") if quoted is not None else str(plain)


def _parts(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    parts, depth, quote, start = [], 0, False, 0
    for place, letter in enumerate(text):
        if letter == "`":
            quote = not quote
        elif not quote and letter in "<(":
            depth += 1
        elif not quote and letter in ">)":
            depth -= 1
        elif letter == "," and depth == 0 and not quote:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]
