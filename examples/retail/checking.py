"""Checks what was loaded against what was landed, without Spark and without Dovetail: counts, and every value."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from retail.data import customer_rows

__all__ = ["Verdict", "check"]


@dataclass(frozen=True)
class Verdict:
    """What the check found.

    Attributes
    ----------
    landed, loaded, missing, repeated
        Orders, rows in the target, orders that are not there, and rows that are there more than once.
    wrong
        Rows with another customer than theirs, or with a segment that this customer never had.
    without_customer, changed
        Rows of customers that are in no table, and rows with a changed segment.
    compared, differing
        Orders that Spark's join had loaded as well, and how many of those differ from ours.
    """

    landed: int
    loaded: int
    missing: int
    repeated: int
    wrong: int
    without_customer: int
    changed: int
    compared: int
    differing: int

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.repeated or self.wrong or self.differing)


def check(
    landing: Sequence[Path], ours: Sequence[Path], theirs: Sequence[Path], customers: int, changed: pa.Table
) -> Verdict:
    """Compare. Everything landed must be there once, with its customer as it was before or after the change."""
    landed = _read(landing, ["order_id", "customer_id", "amount"]).sort_by("order_id")
    loaded = _read(ours).sort_by("order_id")
    ids = loaded.column("order_id").to_numpy()
    distinct = np.unique(ids)
    missing = np.setdiff1d(landed.column("order_id").to_numpy(), distinct).size
    right = _expected(landed, loaded, customers, changed)
    compared, differing = _compare(loaded, _read(theirs)) if theirs else (0, 0)
    segments = loaded.column("segment")
    gold = changed.column("segment").unique()
    return Verdict(
        landed=landed.num_rows,
        loaded=loaded.num_rows,
        missing=int(missing),
        repeated=int(ids.size - distinct.size),
        wrong=loaded.num_rows - right,
        without_customer=segments.null_count,
        changed=int(pc.sum(pc.is_in(segments, gold)).as_py() or 0),
        compared=compared,
        differing=differing,
    )


def _read(files: Sequence[Path], columns: list[str] | None = None) -> pa.Table:
    return pa.concat_tables([pq.read_table(file, columns=columns) for file in files]).combine_chunks()


def _expected(landed: pa.Table, loaded: pa.Table, customers: int, changed: pa.Table) -> int:
    """How many loaded rows are those of their order and of its customer, made from its number again."""
    place = np.searchsorted(landed.column("order_id").to_numpy(), loaded.column("order_id").to_numpy())
    order = landed.take(pa.array(np.minimum(place, landed.num_rows - 1)))
    number = order.column("customer_id").to_numpy()
    is_known = number <= customers
    wanted = customer_rows(number)
    gold = np.isin(number, changed.column("customer_id").to_numpy())
    is_right = np.asarray(pc.equal(loaded.column("order_id"), order.column("order_id")))
    for name in ("customer_id", "amount"):
        is_right &= np.asarray(pc.equal(loaded.column(name), order.column(name)))
    for name in wanted.schema.names[1:]:
        same = np.asarray(pc.fill_null(pc.equal(loaded.column(name), wanted.column(name)), False))
        if name == "segment":
            same |= gold & np.asarray(pc.fill_null(pc.equal(loaded.column(name), changed.column(name)[0]), False))
        absent = np.asarray(pc.is_null(loaded.column(name)))
        is_right &= np.where(is_known, same, absent)
    return int(is_right.sum())


def _compare(ours: pa.Table, theirs: pa.Table) -> tuple[int, int]:
    """Compare the orders that Spark loaded with ours, except for the segment, which changes as the demo runs."""
    names = [name for name in ours.schema.names if name != "segment"]
    theirs = theirs.sort_by("order_id")
    place = np.searchsorted(ours.column("order_id").to_numpy(), theirs.column("order_id").to_numpy())
    mine = ours.take(pa.array(np.minimum(place, ours.num_rows - 1)))
    same = np.ones(theirs.num_rows, bool)
    for name in names:
        left, right = mine.column(name), theirs.column(name).cast(mine.schema.field(name).type)
        both_absent = pc.and_(pc.is_null(left), pc.is_null(right))
        same &= np.asarray(pc.or_(pc.fill_null(pc.equal(left, right), False), both_absent))
    return theirs.num_rows, int(theirs.num_rows - same.sum())
