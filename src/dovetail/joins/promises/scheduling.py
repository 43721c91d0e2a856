"""Decides which input to read next, and which of its tuples to process first.

Inputs wait in queues of tuples and punctuations. *Stream scheduling* chooses the queue. Random scheduling takes any.
Priority-driven scheduling takes the input of the highest priority, the "one" of a one-to-many join, until its queue is
empty or its quota is used up, then the next; after a full round the quotas start anew. So the tuples that others will
look for are there first.

*Tuple scheduling* chooses the order within an input. Sequential scheduling is the order of arrival. Value-oriented
scheduling is active while another input has a punctuation that is not propagated yet: tuples that match it are
processed first, because it waits for their results, and the others go to a *waiting pool*. It ends when no such
punctuation is left, or when stream scheduling switches to another input; then the pool is processed. Inputs whose order
of arrival is itself a promise (clustered, ordered) are processed in sequence. A cluster that is being joined is read to
its end, whatever the quota: the 1-NC algorithm.

Memory: queues and pools use an eighth of the budget, taken from the share of the state. A restart keeps them.

Ding, Rundensteiner, Heineman 2003, sections 4.1, 4.2, 5.3 and 5.4. Tuples are taken in slices, not one by one.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from dovetail.core.errors import BudgetError, PlanError
from dovetail.joins.multiway.spec import TupleWindow
from dovetail.joins.promises.join import MetadataJoin
from dovetail.joins.promises.keys import Keys
from dovetail.joins.promises.punctuation import BoundPunctuation, Punctuation
from dovetail.joins.protocol import Snapshot

__all__ = ["Schedule", "ScheduledJoin"]

StreamScheduling = Literal["priority", "random"]
TupleScheduling = Literal["value", "sequential"]


@dataclass(frozen=True)
class Schedule:
    """How the inputs of a join are read.

    Parameters
    ----------
    streams
        ``"priority"``, or ``"random"`` by the join's seed.
    tuples
        ``"value"``: value-oriented while there are punctuations; or ``"sequential"``.
    priority
        The inputs, the first to be read first. None: unique inputs, then the others.
    quota
        The maximum number of tuples taken from an input per turn: one number, or by name.
    slice_rows
        How many tuples are taken at once.

    Examples
    --------
    >>> Schedule(quota={"news": 100, "access": 1000}).quota_of("news")
    100
    """

    streams: StreamScheduling = "priority"
    tuples: TupleScheduling = "value"
    priority: Sequence[str] | None = None
    quota: int | Mapping[str, int] = 4096
    slice_rows: int = 1024

    def __post_init__(self) -> None:
        for name, allowed in (("streams", StreamScheduling), ("tuples", TupleScheduling)):
            if getattr(self, name) not in get_args(allowed):
                raise PlanError(f"{name}={getattr(self, name)!r} is none of {', '.join(get_args(allowed))}.")
        quotas = [self.quota] if isinstance(self.quota, int) else list(self.quota.values())
        for number in [*quotas, self.slice_rows]:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise PlanError(f"{number!r}: quotas and slices are at least 1 tuple.")

    def quota_of(self, name: str) -> int:
        """The maximum number of tuples taken from an input per turn."""
        return self.quota if isinstance(self.quota, int) else self.quota[name]


@dataclass
class _Queue:
    """The queue of one input, batches and punctuations in order of arrival, and its waiting pool."""

    items: deque[pa.RecordBatch | BoundPunctuation] = field(default_factory=deque)
    pool: list[pa.RecordBatch] = field(default_factory=list)
    taken: int = 0
    nbytes: int = 0

    def put(self, item: pa.RecordBatch | BoundPunctuation) -> None:
        self.items.append(item)
        self.nbytes += _bytes_of(item)

    def take(self) -> Any:
        item = self.items.popleft()
        self.nbytes -= _bytes_of(item)
        return item

    def put_back(self, rest: pa.RecordBatch) -> None:
        """Return the rest of the last item; it keeps the whole item's memory alive."""
        self.items.appendleft(rest)
        self.nbytes += _bytes_of(rest)

    def pool_rows(self, rows: pa.RecordBatch) -> None:
        self.pool.append(rows)
        self.nbytes += _bytes_of(rows)

    def take_pool(self) -> list[pa.RecordBatch]:
        pool, self.pool = self.pool, []
        self.nbytes -= sum(map(_bytes_of, pool))
        return pool

    @property
    def rows(self) -> int:
        return sum(item.num_rows for item in (*self.items, *self.pool) if _is_batch(item))


class ScheduledJoin:
    """Reads the inputs of a metadata-aware join from queues, in an order that suits their promises.

    Parameters
    ----------
    join
        The join; it must be driven only through this object.
    schedule
        How its inputs are read.

    Examples
    --------
    >>> from dovetail.joins.promises import Metadata
    >>> from dovetail.joins.multiway import mjoin_spec
    >>> schemas = {n: pa.schema({"k": pa.int64(), n: pa.int64()}) for n in ("one", "many")}
    >>> join = MetadataJoin(mjoin_spec(schemas, on="k", budget="1MB"), Metadata(keys=["one"]))
    >>> scheduled = ScheduledJoin(join)
    >>> scheduled.enqueue("many", pa.record_batch([[1, 1], [8, 9]], schema=schemas["many"]))
    >>> scheduled.enqueue("one", pa.record_batch([[1], [7]], schema=schemas["one"]))
    >>> [row["many"] for out in scheduled.run() for row in out.to_pylist()]
    [8, 9]
    >>> join.metrics.dropped_on_arrival
    2
    """

    kind = "scheduled_join"

    def __init__(self, join: MetadataJoin, schedule: Schedule | None = None) -> None:
        self.join, self.spec = join, join.spec
        self.schedule = Schedule() if schedule is None else schedule
        if isinstance(self.spec.window, TupleWindow):
            raise PlanError(
                "A tuple window depends on the order of arrival, which scheduling changes.",
                hint="Offer the tuples to the join itself, or use an event-time window.",
            )
        names = self.spec.names
        by_default = sorted(names, key=lambda name: name not in join.metadata.keys)
        priority = by_default if self.schedule.priority is None else list(self.schedule.priority)
        if sorted(priority) != sorted(names):
            raise PlanError(f"priority={priority!r} is not an order of {', '.join(names)}.")
        if not isinstance(self.schedule.quota, int) and set(self.schedule.quota) != set(names):
            raise PlanError(f"quota= names {', '.join(self.schedule.quota)}; the inputs are {', '.join(names)}.")
        self._priority = [names.index(name) for name in priority]
        self._queues = [_Queue() for _ in names]
        share = self.spec.budget.total_bytes // 8
        # Half is for the queues, half for the pools.
        self._most_waiting_bytes = share // 2
        join.state.limits = replace(join.state.limits, state=join.state.limits.state - share)
        self._bytes = join.reserve("queues")
        self._current: int | None = None
        self._draws = 0
        self.switches = 0
        self.pooled_rows = 0

    # ---------------------------------------------------------------- queues

    def enqueue(self, name: str, item: pa.RecordBatch | Punctuation) -> None:
        """Append tuples, with or without codes, or a punctuation to an input's queue.

        Raises a `BudgetError` if the queues are full; `run` frees space.
        """
        queue = self._queues[self._number(name)]
        if isinstance(item, Punctuation):
            queue.put(BoundPunctuation.of(item, name, self.spec.schemas[name]))
        else:
            coded = item if self.spec.code_columns[0] in item.schema.names else self.spec.with_codes(name, item)
            if not coded.num_rows:
                return
            size = int(coded.get_total_buffer_size())
            if self.waiting_bytes + size > self._most_waiting_bytes:
                raise BudgetError(
                    f"{size} bytes of tuples of input {name!r} do not fit the queues: {self.waiting_bytes} of "
                    f"{self._most_waiting_bytes} bytes are taken.",
                    hint="Run the join first, or enqueue smaller batches.",
                )
            queue.put(coded)
        self._bytes.resize(self.waiting_bytes)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of all queues and waiting pools."""
        return sum(queue.nbytes for queue in self._queues)

    def waiting_rows(self) -> dict[str, int]:
        """Unprocessed tuples per input, including its waiting pool."""
        return {name: queue.rows for name, queue in zip(self.spec.names, self._queues, strict=True)}

    # ---------------------------------------------------------------- running

    def run(self, max_tuples: int | None = None) -> Iterator[pa.RecordBatch]:
        """Process all queued tuples, or about `max_tuples` of them; the join is idle when the queues are empty."""
        left = max_tuples
        while (i := self._next_stream()) is not None and (left is None or left > 0):
            # 1. Stream scheduling: switching inputs ends the tuple scheduling of the previous one.
            if self._current is not None and self._current != i:
                yield from self._clean_pool(self._current)
            self._current = i
            # 2. Retrieve, and process in the order of tuple scheduling.
            head = self._queues[i].items[0]
            if not _is_batch(head):
                yield from self._punctuate(i)
                continue
            rows = self._retrieve(i)
            left = None if left is None else left - rows.num_rows
            yield from self._process(i, rows)
            self._bytes.resize(self.waiting_bytes)
        if left is None or left > 0:
            # 3. All queues are empty.
            for i in range(len(self._queues)):
                yield from self._clean_pool(i)
            yield from self.join.step(idle=True)

    def _next_stream(self) -> int | None:
        waiting = [i for i in self._priority if self._queues[i].items]
        if not waiting:
            return None
        if self.schedule.streams == "random":
            self._draws += 1
            drawn = np.random.default_rng([self.spec.seed, self._draws]).integers(len(waiting))
            return waiting[int(drawn)]
        within = [i for i in waiting if self._queues[i].taken < self.schedule.quota_of(self.spec.names[i])]
        if not within:
            for queue in self._queues:
                queue.taken = 0
            within = waiting
        return within[0]

    def _retrieve(self, i: int) -> pa.RecordBatch:
        """The next tuples of an input: a slice within its quota, or up to the end of the cluster."""
        queue = self._queues[i]
        head = queue.take()
        count = min(head.num_rows, self.schedule.slice_rows)
        if self.schedule.streams == "priority":
            count = min(count, self.schedule.quota_of(self.spec.names[i]) - queue.taken)
        if self.spec.names[i] in self.join.metadata.clustered and count < head.num_rows:
            count = self._end_of_cluster(i, head, count)
        if count < head.num_rows:
            queue.put_back(head.slice(count))
        queue.taken += count
        return head.slice(0, count)

    def _end_of_cluster(self, i: int, head: pa.RecordBatch, count: int) -> int:
        codes = head.column(0).fill_null(0).to_numpy(zero_copy_only=False)
        others = np.flatnonzero(codes[count:] != codes[count - 1])
        end = count + (int(others[0]) if others.size else len(codes) - count)
        return end if self.join.is_held_elsewhere(i, codes[count - 1 : count]) else count

    def _process(self, i: int, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if not self._is_value_oriented(i):
            yield from self._clean_pool(i)
            yield from self.join.offer(self.spec.names[i], rows)
            return
        awaited = self.join.collection.awaited(i, self._keys(i, rows))
        if awaited.any():
            urgent = rows if awaited.all() else rows.filter(pa.array(awaited))
            yield from self.join.offer(self.spec.names[i], urgent)
        if not awaited.all():
            rest = rows.filter(pa.array(~awaited))
            self._queues[i].pool_rows(rest)
            self.pooled_rows += rest.num_rows

    def _is_value_oriented(self, i: int) -> bool:
        if self.schedule.tuples != "value" or self.join.keeps_order(self.spec.names[i]):
            return False
        return self.join.collection.is_awaiting(i)

    def _keys(self, i: int, rows: pa.RecordBatch) -> Keys:
        codes = rows.column(0)
        return self.join.collection.readers[i].of_rows(
            codes.fill_null(0).to_numpy(zero_copy_only=False), rows.select(range(1, rows.num_columns))
        )

    def _clean_pool(self, i: int) -> Iterator[pa.RecordBatch]:
        """Return an input to sequential scheduling: process its waiting pool."""
        pool = self._queues[i].take_pool()
        if pool:
            self.switches += 1
            yield from self.join.offer(self.spec.names[i], pa.concat_batches(pool))

    def _punctuate(self, i: int) -> Iterator[pa.RecordBatch]:
        """Apply the punctuations at the head of a queue, after the tuples that wait in the pool."""
        yield from self._clean_pool(i)
        found = []
        while self._queues[i].items and not _is_batch(self._queues[i].items[0]):
            found.append(self._queues[i].take().unbound())
        yield from self.join.punctuate(self.spec.names[i], *found)
        self._bytes.resize(self.waiting_bytes)

    # ---------------------------------------------------------------- time and end

    def advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """Like `MJoin.advance`, after everything queued, which is not late."""
        yield from self.run()
        yield from self.join.advance(watermark)

    def finish(self, name: str) -> Iterator[pa.RecordBatch]:
        """Like `MJoin.finish`, after everything queued."""
        yield from self.run()
        self.join.finish(name)

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Like `MJoin.drain`, after everything queued."""
        yield from self.run()
        yield from self.join.drain()

    def _number(self, name: str) -> int:
        if name not in self.spec.names:
            raise PlanError(f"There is no input {name!r}; the inputs are {', '.join(self.spec.names)}.")
        return self.spec.names.index(name)

    # ---------------------------------------------------------------- restart

    def snapshot(self) -> Snapshot:
        """The state of the join, its queues and its pools, between two calls."""
        saved = self.join.snapshot()
        tables, queues = dict(saved.tables), []
        for i, queue in enumerate(self._queues):
            items: list[Any] = []
            for number, item in enumerate(queue.items):
                items.append(None if _is_batch(item) else item.as_dict())
                if _is_batch(item):
                    tables[f"queue-{i}-{number}"] = pa.Table.from_batches([item])
            for number, batch in enumerate(queue.pool):
                tables[f"pool-{i}-{number}"] = pa.Table.from_batches([batch])
            queues.append({"items": items, "pool": len(queue.pool), "taken": queue.taken})
        about = {"queues": queues, "current": self._current, "draws": self._draws}
        about |= {"switches": self.switches, "pooled_rows": self.pooled_rows}
        return Snapshot(self.kind, saved.fingerprint, tables, {**saved.values, "schedule": about})

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot of the same join."""
        self.join.restore(replace(snapshot, kind=self.join.kind if snapshot.kind == self.kind else snapshot.kind))
        about = snapshot.values["schedule"]
        self._current, self._draws = about["current"], about["draws"]
        self.switches, self.pooled_rows = about["switches"], about["pooled_rows"]
        for i, saved in enumerate(about["queues"]):
            queue = self._queues[i] = _Queue(taken=saved["taken"])
            for number, item in enumerate(saved["items"]):
                queue.put(_batch(snapshot, f"queue-{i}-{number}") if item is None else BoundPunctuation.from_dict(item))
            for number in range(saved["pool"]):
                queue.pool_rows(_batch(snapshot, f"pool-{i}-{number}"))
        self._bytes.resize(self.waiting_bytes)


def _is_batch(item: Any) -> bool:
    return isinstance(item, pa.RecordBatch)


def _bytes_of(item: Any) -> int:
    return int(item.get_total_buffer_size()) if _is_batch(item) else int(item.nbytes)


def _batch(snapshot: Snapshot, name: str) -> pa.RecordBatch:
    [batch] = snapshot.tables[name].combine_chunks().to_batches()
    return batch
