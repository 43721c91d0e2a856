"""MetadataJoin: a multi-way join that uses the promises of its inputs.

Result: exactly that of `MJoin`. Promises only save work and memory.

Promises: punctuations, which come with the data (`punctuate`); inputs that are unique by the join value, clustered, or
ordered by it (`Metadata`); and inputs that have ended. Each *closes* join values of an input. A tuple that no later
result needs is not stored on arrival, or is purged: at once, or in a batch when enough values have been closed, memory
is full, or the inputs are idle. Rows of outer and anti joins that can no longer match are emitted then. Punctuations
are propagated to the output once all their results have been emitted (`take_punctuations`).

Broken promises: a row that its own input had promised not to send is refused, quarantined, or dropped and counted. It
is not joined. Remembering every key would take unbounded memory, so a second row of a unique key is recognised

- until the watermark has passed the window of the first (its event time plus the width, or plus the most that a match
  may be later by the window's bounds), which is at least the window and the lateness; in a tuple window, for as many
  tuples; without a window, always;
- unless the first was purged earlier because every other input had closed its value. The second then joins nothing; in
  an outer join that preserves its input, it is emitted as a row without a match.

A second row that arrives later is treated as a first one and joined with the state at that time.

Memory: as for `MJoin`, with a part of the state's share reserved for promises (`Metadata.memory_share`). Beyond it the
join forgets promises, counted in ``metrics.punctuations_forgotten``, and holds tuples longer.

Restart: everything is kept. Supported: all join types and windows of `MJoin`, on one join attribute that all inputs
share.

Ding, Rundensteiner, Heineman: MJoin: A Metadata-Aware Stream Join Operator (2003). Its 1-NP algorithm is one unique
input with punctuations on the other; 1-NC is one unique input with the other clustered or ordered: see `algorithm`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.core.memory import Reservation
from dovetail.joins.multiway.chunk import Chunk
from dovetail.joins.multiway.mjoin import MJoin
from dovetail.joins.multiway.spec import MJoinSpec, TupleWindow
from dovetail.joins.multiway.spill import Fetch
from dovetail.joins.promises.closing import FEW_CODES, codes_and_count, in_parts, together
from dovetail.joins.promises.collection import PunctuationCollection
from dovetail.joins.promises.deferred import DeferredRows
from dovetail.joins.promises.intervals import IntervalSet
from dovetail.joins.promises.keys import Keys, is_whole
from dovetail.joins.promises.metrics import MetadataMetrics
from dovetail.joins.promises.promises import REASONS, ArrivalPromises, late_rows
from dovetail.joins.promises.punctuation import BoundPunctuation, Punctuation, patterns_of
from dovetail.joins.promises.purge_policy import PurgePolicy, PurgingStages
from dovetail.joins.promises.purging import Purger
from dovetail.joins.promises.quarantine import REASON_COLUMN, Quarantine
from dovetail.joins.promises.ranges import values_of
from dovetail.joins.promises.spec import Metadata
from dovetail.joins.protocol import Snapshot

__all__ = ["REASON_COLUMN", "MetadataJoin"]

CLOSED_ROW = "closed"
"""What a notice says about a join value that no later result has."""

_MOST_VALUES = 1_000_000
_WAITING_SHARE = 32  # of the memory for promises: which values were closed since the last purge


class MetadataJoin(MJoin):
    """A multi-way join that uses punctuations and constraints; see the module docstring.

    Parameters
    ----------
    spec
        The join.
    metadata
        What is known about its inputs.
    trusted
        Inputs that are results of another join: their promises follow from those of its inputs and are not checked.
    written
        For each input of a tree, the user's column names by the internal ones, for messages.

    Examples
    --------
    >>> from dovetail.joins.multiway import mjoin_spec
    >>> schemas = {"news": pa.schema({"sno": pa.int64(), "title": pa.string()}),
    ...            "access": pa.schema({"sno": pa.int64(), "ip": pa.string()})}
    >>> spec = mjoin_spec(schemas, on="sno", budget="1MB")
    >>> join = MetadataJoin(spec, Metadata(keys=["news"], goal="memory"))
    >>> join.algorithm
    '1-NP'
    >>> def offer(name, sno, value):
    ...     batch = pa.record_batch([[sno], [value]], schema=schemas[name])
    ...     return [row for out in join.offer(name, spec.with_codes(name, batch)) for row in out.to_pylist()]
    >>> offer("news", 79, "Cashless society"), offer("access", 79, "64.58.76.224")
    ([], [{'sno': 79, 'title': 'Cashless society', 'ip': '64.58.76.224'}])
    >>> join.state_rows()
    {'news': 1, 'access': 0}
    >>> list(join.punctuate("access", Punctuation({"sno": 79})))
    []
    >>> join.state_rows(), join.take_punctuations()
    ({'news': 0, 'access': 0}, [Punctuation(sno = 79)])
    """

    kind = "metadata_join"
    metrics: MetadataMetrics

    def __init__(
        self,
        spec: MJoinSpec,
        metadata: Metadata | None = None,
        trusted: Collection[str] = (),
        written: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        metadata = Metadata() if metadata is None else metadata
        metadata.check(spec)
        super().__init__(spec)
        self.metadata = metadata
        limit = int(spec.budget.total_bytes * metadata.memory_share)
        self.state.limits = replace(self.state.limits, state=self.state.limits.state - limit)
        self._promise_limit = limit
        self.collection = PunctuationCollection(spec, limit - limit // _WAITING_SHARE)
        self._promise_bytes = self._ledger.reserve("promises")
        self._quarantine = Quarantine(self._ledger.reserve("quarantine"), self.state.limits.arrivals // 2)
        unique = [name in metadata.keys for name in spec.names]
        self._unique = unique
        self._purger = Purger(self.state, self.collection, unique, self._writer, self.metrics)
        # No reference cycles: the join and its memory are freed with the last reference.
        holds = partial(self._purger.holds, reads_disk=True)
        self._promises = ArrivalPromises(spec, metadata, self.collection, holds, trusted, written)
        stages = PurgingStages(self.state, self._prober, self.chooser, self._writer, self.metrics, self._limit)
        stages.purger = self._purger
        self._stages = stages
        self._deferred = DeferredRows()
        self.on_quarantined: Callable[[str, pa.RecordBatch], None] | None = None
        """Called with tuples that broke a promise; None: they wait for `take_quarantined`."""
        waiting_bytes = limit // _WAITING_SHARE
        self._policy = PurgePolicy(metadata, self.state, self._purger, waiting_bytes)
        self._waiting_bytes = self._ledger.reserve("closed_values")
        self._account_promises()

    def _new_metrics(self) -> MetadataMetrics:
        return MetadataMetrics(dict.fromkeys(self.spec.names, 0))

    @property
    def algorithm(self) -> str:
        """The paper's name for this join: ``1-NP``, ``1-NC``, or ``general`` if it has none."""
        return self.metadata.algorithm(self.spec)

    @property
    def punctuations_held(self) -> int:
        """The number of ranges, keys and predicates that represent all promises."""
        return self.collection.entries

    @property
    def purge_lag(self) -> int:
        """Closed join values whose tuples have not been purged yet."""
        return self._policy.unpurged

    def keeps_order(self, name: str) -> bool:
        """Whether the order of an input's tuples is part of its promise."""
        return self._promises.keeps_order(self._number(name))

    def is_held_elsewhere(self, i: int, codes: Int64Array) -> bool:
        """Whether another input holds tuples in memory with one of these codes."""
        return bool(self._purger.has_match(i, codes).any())

    def expect_only(self, comes: Callable[[Int64Array], BoolArray]) -> None:
        """Set which codes can occur, if streams are split over several joins: closed values with no other value between
        them are then stored as one range.
        """
        for each in self.collection.ranges:
            each.comes = comes

    def reserve(self, component: str) -> Reservation:
        """A memory account within the join's budget for a surrounding component."""
        return self._ledger.reserve(component)

    # ---------------------------------------------------------------- input

    def _offer(self, i: int, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        for piece, size in self._reader.slices(i, batch):
            # 1. Before accepting anything: purge, make room, and refuse what breaks a promise.
            self._require_room_for_late(size)
            self._quarantine.require_room(size)
            if self._policy.is_due_for_room(size):
                yield from self._purge(None)
            self.state.make_room(size)
            kept, keys = self._kept_promises(i, piece)
            self._arriving.resize(size)
            # 2. Join and drop the tuples that no later result can need.
            chunk, nulls = self._accept(i, kept)
            dropped, chunk = self._purger.divided(i, chunk)
            yield from self._writer.unmatched(i, nulls)
            if dropped is not None:
                yield from self._join_and_drop(i, dropped)
            # 3. Store the others, and probe the tuples of the other inputs in memory.
            resident = self.state.insert(i, chunk, self._now) if len(chunk) else chunk
            self._arriving.resize(0)
            yield from self._probe(i, resident)
            self.state.tidy(i, self._horizons()[i])
            # 4. Purge what these tuples close, now or later.
            yield from self._close(i, chunk, self._promises.observe(i, keys))
            if isinstance(self.spec.window, TupleWindow):
                yield from self._advance_places(self.spec.window)

    def _kept_promises(self, i: int, piece: pa.RecordBatch) -> tuple[pa.RecordBatch, Keys]:
        """The slice without rows that break a promise, and the keys of the rows that have one and are not late.

        A late row breaks no promise: it is late, whatever was promised since its time.
        """
        rows = piece.select(range(1, piece.num_columns))
        codes = piece.column(0)
        valid = codes.is_valid().to_numpy(zero_copy_only=False)
        keys = self.collection.readers[i].of_rows(codes.fill_null(0).to_numpy(zero_copy_only=False), rows)
        is_late = late_rows(self.spec.window, self.spec.names[i], rows, self.watermark)
        valid &= ~is_late
        verdict = self._promises.judge(i, keys, valid, rows, is_late)
        if verdict.kinds:
            if self.metadata.on_broken_promise == "error":
                self._promises.refuse(i, keys, rows, verdict)
            name = self.spec.names[i]
            for kind, mask in verdict.kinds.items():
                counted = self.metrics.broken_promises
                counted[kind] = counted.get(kind, 0) + int(mask.sum())
                if self.metadata.on_broken_promise == "quarantine":
                    self._quarantine.put(name, rows.filter(pa.array(mask)), REASONS[kind], self.on_quarantined)
            self.metrics.tuples_in[name] += int(verdict.broken.sum())
            keep = ~verdict.broken
            piece = piece.filter(pa.array(keep))
            keys, valid = keys.take(np.flatnonzero(keep)), valid[keep]
        if not valid.all():
            keys = keys.take(np.flatnonzero(valid))
        return piece, keys

    def _join_and_drop(self, i: int, dropped: Chunk) -> Iterator[pa.RecordBatch]:
        yield from self._probe(i, dropped)
        if self.spec.preserved[i] and self.spec.gives_unmatched:
            yield from self._writer.unmatched_of(i, dropped, np.ones(len(dropped), np.bool_))
        self.metrics.dropped_on_arrival += len(dropped)
        self.metrics.saved_bytes += dropped.nbytes

    def _close(self, i: int, chunk: Chunk, closed: Keys | IntervalSet | None) -> Iterator[pa.RecordBatch]:
        """Record the join values closed by arrivals: by their order, and by being unique."""
        codes, count = codes_and_count(closed)
        if self._unique[i] and len(chunk):
            matched = self._purger.has_match(i, chunk.codes[0])
            if matched.any():
                count += int(matched.sum())
                codes = None if codes is None else np.concatenate([codes, chunk.codes[0][matched]])
        if self.collection.is_over_limit():
            yield from self._forget()
            return
        self._account_promises()
        if count:
            yield from self._purge_or_wait(codes, count)

    # ---------------------------------------------------------------- punctuations

    def punctuate(self, name: str, *punctuations: Punctuation) -> Iterator[pa.RecordBatch]:
        """Accept punctuations of an input: no later tuple of it matches them.

        Emits rows of preserved inputs that can no longer match. An unknown column or a value of the wrong type is
        refused and changes nothing.
        """
        i = self._number(name)
        bound = [BoundPunctuation.of(each, name, self.spec.schemas[name]) for each in punctuations]
        return self._guarded(self._punctuate(i, bound))

    def punctuate_rows(
        self, name: str, rows: pa.RecordBatch, times: Int64Array | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Accept rows as punctuations: no later tuple has the same values in some columns.

        Parameters
        ----------
        times
            For punctuations from a separate stream, their event times: each takes effect when the watermark has
            passed it. None: they take effect now.
        columns
            The columns, in which NULL stands for any value. None: the join columns, and NULLs close nothing.
        """
        i = self._number(name)
        key = list(self.collection.readers[i].columns)
        values = rows.select(key if columns is None else list(columns))
        if columns is None:
            whole = is_whole(values)
            values, times = values.filter(pa.array(whole)), None if times is None else times[whole]
        if times is None:
            return self._guarded(self._close_rows(i, values))
        return self._guarded(self._defer_rows(i, values, times))

    def _defer_rows(self, i: int, values: pa.RecordBatch, times: Int64Array) -> Iterator[pa.RecordBatch]:
        self._deferred.add(i, values, times)
        self.metrics.punctuations_forgotten += self._deferred.forget(self._promise_limit // 4)
        yield from self._close_due()

    def _close_due(self) -> Iterator[pa.RecordBatch]:
        """Apply deferred punctuations whose time the watermark has passed."""
        if self.watermark is not None:
            for i, values in self._deferred.due(self.watermark):
                yield from self._close_rows(i, values)
        self._account_promises()

    def _close_rows(self, i: int, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        is_key = rows.schema.names == list(self.collection.readers[i].columns)
        whole = is_whole(rows) if is_key else np.zeros(rows.num_rows, np.bool_)
        values = rows.filter(pa.array(whole))
        for start in range(0, values.num_rows, FEW_CODES):
            keys = self.collection.readers[i].of_values(values.slice(start, FEW_CODES))
            _, once = np.unique(keys.ids(), return_index=True)
            keys = keys.take(np.sort(once))
            self.metrics.punctuations_in += len(keys.codes)
            self.collection.ranges[i].add_keys(keys)
            yield from self._close_values(keys)
        patterns = patterns_of(rows.filter(pa.array(~whole)))
        if patterns:
            yield from self._punctuate(i, patterns)

    def _close_values(self, closed: Keys | IntervalSet | None) -> Iterator[pa.RecordBatch]:
        if self.collection.is_over_limit():
            yield from self._forget()
            return
        self._account_promises()
        yield from self._purge_or_wait(*codes_and_count(closed))

    def end_batch(self) -> Iterator[pa.RecordBatch]:
        """End a micro-batch of a join whose metadata is batchwise."""
        return self._guarded(self._end_batch())

    def _end_batch(self) -> Iterator[pa.RecordBatch]:
        for closed in self._promises.end_batch():
            yield from self._close_values(closed)

    def _punctuate(self, i: int, punctuations: Sequence[BoundPunctuation]) -> Iterator[pa.RecordBatch]:
        closed_codes: list[Int64Array] | None = []
        closed_count = 0
        self.metrics.punctuations_in += len(punctuations)
        for bound in (part for each in together(punctuations) for part in in_parts(each)):
            codes, count = codes_and_count(self.collection.ranges[i].add(bound))
            closed_count += count
            if codes is None or closed_codes is None:
                closed_codes = None
            else:
                closed_codes.append(codes)
            if self.collection.is_over_limit():
                yield from self._forget()
                closed_codes, closed_count = [], 0
        self._account_promises()
        codes = None if closed_codes is None else np.concatenate([np.zeros(0, np.int64), *closed_codes])
        yield from self._purge_or_wait(codes, closed_count)

    def _account_promises(self) -> None:
        self._promise_bytes.resize(
            self.collection.nbytes + self._promises.nbytes + self._deferred.nbytes + self._policy.nbytes
        )

    def _forget(self) -> Iterator[pa.RecordBatch]:
        """Use all promises, also those not noted yet, then forget some of them."""
        self._policy.note_unknown()
        yield from self._purge(None)
        self.metrics.punctuations_forgotten += self.collection.forget()
        self._account_promises()

    def take_punctuations(self) -> list[Punctuation]:
        """The punctuations that became true of the output since the last call; they hold for all later output."""
        found = [bound.unbound() for bound in self.collection.take_ready()]
        self.metrics.punctuations_out += len(found)
        self._account_promises()
        return found

    def take_closed_values(self) -> Iterator[pa.RecordBatch]:
        """Like `take_punctuations`, as rows of the join columns; punctuations that are not such values are left out."""
        columns = self.collection.readers[0].columns
        for bound in self.collection.take_ready():
            self.metrics.punctuations_out += 1
            values = values_of(bound, columns, _MOST_VALUES)
            if values is not None:
                yield values
        self._account_promises()

    # ---------------------------------------------------------------- purging

    def _purge_or_wait(self, codes: Int64Array | None, count: int) -> Iterator[pa.RecordBatch]:
        self._policy.note(count, codes)
        self._waiting_bytes.resize(self._policy.nbytes)
        if self._policy.is_due():
            yield from self._purge(codes if self._policy.is_immediate else None)

    def _purge(self, codes: Int64Array | None) -> Iterator[pa.RecordBatch]:
        """Purge what closed values allow, then propagate what has become true."""
        yield from self._policy.purge(codes)
        self._waiting_bytes.resize(self._policy.nbytes)
        self._pass_on()

    def _pass_on(self) -> None:
        if self.metadata.propagate:
            self.collection.pass_on(partial(self._purger.held, self._horizons()))
        if not self.collection.is_over_limit():
            self._account_promises()

    # ---------------------------------------------------------------- time and end

    def _step(self, idle: bool) -> Iterator[pa.RecordBatch]:
        yield from super()._step(idle)
        if idle and self._policy.is_due_when_idle():
            yield from self._purge(None)

    def _expire(self) -> Iterator[pa.RecordBatch]:
        yield from super()._expire()
        yield from self._close_due()
        self._pass_on()

    def finish(self, name: str) -> None:
        """Mark an input as ended: all its join values are closed."""
        super().finish(name)
        self._purger.ended.add(self._number(name))
        self._policy.note_unknown()
        self._waiting_bytes.resize(self._policy.nbytes)

    def _drain(self) -> Iterator[pa.RecordBatch]:
        yield from super()._drain()
        if self._policy.unpurged:
            yield from self._purge(None)
        if self._policy.is_due_on_disk():
            yield from self._policy.purge_disk(None)
        self._pass_on()

    def take_quarantined(self) -> list[tuple[str, pa.RecordBatch]]:
        """The tuples quarantined since the last call, by input, each with the reason in `REASON_COLUMN`."""
        return self._quarantine.take()

    # ---------------------------------------------------------------- restart

    def fingerprint(self) -> dict[str, Any]:
        """Identifies the state; a snapshot with another fingerprint is refused."""
        return {**super().fingerprint(), "metadata": self.metadata.fingerprint()}

    def snapshot(self, have: frozenset[str] = frozenset()) -> Snapshot:
        snapshot = super().snapshot(have)
        values, tables, names = self.collection.as_state(have, self.state.store.fetch)
        quarantined, put_aside = self._quarantine.as_state()
        others = {**self._deferred.tables(), **put_aside}
        promised = {
            "collection": values,
            "promises": self._promises.as_state(),
            **self._policy.as_state(),
            "quarantined": quarantined,
            # A runtime does not store empty tables.
            "tables": names + [name for name, table in others.items() if table.num_rows],
        }
        tables |= others
        return replace(snapshot, tables={**snapshot.tables, **tables}, values={**snapshot.values, "metadata": promised})

    def table_names(self) -> frozenset[str]:
        return super().table_names() | self.collection.stored_names()

    def refer_to_stored(self, snapshot: Snapshot, fetch: Fetch) -> None:
        super().refer_to_stored(snapshot, fetch)
        self.collection.mark_stored(snapshot.values["metadata"]["collection"], snapshot.tables)

    def restore(self, snapshot: Snapshot, fetch: Fetch | None = None) -> None:
        super().restore(snapshot, fetch)
        promised: Mapping[str, Any] = snapshot.values["metadata"]
        tables = {
            name: snapshot.tables[name] if name in snapshot.tables or fetch is None else fetch(name)
            for name in promised["tables"]
        }
        are_stored = not snapshot.tables.keys() & tables.keys()
        self.collection.restore(promised["collection"], tables, are_stored)
        self._deferred.restore(tables)
        self._promises.restore(promised["promises"])
        self._policy.restore(promised)
        self._waiting_bytes.resize(self._policy.nbytes)
        self._purger.ended = {self._number(name) for name in self.ended}
        self._quarantine.restore(promised["quarantined"], tables)
        self._account_promises()
