"""Parsing of durations such as ``"5 seconds"``."""

import re
from decimal import Decimal

from dovetail.core.errors import PlanError

__all__ = ["parse_duration_ms"]

_UNITS_MS = {
    "ms": 1,
    "millisecond": 1,
    "s": 1000,
    "second": 1000,
    "min": 60_000,
    "minute": 60_000,
    "h": 3_600_000,
    "hour": 3_600_000,
    "day": 86_400_000,
}
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE | re.ASCII)


def parse_duration_ms(name: str, value: str) -> int:
    """Convert a duration such as ``"5 seconds"``, ``"1.5 min"`` or ``"200 ms"`` to milliseconds.

    >>> [parse_duration_ms("max_delay", text) for text in ("5 seconds", "1.5 min", "200ms", "0 seconds")]
    [5000, 90000, 200, 0]
    >>> parse_duration_ms("max_delay", "soon")
    Traceback (most recent call last):
    dovetail.core.errors.PlanError: max_delay='soon' is not a duration. Write a number and a unit, ...
    """
    span = _SPAN.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = None if span is None else span[2].lower()
    if unit is not None and unit not in _UNITS_MS:
        unit = unit.removesuffix("s")
    if span is None or unit not in _UNITS_MS:
        raise PlanError(
            f"{name}={value!r} is not a duration.",
            hint='Write a number and a unit, such as "5 seconds", "200 ms" or "1 minute".',
        )
    return int(Decimal(span[1]) * _UNITS_MS[unit])
