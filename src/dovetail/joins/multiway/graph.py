"""The join graph of a multi-way join: which columns of which inputs must be equal.

Equality is transitive, so columns linked by equalities form one *join attribute*; each input may use its own column
name for it. Attributes shared by exactly the same inputs form one composite attribute: a row must agree in all of them,
and one hash covers them all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.core.errors import PlanError

__all__ = ["Equality", "JoinAttribute", "JoinGraph", "OnClause"]

Column = tuple[str, str]
Equality = tuple[str | Column, str | Column]
OnClause = str | Sequence[str] | Sequence[Equality] | Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class JoinAttribute:
    """Columns whose values are equal in every result."""

    name: str  # used in results and code columns; taken from the first input that has it
    columns: Mapping[str, tuple[str, ...]]  # per input that has it, its columns, in the same order everywhere

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.columns)


@dataclass(frozen=True)
class JoinGraph:
    """Inputs and the join attributes that link them; always connected.

    Examples
    --------
    >>> columns = {"a": ["x", "u"], "b": ["y", "z"], "c": ["z"]}
    >>> graph = JoinGraph.of(columns, on=[("a.x", "b.y"), ("b.z", "c.z")])
    >>> [(attribute.name, attribute.inputs) for attribute in graph.attributes]
    [('x', ('a', 'b')), ('z', ('b', 'c'))]
    >>> graph.star is None, JoinGraph.of({"a": ["k"], "b": ["k"]}, on="k").star.name
    (True, 'k')
    """

    inputs: tuple[str, ...]
    attributes: tuple[JoinAttribute, ...]

    @classmethod
    def of(cls, columns: Mapping[str, Iterable[str]], on: OnClause) -> "JoinGraph":
        """Parse a user's `on`, given the columns of each input.

        `on` is a name or names that every input has; a mapping from each input to its own names, in the same order; or
        a list of equalities between two columns, each written ``"input.column"`` or ``(input, column)``. A missing
        column, or inputs that no equality links, are a `PlanError`.
        """
        available = {name: set(names) for name, names in columns.items()}
        if len(available) < 2:
            raise PlanError(f"A join has at least two inputs, not {len(available)}.")
        classes = _Classes(list(available))
        for left, right in _equalities(list(available), on):
            for name, column in (left, right):
                _check_column(available, name, column)
            classes.link(left, right)
        graph = cls(tuple(available), classes.attributes())
        graph._check_connected()
        return graph

    @property
    def star(self) -> JoinAttribute | None:
        """The attribute that every input has, if any."""
        return next((a for a in self.attributes if len(a.columns) == len(self.inputs)), None)

    def shared(self, left: Iterable[str], right: Iterable[str]) -> tuple[JoinAttribute, ...]:
        """The attributes that two groups of inputs share."""
        ours, theirs = set(left), set(right)
        return tuple(a for a in self.attributes if ours & set(a.columns) and theirs & set(a.columns))

    def restricted(self, names: Iterable[str]) -> "JoinGraph":
        """The subgraph of some inputs, without attributes that only one of them has."""
        kept = [name for name in self.inputs if name in set(names)]
        parts = []
        for attribute in self.attributes:
            columns = {name: attribute.columns[name] for name in kept if name in attribute.columns}
            if len(columns) > 1:
                parts.append(JoinAttribute(attribute.name, columns))
        return JoinGraph(tuple(kept), tuple(parts))

    def is_connected(self) -> bool:
        reached, grew = {self.inputs[0]}, True
        while grew:
            linked = {n for a in self.attributes if reached & set(a.columns) for n in a.columns}
            grew = not linked <= reached
            reached |= linked
        return len(reached) == len(self.inputs)

    def as_dict(self) -> dict[str, Any]:
        """The graph as JSON-able data."""
        attributes = [{"name": a.name, "columns": {n: list(c) for n, c in a.columns.items()}} for a in self.attributes]
        return {"inputs": list(self.inputs), "attributes": attributes}

    def _check_connected(self) -> None:
        if self.is_connected():
            return
        reached: set[str] = {self.inputs[0]}
        for _ in self.inputs:
            reached |= {n for a in self.attributes if reached & set(a.columns) for n in a.columns}
        others = [name for name in self.inputs if name not in reached]
        raise PlanError(
            f"The join graph is not connected: nothing links {', '.join(sorted(reached))} with {', '.join(others)}.",
            hint="Add an equality between the two sides; a stream join cannot be a cross product.",
        )


class _Classes:
    """Union-find over columns linked by equalities."""

    def __init__(self, inputs: list[str]) -> None:
        self._inputs = inputs
        self._parent: dict[Column, Column] = {}

    def link(self, left: Column, right: Column) -> None:
        # The first column stays first: results use its name.
        self._parent[self._root(right)] = self._root(left)

    def attributes(self) -> tuple[JoinAttribute, ...]:
        by_root: dict[Column, dict[str, str]] = {}
        for name, column in self._parent:
            members = by_root.setdefault(self._root((name, column)), {})
            if name in members:
                raise PlanError(
                    f"These equalities also make {name}.{members[name]} equal to {name}.{column}.",
                    hint=f"Filter {name} by that equality first, and join on one of the two columns.",
                )
            members[name] = column
        composite: dict[tuple[str, ...], list[dict[str, str]]] = {}
        for members in by_root.values():
            inputs = tuple(name for name in self._inputs if name in members)
            composite.setdefault(inputs, []).append(members)
        attributes: list[JoinAttribute] = []
        for inputs, parts in composite.items():
            name = "_".join(members[inputs[0]] for members in parts)
            taken = {a.name for a in attributes}
            while name in taken:
                name += "_"
            attributes.append(JoinAttribute(name, {n: tuple(m[n] for m in parts) for n in inputs}))
        return tuple(sorted(attributes, key=lambda a: -len(a.columns)))

    def _root(self, column: Column) -> Column:
        self._parent.setdefault(column, column)
        while self._parent[column] != column:
            column = self._parent[column]
        return column


def _equalities(inputs: list[str], on: OnClause) -> list[tuple[Column, Column]]:
    if isinstance(on, Mapping):
        named = {name: [value] if isinstance(value, str) else list(value) for name, value in on.items()}
        strangers = [name for name in named if name not in inputs] + [name for name in inputs if name not in named]
        if strangers or len({len(names) for names in named.values()}) != 1:
            raise PlanError(
                f"on={dict(on)!r} does not name the same number of columns for each of {', '.join(inputs)}.",
                hint="Give every input its join column, or the same number of them.",
            )
        rows = zip(*(named[name] for name in inputs), strict=True)
        return [((inputs[0], row[0]), (name, column)) for row in rows for name, column in zip(inputs, row, strict=True)]
    parts: list[Any] = [on] if isinstance(on, str) else list(on)
    if not parts:
        raise PlanError("on= names no join column.", hint='Give a column name, or equalities such as ("a.x", "b.y").')
    if all(isinstance(part, str) for part in parts):
        return [((inputs[0], column), (name, column)) for column in parts for name in inputs]
    if not all(isinstance(part, tuple | list) and len(part) == 2 for part in parts):
        raise PlanError(f"on={on!r} is neither names nor equalities.", hint='An equality is ("a.x", "b.y").')
    return [(_column(left, inputs), _column(right, inputs)) for left, right in parts]


def _column(written: Any, inputs: list[str]) -> Column:
    if isinstance(written, tuple | list) and len(written) == 2:
        return str(written[0]), str(written[1])
    # The name of an input may contain a dot.
    for name in sorted(inputs, key=len, reverse=True):
        if isinstance(written, str) and written.startswith(f"{name}."):
            return name, written[len(name) + 1 :]
    raise PlanError(f"{written!r} does not name a column of an input.", hint='Write it as "input.column".')


def _check_column(available: Mapping[str, set[str]], name: str, column: str) -> None:
    if name not in available:
        raise PlanError(f"There is no input {name!r}; the inputs are {', '.join(available)}.")
    if column not in available[name]:
        raise PlanError(
            f"Input {name!r} has no column {column!r}; its columns are {', '.join(sorted(available[name]))}."
        )
