"""Stream and tuple scheduling: which input is read next, which tuples first, and that results do not depend on it."""

import random
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError, PlanError
from dovetail.joins.multiway import TupleWindow, mjoin_spec
from dovetail.joins.promises import Metadata, MetadataJoin, Punctuation, Schedule, ScheduledJoin
from dovetail.testing.held import held_array_bytes
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.rows import assert_same_rows, rows_of
from dovetail.testing.snapshots import through_storage

SCHEMAS = {name: pa.schema({"k": pa.int64(), name: pa.int64()}) for name in ("one", "many")}


def metadata_join(budget: str = "1MB", **metadata: Any) -> MetadataJoin:
    promised = Metadata(**{"keys": ["one"], "goal": "memory", **metadata})
    return MetadataJoin(mjoin_spec(SCHEMAS, on="k", budget=budget, partitions=4), promised)


def scheduled(schedule: Schedule | None = None, **options: Any) -> ScheduledJoin:
    return ScheduledJoin(metadata_join(**options), schedule)


def rows(name: str, *keys: int) -> pa.RecordBatch:
    return pa.record_batch([list(keys), list(range(len(keys)))], schema=SCHEMAS[name])


class Watched(ScheduledJoin):
    """Notes what is offered to the join, in order."""

    def __init__(self, join: MetadataJoin, schedule: Schedule | None = None) -> None:
        super().__init__(join, schedule)
        self.offered: list[tuple[str, list[int]]] = []
        offer = join.offer

        def noted(name: str, batch: pa.RecordBatch) -> Any:
            self.offered.append((name, batch.column("k").to_pylist()))
            return offer(name, batch)

        join.offer = noted  # type: ignore[method-assign]


def watched(schedule: Schedule, **metadata: Any) -> Watched:
    return Watched(metadata_join(**metadata), schedule)


def test_input_of_the_highest_priority_goes_first_until_its_quota_is_used_up() -> None:
    join = watched(Schedule(quota={"one": 3, "many": 2}, slice_rows=2))
    join.enqueue("many", rows("many", 1, 2, 3, 4, 5))
    join.enqueue("one", rows("one", 1, 2, 3, 4, 5))
    out = rows_of(join.run())
    assert join.offered == [
        ("one", [1, 2]),
        ("one", [3]),
        ("many", [1, 2]),
        ("one", [4, 5]),
        ("many", [3, 4]),
        ("many", [5]),
    ]
    assert len(out) == 5
    # All of the many found their one there, and were never kept.
    assert join.join.metrics.dropped_on_arrival == 5


def test_input_of_higher_priority_that_has_tuples_again_comes_before_the_others() -> None:
    join = watched(Schedule(quota=4, slice_rows=1))
    join.enqueue("one", rows("one", 1))
    join.enqueue("many", rows("many", 1, 2, 3))
    list(join.run(max_tuples=2))
    join.enqueue("one", rows("one", 2, 3))
    list(join.run())
    assert [name for name, _ in join.offered] == ["one", "many", "one", "one", "many", "many"]


def test_random_streams_are_the_same_in_every_run() -> None:
    orders = []
    for _ in range(2):
        join = watched(Schedule("random", "sequential", slice_rows=1))
        join.enqueue("one", rows("one", *range(20)))
        join.enqueue("many", rows("many", *range(20)))
        assert len(rows_of(join.run())) == 20
        orders.append([name for name, _ in join.offered])
    assert orders[0] == orders[1]
    assert orders[0] != sorted(orders[0], reverse=True)


def test_tuples_that_a_punctuation_waits_for_are_processed_first() -> None:
    join = watched(Schedule(quota=6, slice_rows=3))
    join.enqueue("many", rows("many", 7, 8, 9))
    join.enqueue("many", Punctuation({"k": 8}))
    list(join.run())
    assert join.join.take_punctuations() == []
    join.enqueue("one", rows("one", 1, 8, 2, 3, 4, 5))
    out = join.run()
    first = next(out)
    assert first.column("k").to_pylist() == [8]
    rest = rows_of(out)
    assert rest == []
    # 8 before its time; then nothing is awaited, so the pool is processed, and the rest in sequence.
    assert join.offered[1:] == [("one", [8]), ("one", [1, 2]), ("one", [3, 4, 5])]
    assert (join.switches, join.pooled_rows) == (1, 2)
    assert join.join.take_punctuations() == [Punctuation({"k": 8})]


def test_turning_to_another_stream_ends_value_oriented_scheduling() -> None:
    join = watched(Schedule(quota=2, slice_rows=2))
    join.enqueue("many", rows("many", 8))
    join.enqueue("many", Punctuation({"k": 8}))
    list(join.run())
    join.enqueue("one", rows("one", 1, 2, 3, 8))
    join.enqueue("many", rows("many", 1))
    list(join.run())
    # The quota is used up before 8 comes: the pool is processed before the other input's turn.
    assert join.offered[1:] == [("one", [1, 2]), ("many", [1]), ("one", [8]), ("one", [3])]


def test_punctuation_comes_after_the_tuples_of_its_input_that_wait() -> None:
    join = watched(Schedule(quota=10, slice_rows=10))
    join.enqueue("many", rows("many", 8))
    join.enqueue("many", Punctuation({"k": 8}))
    list(join.run())
    join.enqueue("one", rows("one", 1, 2))
    join.enqueue("one", Punctuation.between("k", None, 5))
    # If it overtook them, they would break it.
    assert rows_of(join.run()) == []
    assert join.join.metrics.broken_promises == {}


def test_retrieval_goes_on_to_the_end_of_a_cluster_that_is_being_joined() -> None:
    join = watched(Schedule(quota=2, slice_rows=2), clustered=["many"])
    assert join.join.algorithm == "1-NC"
    join.enqueue("one", rows("one", 1, 2))
    join.enqueue("many", rows("many", 1, 1, 1, 1, 2, 3, 3))
    assert len(rows_of(join.run())) == 5
    # 1 is joined, so its cluster is taken whole; 3 has no match, so its cluster is not.
    assert join.offered == [("one", [1, 2]), ("many", [1, 1, 1, 1]), ("many", [2, 3]), ("many", [3])]


def test_queues_have_bounded_room_and_count_as_held() -> None:
    join = scheduled(budget="100kB")
    join.enqueue("many", rows("many", *range(50)))
    with pytest.raises(BudgetError, match=r"do not fit the queues.*Run the join first"):
        join.enqueue("many", rows("many", *range(300)))
    assert join.join.sizes()["queues"] == join.waiting_bytes > 0
    assert held_array_bytes(join, exclude=[join.spec]) <= join.join.size() <= join.spec.budget.total_bytes
    waited = join.waiting_rows()["many"]
    list(join.run())
    assert (join.waiting_bytes, join.join.metrics.tuples_in["many"]) == (0, waited)
    join.enqueue("many", rows("many", *range(50)))


def test_schedules_that_cannot_be_are_refused() -> None:
    for wrong in ({"streams": "fair"}, {"tuples": "any"}, {"quota": 0}, {"slice_rows": 0}):
        with pytest.raises(PlanError):
            Schedule(**wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="not an order of one, many"):
        scheduled(Schedule(priority=["one"]))
    with pytest.raises(PlanError, match="quota= names one"):
        scheduled(Schedule(quota={"one": 5}))
    with pytest.raises(PlanError, match="order of arrival, which scheduling changes"):
        ScheduledJoin(MetadataJoin(mjoin_spec(SCHEMAS, on="k", window=TupleWindow(5))))
    with pytest.raises(PlanError, match="no input 'nobody'"):
        scheduled().enqueue("nobody", rows("one", 1))
    with pytest.raises(PlanError, match="column that input 'one' does not have"):
        scheduled().enqueue("one", Punctuation({"many": 1}))


@pytest.mark.parametrize("seed", range(3))
def test_every_schedule_gives_the_results_of_the_oracle(seed: int) -> None:
    chance = random.Random(seed)
    keys = chance.sample(range(30), 30)
    data: dict[str, list[dict[str, Any]]] = {
        "one": [{"k": k, "one": k} for k in keys],
        "many": [{"k": chance.randrange(35), "many": n} for n in range(200)],
    }
    expected = multiway_oracle(data, [(("one", "k"), ("many", "k"))])
    for streams in ("priority", "random"):
        for tuples in ("value", "sequential"):
            quota, slice_rows = chance.choice([3, 20]), chance.choice([2, 7])
            schedule = Schedule(streams, tuples, quota=quota, slice_rows=slice_rows)  # type: ignore[arg-type]
            join = scheduled(schedule, goal=chance.choice(["rate", "memory"]))
            out: list[dict[str, Any]] = []
            sent = dict.fromkeys(data, 0)
            while any(sent[name] < len(data[name]) for name in data):
                for name in data:
                    part = data[name][sent[name] : sent[name] + chance.randint(0, 30)]
                    sent[name] += len(part)
                    join.enqueue(name, pa.RecordBatch.from_pylist(part, schema=SCHEMAS[name]))
                    if name == "many":
                        ahead = {row["k"] for row in data[name][sent[name] :]}
                        for k in range(35):
                            if k not in ahead and chance.random() < 0.2:
                                join.enqueue(name, Punctuation({"k": k}))
                out += rows_of(join.run(max_tuples=chance.choice([None, 10, 40])))
                assert held_array_bytes(join, exclude=[join.spec]) <= join.join.size()
                if chance.random() < 0.3:
                    saved = through_storage(join.snapshot())
                    join = scheduled(schedule, goal=join.join.metadata.goal)
                    join.restore(saved)
            out += rows_of(join.drain())
            assert_same_rows(out, expected, context=f"seed {seed}, {schedule}")
