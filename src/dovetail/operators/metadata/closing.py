"""Join values that were just closed: few enough to be looked up, or too many."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dovetail.operators.metadata.intervals import IntervalSet
from dovetail.operators.metadata.keys import Keys
from dovetail.operators.metadata.patterns import BoundSet
from dovetail.operators.metadata.punctuation import BoundPunctuation

__all__ = ["FEW_CODES", "codes_and_count", "in_parts"]

Int64Array = npt.NDArray[np.int64]
FEW_CODES = 4096
"""So many values are looked up one by one; for more, all that is held is gone through."""


def in_parts(bound: BoundPunctuation) -> Iterator[BoundPunctuation]:
    """A punctuation of very many values as several, so that what they take is bounded at every moment."""
    [*patterns] = bound.columns.items()
    if len(patterns) != 1 or not isinstance(patterns[0][1], BoundSet) or len(patterns[0][1].values) <= FEW_CODES:
        yield bound
        return
    name, values = patterns[0][0], patterns[0][1].values
    for start in range(0, len(values), FEW_CODES):
        yield BoundPunctuation({name: BoundSet(values.slice(start, FEW_CODES))})


def codes_and_count(closed: Keys | IntervalSet | None) -> tuple[Int64Array | None, int]:
    """The codes of closed values, None where they are too many to look up one by one; and how many, 1 for those."""
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
