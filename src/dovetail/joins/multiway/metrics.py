"""Counters of a multi-way join; they only ever grow."""

from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["MJoinMetrics"]


@dataclass(slots=True)
class MJoinMetrics:
    """What one multi-way join has done since it was made, restarts included.

    Attributes
    ----------
    tuples_in
        Tuples accepted, per input; where an `offer` failed, this tells how far it came.
    null_tuples, late_tuples
        Tuples whose key or event time is NULL, and those behind the watermark.
    output_rows, unmatched_rows
        Rows given out, and those of them that have no match.
    inserts, probes, comparisons
        Tuples put into hash tables, look-ups of a tuple or partial result in an input's tables, and candidates
        compared.
    sample_probes
        Look-ups that only served to learn selectivities.
    reorders
        How often an input's probing sequence changed.
    merges, merged_rows
        Merges of chunks and the rows that they wrote.
    purged_rows
        Rows dropped because they lie outside every window.
    flushes, flushed_rows, spilled_bytes
        Flushes, the rows moved to disk by them or on arrival, and bytes written.
    disk_probes, catch_ups, bytes_read
        Disk-memory stages, complete joins of a partition, and bytes read back.
    redundant_rows
        Candidates that had been given out before.
    """

    tuples_in: dict[str, int] = field(default_factory=dict)
    null_tuples: int = 0
    late_tuples: int = 0
    output_rows: int = 0
    unmatched_rows: int = 0
    inserts: int = 0
    probes: int = 0
    comparisons: int = 0
    sample_probes: int = 0
    reorders: int = 0
    merges: int = 0
    merged_rows: int = 0
    purged_rows: int = 0
    flushes: int = 0
    flushed_rows: int = 0
    spilled_bytes: int = 0
    disk_probes: int = 0
    catch_ups: int = 0
    bytes_read: int = 0
    redundant_rows: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Give the counters as JSON-able data.

        Examples
        --------
        >>> MJoinMetrics({"a": 2}, probes=3).as_dict()["probes"]
        3
        """
        return {f.name: dict(self.tuples_in) if f.name == "tuples_in" else getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MJoinMetrics":
        """The counters that `as_dict` gave."""
        return cls(**values)
