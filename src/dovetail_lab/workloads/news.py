"""News items and the access records that they get: the running example of the metadata-aware join.

Items are numbered in the order in which they are posted. While an item is among the latest ten it gets access records;
when it no longer is, a punctuation says that none of its number will come. Every item gets about as many records, in
random order among the items of the moment, so the number of different values between two punctuations is bounded and
the values that are over trail behind.

Ding, Rundensteiner, Heineman 2003, sections 2 and 6.1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.errors import PlanError

__all__ = ["ACCESS_SCHEMA", "NEWS_SCHEMA", "Accesses", "NewsWorkload"]

NEWS_SCHEMA = pa.schema({"sno": pa.int64(), "title": pa.string(), "keyword": pa.string()})
ACCESS_SCHEMA = pa.schema({"sno": pa.int64(), "ipaddr": pa.string()})
_KEYWORDS = ("Smart Card", "Elections", "Weather", "Football", "Markets", "Health", "Travel", "Science")


class Accesses(NamedTuple):
    """Access records, and the numbers of the items for which no more of them come after these."""

    records: pa.RecordBatch
    closed: npt.NDArray[np.int64]


@dataclass(frozen=True)
class NewsWorkload:
    """A stream of news items and one of access records with punctuations.

    Parameters
    ----------
    items
        How many news items are posted.
    accesses_per_item
        How many access records there are for each, on average.
    order
        ``"ordered"``: items arrive in the order of their number. ``"random"``: in some random order.
    latest
        How many of the latest items get access records.
    seed
        For the random numbers; the same in every run.

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
    accesses_per_item: int = 10
    order: Literal["ordered", "random"] = "ordered"
    latest: int = 10
    seed: int = 2003

    def __post_init__(self) -> None:
        if self.items < 1 or self.accesses_per_item < 1 or self.latest < 1:
            raise PlanError("A news workload has at least one item, one access record each, and one latest item.")
        if self.order not in ("ordered", "random"):
            raise PlanError(f"order={self.order!r} is neither ordered nor random.")

    def news(self, start: int, stop: int) -> pa.RecordBatch:
        """The news items that arrive from place `start` to before place `stop`."""
        numbers = self._arrival_order()[start:stop] if self.order == "random" else np.arange(start, stop)
        titles = pc.binary_join_element_wise("News item", pa.array(numbers).cast(pa.string()), " ")
        keywords = pa.array(_KEYWORDS).take(pa.array(numbers % len(_KEYWORDS)))
        return pa.record_batch([pa.array(numbers), titles, keywords], schema=NEWS_SCHEMA)

    def accesses(self, start: int, stop: int) -> Accesses:
        """The access records from the posting of item `start` to that of item `stop`, and the items then over."""
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
        """Both streams, side by side, a number of postings at a time."""
        for start in range(0, self.items, items_per_part):
            stop = min(start + items_per_part, self.items)
            yield self.news(start, stop), self.accesses(start, stop)

    def _arrival_order(self) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, 0]).permutation(self.items)
