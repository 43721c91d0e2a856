"""Counters of a multi-way join; they only ever grow."""

from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["MJoinMetrics"]


@dataclass(slots=True)
class MJoinMetrics:
    """Counters of one multi-way join, kept across restarts.

    Attributes
    ----------
    tuples_in
        Tuples accepted, per input; after a failed `offer`, how many were accepted.
    null_tuples, late_tuples
        Tuples whose key or event time is NULL, and tuples behind the watermark.
    output_rows, unmatched_rows
        Rows emitted, and those of them without a match.
    inserts, probes, comparisons
        Tuples inserted into hash tables, lookups of a tuple or partial result in one input, and candidates compared.
    sample_probes
        Lookups made only to learn selectivities.
    reorders
        Changes of an input's probing sequence.
    merges, merged_rows
        Merges of chunks or pieces, and the rows they wrote.
    purged_rows
        Rows dropped because they lie outside every window.
    flushes, flushed_rows, spilled_bytes
        Flushes, the rows moved to disk by them or on arrival, and bytes written.
    disk_probes, catch_ups, bytes_read
        Disk-memory stages, complete joins of a domain, and bytes read back.
    reloads, reloaded_rows
        How often spilled tuples came back to memory, and how many.
    redundant_rows
        Candidates that had been emitted before.
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
    reloads: int = 0
    reloaded_rows: int = 0
    redundant_rows: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The counters as JSON-able data.

        Examples
        --------
        >>> MJoinMetrics({"a": 2}, probes=3).as_dict()["probes"]
        3
        """
        return {f.name: dict(self.tuples_in) if f.name == "tuples_in" else getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MJoinMetrics":
        """The inverse of `as_dict`."""
        return cls(**values)
