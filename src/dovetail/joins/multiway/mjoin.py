"""MJoin: a symmetric hash join of any number of streams in bounded memory, with every result exactly once.

Result: all combinations of one tuple per input that agree in the join attributes, lie within the window and satisfy the
conditions between pairs of inputs. Outer joins add, and semi and anti joins emit only, tuples of a preserved input,
once it is known that they match or no longer can. A left join of n inputs keeps the rows of its driving input that are
part of no combination.

When: results of tuples in memory are emitted with the last of their tuples (`offer`). If tuples were spilled, the other
results follow when the delay bound is reached or the inputs are idle (`step`), at the latest from `drain`. Rows without
a match are emitted when the watermark has passed their window (`advance`), or when all inputs have ended (`finish`,
`drain`).

Memory: `size()` never exceeds the budget. An eighth of it is for arriving tuples, an eighth for output, a quarter for
merging and for loading from disk, the rest for state. The excess is spilled by hash partition.

Restart: `snapshot` and `restore` keep everything. Two operators with the same spec and the same calls hold the same
state and emit the same rows: nothing depends on a clock, and the spec's seed determines randomness.

Supported: inner joins of n inputs over any connected join graph; left joins of n inputs with a driving one; right,
full, semi and anti joins of two; windows by event time, for all inputs or a pair of them, and by number of tuples;
conditions between two inputs (`PairCondition`). Not supported: joins without an equality; conditions on three inputs.

Viglas, Naughton, Burger: Maximizing the Output Rate of Multi-Way Join Queries over Streaming Information Sources
(2003).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.core.errors import BudgetError, DovetailError, PlanError, PromiseError, SpillError, StateError
from dovetail.core.memory import Ledger
from dovetail.joins.multiway.arrivals import ArrivalReader
from dovetail.joins.multiway.chunk import Chunk
from dovetail.joins.multiway.disk.compaction import compact_pieces
from dovetail.joins.multiway.disk.reloading import reload_settled
from dovetail.joins.multiway.disk.stages import DiskStages
from dovetail.joins.multiway.expiry import Expiry
from dovetail.joins.multiway.metrics import MJoinMetrics
from dovetail.joins.multiway.output import MultiOutput
from dovetail.joins.multiway.probing import Prober, SequenceChooser
from dovetail.joins.multiway.results import ResultWriter
from dovetail.joins.multiway.snapshots import refer_to_stored, restore_operator, snapshot_of, table_names
from dovetail.joins.multiway.spec import MJoinSpec, TimeWindow, TupleWindow
from dovetail.joins.multiway.spill import Fetch
from dovetail.joins.multiway.state import JoinState
from dovetail.joins.protocol import Snapshot

__all__ = ["MJoin"]

_MOST_PAIRS = 65_536
_FEWEST_PAIRS = 4
_FEWEST_ROWS = 4


class MJoin:
    """A multi-way stream join; see the module docstring.

    The iterators returned by `offer`, `step`, `advance` and `drain` do the work as they are consumed: exhaust each
    before the next call.

    Examples
    --------
    >>> from dovetail.joins.multiway import mjoin_spec
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
        if spec.cascade:
            raise PlanError("A cascade of joins is not one MJoin.", hint="Run it by MJoinTree.")
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
        self._prober = Prober(spec, self.metrics)
        self.chooser = SequenceChooser(spec)
        self._writer = ResultWriter(spec, self._output, self.metrics, writer_bytes, limits.output // 2)
        self._expiry = Expiry(self.state, self._writer)
        self._stages = DiskStages(self.state, self._prober, self.chooser, self._writer, self.metrics, self._limit)
        self._ledger.reserve("bookkeeping", self.chooser.fanout.nbytes + self.state.spilled.nbytes)
        self._late: list[tuple[str, pa.RecordBatch]] = []
        self.on_late: Callable[[str, pa.RecordBatch], None] | None = None
        """Called with late tuples if the window has ``late="side"``; None: they wait for `take_late`."""
        self.watermark: int | None = None
        self.late_before: int | None = None
        """Tuples with an earlier time are late, if the watermark of a tree is ahead of this join's; None: the same."""
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
        """The minimum budget for these inputs, in bytes."""
        reader = ArrivalReader(spec, 1)
        widths = [_guessed_row_bytes(schema) for schema in spec.schemas.values()]
        chunk = max(reader.chunk_bytes(i, _FEWEST_ROWS * w, _FEWEST_ROWS) for i, w in enumerate(widths))
        return 16 * max(chunk, _FEWEST_PAIRS * _pair_bytes(len(widths)), sum(widths))

    @property
    def output_schema(self) -> pa.Schema:
        """The schema of every output batch: the join columns, then the other columns of each input."""
        return self._output.schema

    @property
    def pending(self) -> int:
        """Tuples whose results from disk may be outstanding."""
        return self.state.pending

    @property
    def completed_time(self) -> int | None:
        """The event time before which no result is outstanding; None before the first watermark.

        A row of a preserved input may be emitted for as long as it is kept, with a time before the watermark.
        """
        if self.watermark is None:
            return None
        lows = [d.pending_low for d in self.state.domains if d.pending_low is not None]
        kept = [h for is_kept, h in zip(self.spec.preserved, self._horizons(), strict=True) if is_kept]
        return min([self.watermark, *lows, *(horizon for horizon in kept if horizon is not None)])

    def size(self) -> int:
        """Bytes held now; never above the budget."""
        return self._ledger.held_bytes

    def sizes(self) -> dict[str, int]:
        """Bytes held per component; the sum is `size`."""
        return self._ledger.by_component()

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment."""
        return self._ledger.peak_bytes

    def state_rows(self) -> dict[str, int]:
        """Tuples held per input, in memory and on disk; up to half of a chunk may have expired."""
        return dict(zip(self.spec.names, self.state.rows, strict=True))

    # ---------------------------------------------------------------- input

    def offer(self, name: str, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Accept tuples of an input: they probe the other inputs and are stored.

        The batch has the input's columns and an int64 code per join attribute (see `MJoinSpec.with_codes`). After a
        `SpillError` or `BudgetError`, ``metrics.tuples_in`` tells how many tuples were accepted; the others can be
        offered again.
        """
        i = self._number(name)
        if name in self.ended:
            raise PlanError(f"Input {name!r} has ended.")
        return self._guarded(self._offer(i, self._reader.checked(i, batch)))

    def _offer(self, i: int, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for piece, size in self._reader.slices(i, batch):
            # 1. Make room before accepting anything.
            self._require_room_for_late(size)
            self.state.make_room(size)
            self._arriving.resize(size)
            # 2. Store the tuples.
            chunk, nulls = self._accept(i, piece)
            resident = self.state.insert(i, chunk, self._now)
            self._arriving.resize(0)
            yield from self._writer.unmatched(i, nulls)
            # 3. Probe the tuples of the other inputs in memory.
            yield from self._probe(i, resident)
            self.state.tidy(i, self._horizons()[i])
            if isinstance(self.spec.window, TupleWindow):
                yield from self._advance_places(self.spec.window)

    def _require_room_for_late(self, size: int) -> None:
        """Late tuples wait in the part of the budget that arrivals leave free."""
        if self._late and self._late_bytes.held_bytes + size > self.state.limits.arrivals // 2:
            raise BudgetError(
                f"{self._late_bytes.held_bytes} bytes of late tuples wait to be fetched; there is no room for more.",
                hint="Call take_late after each offer.",
            )

    def _accept(self, i: int, piece: pa.RecordBatch) -> tuple[Chunk, pa.RecordBatch]:
        name = self.spec.names[i]
        first = self.state.next_stamp(piece.num_rows)
        # An input with two time columns is the result of a join: its tuples were checked on arrival.
        judges = isinstance(self.spec.window, TimeWindow) and len(set(self.spec.window.columns_of(name))) == 1
        late_before = self.watermark if self.late_before is None else self.late_before
        arrival = self._reader.read(i, piece, first, self._place, late_before if judges else None)
        self._place += piece.num_rows
        self.metrics.tuples_in[name] += arrival.accepted
        self.metrics.null_tuples += arrival.nulls.num_rows
        self._set_late_aside(name, arrival.late)
        times = arrival.tuples.high
        if times is not None and times.size:
            self._greatest_time[name] = max(self._greatest_time.get(name, int(times[0])), int(times.max()))
        return Chunk.build(self.state.next_serial(), arrival.tuples, self.spec.partitions), arrival.nulls

    def _set_late_aside(self, name: str, rows: pa.RecordBatch) -> None:
        self.metrics.late_tuples += rows.num_rows
        if rows.num_rows and isinstance(self.spec.window, TimeWindow) and self.spec.window.late == "side":
            if self.on_late is not None:
                self.on_late(name, rows)
            else:
                self._late_bytes.grow(int(rows.get_total_buffer_size()))
                self._late.append((name, rows))

    def refuse_late(self, name: str, rows: pa.RecordBatch) -> None:
        """Count tuples, without codes, as late by a watermark ahead of this operator's; see `advance`."""
        self._number(name)
        self._require_room_for_late(int(rows.get_total_buffer_size()))
        self.metrics.tuples_in[name] += rows.num_rows
        self._set_late_aside(name, rows)

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
        """The tuples behind the watermark since the last call, if the window has ``late="side"``."""
        late, self._late = self._late, []
        self._late_bytes.resize(0)
        return late

    # ---------------------------------------------------------------- time

    def set_time(self, now: int) -> None:
        """Set the time for the delay bound, in any unit; it must not go backwards."""
        if self._now is not None and now < self._now:
            raise PlanError(f"set_time({now}): time went backwards from {self._now}.")
        self._now = now

    def step(self, idle: bool = False) -> Iterator[pa.RecordBatch]:
        """Emit what the delay bound requires; with `idle`, also do some disk work ahead of time."""
        return self._guarded(self._step(idle))

    def _step(self, idle: bool) -> Iterator[pa.RecordBatch]:
        delay, is_done = self.spec.max_delay, False
        for number, domain in enumerate(self.state.domains):
            since = domain.pending_since
            if delay is not None and since is not None and self._now is not None and self._now - since >= delay:
                yield from self._stages.join_completely(number)
                is_done = True
        if is_done:
            self._tidy_disk()
        if idle and not is_done:
            yield from self._use_idle_time()

    def _use_idle_time(self) -> Iterator[pa.RecordBatch]:
        """Run the disk-memory stage for the next input and domain, or a complete join if memory holds nothing of it."""
        domains, count = self.state.domains, len(self.spec.names)
        for _ in range(len(domains) * count):
            number, i = divmod(self._turn % (len(domains) * count), count)
            self._turn += 1
            if domains[number].pending == 0:
                continue
            if self.state.is_coordinated:
                yield from self._stages.join_completely(number)
                self.state.store.release()
                return
            if domains[number].pieces[i]:
                yield from self._stages.probe_memory(i, number)
                self.state.store.release()
                return

    def probe_from_disk(self, name: str, domain: int = 0) -> Iterator[pa.RecordBatch]:
        """Run the disk-memory stage (the paper's second stage) for one input and domain now."""
        return self._guarded(self._stages.probe_memory(self._number(name), domain))

    def flush(self, *names: str) -> None:
        """Move all tuples of these inputs from memory to disk."""
        everything = np.ones(self.spec.partitions, np.bool_)
        victims = {i: everything for i in map(self._number, names) if self.state.memory[i]}
        if self.spec.spill_directory is None:
            raise PlanError("There is no spill directory to flush to.", hint="Pass spill_directory=.")
        if victims:
            self.state.flush(victims)

    def watermark_reached(self) -> int | None:
        """The watermark that the observed tuples allow: the minimum of the inputs' latest times, minus the lateness.

        None while an input has no tuple; ended inputs do not hold it back.
        """
        if not isinstance(self.spec.window, TimeWindow):
            return None
        times = [self._greatest_time.get(name) for name in self.spec.names if name not in self.ended]
        known = [time for time in times if time is not None]
        return None if not known or len(known) < len(times) else min(known) - self.spec.window.lateness

    def advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """Declare tuples with an earlier event time late, and purge the state that only they could match.

        Emits the rows of preserved inputs that can no longer match, and the results from disk needed to decide that.
        """
        if not isinstance(self.spec.window, TimeWindow):
            raise PlanError("This join has no event-time window to advance.", hint="Pass window=TimeWindow(...).")
        if self.watermark is not None and watermark < self.watermark:
            raise PlanError(f"The watermark {watermark} is behind the previous one, {self.watermark}.")
        self.watermark = watermark
        return self._guarded(self._expire())

    def _advance_places(self, window: TupleWindow) -> Iterator[pa.RecordBatch]:
        """Purge after an eighth of a window; at once if unmatched rows are emitted."""
        step = 1 if self.spec.gives_unmatched else max(1, window.width // 8)
        if self._place - self._purged_at >= step:
            self._purged_at = self._place
            yield from self._expire()

    def _horizons(self) -> tuple[int | None, ...]:
        """Per input, the event time, or place, before which no tuple can match a later arrival; None for no bound."""
        now = self._place if isinstance(self.spec.window, TupleWindow) else self.watermark
        return tuple(None if now is None or reach is None else now - reach for reach in self.spec.reaches)

    def _expire(self) -> Iterator[pa.RecordBatch]:
        horizons = self._horizons()
        for number, domain in enumerate(self.state.domains):
            if domain.pending and self._expiry.needs_results(number, horizons):
                yield from self._stages.join_completely(number)
        if self.spec.gives_unmatched:
            yield from self._expiry.unmatched_before(horizons)
        self.state.purge(horizons)
        self._tidy_disk()

    def _tidy_disk(self) -> None:
        """Bring back to memory what there is room for, and compact the rest."""
        reload_settled(self.state, self.metrics)
        compact_pieces(self.state, self.metrics, self._horizons())
        # Kept open until now: domains that are joined one after the other lie in the same files.
        self.state.store.release()

    # ---------------------------------------------------------------- end

    def finish(self, name: str) -> None:
        """Mark an input as ended."""
        self._number(name)
        self.ended.add(name)

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Emit every outstanding result; when all inputs have ended, also the rows without a match."""
        return self._guarded(self._drain())

    def _drain(self) -> Iterator[pa.RecordBatch]:
        for number, domain in enumerate(self.state.domains):
            if domain.pending:
                yield from self._stages.join_completely(number)
        if len(self.ended) == len(self.spec.names):
            if self.spec.gives_unmatched:
                yield from self._expiry.all_unmatched()
            self.state.clear()
            self.state.store.release()
        else:
            self._tidy_disk()

    # ---------------------------------------------------------------- restart

    def snapshot(self, have: frozenset[str] = frozenset()) -> Snapshot:
        """The whole state between two calls.

        `have` names the chunks that are stored already (keys of ``values["chunks"]``). Their tables are left out, so
        the snapshot is proportional to what has changed.
        """
        self._check_usable()
        return snapshot_of(self, have)

    def table_names(self) -> frozenset[str]:
        """The stored tables, of chunks and of pieces, that the next snapshot would still reference."""
        return table_names(self)

    def refer_to_stored(self, snapshot: Snapshot, fetch: Fetch) -> None:
        """Read pieces from the last snapshot's stored tables from now on, and delete the spill files.

        Nothing may have happened since `snapshot` was taken. `fetch` returns any of its tables by name, preferably
        mapped, during the life of this operator.
        """
        refer_to_stored(self, snapshot, fetch)

    def restore(self, snapshot: Snapshot, fetch: Fetch | None = None) -> None:
        """Continue from a snapshot of an operator with the same spec.

        `fetch` returns a table that the snapshot left out: tables of chunks in memory now (mapped files are not
        copied), those of pieces on disk whenever they are needed.
        """
        restore_operator(self, snapshot, fetch)
        self._broken = ""

    def fingerprint(self) -> dict[str, Any]:
        """Identifies the state; a snapshot with another fingerprint is refused."""
        return self.spec.fingerprint()

    def scalars(self) -> dict[str, Any]:
        """The scalar state as JSON-able data, for snapshots."""
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
        """The inverse of `scalars`."""
        self.watermark, self._now = values["watermark"], values["now"]
        self._place, self._purged_at, self._turn = values["place"], values["purged_at"], values["turn"]
        self.ended = set(values["ended"])
        self._greatest_time = dict(values["greatest_time"])
        self._late = []
        self._late_bytes.resize(0)

    # ---------------------------------------------------------------- guards

    def _guarded(self, work: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run a call's work. If it stops half-way the operator becomes unusable, so that no result is lost silently."""
        self._check_usable()
        self._broken = "the iterator that it returned was not exhausted"
        try:
            yield from work
        except (SpillError, BudgetError, PromiseError):
            # Raised before anything was accepted: the operator is unchanged.
            self._broken = ""
            raise
        except DovetailError as error:
            self._broken = str(error)
            raise
        self._broken = ""

    def _check_usable(self) -> None:
        if self._broken:
            raise StateError(
                f"An earlier call on this join did not complete: {self._broken}. Results may be missing.",
                hint="Restore the last snapshot.",
            )

    def _number(self, name: str) -> int:
        if name not in self.spec.names:
            raise PlanError(f"There is no input {name!r}; the inputs are {', '.join(self.spec.names)}.")
        return self.spec.names.index(name)


def _pair_bytes(inputs: int) -> int:
    """Bytes per partial result in a probing sequence, which holds it once per level."""
    return inputs * (8 * inputs + 60)


def _guessed_row_bytes(schema: pa.Schema) -> int:
    widths = 0
    for field in schema:
        try:
            widths += max(1, field.type.bit_width // 8)
        except ValueError:
            widths += 32
    return widths
