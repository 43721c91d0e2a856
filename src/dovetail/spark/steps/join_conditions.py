"""The conditions of `multi_join`: comparisons between columns of two inputs as text, and condition objects.

``p.paid BETWEEN o.ordered AND o.ordered + INTERVAL 1 HOUR AND p.amount >= o.amount`` has comparisons joined by AND. A
column is written ``input.column``; the input may be left out where only one has such a column. Names with characters
other than letters, digits and underscores are written in backticks. An interval has a number and a unit from
microseconds to weeks; a day is 24 hours.

Comparisons of the event-time columns, but for ``!=``, are bounds of the window: they also bound the state. All others
are checked on rows whose join columns are equal.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from pyspark.sql import types as T

from dovetail.core.errors import PlanError
from dovetail.joins.conditions import Comparison, ComparisonOperator
from dovetail.joins.multiway import PairCondition, TimeBound, TimeDistance
from dovetail.spark.plan.names import NameResolver

__all__ = ["Compared", "JoinCondition", "JoinConditions", "parse_comparisons"]

JoinCondition = str | PairCondition | Sequence[str | PairCondition]

_TOKEN = re.compile(
    r"\s*(?:(?P<operator><=|>=|<>|!=|==|=|<|>)|(?P<quoted>`(?:[^`]|``)+`)|(?P<text>'[^']*')|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<word>[^\W\d]\w*)|(?P<sign>[+-])|(?P<dot>\.)|(?P<other>\S))"
)
_OPERATORS: dict[str, ComparisonOperator] = {"==": "=", "<>": "!="}
_MIRRORED: dict[ComparisonOperator, ComparisonOperator] = {
    "<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="
}  # fmt: skip
_UNITS_US = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_HINT = (
    "Write comparisons between columns of two inputs, joined by AND, such as 'p.paid BETWEEN o.ordered AND o.ordered + "
    "INTERVAL 1 HOUR'; for anything else pass a PairCondition with a BatchPredicate."
)


class Compared(NamedTuple):
    """``left operator right + shift_us``; the inputs in the order of the join. `shift_us` is None without intervals."""

    left: tuple[str, str]
    operator: ComparisonOperator
    right: tuple[str, str]
    shift_us: int | None


def parse_comparisons(text: str, columns: Mapping[str, Sequence[str]], resolver: NameResolver) -> list[Compared]:
    """Parse a condition on the columns of several inputs; a `PlanError` for any other text.

    Examples
    --------
    >>> rules = NameResolver(is_case_sensitive=False)
    >>> columns = {"o": ["id", "ordered"], "p": ["id", "paid"]}
    >>> parse_comparisons("paid >= ordered + INTERVAL 5 SECONDS", columns, rules)
    [Compared(left=('o', 'ordered'), operator='<=', right=('p', 'paid'), shift_us=-5000000)]
    """
    return [compared for part in _Parser(text, columns, resolver).comparisons() for compared in part]


class _Operand(NamedTuple):
    column: tuple[str, str]
    shift_us: int | None


class _Parser:
    """Reads one text from left to right."""

    def __init__(self, text: str, columns: Mapping[str, Sequence[str]], resolver: NameResolver) -> None:
        self._text, self._columns, self._resolver = text, columns, resolver
        self._tokens = [(str(m.lastgroup), m.group(str(m.lastgroup))) for m in _TOKEN.finditer(text.strip())]
        self._place = 0

    def comparisons(self) -> Iterable[list[Compared]]:
        yield self._comparison()
        while self._place < len(self._tokens):
            self._expect_word("and")
            yield self._comparison()

    def _comparison(self) -> list[Compared]:
        first = self._operand()
        if self._takes_word("between"):
            low = self._operand()
            self._expect_word("and")
            return [self._compared(first, ">=", low), self._compared(first, "<=", self._operand())]
        kind, token = self._next()
        if kind != "operator":
            raise self._wrong(f"{token!r} is not a comparison")
        operator: ComparisonOperator = _OPERATORS.get(token, token)  # type: ignore[arg-type]
        return [self._compared(first, operator, self._operand())]

    def _compared(self, left: _Operand, operator: ComparisonOperator, right: _Operand) -> Compared:
        if left.column[0] == right.column[0]:
            raise PlanError(
                f"condition {self._text!r} compares {left.column[1]!r} with {right.column[1]!r}, which are both "
                f"columns of {left.column[0]!r}.",
                hint="Filter that input by it before the join.",
            )
        names = list(self._columns)
        if names.index(left.column[0]) > names.index(right.column[0]):
            left, operator, right = right, _MIRRORED[operator], left
        if left.shift_us is None and right.shift_us is None:
            return Compared(left.column, operator, right.column, None)
        return Compared(left.column, operator, right.column, (right.shift_us or 0) - (left.shift_us or 0))

    def _operand(self) -> _Operand:
        column, shift_us = self._column(), None
        while self._place < len(self._tokens) and self._tokens[self._place][0] == "sign":
            sign = -1 if self._next()[1] == "-" else 1
            self._expect_word("interval")
            shift_us = (shift_us or 0) + sign * self._interval_us()
        return _Operand(column, shift_us)

    def _interval_us(self) -> int:
        kind, token = self._next()
        number, unit = token, ""
        if kind == "text":
            number, _, unit = token[1:-1].strip().partition(" ")
        if not unit.strip():
            unit = self._next()[1]
        unit = unit.strip().lower()
        known = _UNITS_US.get(unit) or _UNITS_US.get(unit.removesuffix("s"))
        if known is None or not re.fullmatch(r"-?\d+(\.\d+)?", number):
            raise self._wrong(f"'INTERVAL {number} {unit}' is not an interval of {', '.join(_UNITS_US)}")
        return int(Decimal(number) * known)

    def _column(self) -> tuple[str, str]:
        name = self._name()
        if self._place < len(self._tokens) and self._tokens[self._place][0] == "dot":
            self._next()
            return self._qualified(name, self._name())
        having = [n for n, columns in self._columns.items() if self._resolver.numbers_of(name, columns)]
        if len(having) > 1:
            raise PlanError(
                f"condition {self._text!r}: {', '.join(having)} all have a column {name!r}.",
                hint=f"Write {having[0]}.{name}, or that of another input.",
            )
        if not having:
            raise PlanError(
                f"condition {self._text!r}: no input has a column {name!r}.",
                hint="; ".join(f"{n} has {', '.join(columns)}" for n, columns in self._columns.items()) + ".",
            )
        return self._qualified(having[0], name)

    def _qualified(self, name: str, column: str) -> tuple[str, str]:
        if name not in self._columns:
            raise PlanError(
                f"condition {self._text!r}: there is no input {name!r}.",
                hint=f"The inputs are {', '.join(self._columns)}.",
            )
        names = self._columns[name]
        return name, names[self._resolver.number_of(column, names, f"condition {self._text!r}: input {name!r}")]

    def _name(self) -> str:
        kind, token = self._next()
        if kind == "quoted":
            return token[1:-1].replace("``", "`")
        if kind != "word":
            raise self._wrong(f"{token!r} is not a column")
        return token

    def _next(self) -> tuple[str, str]:
        if self._place == len(self._tokens):
            raise self._wrong("it is incomplete")
        self._place += 1
        return self._tokens[self._place - 1]

    def _takes_word(self, word: str) -> bool:
        is_there = self._tokens[self._place : self._place + 1] and self._tokens[self._place][1].lower() == word
        self._place += bool(is_there)
        return bool(is_there)

    def _expect_word(self, word: str) -> None:
        kind, token = self._next()
        if kind != "word" or token.lower() != word:
            raise self._wrong(f"{token!r} stands where {word.upper()} was expected")

    def _wrong(self, what: str) -> PlanError:
        return PlanError(f"condition {self._text!r}: {what}.", hint=_HINT)


@dataclass(frozen=True)
class JoinConditions:
    """The conditions of a join: bounds between event times, and all others."""

    bounds: tuple[TimeBound, ...] = ()
    others: tuple[PairCondition, ...] = ()

    @classmethod
    def of(
        cls,
        condition: JoinCondition | None,
        schemas: Mapping[str, T.StructType],
        times: Mapping[str, str],
        resolver: NameResolver,
    ) -> "JoinConditions":
        """Read what a user gave; ``times`` are the event-time columns, as far as they are named."""
        if condition is None:
            return cls()
        ends: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        others: list[PairCondition] = []
        columns = {name: schema.names for name, schema in schemas.items()}
        for each in [condition] if isinstance(condition, str | PairCondition) else condition:
            if not isinstance(each, str):
                others.append(each)
                continue
            for compared in parse_comparisons(each, columns, resolver):
                (left, ours), operator, (right, theirs), _ = compared
                is_of_times = times.get(left) == ours and times.get(right) == theirs and operator != "!="
                if not is_of_times:
                    others.append(_pair_condition(each, compared, schemas))
                    continue
                _check_moments(each, compared, schemas)
                low, high = _distance(compared)
                lows, highs = ends.setdefault((left, right), ([], []))
                lows += [] if low is None else [low]
                highs += [] if high is None else [high]
        bounds = [
            TimeBound(*pair, max(lows, default=None), min(highs, default=None)) for pair, (lows, highs) in ends.items()
        ]
        return cls(tuple(bounds), tuple(others))


def _distance(compared: Compared) -> tuple[int | None, int | None]:
    """How much later the right column is at least and at most."""
    # left <= right + shift, that is: right - left >= -shift
    shift = -(compared.shift_us or 0)
    distances: dict[str, tuple[int | None, int | None]] = {
        "<=": (shift, None),
        "<": (shift + 1, None),
        ">=": (None, shift),
        ">": (None, shift - 1),
        "=": (shift, shift),
    }
    return distances[compared.operator]


def _pair_condition(text: str, compared: Compared, schemas: Mapping[str, T.StructType]) -> PairCondition:
    (left, ours), operator, (right, theirs), shift_us = compared
    if shift_us is None:
        _check_comparable(text, compared, schemas)
        return PairCondition(left, right, Comparison(ours, operator, theirs))
    _check_moments(text, compared, schemas)
    if operator == "!=":
        raise PlanError(f"condition {text!r}: an interval with !=.", hint="Pass a PairCondition with a BatchPredicate.")
    return PairCondition(left, right, TimeDistance(ours, theirs, *_distance(compared)))


def _kinds(compared: Compared, schemas: Mapping[str, T.StructType]) -> list[T.DataType]:
    return [schemas[name][column].dataType for name, column in (compared.left, compared.right)]


def _check_moments(text: str, compared: Compared, schemas: Mapping[str, T.StructType]) -> None:
    kinds = _kinds(compared, schemas)
    if kinds[0] != kinds[1] or not isinstance(kinds[0], T.TimestampType | T.TimestampNTZType):
        types = " and ".join(kind.simpleString() for kind in kinds)
        raise PlanError(
            f"condition {text!r}: {'.'.join(compared.left)} and {'.'.join(compared.right)} are {types}; times that are "
            "compared with an interval, or as event times, are timestamps of one kind.",
            hint="Cast them to timestamp.",
        )


def _check_comparable(text: str, compared: Compared, schemas: Mapping[str, T.StructType]) -> None:
    """Refuse types that Spark compares after a cast that is not exact in Arrow, or by a collation."""
    kinds = _kinds(compared, schemas)
    exact = (T.IntegralType, T.DecimalType)
    is_known = (
        kinds[0] == kinds[1]
        or all(isinstance(kind, exact) for kind in kinds)
        or all(isinstance(kind, T.IntegralType | T.DoubleType) for kind in kinds)
        or all(isinstance(kind, T.FractionalType) and not isinstance(kind, T.DecimalType) for kind in kinds)
    )
    has_collation = isinstance(kinds[0], T.StringType) and kinds[0] != T.StringType()
    if not is_known or has_collation:
        types = " and ".join(kind.simpleString() for kind in kinds)
        raise PlanError(
            f"condition {text!r}: {'.'.join(compared.left)} and {'.'.join(compared.right)} are {types}, which are not "
            "compared as they are.",
            hint="Cast one of them.",
        )
