"""Counters of a metadata-aware join."""

from dataclasses import dataclass, field, fields
from typing import Any

from dovetail.operators.mjoin.metrics import MJoinMetrics

__all__ = ["MetadataMetrics"]


@dataclass(slots=True)
class MetadataMetrics(MJoinMetrics):
    """What one metadata-aware join has done; see `MJoinMetrics` for the rest.

    Attributes
    ----------
    punctuations_in
        Punctuations given; one that names several values counts once.
    punctuations_out
        Punctuations passed on.
    punctuations_forgotten
        Promises given up because there was no room for them.
    dropped_on_arrival
        Tuples that were joined and never kept.
    closed_rows, saved_bytes
        Tuples purged because their join value was closed; and the bytes that they and those dropped on arrival had.
    purges, purges_by_index
        Times that state was gone through to purge, and how many of these only looked up the values closed.
    unread_pieces
        Pieces on disk that were purged without being read.
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
        """Give the counters as JSON-able data.

        Examples
        --------
        >>> MetadataMetrics({"a": 2}, closed_rows=3).as_dict()["closed_rows"]
        3
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
