"""Operators that go on living in a worker from one micro-batch to the next, each with the one state it may go on from.

A worker has no claim to a shard: its next task may be of another one, and a micro-batch may run again. So an operator
is taken out to be used, and only comes back with the name of the state that it is in.
"""

from typing import Any, Protocol

__all__ = ["LIVE", "LiveOperators"]


class _Sized(Protocol):
    def size(self) -> int:
        """Bytes held now."""


class LiveOperators:
    """Operators by step and shard.

    Examples
    --------
    >>> class Nothing:
    ...     def size(self): return 10
    >>> live = LiveOperators()
    >>> live.keep("step", 0, "state 1", Nothing())
    >>> live.take("step", 0, "state 2") is None  # it had come to another state
    True
    >>> len(live)
    0
    """

    def __init__(self) -> None:
        self._operators: dict[tuple[str, int], tuple[str, _Sized]] = {}

    def __len__(self) -> int:
        return len(self._operators)

    def take(self, owner: str, shard: int, state_id: str) -> Any:
        """The operator of a shard, if it is in this state, or None; whichever it is in, it is no longer kept."""
        known_id, operator = self._operators.pop((owner, shard), (None, None))
        return operator if known_id == state_id else None

    def make_room(self, needed_bytes: int, most_bytes: int) -> None:
        """Let operators go, the longest unused first, until there is room for one of this size."""
        while self._operators and self._size() + needed_bytes > most_bytes:
            del self._operators[next(iter(self._operators))]

    def keep(self, owner: str, shard: int, state_id: str, operator: _Sized) -> None:
        """Keep an operator for the task that goes on from this state."""
        self._operators[owner, shard] = (state_id, operator)

    def clear(self) -> None:
        """Let all go."""
        self._operators.clear()

    def kept(self) -> dict[tuple[str, int], tuple[str, _Sized]]:
        """State and operator by step and shard."""
        return dict(self._operators)

    def _size(self) -> int:
        return sum(operator.size() for _, operator in self._operators.values())


LIVE = LiveOperators()
"""Those of this worker."""
