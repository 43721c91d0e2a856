"""Newly closed join values: few enough to look up one by one, or too many."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.joins.promises.intervals import IntervalSet
from dovetail.joins.promises.keys import Keys
from dovetail.joins.promises.patterns import BoundSet
from dovetail.joins.promises.punctuation import BoundPunctuation

__all__ = ["FEW_CODES", "codes_and_count", "in_parts", "together"]

FEW_CODES = 4096
"""Up to this many values are looked up one by one; for more, the whole state is scanned."""


def together(punctuations: Sequence[BoundPunctuation]) -> Iterator[BoundPunctuation]:
    """Merge neighbours that name values of the same single column: one punctuation costs as much as many."""
    run: list[BoundSet] = []
    column = None
    for bound in punctuations:
        [*patterns] = bound.columns.items()
        name, pattern = patterns[0] if len(patterns) == 1 else (None, None)
        if run and (name != column or not isinstance(pattern, BoundSet)):
            yield _one(str(column), run)
            run = []
        if isinstance(pattern, BoundSet):
            column = name
            run.append(pattern)
        else:
            yield bound
    if run:
        yield _one(str(column), run)


def _one(column: str, sets: list[BoundSet]) -> BoundPunctuation:
    if len(sets) == 1:
        return BoundPunctuation({column: sets[0]})
    return BoundPunctuation({column: BoundSet(pa.concat_arrays([each.values for each in sets]).unique())})


def in_parts(bound: BoundPunctuation) -> Iterator[BoundPunctuation]:
    """Split a punctuation of very many values, so that its memory is bounded at every moment."""
    [*patterns] = bound.columns.items()
    if len(patterns) != 1 or not isinstance(patterns[0][1], BoundSet) or len(patterns[0][1].values) <= FEW_CODES:
        yield bound
        return
    name, values = patterns[0][0], patterns[0][1].values
    for start in range(0, len(values), FEW_CODES):
        yield BoundPunctuation({name: BoundSet(values.slice(start, FEW_CODES))})


def codes_and_count(closed: Keys | IntervalSet | None) -> tuple[Int64Array | None, int]:
    """The codes of closed values and their number; None and 1 if they are too many to look up one by one."""
    if closed is None:
        return None, 1
    if isinstance(closed, Keys):
        count = len(closed.codes)
        return (closed.codes if count <= FEW_CODES else None), count
    if not len(closed):
        return np.zeros(0, np.int64), 0
    codes = closed.points(FEW_CODES)
    single = int((closed.lows == closed.highs).sum())
    return codes, max(1, single) if codes is None else len(codes)
