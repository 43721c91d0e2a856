"""Counters that every operator reports.

Counters only ever grow, so a rate over any interval is the difference of two copies, and the totals of
several shards are a sum. What goes up and down (how much waits, how many bytes are held) is asked of the
operator itself.

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

from dovetail.errors import InternalError, StateError

__all__ = ["OperatorMetrics"]


@dataclass(slots=True)
class OperatorMetrics:
    """What one operator has done since it was made.

    Every stream tuple that was offered is, at any moment between two calls, in exactly one of four places::

        stream_tuples_in == matched_tuples + unmatched_tuples + shed_tuples + pending

    Attributes
    ----------
    stream_tuples_in
        Stream tuples offered, those with a NULL key included.
    null_key_tuples
        Those of them whose key has a NULL; they leave as unmatched.
    matched_tuples, unmatched_tuples
        Stream tuples that have left, with and without a match; each counted once, at the moment it leaves.
    output_rows
        Rows emitted.
    cache_hits, negative_hits
        Stream tuples answered from the cache: with its rows, and by an entry that says "no match".
    cache_insertions, negative_insertions, cache_evictions
        Join values put into the cache with their rows, put there as "no match", and thrown out again.
    disk_steps
        Iterations of the disk phase.
    cycles
        Complete passes over the relation.
    blocks_read, relation_rows_read, bytes_read
        What the disk phase has read.
    lookups
        Codes looked up in the relation's index.
    pairs_rejected
        Pairs of equal codes that were no match: a residual condition said no, or the codes had collided.
    shed
        Stream tuples dropped under overload, per shedding policy.
    cpu_seconds, disk_seconds
        Time spent computing, and waiting for reads.

    Examples
    --------
    >>> OperatorMetrics(disk_steps=2, blocks_read=2).as_dict()["blocks_read"]
    2
    """

    stream_tuples_in: int = 0
    null_key_tuples: int = 0
    matched_tuples: int = 0
    unmatched_tuples: int = 0
    output_rows: int = 0
    cache_hits: int = 0
    negative_hits: int = 0
    cache_insertions: int = 0
    negative_insertions: int = 0
    cache_evictions: int = 0
    disk_steps: int = 0
    cycles: int = 0
    blocks_read: int = 0
    relation_rows_read: int = 0
    bytes_read: int = 0
    lookups: int = 0
    pairs_rejected: int = 0
    shed: dict[str, int] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    disk_seconds: float = 0.0

    @property
    def shed_tuples(self) -> int:
        """Stream tuples dropped under overload, all policies together."""
        return sum(self.shed.values())

    @property
    def tuples_left(self) -> int:
        """Stream tuples that wait no more: matched, unmatched or shed."""
        return self.matched_tuples + self.unmatched_tuples + self.shed_tuples

    def count_shed(self, policy: str, tuples: int) -> None:
        """Count stream tuples dropped by a policy.

        Examples
        --------
        >>> metrics = OperatorMetrics()
        >>> metrics.count_shed("random", 3)
        >>> metrics.shed, metrics.shed_tuples
        ({'random': 3}, 3)
        """
        self.shed[policy] = self.shed.get(policy, 0) + tuples

    def as_dict(self) -> dict[str, Any]:
        """Every counter by name, ready for JSON; the inverse of `from_dict`.

        Examples
        --------
        >>> import json
        >>> saved = json.dumps(OperatorMetrics(cycles=4, shed={"random": 1}).as_dict())
        >>> OperatorMetrics.from_dict(json.loads(saved)) == OperatorMetrics(cycles=4, shed={"random": 1})
        True
        """
        return {name: dict(self.shed) if name == "shed" else getattr(self, name) for name in _NAMES}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Read what `as_dict` wrote; a counter that it did not write is 0.

        Raises
        ------
        StateError
            If there is a name that is no counter of ours.
        """
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
        """An independent copy, to be compared with later.

        Examples
        --------
        >>> metrics = OperatorMetrics(shed={"random": 1})
        >>> before = metrics.copy()
        >>> metrics.count_shed("random", 1)
        >>> before.shed
        {'random': 1}
        """
        return type(self)(**self.as_dict())

    def merge(self, other: "OperatorMetrics") -> None:
        """Add another operator's counters to these, in place.

        Examples
        --------
        >>> total = OperatorMetrics(output_rows=1)
        >>> total.merge(OperatorMetrics(output_rows=2, shed={"random": 5}))
        >>> total.output_rows, total.shed
        (3, {'random': 5})
        """
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for policy, tuples in other.shed.items():
            self.count_shed(policy, tuples)

    @classmethod
    def total(cls, parts: Iterable["OperatorMetrics"]) -> Self:
        """The sum of several operators' counters.

        Examples
        --------
        >>> OperatorMetrics.total([OperatorMetrics(cycles=1), OperatorMetrics(cycles=2)]).cycles
        3
        """
        total = cls()
        for part in parts:
            total.merge(part)
        return total

    def decreased_since(self, earlier: "OperatorMetrics") -> list[str]:
        """Names of counters that are smaller than they were; empty unless something is wrong.

        Examples
        --------
        >>> OperatorMetrics(cycles=1).decreased_since(OperatorMetrics(cycles=2, shed={"random": 1}))
        ['cycles', 'shed[random]']
        """
        numbers = [name for name in _NUMBERS if getattr(self, name) < getattr(earlier, name)]
        shed = [f"shed[{policy}]" for policy, tuples in earlier.shed.items() if self.shed.get(policy, 0) < tuples]
        return numbers + shed

    def __sub__(self, earlier: "OperatorMetrics") -> Self:
        """What happened since ``earlier``, a copy of these same counters.

        Examples
        --------
        >>> (OperatorMetrics(cycles=5) - OperatorMetrics(cycles=2)).cycles
        3
        """
        decreased = self.decreased_since(earlier)
        if decreased:
            raise InternalError(f"Counters only grow, yet these are below their earlier value: {decreased}.")
        numbers = {name: getattr(self, name) - getattr(earlier, name) for name in _NUMBERS}
        shed = {policy: tuples - earlier.shed.get(policy, 0) for policy, tuples in self.shed.items()}
        return type(self)(**numbers, shed=shed)

    def per_second(self, seconds: float) -> dict[str, float]:
        """Every number divided by the time in which it came about; ``shed`` as ``shed_tuples``.

        Examples
        --------
        >>> OperatorMetrics(bytes_read=120).per_second(60)["bytes_read"]
        2.0
        """
        if not seconds > 0:
            raise ValueError(f"seconds={seconds}: a rate needs a time above zero.")
        return {name: getattr(self, name) / seconds for name in (*_NUMBERS, "shed_tuples")}


_NAMES = tuple(column.name for column in fields(OperatorMetrics))
_NUMBERS = tuple(name for name in _NAMES if name != "shed")
