"""The bursty, self-similar stream of the HYBRIDJOIN paper's appendix.

Ten virtual objects switch between on and off. Object i sends 2^i tuples per step while it is on, and keeps its state
for a random part of 2^i steps. So the largest senders change least often, and there are bursts within bursts on every
scale from one step to 2^10. Keys are drawn by Zipf's law.

The paper keeps the objects in a priority queue by the time of their next change; here each object has its own random
numbers, so that counts are computed as arrays and any part of the stream can be remade from a `BurstyState`. Three
places of its figure 9 are interpreted: *on* is a property of an object; all due changes happen (one per step, as
printed, would fall behind, since two are due in an average step); and the stream begins in its steady state, where the
paper begins with all objects on and measures after 20 minutes.

The stream is self-similar up to 2^objects steps; beyond that it is as smooth as independent arrivals.
"""

# mypy: allow-untyped-decorators

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import dovetail.kernels  # noqa: F401 -- chooses where compiled code is kept; must come first
from dovetail.core.errors import PlanError
from dovetail.runtime.generator.mixing import stream_key, uniform_at, uniforms_at
from dovetail.runtime.generator.zipf import KeyOrder, Zipf

__all__ = ["BURSTY_SCHEMA", "BurstyArrivals", "BurstyState", "BurstyStream"]

BURSTY_SCHEMA = pa.schema({"k": pa.int64(), "v": pa.int64(), "ts": pa.timestamp("us", tz="UTC")})
_PAPER_OBJECTS = 10
_MOST_OBJECTS = 40
_STEPS_AT_A_TIME = 1 << 16


@dataclass(frozen=True)
class BurstyState:
    """The position in a bursty stream: all that later steps depend on."""

    step: int  # the next step
    bandwidth: int  # sent by all objects before it, in units of their bandwidth
    swaps: tuple[int, ...]  # per object, how often it has changed
    next_swaps: tuple[float, ...]  # per object, the step of its next change


class BurstyArrivals:
    """How many tuples arrive in each step.

    `tuples_per_step` is the mean; None for that of the paper's objects: half of 2 + 4 + ... + 2^objects. The paper has
    10 objects. Equal arguments give equal streams.

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
            raise PlanError(f"tuples_per_step={tuples_per_step}: must be above 0 and at most 1e9.")
        self.objects, self.seed = objects, seed
        self.tuples_per_step = mean if tuples_per_step is None else float(tuples_per_step)
        self._scale = self.tuples_per_step / mean
        self._keys = np.array([stream_key(seed, 0xB0B, number) for number in range(objects)], dtype=np.uint64)

    def start(self) -> BurstyState:
        """The state before step 0: every object is on or off with equal probability, somewhere within a period."""
        with np.errstate(over="ignore"):
            first = np.array([[uniform_at(key, n) for n in (0, 1)] for key in self._keys])
        # The rest of the period at a random moment: periods are uniform in 2^i, and long ones are hit more often.
        remaining = self._bandwidths * (1.0 - np.sqrt(first[:, 1]))
        swaps = (first[:, 0] < 0.5).astype(np.int64)
        return BurstyState(0, 0, tuple(swaps.tolist()), tuple(remaining.tolist()))

    def advance(self, state: BurstyState, steps: int) -> tuple[NDArray[np.int64], BurstyState]:
        """The tuples of each of the next `steps` steps, and the state after them."""
        if steps < 0:
            raise PlanError(f"steps={steps}: must be at least 0.", hint="Keep an earlier state to start from.")
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
        """The state before a step, from an earlier state or the start; a hundred million steps take some seconds."""
        state = known if known is not None and known.step <= step else self.start()
        while state.step < step:
            _, state = self.advance(state, min(_STEPS_AT_A_TIME, step - state.step))
        return state

    def _tuples(self, totals: NDArray[np.int64]) -> NDArray[np.int64]:
        tuples: NDArray[np.int64] = np.floor(totals * self._scale).astype(np.int64)
        return tuples


class BurstyStream:
    """The tuples of a bursty stream: key, number and time.

    See `Zipf` for `keys`, `exponent` (the paper has 1) and `order`, and `BurstyArrivals` for the arrivals. A step lasts
    `step_us` microseconds, and step 0 is at `start_us` since 1970.

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
        """The first `steps` steps in batches."""
        state = self.arrivals.start()
        while state.step < steps:
            batch, state = self.batch(state, min(steps_per_batch, steps - state.step))
            yield batch


@numba.njit(cache=True)
def _walk(first_step: Any, steps: Any, bandwidths: Any, keys: Any, swaps: Any, next_swaps: Any) -> Any:
    """What is sent in each step; advances `swaps` and `next_swaps`. An object is on after an odd number of changes."""
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
