"""MJoin: a symmetric hash join of any number of streams, in bounded memory, each result exactly once.

What it computes: all combinations of one tuple of each input that agree in the join attributes and lie within the
window; for outer, semi and anti joins also, or only, the tuples of a preserved input, once each, when it is decided
that they match or that they no longer can. A left join of n inputs keeps the rows of its driving input that are part of
no combination.

When: results among tuples in memory come out with the last of their tuples (`offer`). Where tuples had to go to disk,
the rest comes when the delay bound is reached or the inputs are idle (`step`), and at the latest from `drain`. Rows
without a match come out when the watermark has passed their window (`advance`), or when all inputs have ended
(`finish`, `drain`).

Memory: `size()` is what is held and never exceeds the budget. An eighth of the budget is for arriving tuples, an eighth
for output, a quarter for merging and for loading what is on disk, the rest for state. What does not fit goes to the
spill directory, by hash partition.

What a restart keeps: everything, by `snapshot` and `restore`. Two operators with the same spec that were given the same
calls hold the same state and give the same rows: nothing depends on a clock, and randomness comes from the spec's seed.

Supported: inner joins of n inputs over any connected join graph; left joins of n inputs against a driving one; right,
full, semi and anti joins of two; windows by event time and by number of tuples. Not supported: conditions besides
equality.

Viglas, Naughton, Burger: Maximizing the Output Rate of Multi-Way Join Queries over Streaming Information Sources
(2003).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.errors import BudgetError, DovetailError, PlanError, PromiseError, SpillError, StateError
from dovetail.memory import Ledger
from dovetail.operators.mjoin.arrivals import ArrivalReader
from dovetail.operators.mjoin.chunk import Chunk
from dovetail.operators.mjoin.compaction import compact_pieces
from dovetail.operators.mjoin.disk_stages import DiskStages
from dovetail.operators.mjoin.metrics import MJoinMetrics
from dovetail.operators.mjoin.output import MultiOutput
from dovetail.operators.mjoin.probing import Prober, SequenceChooser
from dovetail.operators.mjoin.results import ResultWriter
from dovetail.operators.mjoin.snapshots import refer_to_stored, restore_operator, snapshot_of, table_names
from dovetail.operators.mjoin.spec import MJoinSpec, TimeWindow, TupleWindow
from dovetail.operators.mjoin.spill import Fetch
from dovetail.operators.mjoin.state import JoinState
from dovetail.operators.protocol import Snapshot

__all__ = ["MJoin"]

_MOST_PAIRS = 65_536
_FEWEST_PAIRS = 4
_FEWEST_ROWS = 4


class MJoin:
    """A multi-way stream join; see the module for what it promises.

    The iterators that `offer`, `step`, `advance` and `drain` give do the work as they are consumed: exhaust one before
    the next call.

    Examples
    --------
    >>> from dovetail.operators.mjoin import mjoin_spec
    >>> schemas = {n: pa.schema({"k": pa.int64(), n: pa.string()}) for n in "abc"}
    >>> spec = mjoin_spec(schemas, on="k", budget="1MB")
    >>> join = MJoin(spec)
    >>> def offer(name, k, value):
    ...     batch = spec.with_codes(name, pa.record_batch({"k": [k], name: [value]}))
    ...     return [row for out in join.offer(name, batch) for row in out.to_pylist()]
    >>> offer("a", 1, "x"), offer("c", 1, "z")
    ([], [])
    >>> offer("b", 1, "y")
    [{'k': 1, 'a': 'x', 'b': 'y', 'c': 'z'}]
    """

    kind = "mjoin"

    def __init__(self, spec: MJoinSpec) -> None:
        minimum = self.minimum_budget(spec)
        spec.budget.require(minimum, f"a join of {len(spec.names)} inputs with these columns")
        self.spec = spec
        self.metrics = self._new_metrics()
        self._ledger = Ledger(spec.budget)
        self.state = JoinState(spec, self._ledger, self.metrics)
        limits = self.state.limits
        self._output = MultiOutput(spec)
        self._arriving = self._ledger.reserve("arrivals")
        self._late_bytes = self._ledger.reserve("late")
        writer_bytes = self._ledger.reserve("output")
        self._pairs_bytes = self._ledger.reserve("partial_results")
        self._limit = max(_FEWEST_PAIRS, min(_MOST_PAIRS, limits.output // 2 // _pair_bytes(len(spec.names))))
        self._reader = ArrivalReader(spec, limits.arrivals // 2)
        self._width = None if spec.window is None else spec.window.width
        self._prober = Prober(spec, self.metrics, self._width)
        self.chooser = SequenceChooser(spec)
        self._writer = ResultWriter(spec, self._output, self.metrics, writer_bytes, limits.output // 2)
        self._stages = DiskStages(self.state, self._prober, self.chooser, self._writer, self.metrics, self._limit)
        self._ledger.reserve("bookkeeping", self.chooser.fanout.nbytes + self.state.spilled.nbytes)
        self._late: list[tuple[str, pa.RecordBatch]] = []
        self.on_late: Callable[[str, pa.RecordBatch], None] | None = None
        """Called with late tuples as they come, where the window says ``late="side"``; None: `take_late` gives them."""
        self.watermark: int | None = None
        self._greatest_time: dict[str, int] = {}
        self._place = 0
        self._purged_at = 0
        self._now: int | None = None
        self._turn = 0
        self.ended: set[str] = set()
        self._broken = ""

    def _new_metrics(self) -> MJoinMetrics:
        return MJoinMetrics(dict.fromkeys(self.spec.names, 0))

    @staticmethod
    def minimum_budget(spec: MJoinSpec) -> int:
        """The least budget for these inputs, in bytes."""
        reader = ArrivalReader(spec, 1)
        widths = [_guessed_row_bytes(schema) for schema in spec.schemas.values()]
        chunk = max(reader.chunk_bytes(i, _FEWEST_ROWS * w, _FEWEST_ROWS) for i, w in enumerate(widths))
        return 16 * max(chunk, _FEWEST_PAIRS * _pair_bytes(len(widths)), sum(widths))

    @property
    def output_schema(self) -> pa.Schema:
        """Columns of every batch given: the join columns, then each input's others."""
        return self._output.schema

    @property
    def pending(self) -> int:
        """Tuples that have arrived and may have results that are still to come from disk."""
        return self.state.pending

    @property
    def completed_time(self) -> int | None:
        """The event time before which no result is still to come; None before the first watermark."""
        lows = [d.pending_low for d in self.state.domains if d.pending_low is not None]
        return None if self.watermark is None else min([self.watermark, *lows])

    def size(self) -> int:
        """Bytes held now; never above the budget."""
        return self._ledger.held_bytes

    def sizes(self) -> dict[str, int]:
        """Bytes held per component; the sum is `size`."""
        return self._ledger.by_component()

    @property
    def peak_bytes(self) -> int:
        """The most that was held at any moment."""
        return self._ledger.peak_bytes

    def state_rows(self) -> dict[str, int]:
        """Tuples held per input, in memory and on disk; up to half of a chunk may have expired already."""
        return dict(zip(self.spec.names, self.state.rows, strict=True))

    # ---------------------------------------------------------------- input

    def offer(self, name: str, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Accept tuples of an input: they probe the others and are kept.

        Parameters
        ----------
        name
            The input.
        batch
            Its columns, and an int64 code for each of its join attributes (see `MJoinSpec.with_codes`).

        Raises
        ------
        SpillError, BudgetError
            Where there is no room; ``metrics.tuples_in`` tells how many tuples were accepted, and the rest can be
            offered again when there is.
        """
        i = self._number(name)
        if name in self.ended:
            raise PlanError(f"Input {name!r} has ended: it was finished before.")
        return self._guarded(self._offer(i, self._reader.checked(i, batch)))

    def _offer(self, i: int, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for piece, size in self._reader.slices(i, batch):
            # 1. Make room, before anything is accepted.
            self._require_room_for_late(size)
            self.state.make_room(size)
            self._arriving.resize(size)
            # 2. Keep the tuples.
            chunk, nulls = self._accept(i, piece)
            resident = self.state.insert(i, chunk, self._now)
            self._arriving.resize(0)
            yield from self._writer.unmatched(i, nulls)
            # 3. Probe the other inputs' tuples in memory.
            yield from self._probe(i, resident)
            self.state.tidy(i, self._horizon())
            if isinstance(self.spec.window, TupleWindow):
                yield from self._advance_places(self.spec.window)

    def _require_room_for_late(self, size: int) -> None:
        """Late tuples wait to be fetched in the part of the budget that arrivals leave."""
        if self._late and self._late_bytes.held_bytes + size > self.state.limits.arrivals // 2:
            raise BudgetError(
                f"{self._late_bytes.held_bytes} bytes of late tuples wait to be fetched, and more might come.",
                hint="Call take_late after each offer.",
            )

    def _accept(self, i: int, piece: pa.RecordBatch) -> tuple[Chunk, pa.RecordBatch]:
        name = self.spec.names[i]
        first = self.state.next_stamp(piece.num_rows)
        # An input with two time columns is a join's result, whose tuples were judged when they arrived.
        judges = isinstance(self.spec.window, TimeWindow) and len(set(self.spec.window.columns_of(name))) == 1
        arrival = self._reader.read(i, piece, first, self._place, self.watermark if judges else None)
        self._place += piece.num_rows
        self.metrics.tuples_in[name] += arrival.accepted
        self.metrics.null_tuples += arrival.nulls.num_rows
        self.metrics.late_tuples += arrival.late.num_rows
        if arrival.late.num_rows and isinstance(self.spec.window, TimeWindow) and self.spec.window.late == "side":
            if self.on_late is not None:
                self.on_late(name, arrival.late)
            else:
                self._late_bytes.grow(int(arrival.late.get_total_buffer_size()))
                self._late.append((name, arrival.late))
        times = arrival.tuples.high
        if times is not None and times.size:
            self._greatest_time[name] = max(self._greatest_time.get(name, int(times[0])), int(times.max()))
        return Chunk.build(self.state.next_serial(), arrival.tuples, self.spec.partitions), arrival.nulls

    def _probe(self, i: int, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        rows = np.arange(len(chunk), dtype=np.int32)
        sources = {j: chunks for j, chunks in enumerate(self.state.memory) if j != i}
        sampled, has_changed = self.chooser.observe(i, chunk, rows, sources)
        self.metrics.sample_probes += sampled
        self.metrics.reorders += has_changed
        self._pairs_bytes.resize(min(self._limit * _pair_bytes(len(sources) + 1), self.state.limits.output // 2))
        try:
            for start in range(0, len(rows), self._limit):
                partial = self._prober.start(i, chunk, rows[start : start + self._limit], only_earlier=False)
                for result in self._prober.results(partial, self.chooser.order(i), sources, self._limit):
                    yield from self._writer.matched(result)
        finally:
            self._pairs_bytes.resize(0)

    def take_late(self) -> list[tuple[str, pa.RecordBatch]]:
        """The tuples that came behind the watermark since the last call, where the window says ``late="side"``."""
        late, self._late = self._late, []
        self._late_bytes.resize(0)
        return late

    # ---------------------------------------------------------------- time

    def set_time(self, now: int) -> None:
        """Tell the operator what time it is for the delay bound; in any unit, never backwards."""
        if self._now is not None and now < self._now:
            raise PlanError(f"set_time({now}): time went backwards, it was {self._now} before.")
        self._now = now

    def step(self, idle: bool = False) -> Iterator[pa.RecordBatch]:
        """Give out what the delay bound asks for; with `idle`, also do some of the work on disk ahead of time."""
        return self._guarded(self._step(idle))

    def _step(self, idle: bool) -> Iterator[pa.RecordBatch]:
        delay, is_done = self.spec.max_delay, False
        for number, domain in enumerate(self.state.domains):
            since = domain.pending_since
            if delay is not None and since is not None and self._now is not None and self._now - since >= delay:
                yield from self._stages.join_completely(number)
                is_done = True
        if is_done:
            compact_pieces(self.state, self.metrics, self._horizon())
        if idle and not is_done:
            yield from self._use_idle_time()

    def _use_idle_time(self) -> Iterator[pa.RecordBatch]:
        """The disk-memory stage for the next input and domain, or a complete join where memory holds nothing of it."""
        domains, count = self.state.domains, len(self.spec.names)
        for _ in range(len(domains) * count):
            number, i = divmod(self._turn % (len(domains) * count), count)
            self._turn += 1
            if domains[number].pending == 0:
                continue
            if self.state.is_coordinated:
                yield from self._stages.join_completely(number)
                return
            if domains[number].pieces[i]:
                yield from self._stages.probe_memory(i, number)
                return

    def probe_from_disk(self, name: str, domain: int = 0) -> Iterator[pa.RecordBatch]:
        """The disk-memory stage for one input and domain, now: the paper's second stage."""
        return self._guarded(self._stages.probe_memory(self._number(name), domain))

    def flush(self, *names: str) -> None:
        """Move all tuples of these inputs from memory to disk, now."""
        everything = np.ones(self.spec.partitions, np.bool_)
        victims = {i: everything for i in map(self._number, names) if self.state.memory[i]}
        if self.spec.spill_directory is None:
            raise PlanError("There is no spill directory to flush to.", hint="Pass spill_directory=.")
        if victims:
            self.state.flush(victims)

    def watermark_reached(self) -> int | None:
        """The watermark that the tuples seen allow: the least of the inputs' latest times, minus the lateness.

        An input without a tuple so far allows none; one that has ended does not hold the others back.
        """
        if not isinstance(self.spec.window, TimeWindow):
            return None
        times = [self._greatest_time.get(name) for name in self.spec.names if name not in self.ended]
        known = [time for time in times if time is not None]
        return None if not known or len(known) < len(times) else min(known) - self.spec.window.lateness

    def advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """Promise that tuples with an earlier event time are late; state that only they could match is purged.

        Gives the rows of preserved inputs that can no longer match, and what had to be joined from disk to know it.
        """
        if not isinstance(self.spec.window, TimeWindow):
            raise PlanError("This join has no window of event time to advance.", hint="Pass window=TimeWindow(...).")
        if self.watermark is not None and watermark < self.watermark:
            raise PlanError(f"The watermark {watermark} is behind the previous one, {self.watermark}.")
        self.watermark = watermark
        return self._guarded(self._expire(watermark - self.spec.window.width))

    def _advance_places(self, window: TupleWindow) -> Iterator[pa.RecordBatch]:
        """Purge when an eighth of a window has gone by, or, for unmatched rows, at once."""
        step = 1 if self.spec.gives_unmatched else max(1, window.width // 8)
        if self._place - self._purged_at >= step:
            self._purged_at = self._place
            yield from self._expire(self._place - window.width)

    def _horizon(self) -> int | None:
        """The event time, or place, before which no tuple can match one that is still to arrive."""
        if isinstance(self.spec.window, TupleWindow):
            return self._place - self.spec.window.width
        return None if self.watermark is None or self._width is None else self.watermark - self._width

    def _expire(self, horizon: int) -> Iterator[pa.RecordBatch]:
        gives_unmatched = self.spec.gives_unmatched
        for number, domain in enumerate(self.state.domains):
            if domain.pending and self._holds_expired(number, horizon):
                yield from self._stages.join_completely(number)
        if gives_unmatched:
            yield from self._unmatched_before(horizon)
        self.state.purge(horizon)
        compact_pieces(self.state, self.metrics, horizon)

    def _holds_expired(self, number: int, horizon: int) -> bool:
        """Whether results must be completed before tuples of a domain can be given up."""
        pieces = [piece for of_input in self.state.domains[number].pieces for piece in of_input]
        if not self.spec.gives_unmatched:
            return any(piece.max_low < horizon for piece in pieces)
        chunks = [chunk for side in (self.state.memory, self.state.direct) for of_input in side for chunk in of_input]
        return any(low < horizon for low in [piece.min_low for piece in pieces] + [chunk.min_low for chunk in chunks])

    def _unmatched_before(self, horizon: int | None) -> Iterator[pa.RecordBatch]:
        """Rows of preserved inputs that have not matched and lie before the horizon; all of them without one."""
        for i, kept in enumerate(self.spec.preserved):
            if not kept:
                continue
            resident = [*self.state.memory[i], *self.state.direct[i]]
            for chunk in resident:
                yield from self._unmatched_in(i, chunk, horizon)
            for domain in self.state.domains:
                for piece in domain.pieces[i]:
                    if horizon is None or piece.min_low < horizon:
                        chunk = self.state.store.load(i, piece)
                        yield from self._unmatched_in(i, chunk, horizon)
                        self.state.store.keep_done(piece, 0, chunk)
            self.state.store.release()

    def _unmatched_in(self, i: int, chunk: Chunk, horizon: int | None) -> Iterator[pa.RecordBatch]:
        expired = np.ones(len(chunk), np.bool_) if horizon is None else chunk.expired_rows(horizon)
        if expired is None:
            return
        settled = self.state.is_settled()
        if not settled.all():
            expired = expired & np.repeat(settled, np.diff(chunk.partition_offsets(self.spec.partitions)))
        yield from self._writer.unmatched_of(i, chunk, expired)

    # ---------------------------------------------------------------- end

    def finish(self, name: str) -> None:
        """Say that an input has ended."""
        self._number(name)
        self.ended.add(name)

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Give out every result of what has arrived; when all inputs have ended, also the rows without a match."""
        return self._guarded(self._drain())

    def _drain(self) -> Iterator[pa.RecordBatch]:
        for number, domain in enumerate(self.state.domains):
            if domain.pending:
                yield from self._stages.join_completely(number)
        compact_pieces(self.state, self.metrics, self._horizon())
        if len(self.ended) == len(self.spec.names):
            if self.spec.gives_unmatched:
                yield from self._unmatched_before(None)
            self.state.clear()

    # ---------------------------------------------------------------- restart

    def snapshot(self, have: frozenset[str] = frozenset()) -> Snapshot:
        """The whole state between two calls.

        Parameters
        ----------
        have
            Chunks that are stored already, by name (the keys of ``values["chunks"]``): their tables are left out, so
            that what is written is in proportion to what has changed.
        """
        self._check_usable()
        return snapshot_of(self, have)

    def table_names(self) -> frozenset[str]:
        """The stored tables that the next snapshot would still name, of chunks and of pieces on disk."""
        return table_names(self)

    def refer_to_stored(self, snapshot: Snapshot, fetch: Fetch) -> None:
        """Read what is on disk from where the last snapshot was stored, and delete the spill files.

        Parameters
        ----------
        snapshot
            What `snapshot` gave last; nothing has happened since.
        fetch
            Gives any of its tables by name for as long as this operator lives; best mapped.
        """
        refer_to_stored(self, snapshot, fetch)

    def restore(self, snapshot: Snapshot, fetch: Fetch | None = None) -> None:
        """Continue from a snapshot of an operator with the same spec.

        Parameters
        ----------
        snapshot
            What `snapshot` gave.
        fetch
            Gives a table that the snapshot left out. Those of chunks in memory are asked for now, and mapped files need
            no copy. Those of pieces on disk are asked for when they are needed, for as long as this operator lives.
        """
        restore_operator(self, snapshot, fetch)
        self._broken = ""

    def fingerprint(self) -> dict[str, Any]:
        """What state is about: a snapshot of anything else is refused."""
        return self.spec.fingerprint()

    def scalars(self) -> dict[str, Any]:
        """Numbers of the state that are no tuples, as JSON-able data; for snapshots."""
        return {
            "watermark": self.watermark,
            "place": self._place,
            "purged_at": self._purged_at,
            "now": self._now,
            "turn": self._turn,
            "ended": sorted(self.ended),
            "greatest_time": dict(self._greatest_time),
        }

    def set_scalars(self, values: Mapping[str, Any]) -> None:
        """Take over what `scalars` gave."""
        self.watermark, self._now = values["watermark"], values["now"]
        self._place, self._purged_at, self._turn = values["place"], values["purged_at"], values["turn"]
        self.ended = set(values["ended"])
        self._greatest_time = dict(values["greatest_time"])
        self._late = []
        self._late_bytes.resize(0)

    # ---------------------------------------------------------------- guards

    def _guarded(self, work: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run a call's work; what stops it half-way leaves the operator unusable, so that no result is lost unseen."""
        self._check_usable()
        self._broken = "the iterator that it gave was not exhausted"
        try:
            yield from work
        except (SpillError, BudgetError, PromiseError):
            # Raised before anything was accepted: the operator is as it was.
            self._broken = ""
            raise
        except DovetailError as error:
            self._broken = str(error)
            raise
        self._broken = ""

    def _check_usable(self) -> None:
        if self._broken:
            raise StateError(
                f"An earlier call on this join did not end: {self._broken}. Results may be missing.",
                hint="Restore the last snapshot.",
            )

    def _number(self, name: str) -> int:
        if name not in self.spec.names:
            raise PlanError(f"There is no input {name!r}; the inputs are {', '.join(self.spec.names)}.")
        return self.spec.names.index(name)


def _pair_bytes(inputs: int) -> int:
    """Bytes that one partial result takes while it goes through a probing sequence, at every level once."""
    return inputs * (8 * inputs + 60)


def _guessed_row_bytes(schema: pa.Schema) -> int:
    widths = 0
    for field in schema:
        try:
            widths += max(1, field.type.bit_width // 8)
        except ValueError:
            widths += 32
    return widths
