"""Overflow: budgets, flushing policies, the delay bound, a full disk, restarts, and keys with very many matches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import SpillError, StateError
from dovetail.joins.multiway import MJoin, TimeWindow, mjoin_spec
from dovetail.joins.multiway.snapshots import named_tables
from dovetail.testing.faults import python_program, run_unharmed
from dovetail.testing.snapshots import through_storage

FLUSHING = pytest.mark.parametrize("flushing", ["coordinated", "random"])
WIDE = "x" * 200
ROWS = 60


def expected(rows: int, names: str = "abc") -> list[tuple[str, ...]]:
    return sorted(tuple(f"{name}{k}{WIDE}" for name in names) for k in range(rows))


def fill(join: Any, rows: int = ROWS) -> list[tuple[Any, ...]]:
    """The same keys on all three inputs, in small batches that take turns."""
    out: list[tuple[Any, ...]] = []
    for start in range(0, rows, 10):
        for name in "abc":
            out += join.offer(name, *[(k, f"{name}{k}{WIDE}") for k in range(start, start + 10)])
    return out


@FLUSHING
def test_everything_comes_out_exactly_once_when_most_of_it_spills(script: Any, tmp_path: Path, flushing: str) -> None:
    join = script("abc", budget="24kB", spill_directory=tmp_path, flushing=flushing)
    at_once = fill(join)
    assert join.join.metrics.flushed_rows > 100
    assert any(tmp_path.iterdir())
    assert sorted(at_once + join.end()) == expected(ROWS)
    assert list(tmp_path.iterdir()) == []


def test_coordinated_flushing_gives_more_results_before_the_end(script: Any, tmp_path: Path) -> None:
    early = {}
    for flushing in ("coordinated", "random"):
        join = script("abc", budget="32kB", partitions=16, spill_directory=tmp_path / flushing, flushing=flushing)
        out = []
        for name in "abc":
            out += join.offer(name, *[(k, f"{name}{k}{WIDE}") for k in range(ROWS)])
        early[flushing] = len(out)
        assert sorted(out + join.end()) == expected(ROWS)
    assert early["coordinated"] > early["random"]


@FLUSHING
def test_results_of_spilled_partitions_come_within_the_delay_bound(script: Any, tmp_path: Path, flushing: str) -> None:
    join = script("abc", budget="24kB", spill_directory=tmp_path, flushing=flushing, max_delay=50)
    join.join.set_time(1000)
    out = fill(join)
    assert join.join.pending > 0
    join.join.set_time(1049)
    assert join.labels(join.join.step()) == []
    join.join.set_time(1050)
    out += join.labels(join.join.step())
    assert join.join.pending == 0
    assert sorted(out) == expected(ROWS)
    assert join.end() == []


def test_idle_time_is_used_for_the_disk(script: Any, tmp_path: Path) -> None:
    join = script("abc", budget="24kB", spill_directory=tmp_path, flushing="random")
    out = fill(join)
    while join.join.metrics.disk_probes < 6:
        out += join.labels(join.join.step(idle=True))
    assert sorted(out + join.end()) == expected(ROWS)


@FLUSHING
def test_restart_in_the_middle_of_spilling_changes_nothing(script: Any, tmp_path: Path, flushing: str) -> None:
    join = script("abc", budget="24kB", spill_directory=tmp_path / "first", flushing=flushing)
    out = fill(join, ROWS // 2)
    saved = through_storage(join.join.snapshot())
    again = script("abc", budget="24kB", spill_directory=tmp_path / "second", flushing=flushing)
    again.join.restore(saved)
    assert again.join.state_rows() == join.join.state_rows()
    assert again.join.metrics.as_dict() == join.join.metrics.as_dict()
    rest, other_rest = [], []
    for side, collected in ((join, rest), (again, other_rest)):
        for name in "abc":
            collected += side.offer(name, *[(k, f"{name}{k}{WIDE}") for k in range(ROWS // 2, ROWS)])
        collected += side.end()
    assert rest == other_rest
    assert sorted(out + rest) == expected(ROWS)


def test_snapshot_leaves_out_chunks_that_are_stored_already(script: Any) -> None:
    join = script("ab")
    join.offer("a", *[(k, "a") for k in range(50)])
    first = join.join.snapshot()
    join.offer("b", (3, "b"))
    second = join.join.snapshot(have=frozenset(first.values["chunks"]))
    assert sum(table.num_rows for name, table in second.tables.items() if "index" not in name) == 1
    again = script("ab")
    again.join.restore(second, fetch=lambda name: first.tables[name])
    assert again.offer("b", (4, "c")) == [("a", "c")]
    with pytest.raises(StateError, match="lacks chunk"):
        script("ab").join.restore(second)


def test_commit_writes_the_done_bits_that_were_set_since_the_last(script: Any) -> None:
    join = script("ab", how="left", budget="8MB")
    rows = 20_000
    join.offer("a", *[(k, "a") for k in range(rows)])
    stored: dict[str, pa.Table] = {}
    sizes, tables = [], 0
    for start in range(0, rows // 2, 100):
        join.offer("b", *[(2 * k, "b") for k in range(start, start + 50)])
        snapshot = through_storage(join.join.snapshot(have=frozenset(stored)))
        sizes.append(sum(t.nbytes for name, t in snapshot.tables.items() if name.startswith("done")))
        stored |= snapshot.tables
        stored = {n: t for n, t in stored.items() if n.removesuffix(".index") in named_tables(snapshot.values)}
        join.join.refer_to_stored(snapshot, stored.__getitem__)
        tables = max(tables, sum(name.startswith("done") for name in stored))
    # 50 rows are matched in each: as places they take 200 bytes, as bits of all rows 2,500.
    assert sorted(sizes)[len(sizes) // 2] < 400
    assert sum(sizes) / len(sizes) < 1_500
    assert tables <= 20
    again = script("ab", how="left", budget="8MB")
    again.join.restore(replace(snapshot, tables={}), stored.__getitem__)
    matched = {2 * k for start in range(0, rows // 2, 100) for k in range(start, start + 50)}
    for one in (join, again):
        assert len(one.end()) == rows - len(matched)


def test_what_is_on_disk_is_stored_once_and_attached_without_being_written_or_read(script: Any, tmp_path: Path) -> None:
    options = {"budget": "400kB", "partitions": 4}
    join = script("ab", spill_directory=tmp_path / "first", **options)
    stored: dict[str, pa.Table] = {}
    out: list[Any] = []
    written, rounds, rows = 0, 40, 60
    for number in range(rounds):
        for name in "ab":
            out += join.offer(name, *[(k, f"{name}{k}{WIDE}") for k in range(rows * number, rows * (number + 1))])
        out += join.labels(join.join.drain())
        snapshot = through_storage(join.join.snapshot(have=frozenset(stored)))
        written += sum(t.num_rows for n, t in snapshot.tables.items() if n != "done" and "index" not in n)
        stored |= snapshot.tables
        join.join.refer_to_stored(snapshot, stored.__getitem__)
        assert list((tmp_path / "first").glob("*")) == [], "what is stored is not kept a second time"
    total = 2 * rounds * rows
    assert join.join.metrics.flushed_rows > total / 2
    # A row is stored once for every tier that it reaches, not once for every snapshot.
    assert written < 4 * total
    on_disk = {name: about for name, about in snapshot.values["chunks"].items() if about["place"] == "disk"}
    numbers = {name: about["live"] or range(stored[f"{name}.index"].num_rows) for name, about in on_disk.items()}
    assert 0 < sum(map(len, numbers.values())) < total / 10
    asked: list[str] = []

    def fetch(name: str) -> pa.Table:
        asked.append(name)
        return stored[name]

    again = script("ab", spill_directory=tmp_path / "second", **options)
    again.join.restore(replace(snapshot, tables={}), fetch)
    in_memory = [n for n, about in snapshot.values["chunks"].items() if about["place"] != "disk"]
    # Of what is on disk, only what is known of it is read.
    assert sorted(asked) == sorted([*in_memory, *(f"{name}.index" for name in snapshot.values["chunks"])])
    assert not (tmp_path / "second").exists()
    assert again.join.metrics.as_dict() == join.join.metrics.as_dict()
    assert again.join.state_rows() == join.join.state_rows() == {"a": total // 2, "b": total // 2}
    assert sorted(out) == expected(total // 2, "ab")
    twice = [again.offer("a", (k, "late")) for k in (0, 1170, 2399)]
    assert sorted([row for rows in twice for row in rows] + again.labels(again.join.drain())) == sorted(
        ("late", f"b{k}{WIDE}") for k in (0, 1170, 2399)
    )


def test_snapshot_of_another_join_is_refused(script: Any) -> None:
    saved = script("ab").join.snapshot()
    with pytest.raises(StateError, match="another join"):
        script("ab", how="left").join.restore(saved)


def test_damaged_spill_file_is_an_error_that_names_it(script: Any, tmp_path: Path) -> None:
    join = script("abc", budget="24kB", spill_directory=tmp_path)
    fill(join)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StateError, match=r"\.arrow.*cannot be read.*Restore"):
        join.end()
    with pytest.raises(StateError, match="did not complete"):
        join.join.snapshot()


@FLUSHING
def test_expired_tuples_on_disk_are_dropped_and_their_partitions_return_to_memory(
    script: Any, tmp_path: Path, flushing: str
) -> None:
    window = TimeWindow(10, {name: f"t{name}" for name in "ab"})
    join = script("ab", time=True, window=window, budget="24kB", spill_directory=tmp_path, flushing=flushing)
    join.offer("a", *[(k, 100, f"a{k}{WIDE}") for k in range(120)])
    join.offer("b", *[(k, 100, f"b{k}{WIDE}") for k in range(60)])
    assert any(tmp_path.iterdir())
    join.labels(join.join.advance(111))
    assert join.join.state_rows() == {"a": 0, "b": 0}
    assert list(tmp_path.iterdir()) == []
    join.offer("a", (1, 200, "a"))
    assert join.offer("b", (1, 200, "b")) == [("a", "b")]


@FLUSHING
@pytest.mark.parametrize("how", ["inner", "left"])
def test_what_a_burst_has_spilled_comes_back_when_there_is_room(
    script: Any, tmp_path: Path, flushing: str, how: str
) -> None:
    window = TimeWindow(10, {name: f"t{name}" for name in "ab"})
    options = {"budget": "60kB", "partitions": 8, "flushing": flushing, "how": how}
    join = script("ab", time=True, window=window, spill_directory=tmp_path, **options)
    out: list[Any] = []

    def tick(now: int, keys: range) -> None:
        for name in "ab":
            shown = keys if name == "a" else keys[::2]
            out.extend(join.offer(name, *[(k, now, f"{name}{k}{WIDE}") for k in shown]))
        out.extend(join.labels(join.join.drain()))
        out.extend(join.labels(join.join.advance(now - 1)))

    ticks = [(now, range(10 * now, 10 * now + (60 if now < 4 else 2))) for now in range(40)]
    for now, keys in ticks:
        tick(now, keys)
        if now == 4:
            assert any(any(domain.pieces) for domain in join.join.state.domains)
    assert join.join.metrics.reloaded_rows > 0
    assert not join.join.state.spilled.any()
    assert not any(any(domain.pieces) for domain in join.join.state.domains)
    assert list(tmp_path.iterdir()) == []
    out += join.end()
    a = [(k, now, f"a{k}{WIDE}") for now, keys in ticks for k in keys]
    b = [(k, now, f"b{k}{WIDE}") for now, keys in ticks for k in keys[::2]]
    pairs = [(x[2], y[2]) for x in a for y in b if x[0] == y[0] and abs(x[1] - y[1]) <= 10]
    alone = [(x[2], None) for x in a if how == "left" and not any(x[2] == pair[0] for pair in pairs)]
    assert sorted(out, key=str) == sorted(pairs + alone, key=str)


def test_catch_up_reads_what_new_rows_need_and_not_their_partitions(script: Any, tmp_path: Path) -> None:
    join = script("ab", budget="200kB", partitions=4, spill_directory=tmp_path)
    total = 4000
    for start in range(0, total, 100):
        for name in "ab":
            join.offer(name, *[(k, f"{name}{k}{WIDE}") for k in range(start, start + 100)])
    join.labels(join.join.drain())
    held = sum(piece.bytes for d in join.join.state.domains for pieces in d.pieces for piece in pieces)
    assert held > total * len(WIDE)
    read, out = join.join.metrics.bytes_read, []
    for k in (5, 1234, 3999):
        out += join.offer("a", (k, "late"))
    out += join.labels(join.join.drain())
    assert sorted(out) == sorted(("late", f"b{k}{WIDE}") for k in (5, 1234, 3999))
    assert join.join.metrics.bytes_read - read < held / 20


def test_key_with_a_million_matches_is_given_out_in_bounded_batches(tmp_path: Path) -> None:
    schemas = {name: pa.schema({"k": pa.int64(), name: pa.int64()}) for name in "abc"}
    spec = mjoin_spec(schemas, on="k", budget="400kB", spill_directory=tmp_path)
    join = MJoin(spec)
    for name, rows in (("a", 1000), ("b", 1000)):
        batch = pa.record_batch({"k": [7] * rows, name: range(rows)})
        assert list(join.offer(name, spec.with_codes(name, batch))) == []
    count = total = 0
    for batch in join.offer("c", spec.with_codes("c", pa.record_batch({"k": [7], "c": [1]}))):
        assert join.size() <= 400_000
        assert batch.nbytes <= 50_000
        count += batch.num_rows
        total += int(batch.column("a").to_numpy().sum() + batch.column("b").to_numpy().sum())
    for name in "abc":
        join.finish(name)
    for batch in join.drain():
        count += batch.num_rows
        total += int(batch.column("a").to_numpy().sum() + batch.column("b").to_numpy().sum())
    assert count == 1_000_000
    assert total == 2 * 1000 * sum(range(1000))
    assert join.peak_bytes <= 400_000


FULL_DISK = """
import resource, sys
import pyarrow as pa
from dovetail.core.errors import SpillError
from dovetail.joins.multiway import MJoin, mjoin_spec

schemas = {name: pa.schema({"k": pa.int64(), name: pa.string()}) for name in "ab"}

def join_of(directory):
    spec = mjoin_spec(schemas, on="k", budget="60kB", spill_directory=directory, partitions=4)
    return spec, MJoin(spec)

def batch_of(spec, name, start, stop):
    labels = [name + str(k) + "x" * 300 for k in range(start, stop)]
    return spec.with_codes(name, pa.record_batch({"k": list(range(start, stop)), name: labels}))

# Everything is compiled, and its code stored, before files may no longer grow.
spec, join = join_of(sys.argv[1] + "/warm-up")
for name in "ab":
    list(join.offer(name, batch_of(spec, name, 0, 300)))
    join.finish(name)
list(join.drain())

spec, join = join_of(sys.argv[1] + "/limited")
out, hard = [], resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
failure = None
for name in "ab":
    offered = 0
    while offered < 300:
        try:
            for batch in join.offer(name, batch_of(spec, name, offered, 300)):
                out += batch.column("k").to_pylist()
        except SpillError as error:
            failure = str(error)
            assert join.size() <= 60_000
            snapshot = join.snapshot()
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        offered = join.metrics.tuples_in[name]
for name in "ab":
    join.finish(name)
for batch in join.drain():
    out += batch.column("k").to_pylist()
assert sorted(out) == list(range(300)), len(out)
print(failure)
"""


def test_full_spill_directory_is_a_clear_error_and_nothing_is_lost(tmp_path: Path) -> None:
    said = run_unharmed(python_program(FULL_DISK, str(tmp_path))).stdout
    assert "limited' is full" in said
    assert "No tuple was lost" in said
    assert issubclass(SpillError, OSError)
