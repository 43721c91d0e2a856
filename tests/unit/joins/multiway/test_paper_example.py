"""The paper's worked example (section 2.7), stage by stage, and where its redundancy test would lose a result."""

from pathlib import Path
from typing import Any

import pytest

from dovetail.core.errors import StateError


def letters(text: str) -> int:
    return ord(text)


@pytest.fixture
def three(script: Any, tmp_path: Path) -> Any:
    """Three streams, one partition, and tuples labelled with value and arrival as in the paper's figures."""
    options = {"partitions": 1, "flushing": "random", "spill_directory": tmp_path}
    return script("123", **options, sequences={"1": "23", "2": "13", "3": "12"})


def test_each_stage_of_the_worked_example_gives_its_result(three: Any) -> None:
    def arrive(stream: str, value: str, stamp: int) -> list[tuple[Any, ...]]:
        return three.offer(stream, (letters(value), f"{value}{stamp}"))

    # Figure 6: each stream has room for two tuples; older ones are on disk.
    assert arrive("2", "d", 3) == []
    assert arrive("2", "a", 4) == []
    assert arrive("1", "d", 5) == []
    assert arrive("1", "c", 6) == []
    three.join.flush("2")  # at 7: d is in memory from 3 to 7
    assert arrive("2", "b", 7) == []
    three.join.flush("1")  # at 9: d is in memory from 5 to 9
    assert arrive("1", "b", 9) == []
    assert arrive("1", "d", 10) == []
    assert arrive("3", "e", 11) == []
    assert arrive("2", "f", 14) == []

    # Figure 7: f finds no match in S1, so S2, which has one, is not probed, and no temporary result is made.
    before = three.join.metrics.comparisons
    assert arrive("3", "f", 15) == []
    assert three.join.metrics.comparisons == before

    # Figure 8: b overflows S3 and gives the one result of the first stage.
    three.join.flush("3")
    assert arrive("3", "b", 16) == [("b9", "b7", "b16")]
    assert arrive("3", "d", 17) == []

    # Figure 9: the inputs block; what S2 has on disk probes the others' memory.
    assert three.labels(three.join.probe_from_disk("2")) == [("d10", "d3", "d17")]

    # The end: of the two results with value d, the one that is out already does not come again.
    assert three.end() == [("d5", "d3", "d17")]
    assert three.join.metrics.redundant_rows >= 1


def test_wrong_probing_sequence_makes_the_temporary_result_of_the_example(script: Any) -> None:
    three = script("123", sequences={"1": "23", "2": "13", "3": "21"})
    three.offer("2", (letters("f"), "f14"))
    assert three.offer("3", (letters("f"), "f15")) == []
    assert three.join.metrics.comparisons == 1


def test_triple_whose_pairs_met_in_different_events_is_given_out_once(three: Any) -> None:
    assert three.offer("1", (7, "T1")) == []
    assert three.offer("2", (7, "T2")) == []
    three.join.flush("1")
    three.join.flush("2")
    assert three.offer("3", (7, "T3")) == []
    assert three.labels(three.join.probe_from_disk("1")) == []
    assert three.labels(three.join.probe_from_disk("2")) == []
    assert three.end() == [("T1", "T2", "T3")]


def test_probe_of_tuples_that_left_memory_later_does_not_count_for_them(three: Any) -> None:
    three.offer("1", (7, "x"))
    three.join.flush("1")
    three.offer("1", (7, "y"))
    three.offer("2", (7, "b"))
    assert three.labels(three.join.probe_from_disk("1")) == []
    assert three.offer("3", (7, "c")) == [("y", "b", "c")]
    # y was in memory when the disk was probed, so only x is due from it.
    three.join.flush("1")
    assert three.labels(three.join.probe_from_disk("1")) == [("x", "b", "c")]
    assert three.labels(three.join.probe_from_disk("1")) == []
    assert three.end() == []


def test_complete_join_while_inputs_go_on_is_not_repeated_at_the_end(three: Any) -> None:
    three.offer("1", (7, "a"))
    three.join.flush("1")
    three.offer("2", (7, "b"))
    three.join.flush("2")
    three.offer("3", (7, "c"))
    assert three.labels(three.join.drain()) == [("a", "b", "c")]
    assert three.join.pending == 0
    # There is room: all came back to memory. Flushed again, (a, b, c) would be made from disk.
    three.join.flush("1")
    three.join.flush("2")
    three.offer("3", (7, "d"))
    assert three.join.pending == 1
    assert three.end() == [("a", "b", "d")]


def test_iterator_given_up_half_way_makes_the_operator_refuse_further_calls(three: Any) -> None:
    three.offer("1", (7, "a"))
    three.offer("2", (7, "b"))
    saved = three.join.snapshot()
    batch = three.spec.with_codes("3", __import__("pyarrow").record_batch({"k": [7], "3": ["c"]}))
    three.join.offer("3", batch).__next__()
    with pytest.raises(StateError, match=r"not exhausted.*Restore the last snapshot"):
        three.join.snapshot()
    three.join.restore(saved)
    assert three.offer("3", (7, "c")) == [("a", "b", "c")]
