"""Operators that stay alive in a worker between micro-batches, each with the one state it may continue from.

A worker does not own a shard: its next task may be of another one, and a micro-batch may run again. So an operator is
taken out for use, and returned with the id of the state it is in.
"""

from typing import Any, Protocol

__all__ = ["LIVE", "LiveOperators"]


class _Sized(Protocol):
    def size(self) -> int: ...


class LiveOperators:
    """Operators by step and shard."""

    def __init__(self) -> None:
        self._operators: dict[tuple[str, int], tuple[str, _Sized]] = {}

    def __len__(self) -> int:
        return len(self._operators)

    def take(self, owner: str, shard: int, state_id: str) -> Any:
        """Remove the operator of a shard; returns it if it is in this state, else None."""
        known_id, operator = self._operators.pop((owner, shard), (None, None))
        return operator if known_id == state_id else None

    def make_room(self, needed_bytes: int, most_bytes: int) -> None:
        """Drop operators, least recently used first, until there is room for one of this size."""
        while self._operators and self._size() + needed_bytes > most_bytes:
            del self._operators[next(iter(self._operators))]

    def keep(self, owner: str, shard: int, state_id: str, operator: _Sized) -> None:
        """Keep an operator for the task that continues from this state."""
        self._operators[owner, shard] = (state_id, operator)

    def clear(self) -> None:
        self._operators.clear()

    def kept(self) -> dict[tuple[str, int], tuple[str, _Sized]]:
        """State and operator by step and shard."""
        return dict(self._operators)

    def _size(self) -> int:
        return sum(operator.size() for _, operator in self._operators.values())


LIVE = LiveOperators()
"""The operators of this worker."""
