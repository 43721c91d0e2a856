"""The state of a multi-way join as tables and a dict, and back.

Every chunk is a table of its own, named by its serial number, and never changes under that name; so is its index
(``<name>.index``). A runtime stores those that it does not have yet. Done bits, which do change, are one small table.
Pieces on disk are chunks like any other, so a snapshot does not depend on the spill directory.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dovetail.errors import StateError
from dovetail.operators.mjoin.chunk import DIRECT, Chunk
from dovetail.operators.mjoin.spill import Piece, chunk_table, tuples_of
from dovetail.operators.mjoin.state import JoinState
from dovetail.operators.protocol import Snapshot

if TYPE_CHECKING:
    from dovetail.operators.mjoin.mjoin import MJoin

__all__ = ["restore_operator", "snapshot_of"]

_MEMORY, _DIRECT, _DISK = "memory", "direct", "disk"


def snapshot_of(join: "MJoin", have: frozenset[str]) -> Snapshot:
    """The state of a join between two calls, without the tables that are stored already."""
    state, tables, described, done = join.state, {}, {}, []
    for place, i, item in _held(state):
        name = f"{i}-{item.serial}"
        described[name] = {"input": i, "place": place, "level": item.level, "departure": item.departure}
        described[name]["extremes"] = list(item.extremes)
        if item.done is not None:
            done.append((name, item.done.tobytes()))
        if name in have:
            continue
        if isinstance(item, Piece):
            tables[name] = pa.Table.from_batches([state.store.read_table(item)])
        else:
            tables[name] = pa.Table.from_batches([chunk_table(state.spec, i, item)])
            tables[f"{name}.index"] = item.index_table()
    state.store.release()
    names, bits = zip(*done, strict=True) if done else ((), ())
    tables["done"] = pa.table({"chunk": pa.array(names, pa.string()), "bits": pa.array(bits, pa.binary())})
    domains = [
        [d.joined_until, d.pending, d.pending_since, d.pending_low, [list(entry) for entry in d.log]]
        for d in state.domains
    ]
    values = {
        **join.scalars(),
        "chunks": described,
        "domains": domains,
        "spilled": np.flatnonzero(state.spilled).tolist(),
        "stamp": state.stamp,
        "serial": state.serial,
        "chooser": join.chooser.state(),
        "metrics": join.metrics.as_dict(),
    }
    return Snapshot(join.kind, join.fingerprint(), tables, values)


def restore_operator(join: "MJoin", snapshot: Snapshot, fetch: Callable[[str], pa.Table] | None) -> None:
    """Give a join the state of a snapshot; refused, with nothing changed, if it is of something else."""
    if snapshot.kind != join.kind or dict(snapshot.fingerprint) != join.fingerprint():
        raise StateError(
            f"This snapshot is of another join ({snapshot.kind!r}): inputs, join attributes, join type, window and "
            "partitions must be the same.",
            hint="Make the join as it was, or start without a snapshot.",
        )
    values: dict[str, Any] = dict(snapshot.values)
    done = snapshot.tables["done"]
    bits = dict(zip(done["chunk"].to_pylist(), done["bits"].to_pylist(), strict=True))
    state = join.state
    state.clear()
    for name, about in values["chunks"].items():
        table = _table(name, snapshot, fetch)
        index = snapshot.tables.get(f"{name}.index")
        chunk = _chunk(state, name, about, table, index)
        if name in bits:
            chunk.done = np.frombuffer(bits[name], np.uint8).copy()
        state.adopt(about["input"], chunk, about["place"])
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


def _held(state: JoinState) -> Iterator[tuple[str, int, Chunk | Piece]]:
    for i in range(len(state.memory)):
        for chunk in state.memory[i]:
            yield _MEMORY, i, chunk
        for chunk in state.direct[i]:
            yield _DIRECT, i, chunk
        for domain in state.domains:
            for piece in domain.pieces[i]:
                yield _DISK, i, piece


def _table(name: str, snapshot: Snapshot, fetch: Callable[[str], pa.Table] | None) -> pa.Table:
    table = snapshot.tables.get(name)
    if table is None and fetch is not None:
        table = fetch(name)
    if table is None:
        raise StateError(f"The snapshot lacks chunk {name!r}.", hint="Pass fetch= to read chunks stored elsewhere.")
    return table


def _chunk(state: JoinState, name: str, about: dict[str, Any], table: pa.Table, index: pa.Table | None) -> Chunk:
    # One batch with contiguous columns: a chunk's arrays are views of it.
    batch = table.combine_chunks().to_batches()[0] if table.num_rows else None
    if batch is None:
        raise StateError(f"Chunk {name!r} of the snapshot is empty.")
    i = about["input"]
    starts = None if index is None else index["starts"].combine_chunks().to_numpy()
    tuples = tuples_of(state.spec, i, batch)
    if state.spec.preserved[i]:
        tuples = tuples._replace(done=np.zeros(len(tuples.arrivals), np.bool_))
    serial = int(name.split("-")[1])
    departure = DIRECT if about["place"] == _DIRECT else about["departure"]
    return Chunk.of_ordered(serial, tuples, state.spec.partitions, about["level"], departure, starts, about["extremes"])
