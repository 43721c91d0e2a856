"""Run experiments one after the other. Finished results are written at once, so that a run can be interrupted."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dovetail_lab.experiment import Context, Experiment
from dovetail_lab.repeats import merge
from dovetail_lab.results import Result, environment, read_results
from dovetail_lab.source import commit, load, source_digest

__all__ = ["DEFAULT_REPEATS", "DEFAULT_SEED", "Request", "Step", "run_experiments"]

DEFAULT_SEED = 2007
DEFAULT_REPEATS = {"quick": 1, "full": 3}
# The assumed duration, in seconds, of an experiment that never ran here; only for the estimate of the remaining time.
_EXPECTED_SECONDS = {"quick": 20.0, "full": 100.0}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run, and the directories of results and data."""

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
        """The number of independent runs, each with a seed of its own."""
        return DEFAULT_REPEATS[self.size] if self.repeats is None else self.repeats


@dataclass(frozen=True)
class Step:
    """The progress of a run, reported before, during and after each experiment."""

    experiment: Experiment
    number: int  # its position among the experiments of the run
    total: int
    share_done: float  # fraction of the expected time of the whole run, 0 to 1
    seconds_left: float  # estimated from the duration of earlier runs
    result: Result | None = None  # once it is done


def run_experiments(request: Request, report: Callable[[Step], None] = lambda step: None) -> list[Result]:
    """Run the requested experiments and return their results, in order.

    Each is run as often as it is repeated, every time with another seed and everything made anew, and the runs are
    merged. With ``is_resumed``, experiments with a stored result of the same code, size, seed and repeats are not run
    again.
    """
    request.results.mkdir(parents=True, exist_ok=True)
    request.data.mkdir(parents=True, exist_ok=True)
    known = read_results(request.results)
    done = {name: result for name, result in known.items() if request.is_resumed and _is_answer(request, result)}
    waiting = [experiment for experiment in request.experiments if experiment.name not in done]
    clock = _Clock(waiting, known, request.size)
    # What experiments share, such as relations and curves, is of one seed.
    contexts = [Context(request.is_quick, request.seed + number, 1, request.data) for number in range(request.times)]
    machine, versions = environment()
    for number, experiment in enumerate(waiting, start=1):

        def tell(share: float, result: Result | None = None, experiment: Experiment = experiment) -> None:
            part, left = clock.progress(number - 1, share)  # noqa: B023 -- used within this iteration alone
            report(Step(experiment, number, len(waiting), part, left, result))  # noqa: B023

        tell(0.0)
        started_at, began, load_before = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic(), load()
        runs = []
        for run, context in enumerate(contexts):

            def tell_part(parts: int, total: int, run: int = run, tell: Callable[..., None] = tell) -> None:
                tell((run + parts / max(1, total)) / request.times)

            context.report_progress = tell_part
            context.begin(0)
            runs.append(experiment.run(context))
        measured = merge(runs)
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
            revision=experiment.revision,
            commit=commit(),
            source=source_digest(),
            load=(load_before, load()),
        )
        result.write(request.results)
        done[experiment.name] = result
        tell(1.0, result)
    return [done[experiment.name] for experiment in request.experiments]


def _is_answer(request: Request, result: Result) -> bool:
    wanted = (request.size, request.seed, request.times, source_digest())
    return (result.size, result.seed, result.repeats, result.source) == wanted


class _Clock:
    """Estimates the progress and the remaining time of a run from the duration of earlier runs."""

    def __init__(self, experiments: Iterable[Experiment], known: Mapping[str, Result], size: str) -> None:
        self._expected = [
            known[e.name].seconds if e.name in known and known[e.name].size == size else _EXPECTED_SECONDS[size]
            for e in experiments
        ]
        self._total = sum(self._expected)
        self._began = time.monotonic()

    def progress(self, finished: int, share: float) -> tuple[float, float]:
        """(fraction done, seconds left) when `finished` are done, and the fraction `share` of the next one."""
        done = sum(self._expected[:finished]) + share * sum(self._expected[finished : finished + 1])
        part = min(1.0, done / self._total) if self._total else 1.0
        left = self._total - done
        # Once a tenth is done, the pace so far is a better estimate.
        if part > 0.1:
            left = (time.monotonic() - self._began) * (1 - part) / part
        return part, left
