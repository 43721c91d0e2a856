"""Counters that every operator reports.

Counters never decrease. A rate over any interval is the difference of two copies, and the total of several shards is
a sum. Values that go up and down (pending tuples, held bytes) are properties of the operator itself.

Examples
--------
>>> metrics = OperatorMetrics()
>>> before = metrics.copy()
>>> metrics.stream_tuples_in += 1000
>>> metrics.matched_tuples += 900
>>> metrics.count_shed("oldest", 100)
>>> (metrics - before).per_second(seconds=2.0)["stream_tuples_in"]
500.0
>>> metrics.tuples_left
1000
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from dovetail.core.errors import InternalError, StateError

__all__ = ["OperatorMetrics"]


@dataclass(slots=True)
class OperatorMetrics:
    """Counters of one operator since it was created.

    Between two calls, every stream tuple submitted is in exactly one of four states::

        stream_tuples_in == matched_tuples + unmatched_tuples + shed_tuples + pending
    """

    stream_tuples_in: int = 0  # including those with a NULL key
    null_key_tuples: int = 0  # they leave as unmatched
    matched_tuples: int = 0  # counted once, when the tuple leaves
    unmatched_tuples: int = 0
    output_rows: int = 0
    cache_hits: int = 0  # tuples answered with cached rows
    negative_hits: int = 0  # tuples answered by a cached "no match"
    cache_insertions: int = 0
    negative_insertions: int = 0
    cache_evictions: int = 0
    disk_steps: int = 0  # iterations of the disk phase
    cycles: int = 0  # complete passes over the relation
    blocks_read: int = 0
    relation_rows_read: int = 0
    bytes_read: int = 0
    lookups: int = 0  # codes looked up in the relation's index
    pairs_rejected: int = 0  # equal codes, but a hash collision or the residual condition is false
    shed: dict[str, int] = field(default_factory=dict)  # tuples dropped under overload, per policy
    cpu_seconds: float = 0.0
    disk_seconds: float = 0.0

    @property
    def shed_tuples(self) -> int:
        """Tuples dropped under overload, over all policies."""
        return sum(self.shed.values())

    @property
    def tuples_left(self) -> int:
        """Stream tuples that no longer wait: matched, unmatched or shed."""
        return self.matched_tuples + self.unmatched_tuples + self.shed_tuples

    def count_shed(self, policy: str, tuples: int) -> None:
        self.shed[policy] = self.shed.get(policy, 0) + tuples

    def as_dict(self) -> dict[str, Any]:
        """Every counter by name; JSON-serializable."""
        return {name: dict(self.shed) if name == "shed" else getattr(self, name) for name in _NAMES}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Read the output of `as_dict`. Missing counters are 0; an unknown one raises a `StateError`."""
        unknown = sorted(set(saved) - set(_NAMES))
        if unknown:
            raise StateError(
                f"Saved metrics have counters that this version does not know: {', '.join(unknown)}.",
                hint="Read them with the version of Dovetail that wrote them.",
            )
        metrics = cls(**saved)
        metrics.shed = dict(metrics.shed)
        return metrics

    def copy(self) -> Self:
        return type(self)(**self.as_dict())

    def merge(self, other: "OperatorMetrics") -> None:
        """Add another operator's counters, in place."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for policy, tuples in other.shed.items():
            self.count_shed(policy, tuples)

    @classmethod
    def total(cls, parts: Iterable["OperatorMetrics"]) -> Self:
        total = cls()
        for part in parts:
            total.merge(part)
        return total

    def decreased_since(self, earlier: "OperatorMetrics") -> list[str]:
        """The counters that are smaller than before: empty unless something is wrong."""
        numbers = [name for name in _NUMBERS if getattr(self, name) < getattr(earlier, name)]
        shed = [f"shed[{policy}]" for policy, tuples in earlier.shed.items() if self.shed.get(policy, 0) < tuples]
        return numbers + shed

    def __sub__(self, earlier: "OperatorMetrics") -> Self:
        """The change since `earlier`, an older copy of the same counters."""
        decreased = self.decreased_since(earlier)
        if decreased:
            raise InternalError(f"Counters only grow, yet these are below their earlier value: {decreased}.")
        numbers = {name: getattr(self, name) - getattr(earlier, name) for name in _NUMBERS}
        shed = {policy: tuples - earlier.shed.get(policy, 0) for policy, tuples in self.shed.items()}
        return type(self)(**numbers, shed=shed)

    def per_second(self, seconds: float) -> dict[str, float]:
        """Divide every counter by `seconds`; ``shed`` is reported as ``shed_tuples``."""
        if not seconds > 0:
            raise ValueError(f"seconds={seconds}: a rate needs a duration above zero.")
        return {name: getattr(self, name) / seconds for name in (*_NUMBERS, "shed_tuples")}


_NAMES = tuple(column.name for column in fields(OperatorMetrics))
_NUMBERS = tuple(name for name in _NAMES if name != "shed")
