"""Join values that were just closed: few enough to be looked up, or too many."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.operators.metadata.intervals import IntervalSet
from dovetail.operators.metadata.keys import Keys
from dovetail.operators.metadata.patterns import BoundSet
from dovetail.operators.metadata.punctuation import BoundPunctuation

__all__ = ["FEW_CODES", "codes_and_count", "in_parts", "together"]

Int64Array = npt.NDArray[np.int64]
FEW_CODES = 4096
"""So many values are looked up one by one; for more, all that is held is gone through."""


def together(punctuations: Sequence[BoundPunctuation]) -> Iterator[BoundPunctuation]:
    """The same with neighbours that name values of the same one column as one, since one costs as much as many."""
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
