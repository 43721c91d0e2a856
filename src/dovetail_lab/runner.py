"""Run experiments one after the other; what is finished is on disk at once, so that a run can be broken off."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dovetail.lab.experiment import Context, Experiment
from dovetail.lab.results import Result, environment, read_results

__all__ = ["DEFAULT_REPEATS", "DEFAULT_SEED", "Request", "Step", "run_experiments"]

DEFAULT_SEED = 2007
DEFAULT_REPEATS = {"quick": 1, "full": 3}
# What an experiment is thought to take that was never run here, in seconds: for the time left alone.
_EXPECTED_SECONDS = {"quick": 20.0, "full": 100.0}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run, and where results and data go."""

    experiments: Sequence[Experiment]
    results: Path
    data: Path
    is_quick: bool = False
    is_resumed: bool = False
    seed: int = DEFAULT_SEED
    repeats: int | None = None

    @property
    def size(self) -> str:
        """``"quick"`` or ``"full"``."""
        return "quick" if self.is_quick else "full"

    @property
    def times(self) -> int:
        """How often each measurement is repeated."""
        return DEFAULT_REPEATS[self.size] if self.repeats is None else self.repeats


@dataclass(frozen=True)
class Step:
    """Where a run is: told before, during and after each experiment.

    Attributes
    ----------
    experiment
        The one that is run.
    number, total
        Its place among those that are run.
    share_done
        The part of the whole run's expected time that has passed, 0 to 1.
    seconds_left
        An estimate: experiments that were run here before count with the time that they took then.
    result
        What it gave, once it is done.
    """

    experiment: Experiment
    number: int
    total: int
    share_done: float
    seconds_left: float
    result: Result | None = None


def run_experiments(request: Request, report: Callable[[Step], None] = lambda step: None) -> list[Result]:
    """Run what was asked for; with ``is_resumed``, leave out what has a result of the same size, seed and repeats.

    Returns
    -------
    list of Result
        One per experiment asked for, in their order: those left out as they are on disk.
    """
    request.results.mkdir(parents=True, exist_ok=True)
    request.data.mkdir(parents=True, exist_ok=True)
    known = read_results(request.results)
    done = {name: result for name, result in known.items() if request.is_resumed and _is_answer(request, result)}
    waiting = [experiment for experiment in request.experiments if experiment.name not in done]
    clock = _Clock(waiting, known, request.size)
    context = Context(request.is_quick, request.seed, request.times, request.data)
    machine, versions = environment()
    for number, experiment in enumerate(waiting, start=1):

        def tell(share: float, result: Result | None = None, experiment: Experiment = experiment) -> None:
            part, left = clock.progress(number - 1, share)  # noqa: B023 -- used within this iteration alone
            report(Step(experiment, number, len(waiting), part, left, result))  # noqa: B023

        tell(0.0)
        context.report_progress = lambda parts, total, tell=tell: tell(parts / max(1, total))  # type: ignore[misc]
        context.begin(0)
        started_at, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        measured = experiment.run(context)
        result = Result(
            experiment=experiment.name,
            size=request.size,
            seed=request.seed,
            repeats=request.times,
            started_at=started_at,
            seconds=time.monotonic() - began,
            machine=machine,
            versions=versions,
            measured=measured,
            verdict=experiment.judge(measured),
        )
        result.write(request.results)
        done[experiment.name] = result
        tell(1.0, result)
    return [done[experiment.name] for experiment in request.experiments]


def _is_answer(request: Request, result: Result) -> bool:
    return (result.size, result.seed, result.repeats) == (request.size, request.seed, request.times)


class _Clock:
    """Guesses how much of a run is done and how long the rest takes, from how long experiments took before."""

    def __init__(self, experiments: Iterable[Experiment], known: Mapping[str, Result], size: str) -> None:
        self._expected = [
            known[e.name].seconds if e.name in known and known[e.name].size == size else _EXPECTED_SECONDS[size]
            for e in experiments
        ]
        self._total = sum(self._expected)
        self._began = time.monotonic()

    def progress(self, finished: int, share: float) -> tuple[float, float]:
        """(share done, seconds left) when so many are finished and the next one is done to a share."""
        done = sum(self._expected[:finished]) + share * sum(self._expected[finished : finished + 1])
        part = min(1.0, done / self._total) if self._total else 1.0
        left = self._total - done
        # Once a tenth is done, the pace so far says more than the expectation.
        if part > 0.1:
            left = (time.monotonic() - self._began) * (1 - part) / part
        return part, left
