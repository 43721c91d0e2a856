"""Arrival times of tuples: Poisson processes with given rates, one per input, and their combined order.

Viglas, Naughton, Burger 2003, section 3.1: delays between arrivals are exponential around each input's mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.core.errors import PlanError

__all__ = ["Arrival", "ArrivalPhase", "arrival_order", "arrival_slices", "poisson_times"]


class ArrivalPhase(NamedTuple):
    """A fraction of a stream's tuples, and the mean delay between them."""

    share: float
    mean_delay_ms: float


class Arrival(NamedTuple):
    """Tuples `first` to `last` (exclusive) of an input, all of which have arrived by `moment_ms`."""

    moment_ms: float
    name: str
    first: int
    last: int


def poisson_times(count: int, delay: float | Sequence[ArrivalPhase], *, seed: int = 0) -> NDArray[np.float64]:
    """The arrival times of the tuples of one stream, in milliseconds.

    Parameters
    ----------
    count
        The number of tuples.
    delay
        Mean delay between two tuples in milliseconds, or the phases of a stream with a changing rate.
    seed
        The seed of the delays.

    Examples
    --------
    >>> times = poisson_times(10_000, 2.0, seed=1)
    >>> bool((np.diff(times) >= 0).all()), bool(abs(times[-1] / 10_000 - 2.0) < 0.1)
    (True, True)
    >>> slow_in_the_middle = [ArrivalPhase(0.4, 1.0), ArrivalPhase(0.2, 10.0), ArrivalPhase(0.4, 1.0)]
    >>> times = poisson_times(10_000, slow_in_the_middle, seed=1)
    >>> int(times[4000]) < 5000 < 20_000 < int(times[6000])
    True
    """
    phases = [ArrivalPhase(1.0, delay)] if isinstance(delay, int | float) else list(delay)
    if count < 0 or not phases or any(phase.mean_delay_ms < 0 or phase.share < 0 for phase in phases):
        raise PlanError(f"count={count}, delay={delay}: neither can be negative.")
    shares = np.cumsum([phase.share for phase in phases])
    if abs(shares[-1] - 1.0) > 1e-9:
        raise PlanError(f"The shares of the phases add up to {shares[-1]:g}.", hint="They must add up to 1.")
    phase_of = np.searchsorted(shares * count, np.arange(count), side="right").clip(max=len(phases) - 1)
    means = np.array([phase.mean_delay_ms for phase in phases])[phase_of]
    return np.cumsum(np.random.default_rng([seed, 0xA11]).exponential(1.0, count) * means)


def arrival_order(times: Mapping[str, NDArray[np.float64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All tuples in order of arrival: the number of the input, and the position in it.

    Examples
    --------
    >>> inputs, positions = arrival_order({"a": np.array([1.0, 4.0]), "b": np.array([2.0])})
    >>> inputs.tolist(), positions.tolist()
    ([0, 1, 0], [0, 0, 1])
    """
    moments = np.concatenate([np.zeros(0), *times.values()])
    inputs = np.repeat(np.arange(len(times)), [len(part) for part in times.values()])
    positions = np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(len(part)) for part in times.values())])
    order = np.argsort(moments, kind="stable")
    return inputs[order], positions[order]


def arrival_slices(times: Mapping[str, NDArray[np.float64]], slice_ms: float) -> Iterator[Arrival]:
    """Yield the arrivals in each time slice, one part per input.

    Examples
    --------
    >>> for part in arrival_slices({"a": np.array([1.0, 4.0]), "b": np.array([2.0])}, slice_ms=3.0):
    ...     print(part.moment_ms, part.name, part.first, part.last)
    3.0 a 0 1
    3.0 b 0 1
    6.0 a 1 2
    """
    if slice_ms <= 0:
        raise PlanError(f"slice_ms={slice_ms}: a time slice must be longer than 0.")
    end = max((float(part[-1]) for part in times.values() if part.size), default=0.0)
    moments = slice_ms * np.arange(1, int(end // slice_ms) + 2)
    edges = {name: np.searchsorted(part, moments, side="left") for name, part in times.items()}
    sent = dict.fromkeys(times, 0)
    for number, moment in enumerate(moments.tolist()):
        for name, edge in edges.items():
            last = int(edge[number])
            if last > sent[name]:
                yield Arrival(moment, name, sent[name], last)
                sent[name] = last
