"""The three experiments of the paper on metadata-aware joins, as curves over the number of results."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from dovetail.joins.multiway import MJoin, XJoin, mjoin_spec
from dovetail.joins.promises import Metadata, MetadataJoin, Punctuation, Schedule, ScheduledJoin
from dovetail_lab.workloads.news import ACCESS_SCHEMA, NEWS_SCHEMA, NewsWorkload

__all__ = [
    "BULK",
    "SCHEMAS",
    "Arrival",
    "Curve",
    "Scale",
    "against_xjoin",
    "fastest",
    "joined",
    "metadata_join",
    "purging",
    "scheduling",
    "without_metadata",
]

SCHEMAS = {"news": NEWS_SCHEMA, "access": ACCESS_SCHEMA}
Arrival = Literal["ordered", "random"]
BULK = 500
"""The number of completed values per punctuation, as from a source that sends large batches."""


@dataclass
class Curve:
    """CPU seconds and bytes held, by number of results."""

    name: str
    results: list[int] = field(default_factory=lambda: [0])
    seconds: list[float] = field(default_factory=lambda: [0.0])
    held_bytes: list[int] = field(default_factory=lambda: [0])
    counters: dict[str, Any] = field(default_factory=dict)

    @property
    def total_seconds(self) -> float:
        """The whole run."""
        return self.seconds[-1]

    def note(self, results: int, seconds: float, held_bytes: int) -> None:
        """Add a point."""
        self.results.append(results)
        self.seconds.append(seconds)
        self.held_bytes.append(held_bytes)


@dataclass(frozen=True)
class Scale:
    """The amount of data of an experiment."""

    items: int = 2000
    accesses_per_item: int = 10
    items_per_part: int = 1  # postings, and completed values, per punctuation
    runs: int = 2  # the fastest run counts
    seed: int = 2003


def fastest(run: Callable[[], Curve], runs: int) -> Curve:
    """The fastest of several runs: other load on the machine only adds time."""
    return min((run() for _ in range(runs)), key=lambda curve: curve.total_seconds)


# ---------------------------------------------------------------- experiment 1


def scheduling(scale: Scale, order: Arrival, schedule: Schedule, name: str) -> Curve:
    """Time to results with immediate purging and propagated punctuations; the queues never become empty."""
    work = NewsWorkload(scale.items, scale.accesses_per_item, order, seed=scale.seed)
    spec = mjoin_spec(SCHEMAS, on="sno", budget="512MB")
    join = ScheduledJoin(MetadataJoin(spec, Metadata(keys=["news"], goal="memory")), schedule)
    waiting: list[tuple[str, pa.RecordBatch | Punctuation]] = []
    for news, accesses in work.parts(scale.items_per_part):
        waiting.append(("news", news))
        waiting.append(("access", accesses.records))
        waiting += [("access", Punctuation({"sno": number})) for number in accesses.closed.tolist()]
    for source, item in waiting:
        join.enqueue(source, item)
    curve, results, passed_on = Curve(name), 0, 0
    step = max(1, scale.items * scale.accesses_per_item // 20)
    started = time.process_time()
    while any(join.waiting_rows().values()):
        results += sum(batch.num_rows for batch in join.run(max_tuples=step))
        passed_on += len(join.join.take_punctuations())
        curve.note(results, time.process_time() - started, join.join.size())
    metrics = join.join.metrics
    assert results == scale.items * scale.accesses_per_item, "every access record meets its item"
    curve.counters = {
        "inserts": metrics.inserts,
        "dropped_on_arrival": metrics.dropped_on_arrival,
        "pooled": join.pooled_rows,
    }
    return curve


# ---------------------------------------------------------------- experiments 2 and 3


def arrivals(scale: Scale, order: Arrival, batch_items: int) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch, Any]]:
    """News, access records, and the completed numbers, one batch at a time."""
    work = NewsWorkload(scale.items, scale.accesses_per_item, order, seed=scale.seed)
    for news, accesses in work.parts(batch_items):
        yield news, accesses.records, accesses.closed


def joined(
    join: MJoin,
    scale: Scale,
    order: Arrival,
    name: str,
    batch_items: int,
    uses_punctuations: bool,
    one_by_one: bool = False,
) -> Curve:
    """Time and memory of a join that gets both inputs in turns, with a punctuation for every completed value.

    Records come in batches, and so do their punctuations, or `one_by_one`.
    """
    curve, results, cpu = Curve(name), 0, 0.0
    parts = list(arrivals(scale, order, batch_items))
    every = max(1, len(parts) // 40)
    peak = 0
    for number, (news, access, closed) in enumerate(parts):
        coded = [join.spec.with_codes("news", news), join.spec.with_codes("access", access)]
        given = [Punctuation({"sno": value}) for value in closed.tolist()]
        if len(given) >= BULK:
            given = [Punctuation.one_of("sno", pa.array(closed))]
        started = time.process_time()
        for source, batch in zip(("news", "access"), coded, strict=True):
            results += sum(out.num_rows for out in join.offer(source, batch))
        peak = max(peak, join.size())
        if uses_punctuations and isinstance(join, MetadataJoin):
            for several in [[each] for each in given] if one_by_one else [given]:
                results += sum(out.num_rows for out in join.punctuate("access", *several))
        cpu += time.process_time() - started
        if number % every == every - 1 or number == len(parts) - 1:
            curve.note(results, cpu, peak)
            peak = 0
    started = time.process_time()
    results += sum(out.num_rows for out in join.drain())
    cpu += time.process_time() - started
    curve.note(results, cpu, join.size())
    assert results == scale.items * scale.accesses_per_item, "every access record meets its item"
    curve.counters = {"inserts": join.metrics.inserts, "state_rows": sum(join.state_rows().values())}
    return curve


def metadata_join(purge_count: int | None, budget: str | int = "512MB", directory: str | None = None) -> MetadataJoin:
    """A one-to-many join that purges after `purge_count` punctuations; 1: immediately."""
    spec = mjoin_spec(SCHEMAS, on="sno", budget=budget, flushing="random", spill_directory=directory)
    purging = "immediate" if purge_count == 1 else "batched"
    metadata = Metadata(keys=["news"], purging=purging, purge_count=purge_count, propagate=False)  # type: ignore[arg-type]
    return MetadataJoin(spec, metadata)


def without_metadata(budget: str | int, directory: str) -> XJoin:
    """A join of the same streams without metadata."""
    return XJoin(mjoin_spec(SCHEMAS, on="sno", budget=budget, flushing="random", spill_directory=directory))


def against_xjoin(
    scale: Scale,
    order: Arrival,
    budget: str | int = "512MB",
    batch_items: int = 10,
    purge_count: int | None = 100,
) -> list[Curve]:
    """Experiment 2: purging after 100 punctuations against a join without metadata."""

    def ours() -> Curve:
        with tempfile.TemporaryDirectory() as directory:
            join = metadata_join(purge_count, budget, directory)
            return joined(join, scale, order, "MJoin, batch purging", batch_items, True)

    def theirs() -> Curve:
        with tempfile.TemporaryDirectory() as directory:
            return joined(without_metadata(budget, directory), scale, order, "XJoin", batch_items, False)

    return [fastest(ours, scale.runs), fastest(theirs, scale.runs)]


def purging(scale: Scale, order: Arrival, batch_items: int = 10) -> list[Curve]:
    """Experiment 3: purging after every punctuation, after 100, and after a number that the join chooses."""
    found = []
    for count, name in ((1, "immediate"), (100, "batches of 100"), (None, "batches of its own choice")):

        def run(count: int | None = count, name: str = name) -> Curve:
            return joined(metadata_join(count), scale, order, name, batch_items, True, one_by_one=True)

        found.append(fastest(run, scale.runs))
    return found
