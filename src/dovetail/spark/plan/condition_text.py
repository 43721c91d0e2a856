"""Parses conditions written as text: comparisons of a stream column with a relation column, joined by AND.

``valid_from <= ts AND ts < valid_to`` becomes a `Range`, which ``mesh`` can search in order; other comparisons stay as
they are. A name that both sides have is written ``stream.name`` or ``relation.name``. Names with characters other than
letters, digits and underscores are written in backticks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.core.errors import PlanError
from dovetail.joins.conditions import AllOf, Comparison, ComparisonOperator, Condition, Range
from dovetail.spark.plan.names import NameResolver

__all__ = ["parse_condition"]

_TOKEN = re.compile(
    r"\s*(?:(?P<operator><=|>=|<>|!=|==|=|<|>)|(?P<quoted>`(?:[^`]|``)+`)|(?P<word>[^\W\d]\w*)|(?P<dot>\.)|(?P<other>\S))"
)
_OPERATORS: dict[str, ComparisonOperator] = {"==": "=", "<>": "!="}
_MIRRORED: dict[str, ComparisonOperator] = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
_HINT = (
    "Write comparisons between a column of the stream and one of the relation, joined by AND, such as "
    "'valid_from <= ts AND ts < valid_to'; for anything else pass a dovetail.joins.BatchPredicate."
)


@dataclass(frozen=True)
class _Name:
    side: str | None
    name: str


def parse_condition(text: str, stream: Sequence[str], relation: Sequence[str], resolver: NameResolver) -> Condition:
    """Parse a condition on the columns of a stream and a relation.

    Raises a `PlanError` for any other text, a name that belongs to neither or both sides, or a comparison within one
    side.

    Examples
    --------
    >>> rules = NameResolver(is_case_sensitive=False)
    >>> parse_condition("low <= ts AND ts < high", ["id", "ts"], ["low", "high"], rules).describe()
    'relation.low <= stream.ts < relation.high'
    >>> parse_condition("relation.price >= stream.price", ["price"], ["price"], rules).describe()
    'stream.price <= relation.price'
    """
    comparisons = []
    for part in _split_at_and(_tokens(text), text):
        left, operator, right = _sides(part, text)
        sides = [_resolved(name, stream, relation, resolver, text) for name in (left, right)]
        if {side for side, _ in sides} != {"stream", "relation"}:
            raise PlanError(
                f"condition {text!r} compares {left.name!r} with {right.name!r}, which are both columns of the "
                f"{sides[0][0]}.",
                hint="Filter that side by it before the join.",
            )
        if sides[0][0] == "stream":
            comparisons.append(Comparison(sides[0][1], operator, sides[1][1]))
        else:
            comparisons.append(Comparison(sides[1][1], _MIRRORED[operator], sides[0][1]))
    conditions = _with_ranges(comparisons)
    return conditions[0] if len(conditions) == 1 else AllOf(*conditions)


def _tokens(text: str) -> list[tuple[str, str]]:
    found = []
    for match in _TOKEN.finditer(text.strip()):
        kind = str(match.lastgroup)
        found.append((kind, match.group(kind)))
    return found


def _split_at_and(tokens: list[tuple[str, str]], text: str) -> list[list[tuple[str, str]]]:
    parts: list[list[tuple[str, str]]] = [[]]
    for kind, token in tokens:
        if kind == "word" and token.lower() == "and":
            parts.append([])
        else:
            parts[-1].append((kind, token))
    if not all(parts):
        raise PlanError(f"condition {text!r} is incomplete.", hint=_HINT)
    return parts


def _sides(part: list[tuple[str, str]], text: str) -> tuple[_Name, ComparisonOperator, _Name]:
    places = [place for place, (kind, _) in enumerate(part) if kind == "operator"]
    if len(places) != 1:
        raise PlanError(f"condition {text!r}: {_text_of(part)!r} is not a comparison of two columns.", hint=_HINT)
    token = part[places[0]][1]
    operator: ComparisonOperator = _OPERATORS.get(token, token)  # type: ignore[arg-type]
    return _name(part[: places[0]], text), operator, _name(part[places[0] + 1 :], text)


def _name(tokens: list[tuple[str, str]], text: str) -> _Name:
    kinds = [kind for kind, _ in tokens]
    names = [token[1:-1].replace("``", "`") if kind == "quoted" else token for kind, token in tokens if kind != "dot"]
    is_name = len(kinds) == 1 and kinds[0] in ("word", "quoted")
    is_qualified = len(kinds) == 3 and kinds[1] == "dot" and {kinds[0], kinds[2]} <= {"word", "quoted"}
    if is_qualified and names[0].lower() in ("stream", "relation"):
        return _Name(names[0].lower(), names[1])
    if not is_name:
        raise PlanError(f"condition {text!r}: {_text_of(tokens)!r} is not a column.", hint=_HINT)
    return _Name(None, names[0])


def _text_of(tokens: list[tuple[str, str]]) -> str:
    return " ".join(token for _, token in tokens)


def _resolved(
    name: _Name, stream: Sequence[str], relation: Sequence[str], resolver: NameResolver, text: str
) -> tuple[str, str]:
    """The side and the spelling of a name."""
    owners = {"stream": stream, "relation": relation}
    if name.side is not None:
        names = owners[name.side]
        return name.side, names[resolver.number_of(name.name, names, f"condition {text!r}: the {name.side}")]
    having = [side for side, names in owners.items() if resolver.numbers_of(name.name, names)]
    if not having:
        raise PlanError(
            f"condition {text!r}: neither side has a column {name.name!r}.",
            hint=f"The stream has {', '.join(stream)}; the relation has {', '.join(relation)}.",
        )
    if len(having) > 1:
        raise PlanError(
            f"condition {text!r}: both sides have a column {name.name!r}.",
            hint=f"Write stream.{name.name} or relation.{name.name}.",
        )
    names = owners[having[0]]
    return having[0], names[resolver.number_of(name.name, names, f"condition {text!r}: the {having[0]}")]


def _with_ranges(comparisons: list[Comparison]) -> list[Condition]:
    """Combine a lower and an upper bound of the same stream column into a range."""
    conditions: list[Condition] = []
    left = list(comparisons)
    while left:
        first = left.pop(0)
        wanted = {"<": "> >=", "<=": "> >=", ">": "< <=", ">=": "< <="}.get(first.operator, "").split()
        other = next((c for c in left if c.stream_column == first.stream_column and c.operator in wanted), None)
        if other is None:
            conditions.append(first)
            continue
        left.remove(other)
        low, high = (first, other) if first.operator.startswith(">") else (other, first)
        conditions.append(
            Range(
                first.stream_column,
                low.relation_column,
                high.relation_column,
                includes_low=low.operator == ">=",
                includes_high=high.operator == "<=",
            )
        )
    return conditions
