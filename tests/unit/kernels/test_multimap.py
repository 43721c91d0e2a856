"""`MultiMap` against a list of (number, code) pairs that does the same one entry at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.core.errors import BudgetError, InternalError
from dovetail.kernels import _multimap_kernels as compiled
from dovetail.kernels._slots import SLOTS_PER_LINE
from dovetail.kernels._vector import LINE
from dovetail.kernels.hashing import home_slot
from dovetail.kernels.multimap import DENSE_LOAD, MultiMap

INT64 = np.iinfo(np.int64)
# Few enough to repeat often; with the values at which signs, shifts and sentinels go wrong.
CODES = st.one_of(st.sampled_from([INT64.min, INT64.max, -1, 0, 1]), st.integers(2, 12))
BATCHES = st.lists(CODES, max_size=12)


def codes_array(codes):
    return np.array(codes, dtype=np.int64)


class NaiveMultiMap:
    """The twin: live entries in order of arrival, every question answered by going through all of them."""

    def __init__(self):
        self.entries: list[tuple[int, int]] = []

    def insert(self, seqs, codes):
        self.entries.extend(zip(seqs, codes, strict=True))

    def probe(self, codes):
        pairs = [(row, seq) for row, code in enumerate(codes) for seq, stored in self.entries if stored == code]
        return [row for row, _ in pairs], [seq for _, seq in pairs]

    def count(self, codes):
        return [sum(stored == code for _, stored in self.entries) for code in codes]

    def remove_oldest(self, count):
        gone, self.entries = self.entries[:count], self.entries[count:]
        return [seq for seq, _ in gone]

    def remove_codes(self, codes):
        gone = [seq for code in dict.fromkeys(codes) for seq, stored in self.entries if stored == code]
        self.remove_seqs(gone)
        return gone

    def remove_seqs(self, seqs):
        self.entries = [entry for entry in self.entries if entry[0] not in set(seqs)]


class MultiMapMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 30), max_load=st.sampled_from([0.25, 0.5, 0.9]))
    def make(self, capacity, max_load):
        self.map = MultiMap(capacity, max_load)
        self.twin = NaiveMultiMap()
        self.next_seq = 0

    @rule(codes=BATCHES)
    def insert(self, codes):
        if len(self.twin.entries) + len(codes) > self.map.capacity:
            with pytest.raises(BudgetError, match="do not fit"):
                self.map.insert(codes_array(codes))
            return
        seqs = self.map.insert(codes_array(codes)).tolist()
        assert seqs == sorted(set(seqs)), "numbers ascend and are not repeated"
        assert all(seq >= self.next_seq for seq in seqs), "a number is never used again"
        self.next_seq = self.map.next_seq
        assert all(seq < self.next_seq for seq in seqs)
        self.twin.insert(seqs, codes)

    @rule(codes=BATCHES)
    def probe(self, codes):
        expected = self.twin.probe(codes)
        rows, seqs = self.map.probe(codes_array(codes))
        assert (rows.tolist(), seqs.tolist()) == expected
        assert (rows.dtype, seqs.dtype) == (np.int32, np.int64)
        rows, positions = self.map.probe_positions(codes_array(codes))
        assert (rows.tolist(), self.map.seqs_at(positions).tolist()) == expected
        assert positions.tolist() == [seq % self.map.ring_size for seq in expected[1]]

    @rule(codes=BATCHES, max_pairs=st.integers(1, 20))
    def probe_in_bounded_steps(self, codes, max_pairs):
        all_rows, all_seqs, state, is_finished = [], [], None, False
        while not is_finished:
            rows, seqs, state = self.map.probe_limited(codes_array(codes), state, max_pairs)
            is_finished = state is None
            assert len(rows) == max_pairs or is_finished, "steps are full until the end"
            assert len(rows) <= max_pairs
            all_rows += rows.tolist()
            all_seqs += seqs.tolist()
        assert (all_rows, all_seqs) == self.twin.probe(codes)

    @rule(codes=BATCHES)
    def count_and_contains(self, codes):
        expected = self.twin.count(codes)
        assert self.map.count(codes_array(codes)).tolist() == expected
        assert self.map.contains(codes_array(codes)).tolist() == [count > 0 for count in expected]

    @rule(low=CODES, high=CODES, max_count=st.integers(1, 8))
    def positions_between(self, low, high, max_count):
        positions, place = [], 0
        while place < self.map.ring_size:
            more, place = self.map.positions_between(low, high, place, max_count)
            assert len(more) <= max_count
            positions += more.tolist()
        expected = [seq % self.map.ring_size for seq, code in self.twin.entries if low <= code <= high]
        assert positions == sorted(expected)

    @rule(count=st.integers(0, 10))
    def oldest_seqs(self, count):
        assert self.map.oldest_seqs(count).tolist() == [seq for seq, _ in self.twin.entries[:count]]

    @rule(count=st.integers(0, 10))
    def remove_oldest(self, count):
        assert self.map.remove_oldest(count).tolist() == self.twin.remove_oldest(count)

    @rule(codes=BATCHES)
    def remove_codes(self, codes):
        assert self.map.remove_codes(codes_array(codes)).tolist() == self.twin.remove_codes(codes)

    @rule(data=st.data())
    def remove_seqs(self, data):
        live = [seq for seq, _ in self.twin.entries]
        victims = data.draw(st.lists(st.sampled_from(live), max_size=8)) if live else []
        assert self.map.remove_seqs(codes_array(victims)) == len(set(victims))
        self.twin.remove_seqs(victims)

    @precondition(lambda self: self.next_seq > 0)
    @rule(data=st.data())
    def refuse_dead_seqs(self, data):
        live = {seq for seq, _ in self.twin.entries}
        dead = [seq for seq in range(-2, self.next_seq + 2) if seq not in live]
        seqs = codes_array([*sorted(live), data.draw(st.sampled_from(dead))])
        with pytest.raises(ValueError, match="No live entry"):
            self.map.remove_seqs(seqs)
        with pytest.raises(ValueError, match="No live entry"):
            self.map.codes_of(seqs)

    @rule(capacity=st.integers(1, 40))
    def resize(self, capacity):
        if capacity < len(self.twin.entries):
            with pytest.raises(BudgetError, match="cannot be resized to capacity"):
                self.map.resized(capacity)
            return
        resized = self.map.resized(capacity)
        seqs = resized.live_seqs().tolist()
        assert all(seq >= self.next_seq for seq in seqs)
        self.twin.entries = [(seq, code) for seq, (_, code) in zip(seqs, self.twin.entries, strict=True)]
        self.map = resized
        self.next_seq = self.map.next_seq

    @rule()
    def clear(self):
        self.map.clear()
        self.twin.entries = []

    @invariant()
    def agrees(self):
        if not hasattr(self, "map"):
            return
        entries = self.twin.entries
        assert len(self.map) == len(entries)
        assert self.map.oldest == (entries[0] if entries else None)
        seqs = self.map.live_seqs()
        assert seqs.tolist() == [seq for seq, _ in entries]
        assert self.map.codes_of(seqs).tolist() == [code for _, code in entries]
        assert len({seq % self.map.ring_size for seq, _ in entries}) == len(entries), "positions are not shared"
        assert self.map.positions_of(seqs).tolist() == [seq % self.map.ring_size for seq, _ in entries]


MultiMapMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestMultiMapMachine = MultiMapMachine.TestCase


@given(st.lists(st.integers(0, 40), max_size=300), st.lists(st.integers(0, 60), max_size=400))
@settings(max_examples=30)
def test_probe_of_several_blocks_finds_what_a_dictionary_finds(stored, probed):
    window = MultiMap(max(1, len(stored)))
    seqs = window.insert(codes_array(stored)).tolist()
    by_code: dict[int, list[int]] = {}
    for seq, code in zip(seqs, stored, strict=True):
        by_code.setdefault(code, []).append(seq)
    rows, found = window.probe(codes_array(probed))
    assert list(zip(rows.tolist(), found.tolist(), strict=True)) == [
        (row, seq) for row, code in enumerate(probed) for seq in by_code.get(code, [])
    ]


@pytest.mark.parametrize("max_pairs", [None, 1, 700, 100_000])
def test_probe_of_many_long_chains_gives_each_in_its_order(max_pairs):
    """Far more codes with several entries than are walked together, of very different lengths."""
    rng = np.random.default_rng(17)
    stored = np.minimum(rng.zipf(1.3, 4_000), 600).astype(np.int64)
    window = MultiMap(stored.size)
    seqs = window.insert(stored)
    probed = rng.permutation(np.arange(700))
    if max_pairs is None:
        rows, found = window.probe(probed)
    else:
        pieces, state = [], None
        while not pieces or state is not None:
            *piece, state = window.probe_limited(probed, state, max_pairs)
            pieces.append(piece)
        rows, found = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    expected = [(row, seq) for row, code in enumerate(probed.tolist()) for seq in seqs[stored == code].tolist()]
    assert list(zip(rows.tolist(), found.tolist(), strict=True)) == expected


def test_first_in_first_out_over_many_rounds_of_the_ring():
    window = MultiMap(64)
    rng = np.random.default_rng(11)
    expected: list[tuple[int, int]] = []
    for _ in range(60):
        codes = rng.integers(0, 20, 32)
        if len(window) + 32 > window.capacity:
            assert window.remove_oldest(32).tolist() == [seq for seq, _ in expected[:32]]
            expected = expected[32:]
        expected += zip(window.insert(codes).tolist(), codes.tolist(), strict=True)
        assert window.codes_of(window.live_seqs()).tolist() == [code for _, code in expected]
    assert window.next_seq > 20 * window.ring_size, "the ring went round often enough to mean something"


def test_insert_finds_room_while_an_ancient_entry_and_holes_remain():
    window = MultiMap(20)
    ancient = window.insert(codes_array([-7]))
    rng = np.random.default_rng(12)
    for round_number in range(200):
        window.insert(rng.integers(0, 1000, window.capacity - len(window)))
        assert len(window) == window.capacity
        younger = window.live_seqs()[1:]
        window.remove_seqs(rng.permutation(younger)[: rng.integers(1, younger.size + 1)])
        assert window.oldest == (0, -7), f"round {round_number}"
    assert window.next_seq > 50 * window.ring_size
    assert window.probe(codes_array([-7]))[1].tolist() == ancient.tolist()
    kept = window.live_seqs()
    assert window.remove_oldest(window.capacity).tolist() == kept.tolist()


def test_a_number_from_an_earlier_round_is_given_while_its_entry_lives_and_forgotten_after():
    window = MultiMap(8)
    (ancient,) = window.insert(codes_array([5])).tolist()
    while window.next_seq <= 3 * window.ring_size:
        # Each lives for less than a round, so that the ancient entry is the only one that the writer has passed.
        window.insert(codes_array([6]))
        window.remove_codes(codes_array([6]))
    assert window._state[compiled.STALE] == 1
    assert window.probe(codes_array([5]))[1].tolist() == [ancient]
    window.remove_codes(codes_array([5]))
    assert window._state[compiled.STALE] == 0, "probes need not read entries any more"
    younger = window.insert(codes_array([5, 7, 5])).tolist()
    assert window.probe(codes_array([5]))[1].tolist() == [younger[0], younger[2]]


@pytest.mark.parametrize("max_load", [0.5, 0.9])
def test_codes_that_run_over_the_end_of_the_table_go_on_at_its_beginning(max_load):
    window = MultiMap(24, max_load)
    line_count = window._slots.size // LINE
    homes = {code: int(home_slot(np.int64(code), line_count)) for code in range(2000)}
    last = max(homes.values())
    # Enough to fill the lines from their home to the end of the table, and then some.
    wanted = (line_count - last) * SLOTS_PER_LINE + 6
    crowd = [code for code, home in homes.items() if home == last][:wanted]
    assert len(crowd) == wanted <= window.capacity
    seqs = dict(zip(crowd, window.insert(codes_array(crowd)).tolist(), strict=True))
    assert window._slots[1] != 0, "the first slot is taken by a code that ran over"
    absent = [code for code, home in homes.items() if home == last][wanted : wanted + 5]
    rng = np.random.default_rng(13)
    for gone in rng.permutation(crowd).tolist():
        rows, found = window.probe(codes_array([*crowd, *absent]))
        assert found.tolist() == [seq for code, seq in seqs.items()]
        assert rows.tolist() == [crowd.index(code) for code in seqs]
        assert window.remove_codes(codes_array([gone])).tolist() == [seqs.pop(gone)]
    assert not window._slots[1::2].any(), "all slots are empty again"


def test_oldest_is_found_across_rounds_of_which_nothing_is_left():
    window = MultiMap(40)
    window.insert(codes_array([1]))
    for _ in range(30):
        window.insert(np.full(39, 2))
        window.remove_codes(codes_array([2]))
    last = window.insert(codes_array([3, 4]))
    window.remove_codes(codes_array([1]))
    assert window.oldest == (int(last[0]), 3)
    assert window.remove_oldest(1).tolist() == [last[0]]
    assert window.oldest == (int(last[1]), 4)


def test_one_code_with_all_entries_is_removed_whole_in_part_and_from_the_front():
    window = MultiMap(3000)
    seqs = window.insert(np.full(3000, 9))
    assert window.count(codes_array([9])).tolist() == [3000]
    assert window.remove_oldest(1000).tolist() == seqs[:1000].tolist()
    assert window.remove_seqs(seqs[1000::2]) == 1000
    rows, found = window.probe(codes_array([8, 9]))
    assert found.tolist() == seqs[1001::2].tolist()
    assert set(rows.tolist()) == {1}
    assert window.remove_codes(codes_array([9, 9])).tolist() == seqs[1001::2].tolist()
    assert len(window) == 0
    assert window.oldest is None


def test_refused_insert_changes_nothing():
    window = MultiMap(3)
    window.insert(codes_array([1, 2]))
    with pytest.raises(BudgetError, match=r"2 more entries do not fit in a MultiMap of capacity 3 that holds 2"):
        window.insert(codes_array([3, 4]))
    assert window.codes_of(window.live_seqs()).tolist() == [1, 2]
    assert window.insert(codes_array([3])).size == 1


def test_counting_of_rounds_begins_anew_before_its_bits_run_out():
    window = MultiMap(16)
    window._last_lap = 40
    expected = window.insert(codes_array([5, 6, 5])).tolist()
    for code in range(1000):
        (gone,) = window.remove_oldest(1).tolist()
        assert gone == expected.pop(0)
        (new,) = window.insert(codes_array([code])).tolist()
        assert new > expected[-1]
        expected.append(new)
        assert window.live_seqs().tolist() == expected
        assert window.oldest == (expected[0], window.codes_of(codes_array(expected[:1]))[0])
    assert expected[0] > 41 * window.ring_size
    assert window.probe(codes_array([998]))[1].tolist() == [expected[1]]
    assert window.remove_codes(codes_array([998])).tolist() == [expected[1]]
    assert window.remove_seqs(codes_array([expected[2]])) == 1


def test_an_entry_older_than_rounds_can_be_counted_is_reported():
    window = MultiMap(16)
    window._last_lap = 40
    window.insert(codes_array([5]))
    while window.next_seq // window.ring_size < 20:
        window.insert(np.full(10, 6))
        window.remove_codes(codes_array([6]))
    window._last_lap = 21
    with pytest.raises(InternalError, match="laps"):
        window.insert(codes_array([7]))
    assert window.codes_of(window.live_seqs()).tolist() == [5]


def test_bounded_probe_refuses_to_go_on_after_a_change():
    window = MultiMap(10)
    window.insert(codes_array([1, 1, 1]))
    _, _, state = window.probe_limited(codes_array([1]), None, 2)
    window.insert(codes_array([2]))
    with pytest.raises(ValueError, match="has changed"):
        window.probe_limited(codes_array([1]), state, 2)
    with pytest.raises(ValueError, match="at least 1 pair"):
        window.probe_limited(codes_array([1]), None, 0)


def test_read_only_and_strided_codes_are_accepted():
    window = MultiMap(10)
    codes = np.arange(10)
    codes.flags.writeable = False
    window.insert(codes[::2])
    assert window.contains(codes).tolist() == [True, False] * 5
    assert not codes.flags.writeable
    mine = np.arange(3)
    window.contains(mine)
    assert mine.flags.writeable, "the caller's array is left as it was"


@pytest.mark.parametrize("codes", [np.array([1.0]), np.array([1], dtype=np.int32), np.array([[1]])])
def test_arrays_that_are_not_codes_are_refused(codes):
    with pytest.raises(TypeError, match="one-dimensional int64"):
        MultiMap(3).insert(codes)


@pytest.mark.parametrize(("capacity", "max_load"), [(0, 0.5), (-1, 0.5), (2**31, 0.5), (10, 0.0), (10, 1.0)])
def test_impossible_sizes_are_refused(capacity, max_load):
    with pytest.raises(ValueError, match="MultiMap"):
        MultiMap(capacity, max_load)


def test_pass_without_room_for_a_position_is_refused():
    with pytest.raises(ValueError, match="at least 1 position"):
        MultiMap(4).positions_between(0, 1, 0, 0)


def test_negative_count_is_refused():
    with pytest.raises(ValueError, match="-1 entries"):
        MultiMap(3).remove_oldest(-1)


@pytest.mark.parametrize("capacity", [1, 2, 7, 1000])
@pytest.mark.parametrize("max_load", [0.25, 0.5, 0.9])
def test_declared_bytes_are_the_bytes_allocated(capacity, max_load):
    window = MultiMap(capacity, max_load)
    allocated = window._slots.base.nbytes + window._entries.nbytes + window._state.nbytes
    assert window.nbytes == MultiMap.nbytes_of(capacity, max_load) == allocated
    assert window._slots.ctypes.data % 64 == 0, "a line of slots is a cache line"


def test_bytes_per_entry_are_as_documented():
    assert MultiMap.nbytes_of(1_000_000) / 1_000_000 == pytest.approx(65, abs=0.01)
    assert MultiMap.nbytes_of(1_000_000, DENSE_LOAD) / 1_000_000 == pytest.approx(49, abs=0.01)


def test_codes_of_removed_entries_stay_at_their_positions() -> None:
    window = MultiMap(4)
    positions = window.positions_of(window.insert(np.array([5, 9])))
    window.remove_oldest(2)
    assert window.codes_left_at(positions).tolist() == [5, 9]


def test_ring_size_is_known_before_the_map_exists() -> None:
    assert MultiMap.ring_size_of(1600) == MultiMap(1600).ring_size == 1701
