"""Converts the state of a multi-way join to tables and a dict, and back.

Every chunk in memory is one table, named by its serial number and immutable under that name, plus its index
(``<name>.index``). Pieces on disk that a snapshot sees for the first time form one table per input, one record batch
per piece; its index holds their metadata. A runtime stores the tables it does not have yet. Done bits do change: see
`bit_log`.

A piece in a stored table is referenced, not copied: neither a later snapshot nor a restart writes it again, unless less
than half of its table is still needed.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dovetail.core.errors import StateError
from dovetail.joins.multiway.bit_log import KINDS, StoredBits, bit_tables, mark_stored, size_of
from dovetail.joins.multiway.chunk import DIRECT, IN_MEMORY, Chunk, get_bits
from dovetail.joins.multiway.spill import FACTS, Fetch, Piece, StoredTable, chunk_table, tuples_of
from dovetail.joins.multiway.state import JoinState
from dovetail.joins.protocol import Snapshot
from dovetail.storage.digests import digest_of

if TYPE_CHECKING:
    from dovetail.joins.multiway.mjoin import MJoin

__all__ = ["named_tables", "refer_to_stored", "restore_operator", "snapshot_of", "table_names"]

_MEMORY, _DIRECT, _DISK = "memory", "direct", "disk"


def snapshot_of(join: "MJoin", have: frozenset[str]) -> Snapshot:
    """The state of a join between two calls, without the tables that are stored already."""
    state, tables, described = join.state, {}, {}
    for i in range(len(state.memory)):
        for chunk in (*state.memory[i], *state.direct[i]):
            name = f"{i}-{chunk.serial}"
            place = _DIRECT if chunk.departure == DIRECT else _MEMORY
            described[name] = {
                "input": i,
                "place": place,
                "level": chunk.level,
                "extremes": list(chunk.extremes),
                "timed": chunk.is_timed,
            }
            if name not in have:
                tables[name] = pa.Table.from_batches([chunk_table(state.spec, i, chunk)])
                tables[f"{name}.index"] = chunk.index_table()
        for name, pieces, is_new in _tables_of_pieces(state, i, have):
            is_whole = is_new or len(pieces) == state.stored[name].pieces
            described[name] = {"input": i, "place": _DISK, "live": None if is_whole else sorted(pieces)}
            if is_new:
                # Mapped, not loaded: the pieces spilled since the last snapshot may not fit in memory.
                tables[name] = pa.Table.from_batches([state.store.mapped(piece) for piece in pieces.values()])
                facts = zip(*(piece.facts() for piece in pieces.values()), strict=True)
                tables[f"{name}.index"] = pa.table([pa.array(f, pa.int64()) for f in facts], names=list(FACTS))
    state.store.release()
    logged: dict[str, list[str]] = {}
    for kind in KINDS:
        new, logged[kind] = bit_tables(state, kind, have, state.store.fetch)
        tables |= new
    domains = [
        [d.joined_until, d.pending, d.pending_since, d.pending_low, [list(entry) for entry in d.log]]
        for d in state.domains
    ]
    values = {
        **join.scalars(),
        "chunks": described,
        **logged,
        "domains": domains,
        "spilled": np.flatnonzero(state.spilled).tolist(),
        "stamp": state.stamp,
        "serial": state.serial,
        "chooser": join.chooser.state(),
        "metrics": join.metrics.as_dict(),
    }
    return Snapshot(join.kind, join.fingerprint(), tables, values)


def table_names(join: "MJoin") -> frozenset[str]:
    """The stored tables, without indexes, that the next snapshot would still reference."""
    state = join.state
    held = {name for log in state.bit_logs.values() for name in log}
    held |= {f"{i}-{c.serial}" for i in range(len(state.memory)) for c in (*state.memory[i], *state.direct[i])}
    known = frozenset(state.stored)
    for i in range(len(state.memory)):
        held |= {name for name, _, is_new in _tables_of_pieces(state, i, known) if not is_new}
    return frozenset(held)


def _tables_of_pieces(
    state: JoinState, i: int, have: frozenset[str]
) -> Iterator[tuple[str, Mapping[int, Piece], bool]]:
    """An input's pieces by table, each with its number in it; and whether the table is new."""
    stored: dict[str, dict[int, Piece]] = {}
    new: list[Piece] = []
    for domain in state.domains:
        for piece in domain.pieces[i]:
            if piece.file is None and piece.table in have:
                stored.setdefault(piece.table, {})[piece.number] = piece
            else:
                new.append(piece)
    for name, pieces in stored.items():
        if 2 * sum(piece.rows for piece in pieces.values()) >= state.stored[name].rows:
            yield name, pieces, False
        else:
            # Most of that table is garbage by now.
            new += pieces.values()
    if new:
        serials = np.array([piece.serial for piece in new], np.int64)
        yield f"{i}-{new[0].serial}-{digest_of(serials.tobytes())}", dict(enumerate(new)), True


def refer_to_stored(join: "MJoin", snapshot: Snapshot, fetch: Fetch) -> None:
    """Read the pieces of a stored snapshot from its tables, and delete their spill files."""
    state = join.state
    state.store.fetch_from(fetch)
    held = {(i, p.serial): p for d in state.domains for i, pieces in enumerate(d.pieces) for p in pieces}
    named = {name: about for name, about in snapshot.values["chunks"].items() if about["place"] == _DISK}
    state.stored = {name: about for name, about in state.stored.items() if name in named}
    for name in named.keys() - state.stored.keys():
        facts = snapshot.tables[f"{name}.index"]
        for number, serial in enumerate(facts["serial"].to_pylist()):
            state.store.refer(held[named[name]["input"], serial], name, number)
        state.stored[name] = _stored(facts)
    for kind in KINDS:
        mark_stored(state, kind, snapshot.tables, snapshot.values[kind])


def named_tables(values: Mapping[str, Any]) -> frozenset[str]:
    """The tables, without indexes, that a snapshot with these values is made of."""
    promised = values.get("metadata", {}).get("tables", ())
    bits = [name for kind in KINDS for name in values.get(kind, ())]
    return frozenset([*values["chunks"], *bits, *promised])


def _stored(facts: pa.Table) -> StoredTable:
    return StoredTable(facts.num_rows, sum(facts["rows"].to_pylist()))


def restore_operator(join: "MJoin", snapshot: Snapshot, fetch: Fetch | None) -> None:
    """Restore a join from a snapshot; a snapshot of another join is refused and changes nothing."""
    if snapshot.kind != join.kind or dict(snapshot.fingerprint) != join.fingerprint():
        raise StateError(
            f"This snapshot is of another join ({snapshot.kind!r}): inputs, join attributes, join type, window and "
            "partitions must be the same.",
            hint="Make the join as it was, or start without a snapshot.",
        )
    values: dict[str, Any] = dict(snapshot.values)
    # Earlier versions had one table of done bits, and did not name it.
    named = {kind: values.get(kind, ["done"] if kind == "done" else []) for kind in KINDS}
    logged = {kind: {name: _table(name, snapshot, fetch) for name in names} for kind, names in named.items()}
    bits = [StoredBits(kind, tables.values()) for kind, tables in logged.items()]
    state = join.state
    state.clear()
    state.stored = {}
    if fetch is not None:
        state.store.fetch_from(fetch)
    for name, about in values["chunks"].items():
        if about["place"] == _DISK:
            facts = _index(name, snapshot, fetch)
            if facts is None:
                raise _lacks(name)
            _restore_pieces(state, name, about, facts, snapshot.tables.get(name), bits[0])
            continue
        chunk = _chunk(state, name, about, _table(name, snapshot, fetch), _index(name, snapshot, fetch))
        for each in bits:
            each.restore(name, chunk)
        state.adopt(about["input"], chunk, about["place"] == _DIRECT)
    # What came with the snapshot is stored nowhere: the next one has it again.
    state.bit_logs = {
        kind: {} if tables.keys() & snapshot.tables.keys() else {name: size_of(t) for name, t in tables.items()}
        for kind, tables in logged.items()
    }
    state.stamp, state.serial = values["stamp"], values["serial"]
    state.spilled[:] = False
    state.spilled[values["spilled"]] = True
    for domain, (joined_until, pending, since, low, log) in zip(state.domains, values["domains"], strict=True):
        domain.joined_until, domain.pending, domain.pending_since, domain.pending_low = (
            joined_until,
            pending,
            since,
            low,
        )
        domain.log = [(int(i), int(stamp)) for i, stamp in log]
    join.set_scalars(values)
    join.chooser.restore(values["chooser"])
    restored = type(join.metrics).from_dict(dict(values["metrics"]))
    for field in restored.as_dict():
        setattr(join.metrics, field, getattr(restored, field))


def _restore_pieces(
    state: JoinState,
    name: str,
    about: Mapping[str, Any],
    facts: pa.Table,
    table: pa.Table | None,
    done: StoredBits,
) -> None:
    """Write pieces whose table came with the snapshot to the spill directory; reference the others."""
    i = about["input"]
    known = list(zip(*(column.to_pylist() for column in facts.columns), strict=True))
    numbers = range(len(known)) if about["live"] is None else about["live"]
    pieces = [Piece.stored(known[number], name, number) for number in numbers]
    for piece in pieces:
        if state.spec.preserved[i]:
            done.restore(f"{i}-{piece.serial}", piece.with_done(np.zeros(-(-piece.rows // 8), np.uint8)))
    if table is None:
        state.stored[name] = _stored(facts)
        state.file_pieces(i, pieces)
        return
    batches = table.to_batches()

    def loaded() -> Iterator[Chunk]:
        for piece in pieces:
            tuples = tuples_of(state.spec, i, batches[piece.number])
            if piece.done is not None:
                tuples = tuples._replace(done=get_bits(piece.done, None, piece.rows))
            yield Chunk.of_ordered(piece.serial, tuples, state.spec.partitions, piece.level)

    state.adopt_pieces(i, loaded(), pieces)


def _index(name: str, snapshot: Snapshot, fetch: Fetch | None) -> pa.Table | None:
    index = snapshot.tables.get(f"{name}.index")
    return fetch(f"{name}.index") if index is None and fetch is not None else index


def _table(name: str, snapshot: Snapshot, fetch: Fetch | None) -> pa.Table:
    table = snapshot.tables.get(name)
    if table is None and fetch is not None:
        table = fetch(name)
    if table is None:
        raise _lacks(name)
    return table


def _lacks(name: str) -> StateError:
    return StateError(f"The snapshot lacks chunk {name!r}.", hint="Pass fetch= to read chunks stored elsewhere.")


def _chunk(state: JoinState, name: str, about: dict[str, Any], table: pa.Table, index: pa.Table | None) -> Chunk:
    # One batch with contiguous columns: the chunk's arrays are views of it.
    batch = table.combine_chunks().to_batches()[0] if table.num_rows else None
    if batch is None:
        raise StateError(f"Chunk {name!r} of the snapshot is empty.")
    i = about["input"]
    starts = None if index is None else index["starts"].combine_chunks().to_numpy()
    tuples = tuples_of(state.spec, i, batch)
    if state.spec.preserved[i]:
        tuples = tuples._replace(done=np.zeros(len(tuples.arrivals), np.bool_))
    serial = int(name.split("-")[1])
    departure = DIRECT if about["place"] == _DIRECT else IN_MEMORY
    return Chunk.of_ordered(
        serial,
        tuples,
        state.spec.partitions,
        about["level"],
        departure,
        starts,
        about["extremes"],
        is_timed=about.get("timed", False),  # Earlier versions did not order rows by time.
    )
