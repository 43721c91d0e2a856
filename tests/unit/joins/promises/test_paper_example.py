"""The paper's running example (section 2) and the execution logic of 1-NP and 1-NC (sections 5.3, 5.4)."""

from pathlib import Path
from typing import Any

from dovetail.joins.promises import Metadata, Punctuation

ONE_TO_MANY = Metadata(keys=["a"], goal="memory")
BY_NAME = Metadata(keys=["a"])


def test_news_and_access_records_of_figures_2_and_3(script: Any) -> None:
    join = script("ab", ONE_TO_MANY)
    assert join.join.algorithm == "1-NP"
    assert join.offer("a", (79, "Cashless society gets mixed reviews")) == []
    results = join.offer("b", (79, "64.58.76.224"), (81, "207.68.172.234"), (79, "202.112.39.8"))
    assert [ip for _, ip in results] == ["202.112.39.8", "64.58.76.224"]
    # Access records that were joined are gone; the one of item 81, whose news is still to come, is not.
    assert join.held() == (1, 1)
    assert join.promise("b", Punctuation({"k": 79, "b": Punctuation.ANY})) == []
    # The news item goes with its last access record, and the punctuation is passed on.
    assert join.held() == (0, 1)
    assert join.passed_on() == ["k = 79"]
    assert join.promise("b", 81) == []
    assert join.passed_on() == []
    assert join.offer("a", (81, "late news")) == [("late news", "207.68.172.234")]
    assert join.passed_on() == ["k = 81"]
    assert join.held() == (0, 0)
    assert join.state_bytes() == 0


def test_substream_of_section_6_is_emptied_as_punctuations_arrive(script: Any) -> None:
    join = script("ab", ONE_TO_MANY)
    join.offer("a", *[(sno, f"news {sno}") for sno in range(3, 13)])
    first = [9, 12, 5, 11, 7, 4, 12, 6, 4, 7, 3, 12]
    second = [5, 11, 10, 7, 4, 7, 4, 9, 12]
    assert len(join.offer("b", *[(sno, "ip") for sno in first])) == 12
    join.promise("b", 3)
    assert len(join.offer("b", *[(sno, "ip") for sno in second])) == 9
    join.promise("b", 4)
    assert join.held() == (8, 0)
    assert join.passed_on() == ["k in [3, 4]"]
    assert join.join.metrics.dropped_on_arrival == 21


def test_rule_1_purges_in_batches_and_rule_2_at_once(script: Any) -> None:
    batched = script("ab", Metadata(keys=["a"], goal="rate", purge_count=3))
    at_once = script("ab", Metadata(keys=["a"], goal="memory"))
    for join in (batched, at_once):
        join.offer("a", *[(k, f"a{k}") for k in range(5)])
    for k, held in enumerate([5, 5, 2, 2]):
        batched.promise("b", k)
        at_once.promise("b", k)
        assert (batched.held()[0], at_once.held()[0]) == (held, 4 - k)
    assert batched.join.purge_lag == 1
    assert (batched.join.metrics.purges, at_once.join.metrics.purges) == (1, 4)


def test_batch_purging_when_memory_is_full_and_when_idle(script: Any) -> None:
    join = script("ab", Metadata(keys=["a"], purge_count=1000), budget="40kB")
    join.offer("a", *[(k, "x" * 100) for k in range(50)])
    join.promise("b", *range(50))
    assert join.held() == (50, 0)
    assert join.labels(join.join.step(idle=True)) == []
    assert join.held() == (0, 0)
    # 200 tuples do not fit, and there is nowhere to spill to: purging makes the room.
    for start in range(100, 300, 20):
        join.offer("a", *[(k, "x" * 100) for k in range(start, start + 20)])
        join.promise("b", *range(start, start + 20))
    assert join.join.metrics.purges > 1


def test_tuple_whose_bucket_has_a_part_on_disk_is_kept(script: Any, tmp_path: Path) -> None:
    options = {"spill_directory": tmp_path, "partitions": 1, "flushing": "random"}
    join = script("ab", Metadata(keys=["a"], goal="memory"), **options)
    join.offer("b", (1, "b1"))
    join.join.flush("b")
    join.promise("b", 1)
    # Figure 7: the join value is punctuated, but the bucket has a disk part.
    assert join.offer("a", (1, "a1")) == []
    assert join.held() == (1, 1)
    assert join.passed_on() == []
    assert join.labels(join.join.drain()) == [("a1", "b1")]
    assert join.held() == (0, 0)
    assert join.passed_on() == ["k = 1"]


def test_clustered_access_records_need_no_punctuation(script: Any) -> None:
    join = script("ab", Metadata(keys=["a"], clustered=["b"], goal="memory"))
    assert join.join.algorithm == "1-NC"
    join.offer("a", (1, "a1"), (2, "a2"), (3, "a3"))
    assert len(join.offer("b", (2, "x"), (2, "y"))) == 2
    assert join.held() == (3, 0)
    # Another value ends the cluster of 2.
    assert join.offer("b", (1, "x")) == [("a1", "x")]
    assert join.held() == (2, 0)
    assert join.passed_on() == ["k = 2"]


def test_ordered_arrival_closes_everything_behind_it(script: Any) -> None:
    join = script("ab", Metadata(keys=["a"], ordered={"b": "ascending"}, goal="memory"))
    join.offer("a", *[(k, f"a{k}") for k in (5, 3, 8, 1)])
    assert join.offer("b", (3, "x"), (6, "y")) == [("a3", "x")]
    assert join.held() == (1, 1)
    assert join.passed_on() == ["k in (, 5]"]
