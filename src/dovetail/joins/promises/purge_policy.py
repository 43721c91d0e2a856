"""When state is purged: at once, or when enough values have been closed, memory is full, or the inputs are idle.

These are the events of the paper (section 5.2): a punctuation was retrieved (immediate purging); a threshold of
unpurged punctuations; memory is full and unpurged punctuations exist; all input queues are empty.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.joins.multiway.disk.stages import DiskStages
from dovetail.joins.multiway.state import JoinState
from dovetail.joins.promises.purging import Purger
from dovetail.joins.promises.spec import Metadata
from dovetail.kernels.bucket_index import partitions_of

__all__ = ["PurgePolicy", "PurgingStages"]

_FEWEST_PURGED = 100


class PurgePolicy:
    """Counts closed values that wait to be purged, and purges them when due."""

    def __init__(self, metadata: Metadata, state: JoinState, purger: Purger, most_waiting_bytes: int) -> None:
        self._most_waiting_bytes = most_waiting_bytes
        self._metadata = metadata
        self._state = state
        self._purger = purger
        self.unpurged = 0
        self.unpurged_on_disk = 0
        self._waiting: list[Int64Array] | None = []
        """The values that were closed since the last purge; None if they are not known one by one."""

    @property
    def nbytes(self) -> int:
        return sum(codes.nbytes for codes in self._waiting or ())

    @property
    def is_immediate(self) -> bool:
        return self._metadata.purging_used == "immediate"

    def note(self, count: int, codes: Int64Array | None) -> None:
        """Count newly closed values, and remember which they are; None if that is not known."""
        self.unpurged += count
        self.unpurged_on_disk += count
        if codes is None or self.nbytes + codes.nbytes > self._most_waiting_bytes:
            self._waiting = None
        elif self._waiting is not None:
            self._waiting.append(codes)

    def note_unknown(self) -> None:
        """Any value may have been closed: the next purge looks at all tuples."""
        self.unpurged += 1
        self._waiting = None

    def is_due(self) -> bool:
        return self.is_immediate or self.unpurged >= self._purged_together()

    def is_due_for_room(self, needed_bytes: int) -> bool:
        """Whether values wait, and `needed_bytes` more would fill the memory."""
        limit = self._metadata.purge_memory * self._state.limits.state
        return bool(self.unpurged) and self._state.held_bytes + needed_bytes > limit

    def is_due_when_idle(self) -> bool:
        return bool(self.unpurged) and self._metadata.purge_when_idle

    def is_due_on_disk(self) -> bool:
        """Whether enough values were closed to read the tuples on disk for them."""
        return self.unpurged_on_disk >= self._purged_together()

    def _purged_together(self) -> int:
        if self._metadata.purge_count is not None:
            return self._metadata.purge_count
        return max(_FEWEST_PURGED, sum(map(len, (c for chunks in self._state.memory for c in chunks))) // 16)

    def purge(self, codes: Int64Array | None) -> Iterator[pa.RecordBatch]:
        """Purge what closed values allow; given codes, only tuples with one of them, and their partitions."""
        self.unpurged = 0
        waiting, self._waiting = self._waiting, []
        if self._purger.knows_something:
            in_memory = codes
            if codes is None and waiting is not None:
                # Together they are all that was closed: no other tuple needs a look.
                in_memory = np.concatenate([np.zeros(0, np.int64), *waiting])
            yield from self._purger.purge_memory(in_memory)
            if any(domain.is_open for domain in self._state.domains):
                yield from self._purger.purge_unread()
                if self.is_immediate:
                    yield from self.purge_disk(codes)

    def purge_disk(self, codes: Int64Array | None) -> Iterator[pa.RecordBatch]:
        """Read and purge the tuples on disk; given codes, only in their partitions."""
        self.unpurged_on_disk = 0 if codes is None else self.unpurged_on_disk
        partitions = self._state.spec.partitions
        numbers = np.arange(partitions) if codes is None else np.unique(partitions_of(codes, partitions))
        for number in numbers.tolist():
            yield from self._purger.purge_domain(number)

    def as_state(self) -> dict[str, int]:
        return {"unpurged": self.unpurged, "unpurged_on_disk": self.unpurged_on_disk}

    def restore(self, values: Mapping[str, Any]) -> None:
        self.unpurged, self.unpurged_on_disk = values["unpurged"], values["unpurged_on_disk"]
        self._waiting = None if self.unpurged else []


class PurgingStages(DiskStages):
    """Disk stages that purge a domain after they have read and joined it."""

    purger: Purger

    def join_completely(self, number: int) -> Iterator[pa.RecordBatch]:
        yield from super().join_completely(number)
        if self.purger.knows_something:
            yield from self.purger.purge_domain(number)
