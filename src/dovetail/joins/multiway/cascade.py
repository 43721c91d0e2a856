"""Outer joins of many inputs, as SQL cascades them: ``a LEFT JOIN b ... FULL JOIN c ...``.

Every input after the first has a join type, and is joined in this order with the result so far. The join columns are
those of SQL's ``USING``, as in Spark's ``join(other, on=[...], how)``: of a row that lacks an input, a join column has
the value of the first input that the row has. A window or a condition between two inputs belongs to the join of the
later one; a condition on an input that a row lacks is not satisfied. After a semi or anti join, the columns of its
input are gone.

A cascade is a tree of joins of two (`tree_nodes`), but that inner joins in a row are one join where they share a join
column. A row without a match leaves a join only once the watermark has passed its window, and then meets the next
input: so the watermark of each join is behind that of the join below it (`MJoin.completed_time`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from dovetail.core.errors import PlanError
from dovetail.joins.multiway.graph import JoinGraph

__all__ = [
    "DROPPING", "UNMATCHED", "JoinTypes", "MultiJoinType", "carried_inputs", "cascade_tree", "nullable_inputs",
    "resolved_join_type",
]  # fmt: skip

MultiJoinType = Literal["inner", "left", "right", "full", "semi", "anti"]
JoinTypes = MultiJoinType | Mapping[str, MultiJoinType]
Cascade = tuple[MultiJoinType, ...]
DROPPING = ("semi", "anti")
UNMATCHED = ("left", "right", "full", "anti")
"""The join types that emit rows without a match."""


def resolved_join_type(names: Sequence[str], how: JoinTypes) -> tuple[MultiJoinType, Cascade]:
    """The type of one join of all inputs and, if it takes several, the type with which each input is joined.

    Examples
    --------
    >>> resolved_join_type("abc", {"a": "inner", "b": "left", "c": "full"})
    ('inner', ('inner', 'left', 'full'))
    >>> resolved_join_type("ab", {"b": "left"}), resolved_join_type("abc", "left")
    (('left', ()), ('left', ()))
    >>> resolved_join_type("abc", "full")
    ('inner', ('inner', 'full', 'full'))
    """
    types = get_args(MultiJoinType)
    if not isinstance(how, Mapping):
        if how not in types:
            raise PlanError(f"how={how!r} is none of {', '.join(types)}.")
        if len(names) == 2 or how in ("inner", "left"):
            return how, ()
        return "inner", ("inner", *([how] * (len(names) - 1)))
    strangers = [name for name in how if name not in names]
    if strangers:
        raise PlanError(f"how= names {strangers[0]!r}; the inputs are {', '.join(names)}.")
    missing = [name for name in names[1:] if name not in how]
    if missing:
        raise PlanError(
            f"how= does not say how {missing[0]!r} is joined.", hint=f'Add it: how={{..., {missing[0]!r}: "inner"}}.'
        )
    for name, kind in how.items():
        if kind not in types:
            raise PlanError(f"how={{{name!r}: {kind!r}}} is none of {', '.join(types)}.")
    if how.get(names[0], "inner") != "inner":
        raise PlanError(
            f"how={{{names[0]!r}: {how[names[0]]!r}}}: the first input is joined with nothing before it.",
            hint=f'Leave {names[0]!r} out of how=, or say "inner"; give the type to the input that is joined with it.',
        )
    kinds = tuple(how[name] for name in names[1:])
    if len(names) == 2:
        return kinds[0], ()
    return "inner", () if set(kinds) == {"inner"} else ("inner", *kinds)


def carried_inputs(names: Sequence[str], cascade: Cascade) -> tuple[str, ...]:
    """The inputs whose columns are in the result."""
    return tuple(name for name, kind in zip(names, cascade, strict=True) if kind not in DROPPING)


def nullable_inputs(names: Sequence[str], cascade: Cascade) -> frozenset[str]:
    """The inputs that a row of the result may lack.

    Examples
    --------
    >>> sorted(nullable_inputs("abcd", ("inner", "left", "full", "inner")))
    ['a', 'b', 'c']
    """
    lacking: set[str] = set()
    for place, kind in enumerate(cascade):
        if kind in ("right", "full"):
            lacking |= set(names[:place])
        if kind in ("left", "full"):
            lacking.add(names[place])
    return frozenset(lacking)


def cascade_tree(graph: JoinGraph, cascade: Cascade) -> list[Any]:
    """The plan of a cascade, as nested lists.

    Examples
    --------
    >>> graph = JoinGraph.of({name: ["k"] for name in "abcde"}, on="k")
    >>> cascade_tree(graph, ("inner", "inner", "left", "inner", "inner"))
    [[['a', 'b'], 'c'], 'd', 'e']
    """
    names = graph.inputs
    _check_dropped(graph, cascade)
    tree: Any = names[0]
    place, gone = 1, set[str]()
    while place < len(names):
        group = [names[place]]
        before = [name for name in names[:place] if name not in gone]
        if not graph.shared(before, group):
            raise PlanError(
                f"Nothing links {names[place]!r} with the inputs before it: {', '.join(before)}.",
                hint=f"A cascade is joined in the order of the inputs: name {names[place]!r} after an input that it is "
                "joined with, or add an equality.",
            )
        while (
            cascade[place] == "inner"
            and place + len(group) < len(names)
            and cascade[place + len(group)] == "inner"
            and _share_one(graph, before, [*group, names[place + len(group)]])
        ):
            group.append(names[place + len(group)])
        if cascade[place] in DROPPING:
            gone.add(names[place])
        tree = [tree, *group]
        place += len(group)
    return list(tree)


def _share_one(graph: JoinGraph, before: Sequence[str], others: Sequence[str]) -> bool:
    """Whether one join attribute links the result so far with each of the others."""
    return any(set(before) & set(a.columns) and set(others) <= set(a.columns) for a in graph.attributes)


def _check_dropped(graph: JoinGraph, cascade: Cascade) -> None:
    """Refuse equalities with a column that a semi or anti join has dropped."""
    for attribute in graph.attributes:
        held = False
        for place, name in enumerate(graph.inputs):
            if name not in attribute.columns:
                continue
            before = [other for other in graph.inputs[:place] if other in attribute.columns]
            if before and not held:
                raise PlanError(
                    f"{name!r} is joined by {name}.{attribute.columns[name][0]} with {before[0]!r}, whose columns are "
                    "gone after its semi or anti join.",
                    hint=f"Join {name!r} before {before[0]!r}, or by a column of another input.",
                )
            held = held or cascade[place] not in DROPPING
