"""Hypothesis strategies for streams of several hundred tuples: long enough for a cache to fill, hit, and evict.

Only a seed and a few numbers are drawn, and the rows are derived from them: a stream of 900 tuples costs no more to
draw than one of nine. Some examples have what the short cases of `dovetail.testing.strategies` always have: keys that
collide or are missing, NULLs, a join value with very many rows, rows far longer than the mean, relations of several
segments with deleted rows, on fast and slow simulated disks.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from dovetail.relation.io import Disk, SimulatedDisk
from dovetail.testing.oracle import Condition, JoinType
from dovetail.testing.shard import MemoryShard
from dovetail.testing.strategies import JoinCase

__all__ = ["LongCase", "long_cases"]

_STREAM_COLUMNS = [("t", pa.int64()), ("x", pa.int64())]
_RELATION_COLUMNS = [("v", pa.string()), ("low", pa.int64()), ("high", pa.int64())]


@dataclass(frozen=True, repr=False)
class LongCase(JoinCase):
    """A long stream, and a relation of several segments with deleted rows."""

    deleted: frozenset[int] = frozenset()  # numbers of relation rows
    how_many_segments: int = 1  # row i is in segment i modulo this
    disk_kind: str = "none"  # or "fast" or "slow"

    def __repr__(self) -> str:
        rows = (
            f"{len(self.stream_rows)} stream rows, {len(self.relation_rows)} relation rows, {len(self.deleted)} deleted"
        )
        return (
            f"LongCase({rows}, {self.how_many_segments} segments, {self.distinct_codes} codes, {self.disk_kind} disk)"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis would print every row.
        printer.text(repr(self))

    def shard(self, columns: Sequence[str] | None = None) -> MemoryShard:
        codes = self.relation_codes()
        segments = [row % self.how_many_segments for row in range(len(codes))]
        return MemoryShard(
            self.relation_table(),
            codes,
            columns,
            self.deleted,
            segments=segments,
            disk=self.disk(),
            batch_rows=self.batch_rows,
        )

    def disk(self) -> Disk | None:
        """A new simulated disk without real delays; None if pages are in memory."""
        if self.disk_kind == "none":
            return None
        if self.disk_kind == "fast":
            return SimulatedDisk(1e9, 1e-6, virtual=True)
        return SimulatedDisk(1e4, 1e-3, virtual=True)

    def live_rows(self) -> list[dict[str, Any]]:
        return [row for number, row in enumerate(self.relation_rows) if number not in self.deleted]

    def live_case(self, stream_rows: list[dict[str, Any]] | None = None) -> JoinCase:
        """The same join for the oracle: all or some of the stream's rows, with the rows that are not deleted."""
        rows = self.stream_rows if stream_rows is None else stream_rows
        return JoinCase(rows, self.live_rows(), self.stream_schema, self.relation_schema, self.on, self.distinct_codes)

    def expected(
        self, how: JoinType, condition: Condition | None = None, select: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The oracle's result, without deleted rows."""
        return self.live_case().expected(how, condition, select)

    def expected_groups(
        self, how: JoinType, condition: Condition | None = None, select: Sequence[str] | None = None
    ) -> list[list[dict[str, Any]]]:
        """The oracle's result, without deleted rows, in stream order."""
        return self.live_case().expected_groups(how, condition, select)


@st.composite
def long_cases(draw: st.DrawFn) -> LongCase:
    """A stream of 400 to 900 tuples and a relation of up to about 300 rows."""
    chance = random.Random(draw(st.integers(0, 2**32 - 1)))
    is_text = draw(st.booleans())
    key_count = draw(st.sampled_from([4, 40, 150]))
    exponent = draw(st.sampled_from([0.0, 1.0, 1.5]))
    most_rows_per_key = draw(st.sampled_from([1, 1, 3]))
    has_heavy_key, has_long_rows = draw(st.booleans()), draw(st.booleans())
    unmatched_share, null_share = draw(st.sampled_from([0.0, 0.3])), draw(st.sampled_from([0.0, 0.05]))
    keys: list[Any] = [f"key {number}" if is_text else 1000 * number for number in range(key_count)]
    chance.shuffle(keys)
    weights = [1 / (rank + 1) ** exponent for rank in range(key_count)]

    def small() -> int | None:
        return None if chance.random() < 0.1 else chance.randint(0, 5)

    stream_rows: list[dict[str, Any]] = []
    for key in chance.choices(keys, weights, k=draw(st.integers(400, 900))):
        kind = chance.random()
        if kind < null_share:
            key = None
        elif kind < null_share + unmatched_share:
            key = f"none {chance.randint(0, 3)}" if is_text else 1000 * chance.randint(0, 3) + 7
        stream_rows.append({"k": key, "t": len(stream_rows), "x": small()})
    relation_rows: list[dict[str, Any]] = []
    for number, key in enumerate(keys):
        count = 60 if has_heavy_key and number == 2 else chance.randint(1, most_rows_per_key)
        for _ in range(count):
            text = "v" * chance.randint(100, 400) if has_long_rows and chance.random() < 0.1 else "v"
            relation_rows.append({"k": key, "v": f"{text}{len(relation_rows)}", "low": small(), "high": small()})
    deleted_share = draw(st.sampled_from([0.0, 0.2]))
    key_type = pa.string() if is_text else pa.int64()
    return LongCase(
        stream_rows,
        relation_rows,
        pa.schema([("k", key_type), *_STREAM_COLUMNS]),
        pa.schema([("k", key_type), *_RELATION_COLUMNS]),
        on=(("k", "k"),),
        distinct_codes=draw(st.sampled_from([None, None, 20])),
        deleted=frozenset(row for row in range(len(relation_rows)) if chance.random() < deleted_share),
        how_many_segments=draw(st.sampled_from([1, 1, 3])),
        disk_kind=draw(st.sampled_from(["none", "fast", "slow"])),
    )
