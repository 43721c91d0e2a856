"""News items and their access records: the running example of the metadata-aware join.

Items are numbered in the order of posting. While an item is among the latest ten it gets access records; then a
punctuation says that no more records of its number will come. Every item gets about the same number of records, in
random order among the current items, so the number of distinct values between two punctuations is bounded and completed
values trail behind.

Ding, Rundensteiner, Heineman 2003, sections 2 and 6.1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.errors import PlanError

__all__ = ["ACCESS_SCHEMA", "NEWS_SCHEMA", "Accesses", "NewsWorkload"]

NEWS_SCHEMA = pa.schema({"sno": pa.int64(), "title": pa.string(), "keyword": pa.string()})
ACCESS_SCHEMA = pa.schema({"sno": pa.int64(), "ipaddr": pa.string()})
_KEYWORDS = ("Smart Card", "Elections", "Weather", "Football", "Markets", "Health", "Travel", "Science")


class Accesses(NamedTuple):
    """Access records, and the numbers of the items that get no more of them."""

    records: pa.RecordBatch
    closed: npt.NDArray[np.int64]


@dataclass(frozen=True)
class NewsWorkload:
    """A stream of news items and one of access records with punctuations.

    Examples
    --------
    >>> work = NewsWorkload(items=100, accesses_per_item=5, seed=7)
    >>> work.news(0, 2)["sno"].to_pylist()
    [0, 1]
    >>> part = work.accesses(50, 60)
    >>> part.records.num_rows, part.closed.tolist()
    (50, [41, 42, 43, 44, 45, 46, 47, 48, 49, 50])
    """

    items: int
    accesses_per_item: int = 10  # mean
    order: Literal["ordered", "random"] = "ordered"  # of arrival, by item number
    latest: int = 10  # the number of latest items that get access records
    seed: int = 2003

    def __post_init__(self) -> None:
        if self.items < 1 or self.accesses_per_item < 1 or self.latest < 1:
            raise PlanError("A news workload has at least one item, one access record each, and one latest item.")
        if self.order not in ("ordered", "random"):
            raise PlanError(f"order={self.order!r} must be ordered or random.")

    def news(self, start: int, stop: int) -> pa.RecordBatch:
        """The news items at positions `start` to `stop` (exclusive) of the stream."""
        numbers = self._arrival_order()[start:stop] if self.order == "random" else np.arange(start, stop)
        titles = pc.binary_join_element_wise("News item", pa.array(numbers).cast(pa.string()), " ")
        keywords = pa.array(_KEYWORDS).take(pa.array(numbers % len(_KEYWORDS)))
        return pa.record_batch([pa.array(numbers), titles, keywords], schema=NEWS_SCHEMA)

    def accesses(self, start: int, stop: int) -> Accesses:
        """The access records from the posting of item `start` to that of item `stop`, and the items completed then."""
        random = np.random.default_rng([self.seed, 1, start])
        moments = np.repeat(np.arange(start, stop), self.accesses_per_item)
        numbers = np.maximum(moments - random.integers(0, self.latest, moments.size), 0)
        hosts = random.integers(0, 1 << 16, moments.size)
        parts = [pa.array(part).cast(pa.string()) for part in (hosts >> 8, hosts & 255)]
        addresses = pc.binary_join_element_wise("10.0", *parts, ".")
        records = pa.record_batch([pa.array(numbers), addresses], schema=ACCESS_SCHEMA)
        last = self.items if stop >= self.items else stop - self.latest + 1
        return Accesses(records, np.arange(max(0, start - self.latest + 1), max(0, last)))

    def parts(self, items_per_part: int) -> Iterator[tuple[pa.RecordBatch, Accesses]]:
        """Both streams in parallel, `items_per_part` postings at a time."""
        for start in range(0, self.items, items_per_part):
            stop = min(start + items_per_part, self.items)
            yield self.news(start, stop), self.accesses(start, stop)

    def _arrival_order(self) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, 0]).permutation(self.items)
