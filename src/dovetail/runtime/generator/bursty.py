"""The bursty, self-similar stream of the HYBRIDJOIN paper's appendix.

Ten virtual objects take turns between on and off. Object i sends 2^i tuples a step while it is on, and stays as it is
for a random part of 2^i steps, so what sends most also changes least often, and there are bursts within bursts on every
scale from one step to 2^10. A tuple's key is drawn by Zipf's law.

The paper keeps the objects in a priority queue by the time of their next change; here each object has its own numbers,
so that counts come out as arrays and any part of the stream can be made again from a `BurstyState`. Three places of its
figure 9 are read for what they must mean: *on* is a property of an object; all changes that are due happen (one a step,
as printed, would fall behind, since two are due in an average step); and the stream begins in its steady state, where
the paper begins with all objects on and measures after 20 minutes.

The stream is self-similar over the scales that the objects have, and no further: beyond 2^objects steps it is as smooth
as independent arrivals. More objects reach further.
"""

# mypy: allow-untyped-decorators

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import dovetail.kernels  # noqa: F401 -- chooses where compiled code is kept; must come first
from dovetail.errors import PlanError
from dovetail.testing.flows import Feed
from dovetail.workloads._mixing import stream_key, uniform_at, uniforms_at
from dovetail.workloads.zipf import KeyOrder, Zipf

__all__ = ["BURSTY_SCHEMA", "BurstyArrivals", "BurstyState", "BurstyStream", "hurst_exponent", "write_bursty_files"]

BURSTY_SCHEMA = pa.schema({"k": pa.int64(), "v": pa.int64(), "ts": pa.timestamp("us", tz="UTC")})
_PAPER_OBJECTS = 10
_MOST_OBJECTS = 40
_STEPS_AT_A_TIME = 1 << 16


@dataclass(frozen=True)
class BurstyState:
    """Where a bursty stream stands: everything that the steps from here on depend on.

    Attributes
    ----------
    step
        The next step.
    bandwidth
        What all objects together have sent before it, in units of their bandwidth.
    swaps, next_swaps
        For each object, how often it has changed, and when it will change next.
    """

    step: int
    bandwidth: int
    swaps: tuple[int, ...]
    next_swaps: tuple[float, ...]


class BurstyArrivals:
    """How many tuples arrive in each step.

    Parameters
    ----------
    tuples_per_step
        The mean; None for that of the paper's objects: half of 2 + 4 + ... + 2^objects.
    objects
        How many virtual objects; the paper has 10.
    seed
        Equal arguments give equal streams.

    Examples
    --------
    >>> arrivals = BurstyArrivals(tuples_per_step=100.0, seed=1)
    >>> counts, state = arrivals.advance(arrivals.start(), 1000)
    >>> counts.size, state.step
    (1000, 1000)
    >>> rest, _ = arrivals.advance(state, 10)         # goes on where the first part ended
    >>> bool((arrivals.counts(1010)[1000:] == rest).all())
    True
    """

    def __init__(self, tuples_per_step: float | None = None, *, objects: int = _PAPER_OBJECTS, seed: int = 0) -> None:
        if not 1 <= objects <= _MOST_OBJECTS:
            raise PlanError(f"objects={objects}: a bursty stream has 1 to {_MOST_OBJECTS} virtual objects.")
        self._bandwidths = np.int64(1) << np.arange(1, objects + 1, dtype=np.int64)
        mean = float(self._bandwidths.sum()) / 2.0
        if tuples_per_step is not None and not 0.0 < tuples_per_step <= 1e9:
            raise PlanError(f"tuples_per_step={tuples_per_step}: a stream has more than 0 and up to 1e9 tuples a step.")
        self.objects, self.seed = objects, seed
        self.tuples_per_step = mean if tuples_per_step is None else float(tuples_per_step)
        self._scale = self.tuples_per_step / mean
        self._keys = np.array([stream_key(seed, 0xB0B, number) for number in range(objects)], dtype=np.uint64)

    def start(self) -> BurstyState:
        """The state before step 0: every object on or off as often, and somewhere within a period."""
        with np.errstate(over="ignore"):
            first = np.array([[uniform_at(key, n) for n in (0, 1)] for key in self._keys])
        # What is left of a period that one falls into: periods are a uniform share of 2^i, and long ones are met more.
        remaining = self._bandwidths * (1.0 - np.sqrt(first[:, 1]))
        swaps = (first[:, 0] < 0.5).astype(np.int64)
        return BurstyState(0, 0, tuple(swaps.tolist()), tuple(remaining.tolist()))

    def advance(self, state: BurstyState, steps: int) -> tuple[NDArray[np.int64], BurstyState]:
        """The tuples of each of the next `steps` steps, and the state after them."""
        if steps < 0:
            raise PlanError(f"steps={steps}: a stream does not go backwards.", hint="Keep the state to start from.")
        swaps = np.array(state.swaps, dtype=np.int64)
        next_swaps = np.array(state.next_swaps, dtype=np.float64)
        with np.errstate(over="ignore"):
            sent = _walk(state.step, steps, self._bandwidths, self._keys, swaps, next_swaps)
        totals = state.bandwidth + np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sent)])
        after = BurstyState(state.step + steps, int(totals[-1]), tuple(swaps.tolist()), tuple(next_swaps.tolist()))
        return np.diff(self._tuples(totals)), after

    def counts(self, steps: int) -> NDArray[np.int64]:
        """The tuples of each of the first `steps` steps."""
        return self.advance(self.start(), steps)[0]

    def tuples_before(self, state: BurstyState) -> int:
        """How many tuples arrived before a state."""
        return int(self._tuples(np.array([state.bandwidth], dtype=np.int64))[0])

    def seek(self, step: int, known: BurstyState | None = None) -> BurstyState:
        """The state before a step, from an earlier one or from the start; a hundred million steps take some seconds."""
        state = known if known is not None and known.step <= step else self.start()
        while state.step < step:
            _, state = self.advance(state, min(_STEPS_AT_A_TIME, step - state.step))
        return state

    def _tuples(self, totals: NDArray[np.int64]) -> NDArray[np.int64]:
        tuples: NDArray[np.int64] = np.floor(totals * self._scale).astype(np.int64)
        return tuples


class BurstyStream:
    """The tuples of a bursty stream: key, number and time.

    Parameters
    ----------
    keys
        Size of the domain of keys.
    exponent, order
        Of the keys' distribution, see `Zipf`; the paper has exponent 1.
    tuples_per_step, objects, seed
        See `BurstyArrivals`.
    step_us
        How long a step is in the tuples' times, in microseconds.
    start_us
        The time of step 0, in microseconds since 1970.

    Examples
    --------
    >>> stream = BurstyStream(keys=1000, tuples_per_step=5.0, seed=3)
    >>> batch, state = stream.batch(stream.arrivals.start(), 100)
    >>> batch.schema.names, batch["v"].to_pylist() == list(range(batch.num_rows))
    (['k', 'v', 'ts'], True)
    """

    def __init__(
        self,
        keys: int = 1_000_000,
        *,
        exponent: float = 1.0,
        order: KeyOrder = "shuffled",
        tuples_per_step: float | None = None,
        objects: int = _PAPER_OBJECTS,
        step_us: int = 1000,
        start_us: int = 1_293_840_000_000_000,
        seed: int = 0,
    ) -> None:
        if step_us < 1:
            raise PlanError(f"step_us={step_us}: a step takes at least a microsecond.")
        self.arrivals = BurstyArrivals(tuples_per_step, objects=objects, seed=seed)
        self.keys = Zipf(keys, exponent, order=order, seed=seed)
        self.step_us, self.start_us = step_us, start_us
        self._key_numbers = stream_key(seed, 0x5EED)

    def batch(self, state: BurstyState, steps: int) -> tuple[pa.RecordBatch, BurstyState]:
        """The tuples of the next `steps` steps, and the state after them."""
        counts, after = self.arrivals.advance(state, steps)
        first = self.arrivals.tuples_before(state)
        total = int(counts.sum())
        keys = self.keys.codes_of(self.keys.ranks_at(uniforms_at(self._key_numbers, first, total)))
        steps_of = np.repeat(np.arange(state.step, after.step, dtype=np.int64), counts)
        times = pa.array(self.start_us + steps_of * self.step_us).cast(BURSTY_SCHEMA.field("ts").type)
        columns = [pa.array(keys), pa.array(np.arange(first, first + total, dtype=np.int64)), times]
        return pa.record_batch(columns, schema=BURSTY_SCHEMA), after

    def batches(self, steps: int, steps_per_batch: int) -> Iterator[pa.RecordBatch]:
        """The first `steps` steps, so many at a time."""
        state = self.arrivals.start()
        while state.step < steps:
            batch, state = self.batch(state, min(steps_per_batch, steps - state.step))
            yield batch


def write_bursty_files(
    stream: BurstyStream, directory: str | os.PathLike[str], steps: int, steps_per_file: int
) -> list[Path]:
    """Write the first steps of a stream as Parquet files that a streaming file source reads one after the other.

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
    """Estimate how self-similar a stream is from how the variance of its means over m steps falls with m.

    0.5 for independent arrivals (the variance falls as 1/m), 1 where averaging smooths nothing.

    Parameters
    ----------
    counts
        Arrivals in each step.
    smallest, largest
        The scales m to look at: powers of two between these; by default up to a fiftieth of the stream.

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


@numba.njit(cache=True)
def _walk(first_step: Any, steps: Any, bandwidths: Any, keys: Any, swaps: Any, next_swaps: Any) -> Any:
    """What is sent in each step; `swaps` and `next_swaps` move on. An object is on after an odd number of changes."""
    sent = np.zeros(steps, dtype=np.int64)
    for number in range(bandwidths.size):
        bandwidth, key = bandwidths[number], keys[number]
        count, change = swaps[number], next_swaps[number]
        at = 0
        while at < steps:
            while change <= first_step + at:
                count += 1
                # Positions 0 and 1 decided the state at the start.
                change += uniform_at(key, count + 1) * bandwidth
            until = min(steps, np.int64(np.ceil(change)) - first_step)
            if count & 1:
                for i in range(at, until):
                    sent[i] += bandwidth
            at = until
        swaps[number], next_swaps[number] = count, change
    return sent
