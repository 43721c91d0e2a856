"""The bursty stream as files, and an estimate of a stream's self-similarity."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dovetail.core.errors import PlanError
from dovetail.runtime.generator.bursty import BurstyStream
from dovetail.testing.flows import Feed

__all__ = ["hurst_exponent", "write_bursty_files"]


def write_bursty_files(
    stream: BurstyStream, directory: str | os.PathLike[str], steps: int, steps_per_file: int
) -> list[Path]:
    """Write the first steps of a stream as Parquet files that a streaming file source reads in order.

    Examples
    --------
    >>> import tempfile
    >>> files = write_bursty_files(BurstyStream(keys=10, tuples_per_step=2.0), tempfile.mkdtemp(), 100, 50)
    >>> [path.name for path in files]
    ['000000.parquet', '000001.parquet']
    """
    feed = Feed(directory)
    return [feed.add(pa.Table.from_batches([batch])) for batch in stream.batches(steps, steps_per_file)]


def hurst_exponent(counts: NDArray[np.int64], smallest: int = 1, largest: int | None = None) -> float:
    """Estimate the self-similarity of a stream from how the variance of its means over m steps decreases with m.

    0.5 for independent arrivals (the variance decreases as 1/m), 1 if averaging smooths nothing.

    Parameters
    ----------
    counts
        Arrivals in each step.
    smallest, largest
        The range of the scales m, powers of two; by default up to a fiftieth of the stream.

    Examples
    --------
    >>> poisson = np.random.default_rng(1).poisson(50.0, 100_000)
    >>> abs(hurst_exponent(poisson) - 0.5) < 0.05
    True
    """
    limit = counts.size // 50 if largest is None else largest
    scales = [1 << power for power in range(40) if smallest <= 1 << power <= limit]
    if len(scales) < 3:
        raise PlanError(
            f"{counts.size} steps with scales from {smallest} to {limit} are too few for a Hurst exponent.",
            hint="Three powers of two are needed, each with fifty blocks.",
        )
    variances = []
    for scale in scales:
        blocks = counts[: counts.size // scale * scale].reshape(-1, scale).mean(axis=1)
        variances.append(float(blocks.var()))
    slope = np.polyfit(np.log(scales), np.log(variances), 1)[0]
    return 1.0 + float(slope) / 2.0
