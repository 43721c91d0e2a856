"""Operators whose snapshots are kept: what each is given before and after its snapshot, and what must come out.

A snapshot is stored as a flow stores a shard's state: tables in state files, and a commit that names them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from golden_plain import Row, lookup_join, same_key, streams_join

import dovetail as dt
from dovetail.joins.multiway.planner import plan_multiway
from dovetail.operators import OPERATORS, Snapshot, join_spec
from dovetail.operators.metadata import Metadata, MetadataJoin, Punctuation, Schedule, ScheduledJoin
from dovetail.operators.mjoin import MJoin, MJoinTree, SymmetricHashJoin, TimeWindow, XJoin, mjoin_spec
from dovetail.relation import compute_codes
from dovetail.spark.flow.fingerprint import FlowFingerprint
from dovetail.spark.flow.store import FlowStore
from dovetail.storage.documents import read_document
from dovetail.storage.state_files import ShardState, read_table, write_tables

NAME = "snapshots"
KEYS = 3_000
CITIES: list[Row] = [
    {"k": key, "city": f"c{key % 17}"} for key in range(0, KEYS, 2) for _ in range(1 + (key % 50 == 0))
]
_SHARD = 0


@dataclass(frozen=True)
class SnapshotCase:
    """An operator with state.

    `make` is given the directory of the copy and one to spill to; `first` is done before the snapshot and `later` after
    it, and both give the rows that came out.
    """

    name: str
    make: Callable[[Path, Path], Any]
    first: Callable[[Any], Iterable[pa.RecordBatch]]
    later: Callable[[Any], Iterable[pa.RecordBatch]]
    expected: Callable[[], list[Row]]
    must_wait: bool = True

    def save(self, join: Any, copy: Path) -> None:
        """Store the operator's snapshot."""
        store = FlowStore(copy / "state" / self.name)
        store.open(FlowFingerprint(self.name, ({"name": self.name, "shards": 1},)))
        saved = join.snapshot()
        files = write_tables(store.state_root, self.name, _SHARD, 0, list(saved.tables.items()))
        values = {"kind": saved.kind, "fingerprint": dict(saved.fingerprint), "values": dict(saved.values)}
        state = ShardState("golden", tuple(files), values)
        store.create_commit(0, {"batch": 0, "operators": {self.name: [state.as_dict()]}})

    def restored(self, copy: Path, scratch: Path) -> Any:
        """The operator as it was when its snapshot was stored."""
        store = FlowStore(copy / "state" / self.name)
        # Not store.commit: there is a state here, but no flow that ran.
        commit = read_document(store.root / "commits" / "00000000.json")
        assert commit is not None, f"{copy} has no snapshot of {self.name}."
        state = ShardState.from_dict(commit["operators"][self.name][_SHARD])
        tables = {file.table: read_table(store.state_root, file) for file in state.files}
        join = self.make(copy, scratch)
        join.restore(Snapshot(state.values["kind"], state.values["fingerprint"], tables, state.values["values"]))
        return join


# ==================================================================== streams with a relation


def orders(first: int, count: int) -> list[Row]:
    """Rows of a stream; some have no key, and half of the keys are in the relation."""
    numbers = range(first, first + count)
    return [{"k": None if n % 97 == 0 else n * 7919 % KEYS, "n": n} for n in numbers]


def build_cities(copy: Path) -> None:
    """Write the relation that the stream is joined with."""
    dt.Relation.build(pa.Table.from_pylist(CITIES), copy / "cities", on="k", shards=1)


def _coded(rows: list[Row]) -> pa.RecordBatch:
    table = pa.Table.from_pylist(rows, schema=pa.schema({"k": pa.int64(), "n": pa.int64()}))
    (batch,) = table.add_column(0, "__code", compute_codes(table, ["k"])).to_batches()
    return batch


def _semi_stream(kind: str, how: str, budget: str, **options: Any) -> SnapshotCase:
    def make(copy: Path, scratch: Path) -> Any:
        relation = dt.Relation.open(copy / "cities")
        return OPERATORS[kind](join_spec(relation, _coded(orders(0, 1)).schema, how=how, budget=budget, **options))

    def first(join: Any) -> Iterable[pa.RecordBatch]:
        # Several chunks, of which the first have met a part of the relation.
        for number in range(0, 240, 80):
            yield from join.offer(_coded(orders(number, 80)))
        if join.pending:
            yield from join.step()
        yield from join.offer(_coded(orders(240, 60)))

    def later(join: Any) -> Iterable[pa.RecordBatch]:
        yield from join.offer(_coded(orders(300, 100)))
        yield from join.drain()

    name = kind + ("-ordered" if options.get("ordered") else "")
    # A lookup in the index lets nothing wait; what it keeps are its counters.
    must_wait = kind != "index_nested_loop"
    return SnapshotCase(name, make, first, later, lambda: lookup_join(orders(0, 400), CITIES, "k", how), must_wait)


# ==================================================================== streams with each other

_LABELS = {name: pa.schema({"k": pa.int64(), name: pa.string()}) for name in "abc"}
_PAIR = {name: _LABELS[name] for name in "ab"}
_TIMED = {name: pa.schema({"k": pa.int64(), f"t{name}": pa.int64(), name: pa.string()}) for name in "abc"}
_TREE = {
    "a": pa.schema({"x": pa.int64(), "a": pa.string()}),
    "b": pa.schema({"x": pa.int64(), "y": pa.string(), "b": pa.string()}),
    "c": pa.schema({"y": pa.string(), "c": pa.string()}),
}
_WIDTH = 6


def labelled(name: str, first: int, count: int) -> list[Row]:
    """Rows of an input with every column that any of these joins has."""
    place = "abc".index(name)
    rows = []
    for n in range(first, first + count):
        key = None if n % 19 == 7 else (n * (7 + 4 * place) + place) % 40
        rows.append({"k": key, "x": key, "y": f"y{n % 37}", f"t{name}": n, name: f"{name}{n}" + "-" * 60})
    return rows


def shown(rows: Iterable[Row]) -> list[Row]:
    """Rows without what only makes labels long enough to spill."""
    return [{name: v.rstrip("-") if isinstance(v, str) else v for name, v in row.items()} for row in rows]


def _batch(schemas: dict[str, pa.Schema], name: str, rows: list[Row]) -> pa.RecordBatch:
    picked = [{column: row[column] for column in schemas[name].names} for row in rows]
    return pa.RecordBatch.from_pylist(picked, schema=schemas[name])


def _multi_way(
    name: str,
    schemas: dict[str, pa.Schema],
    make: Callable[[Path], Any],
    expected: Callable[[], list[Row]],
    is_coded: bool = True,
) -> SnapshotCase:
    def offered(join: Any, begin: int, end: int) -> Iterable[pa.RecordBatch]:
        for start in range(begin, end, 20):
            for each in schemas:
                batch = _batch(schemas, each, labelled(each, start, 20))
                yield from join.offer(each, join.spec.with_codes(each, batch) if is_coded else batch)

    def later(join: Any) -> Iterable[pa.RecordBatch]:
        yield from offered(join, 60, 100)
        for each in schemas:
            join.finish(each)
        yield from join.drain()

    return SnapshotCase(name, lambda copy, scratch: make(scratch), lambda join: offered(join, 0, 60), later, expected)


def _all_labels(names: str) -> dict[str, list[Row]]:
    return {name: labelled(name, 0, 100) for name in names}


def _by_key(names: str) -> list[Row]:
    columns = {"k": (names[0], "k"), **{name: (name, name) for name in names}}
    return streams_join(_all_labels(names), same_key, columns)


def _left_by_key() -> list[Row]:
    matched = _by_key("ab")
    found = {row["a"] for row in matched}
    return matched + [{"k": r["k"], "a": r["a"], "b": None} for r in labelled("a", 0, 100) if r["a"] not in found]


def _in_window() -> list[Row]:
    def agree(rows: Any) -> bool:
        times = [row[f"t{name}"] for name, row in rows.items()]
        return same_key(rows) and max(times) - min(times) <= _WIDTH

    columns = {"k": ("a", "k")}
    for name in "abc":
        columns |= {f"t{name}": (name, f"t{name}"), name: (name, name)}
    return streams_join(_all_labels("abc"), agree, columns)


def _in_tree() -> list[Row]:
    def agree(rows: Any) -> bool:
        return rows["a"]["x"] is not None and rows["a"]["x"] == rows["b"]["x"] and rows["b"]["y"] == rows["c"]["y"]

    columns = {"x": ("a", "x"), "y": ("b", "y"), **{name: (name, name) for name in "abc"}}
    return streams_join(_all_labels("abc"), agree, columns)


def _tree(scratch: Path) -> MJoinTree:
    spec = mjoin_spec(_TREE, on=[("a.x", "b.x"), ("b.y", "c.y")], budget="1MB")
    return MJoinTree(spec, plan_multiway(spec.graph, force=[["a", "b"], "c"]))


def _window(scratch: Path) -> MJoin:
    window = TimeWindow(_WIDTH, {name: f"t{name}" for name in "abc"})
    return MJoin(mjoin_spec(_TIMED, on="k", window=window, budget="1MB", partitions=4))


def _spilled(scratch: Path) -> MJoin:
    spec = mjoin_spec(
        _LABELS, on="k", budget="24kB", partitions=4, spill_directory=scratch, flushing="coordinated", max_delay=1 << 40
    )
    return MJoin(spec)


def _outer(scratch: Path) -> MJoin:
    return MJoin(mjoin_spec(_PAIR, on="k", how="left", budget="24kB", partitions=4, spill_directory=scratch))


def _xjoin(scratch: Path) -> XJoin:
    spec = mjoin_spec(_PAIR, on="k", budget="24kB", partitions=4, spill_directory=scratch, flushing="random")
    return XJoin(spec)


def _symmetric(scratch: Path) -> SymmetricHashJoin:
    return SymmetricHashJoin(mjoin_spec(_PAIR, on="k", budget="1MB", partitions=4))


# ==================================================================== streams that promise something

_NEWS = {
    "one": pa.schema({"k": pa.int64(), "title": pa.string()}),
    "many": pa.schema({"k": pa.int64(), "n": pa.int64()}),
}


def _titles(keys: range) -> list[Row]:
    return [{"k": key, "title": f"title {key}"} for key in keys]


def _accesses(numbers: range) -> list[Row]:
    return [{"k": n * 13 % 60, "n": n} for n in numbers]


def _promising(scratch: Path) -> MetadataJoin:
    promised = Metadata(keys=["one"], goal="rate", purge_count=1_000, on_broken_promise="quarantine")
    return MetadataJoin(mjoin_spec(_NEWS, on="k", how="left", budget="1MB", partitions=4), promised)


def _promised_expected() -> list[Row]:
    # Keys 50 to 59 have no title; a row of a closed value is put aside: n of 120 and more has none of keys 0 to 4.
    rows = [row for row in _accesses(range(240)) if row["n"] < 120 or row["k"] >= 5]
    return [
        {"k": title["k"], "title": title["title"], "n": row["n"]} for title in _titles(range(50)) for row in rows
        if row["k"] == title["k"]
    ]  # fmt: skip


def _news_batch(join: Any, name: str, rows: list[Row]) -> pa.RecordBatch:
    return join.spec.with_codes(name, pa.RecordBatch.from_pylist(rows, schema=_NEWS[name]))


def _promising_first(join: MetadataJoin) -> Iterable[pa.RecordBatch]:
    yield from join.offer("one", _news_batch(join, "one", _titles(range(30))))
    yield from join.offer("many", _news_batch(join, "many", _accesses(range(120))))
    yield from join.punctuate("many", Punctuation({"k": [0, 1, 2]}))
    yield from join.punctuate("many", Punctuation.between("k", 3, 4))
    yield from join.offer("many", _news_batch(join, "many", [{"k": 1, "n": -1}]))


def _promising_later(join: MetadataJoin) -> Iterable[pa.RecordBatch]:
    # Promised before the snapshot, and only now broken.
    yield from join.offer("many", _news_batch(join, "many", _accesses(range(120, 240))))
    yield from join.offer("one", _news_batch(join, "one", _titles(range(30, 50))))
    for name in ("one", "many"):
        join.finish(name)
    yield from join.drain()


def _scheduled(scratch: Path) -> ScheduledJoin:
    promised = Metadata(keys=["one"], goal="memory")
    join = MetadataJoin(mjoin_spec(_NEWS, on="k", budget="1MB", partitions=4), promised)
    return ScheduledJoin(join, Schedule(quota=16, slice_rows=8))


def _scheduled_first(join: ScheduledJoin) -> Iterable[pa.RecordBatch]:
    for start in (0, 60):
        rows = pa.RecordBatch.from_pylist(_accesses(range(start, start + 60)), schema=_NEWS["many"])
        join.enqueue("many", rows)
    join.enqueue("many", Punctuation({"k": [7, 8]}))
    join.enqueue("one", pa.RecordBatch.from_pylist(_titles(range(30)), schema=_NEWS["one"]))
    yield from join.run(max_tuples=40)


def _scheduled_later(join: ScheduledJoin) -> Iterable[pa.RecordBatch]:
    join.enqueue("one", pa.RecordBatch.from_pylist(_titles(range(30, 50)), schema=_NEWS["one"]))
    yield from join.run()
    yield from join.drain()


def _scheduled_expected() -> list[Row]:
    rows = _accesses(range(120))
    titles = _titles(range(50))
    return [{"k": t["k"], "title": t["title"], "n": r["n"]} for t in titles for r in rows if r["k"] == t["k"]]


SNAPSHOTS = [
    _semi_stream("mesh", "left", "60kB"),
    _semi_stream("mesh", "inner", "60kB", ordered=True),
    _semi_stream("hybrid", "inner", "30kB"),
    _semi_stream("balanced", "semi", "30kB"),
    _semi_stream("index_nested_loop", "anti", "60kB"),
    _semi_stream("auto", "left", "60kB"),
    _multi_way("mjoin-window", _TIMED, _window, _in_window),
    _multi_way("mjoin-spilled", _LABELS, _spilled, lambda: _by_key("abc")),
    _multi_way("mjoin-outer", _PAIR, _outer, _left_by_key),
    _multi_way("mjoin-tree", _TREE, _tree, _in_tree, is_coded=False),
    _multi_way("xjoin", _PAIR, _xjoin, lambda: _by_key("ab")),
    _multi_way("symmetric-hash-join", _PAIR, _symmetric, lambda: _by_key("ab")),
    SnapshotCase(
        "metadata-join",
        lambda copy, scratch: _promising(scratch),
        _promising_first,
        _promising_later,
        _promised_expected,
    ),
    SnapshotCase(
        "scheduled-join",
        lambda copy, scratch: _scheduled(scratch),
        _scheduled_first,
        _scheduled_later,
        _scheduled_expected,
    ),
]
