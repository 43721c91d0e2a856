"""Counters of a metadata-aware join."""

from dataclasses import dataclass, field, fields
from typing import Any

from dovetail.joins.multiway.metrics import MJoinMetrics

__all__ = ["MetadataMetrics"]


@dataclass(slots=True)
class MetadataMetrics(MJoinMetrics):
    """Counters of one metadata-aware join, in addition to `MJoinMetrics`.

    Attributes
    ----------
    punctuations_in
        Punctuations given; one that names several values counts once.
    punctuations_out
        Punctuations propagated.
    punctuations_forgotten
        Promises dropped for lack of memory.
    dropped_on_arrival
        Tuples that were joined but never stored.
    closed_rows, saved_bytes
        Tuples purged because their join value was closed; and the size of these and of tuples dropped on arrival.
    purges, purges_by_index
        Passes over the state, and how many of them only looked up the closed values.
    unread_pieces
        Pieces on disk that were purged without reading them.
    broken_promises
        Tuples that broke a promise, by kind: ``punctuation``, ``unique``, ``clustered``, ``ordered``.
    """

    punctuations_in: int = 0
    punctuations_out: int = 0
    punctuations_forgotten: int = 0
    dropped_on_arrival: int = 0
    closed_rows: int = 0
    saved_bytes: int = 0
    purges: int = 0
    purges_by_index: int = 0
    unread_pieces: int = 0
    broken_promises: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The counters as JSON-able data.

        Examples
        --------
        >>> MetadataMetrics({"a": 2}, closed_rows=3).as_dict()["closed_rows"]
        3
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
