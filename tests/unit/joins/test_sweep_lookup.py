"""Lookups of more tuples than a batch has, whose rows are read in one pass, and the choice between lookup and scan."""

from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.arrays import Int64Array
from dovetail.core.memory import Budget
from dovetail.joins import AutoJoin, LookupJoin
from dovetail.joins.phases import lookup
from dovetail.joins.spec import JoinSpec
from dovetail.relation import Relation
from dovetail.relation.reads.paged_file import PagedFile
from dovetail.relation.reads.read_costs import ReadCosts
from dovetail.relation.relation_reader import RelationReader
from dovetail.testing.shard import MemoryShard

SEED = 7_301
SCHEMA = pa.schema({"__code": pa.int64(), "k": pa.int64(), "t": pa.int64()})


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep begins with 500 tuples, and holds its rows in pieces of some kilobytes."""
    monkeypatch.setattr(lookup, "MAX_BATCH_ROWS", 500)
    monkeypatch.setattr(lookup, "HELD_PIECE_BYTES", 1 << 12)
    monkeypatch.setattr("dovetail.joins.phases.row_source.HELD_PIECE_BYTES", 1 << 12)


@pytest.fixture(params=["pages", "whole batches"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(PagedFile, "absent_share", lambda file: 1.0)
    monkeypatch.setattr(ReadCosts, "prefers_pass", lambda *_: request.param == "whole batches")
    return str(request.param)


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
@pytest.mark.parametrize("budget", ["400KB", "3MB", "40MB"])
def test_oracle_sweeps_of_any_size_give_the_exact_join(
    small_batches: None, way: str, how: str, budget: str, tmp_path: object
) -> None:
    print("seed", SEED)
    random = np.random.default_rng(SEED)
    keys = np.concatenate([np.arange(3_000), random.integers(0, 3_000, 900), np.full(700, 77)])
    text = [None if n % 13 == 0 else f"row {n} " * int(n % 7) for n in range(keys.size)]
    relation = Relation.build(pa.table({"k": keys, "text": text}), f"{tmp_path}/r", on="k", shards=2)
    rows_of = defaultdict(list)
    for key, value in zip(keys.tolist(), text, strict=True):
        rows_of[key].append(value)
    asked = random.integers(-300, 3_300, 4_000)
    codes = pa.array(asked.tolist(), pa.int64(), mask=random.random(asked.size) < 0.02)
    stream = pa.record_batch([codes, codes, pa.array(np.arange(asked.size))], schema=SCHEMA)
    spec = JoinSpec(relation.reader(["text"]), SCHEMA, (("k", "k"),), how=how, budget=Budget.parse(budget))  # type: ignore[arg-type]
    join, found = LookupJoin(spec, sweeps=True), []
    for batch in join.offer(stream):
        assert join.size() <= spec.budget.total_bytes
        columns = [batch.column(name).to_pylist() for name in batch.schema.names if name != "k"]
        found += list(zip(*columns, strict=True))
    expected: list[tuple[object, ...]] = []
    for number, key in enumerate(codes.to_pylist()):
        mine = rows_of.get(key, []) if key is not None else []
        if how in ("semi", "anti"):
            expected += [(number,)] if bool(mine) == (how == "semi") else []
        else:
            expected += [(number, value) for value in mine] or ([(number, None)] if how == "left" else [])
    assert sorted(found, key=repr) == sorted(expected, key=repr)
    assert [row[0] for row in found] == sorted(row[0] for row in found), "in the order of the stream"
    assert join.metrics.stream_tuples_in == asked.size
    assert join.size() <= join.sizes()["index"] + join.sizes().get("lookup", 0) + 1_000


class _CountingReader:
    """A reader that knows how many rows were gathered together."""

    def __init__(self, reader: RelationReader) -> None:
        self._reader, self.passes = reader, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def gather_ascending(self, positions: Int64Array, *, in_pass: bool = False) -> Any:
        self.passes.append(positions.size)
        return self._reader.gather_ascending(positions, in_pass=in_pass)


def test_sweep_is_as_large_as_the_budget_allows(small_batches: None, tmp_path: object) -> None:
    keys = np.arange(20_000)
    relation = Relation.build(pa.table({"k": keys, "n": keys * 3}), f"{tmp_path}/r", on="k", shards=1)
    stream = pa.record_batch({"__code": keys, "k": keys, "t": keys}, schema=SCHEMA)
    sizes = []
    for budget in ("1MB", "4MB", "64MB"):
        reader = _CountingReader(relation.reader(["n"]))
        passes = reader.passes
        spec = JoinSpec(reader, SCHEMA, (("k", "k"),), budget=Budget.parse(budget))
        rows = sum(batch.num_rows for batch in LookupJoin(spec, sweeps=True).offer(stream))
        assert rows == sum(passes) == keys.size
        assert max(passes) <= 1.5 * min(passes) or len(passes) > 4, "sweeps of one query are alike"
        sizes.append(max(passes))
    assert sizes == sorted(sizes)
    assert sizes[-1] == keys.size


# -------------------------------------------------------------------- the choice


def auto_on(absent: float, costs: ReadCosts, rows: int = 200_000) -> AutoJoin:
    keys = np.arange(rows)
    table = pa.table({"k": keys, "a": keys, "b": keys, "c": keys})
    shard = MemoryShard(table.drop_columns(["k"]), codes=keys.tolist(), batch_rows=65_536)
    shard.absent, shard.costs = absent, costs
    return AutoJoin(JoinSpec(shard, SCHEMA, (("k", "k"),), budget=Budget.parse("64MB")))


def test_auto_waits_for_one_pass_where_many_tuples_ask_for_rows_on_a_device() -> None:
    costs = ReadCosts(read_s=1e-4, page_s=1e-6)
    choice = auto_on(absent=1.0, costs=costs).choice
    assert choice.waits_for_device
    choice.expected = 1_000_000.0
    assert not choice.looks_up(65_536)
    choice.expected = 100.0
    assert choice.looks_up(100)
    assert not choice.prefers_lookup(60_000)
    assert choice.prefers_lookup(10)


def test_auto_looks_up_where_the_device_reads_pages_as_fast_as_it_passes() -> None:
    choice = auto_on(absent=1.0, costs=ReadCosts(read_s=1e-8, page_s=2e-4)).choice
    assert choice.prefers_lookup(100)
    cheap = auto_on(absent=0.0, costs=ReadCosts(read_s=1.0, page_s=1.0)).choice
    assert cheap.lookup_read_seconds(1_000) == cheap.scan_read_seconds() == 0.0, "everything is in memory"
    assert not cheap.waits_for_device


def test_choice_follows_a_device_that_becomes_slow_in_mid_stream() -> None:
    costs = ReadCosts(read_s=2e-6, page_s=2e-6)
    choice = auto_on(absent=1.0, costs=costs).choice
    few = 10
    lookup_s, scan_s = choice.lookup_read_seconds(few), choice.scan_read_seconds()
    for turn in range(40):
        # Each read now waits a millisecond; a page more costs nothing new.
        reads, pages = (500, 500) if turn % 2 else (50, 2_000)
        costs.note(reads, pages, reads * 1e-3 + pages * 2e-6)
    assert choice.lookup_read_seconds(few) > 10 * lookup_s
    assert choice.scan_read_seconds() < 2 * scan_s


def test_auto_looks_at_memory_from_time_to_time_and_not_where_two_runs_must_agree() -> None:
    join = auto_on(absent=1.0, costs=ReadCosts())
    join.spec.shard.absent = 0.0  # type: ignore[attr-defined]
    for _ in range(20):
        join.choice.looks_up(10)
    assert join.choice.absent == 0.0
    blind = AutoJoin(join.spec, observes=False)
    blind.spec.shard.absent = 1.0  # type: ignore[attr-defined]
    for _ in range(20):
        blind.choice.looks_up(10)
    assert blind.choice.absent == 0.0
