"""The data of the demo: customers, orders that land in bursts, and a change of some customers."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import dovetail as dt
from dovetail.testing.flows import Feed
from dovetail_lab.workloads import Zipf

__all__ = ["CHANGED_SEGMENT", "Shops", "change_customers", "customer_rows", "drop_from_page_cache", "make_customers"]

Int64Array = npt.NDArray[np.int64]
CHANGED_SEGMENT = "gold"
SEED = 11
_SEGMENTS = pa.array(["new", "regular", "vip"])
_CHUNK_ROWS = 250_000
_LANDING_SECONDS = 0.25
_BURST_CHANCE, _BURST_FACTOR, _QUIET_FACTOR = 0.18, 3.5, 0.45  # 1 on average


def customer_rows(ids: Int64Array) -> pa.Table:
    """The customers with these numbers, about 110 bytes each."""
    mixed = ids * np.int64(0x9E3779B97F4A7C15 - 2**64)
    account = pa.array(mixed).cast(pa.string())
    return pa.table(
        {
            "customer_id": ids,
            "name": pc.binary_join_element_wise("Customer", pa.array(ids).cast(pa.string()), " "),
            "segment": _SEGMENTS.take(pa.array(ids % 3)),
            "city": pc.binary_join_element_wise("City", pa.array(ids % 9973).cast(pa.string()), " "),
            "account": mixed,
            "mail": pc.binary_join_element_wise(pc.binary_join_element_wise("c", account, "."), "example.org", "@"),
            "balance": (ids * 7919 % 1_000_000) / 100.0,
        }
    )


def make_customers(count: int, root: Path, report: Callable[[int], None]) -> dt.Relation:
    """The same customers for both: as Parquet files for Spark, as a relation for Dovetail. ``report`` is given rows."""
    files = root / "customers.parquet"
    files.mkdir()
    chunks = []
    for first in range(1, count + 1, _CHUNK_ROWS):
        rows = customer_rows(np.arange(first, min(first + _CHUNK_ROWS, count + 1), dtype=np.int64))
        pq.write_table(rows, files / f"part-{first:010d}.parquet")
        chunks.append(rows)
        report(rows.num_rows)
    relation = dt.Relation.build(
        pa.concat_tables(chunks), root / "relations" / "customers", on="customer_id", shards=2, unique=True
    )
    drop_from_page_cache(root)
    return relation


def drop_from_page_cache(root: Path) -> None:
    """Begin with a cold table: what was just written would otherwise be read from memory."""
    for path in [*root.rglob("*.parquet"), *(root / "relations").rglob("*")]:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Shops(threading.Thread):
    """Lands files of orders in bursts: mostly quiet, now and then eight times as busy."""

    def __init__(self, root: Path, customers: int, orders_per_second: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self.feed, self.offered = Feed(root / "landing"), 0
        self.landed: list[tuple[float, int]] = []
        """When each file landed, and how many orders had by then."""
        self._zipf = Zipf(customers + customers // 50, 1.0, order="shuffled", seed=SEED)
        self._rate, self._seconds = orders_per_second, seconds
        self._chance = np.random.default_rng(SEED)
        self.may_end = threading.Event()
        """Set when no further orders are needed; until then they land, also beyond their time."""

    def run(self) -> None:
        """Land a file every quarter of a second, on average as many orders as were asked for."""
        begun = time.monotonic()
        for number in itertools.count():
            if number >= round(self._seconds / _LANDING_SECONDS) and self.may_end.is_set():
                return
            time.sleep(max(0.0, begun + number * _LANDING_SECONDS - time.monotonic()))
            is_burst = self._chance.random() < _BURST_CHANCE
            self.land(int(self._rate * _LANDING_SECONDS * (_BURST_FACTOR if is_burst else _QUIET_FACTOR)))

    def land(self, count: int) -> None:
        """Land one file of new orders."""
        ids = np.arange(self.offered, self.offered + count, dtype=np.int64)
        now = datetime.now(UTC)
        self.feed.add(
            pa.table(
                {
                    "order_id": ids,
                    "customer_id": self._zipf.sample(count),
                    "amount": np.round(5 + (ids * 7919 % 20_000) / 100, 2),
                    "landed_at": pa.array([now] * count, pa.timestamp("us", tz="UTC")),
                }
            )
        )
        self.offered += count
        self.landed.append((now.timestamp(), self.offered))

    def hottest(self, count: int) -> Int64Array:
        """The customers that order most."""
        return self._zipf.codes_of(np.arange(1, count + 1))

    def waiting_since(self, loaded: int) -> float | None:
        """When the oldest order landed that is not among the first ``loaded``; None if all are."""
        return next((at for at, offered in reversed(list(self._until(loaded)))), None)

    def _until(self, loaded: int) -> Iterator[tuple[float, int]]:
        """Files from the newest back to the oldest that is not loaded."""
        for at, offered in reversed(self.landed):
            if offered <= loaded:
                return
            yield at, offered


def change_customers(relation: dt.Relation, numbers: Int64Array) -> tuple[dt.Relation, pa.Table]:
    """Move some customers to another segment; gives the new version and their new rows."""
    numbers = numbers[numbers <= relation.stats.rows]
    rows = customer_rows(np.sort(numbers))
    place = rows.schema.get_field_index("segment")
    rows = rows.set_column(place, "segment", pa.array([CHANGED_SEGMENT] * rows.num_rows))
    return relation.upsert(rows), rows
