"""What reads cost, and what follows: gaps that are read, passes over the table, a device that changes."""

from pathlib import Path

import numpy as np
import pytest

from dovetail.relation.reads.drop_behind import DropBehind, available_memory
from dovetail.relation.reads.read_costs import ReadCosts, read_costs_of

SEED = 40_117


class Device:
    """A device with these costs; it answers a batch of reads after as long as they take."""

    def __init__(self, read_s: float, page_s: float) -> None:
        self.read_s, self.page_s = read_s, page_s

    def serve(self, costs: ReadCosts, wanted: int, of_pages: int, random: np.random.Generator) -> None:
        """What a lookup does: random pages, merged over the gaps that are worth it."""
        pages = np.unique(random.integers(0, of_pages, wanted))
        if costs.prefers_pass(pages.size, of_pages):
            costs.note_pass(of_pages, self.read_s + of_pages * self.page_s)
            return
        gaps = np.diff(pages) - 1
        is_read = gaps <= costs.next_gap_pages()
        reads, transferred = 1 + int((~is_read).sum()), pages.size + int(gaps[is_read].sum())
        costs.note(reads, transferred, reads * self.read_s + transferred * self.page_s)


@pytest.mark.parametrize("wanted", [10, 1_000, 30_000, 100_000, 300_000])
@pytest.mark.parametrize("gap_reads", [0.5, 3.0, 12.0])
def test_predicted_cost_is_that_of_random_pages_read_with_their_gaps(wanted: int, gap_reads: float) -> None:
    total, costs = 200_000, ReadCosts(read_s=gap_reads * 2e-6, page_s=2e-6)
    random = np.random.default_rng([SEED, wanted])
    pages = np.sort(random.permutation(total)[: min(wanted, total - 1)])
    gaps = np.diff(pages) - 1
    is_read = gaps <= costs.gap_pages
    expected = (1 + (~is_read).sum()) * costs.read_s + (pages.size + gaps[is_read].sum()) * costs.page_s
    assert costs.seconds(pages.size, total) == pytest.approx(expected, rel=0.05)
    assert costs.seconds(pages.size, total) <= pages.size * (costs.read_s + costs.page_s) + 1e-9


def test_one_pass_is_preferred_from_some_density_on() -> None:
    costs, total = ReadCosts(read_s=1e-5, page_s=1.7e-6), 1_800_000
    preferred = [costs.prefers_pass(wanted, total) for wanted in range(0, total, 10_000)]
    turn = preferred.index(True)
    assert preferred == [False] * turn + [True] * (len(preferred) - turn)
    # A pass takes 3 s, and so do some 260,000 random reads.
    assert 100_000 < turn * 10_000 < 500_000
    assert costs.prefers_pass(total, total)


def test_costs_follow_a_device_that_becomes_ten_times_slower_in_mid_stream() -> None:
    print("seed", SEED)
    random, costs = np.random.default_rng(SEED), ReadCosts(read_s=1e-5, page_s=1.6e-6)
    for _ in range(30):
        Device(1e-5, 1.6e-6).serve(costs, 2_000, 1_000_000, random)
    assert costs.read_s == pytest.approx(1e-5, rel=0.2)
    wanted, total, gap = 15_000, 400_000, costs.gap_pages
    assert not costs.prefers_pass(wanted, total)
    # Random reads wait for something, long ones do not: as on a network disk whose operations are limited.
    # A micro-batch asks some dozens of times.
    for _ in range(60):
        Device(1e-4, 1.6e-6).serve(costs, wanted, total, random)
        if costs.prefers_pass(wanted, total):
            break
    assert costs.prefers_pass(wanted, total), "one pass is now cheaper"
    assert costs.gap_pages > 2 * gap
    for _ in range(30):
        Device(1e-4, 1.6e-6).serve(costs, 2_000, 1_000_000, random)
    assert costs.read_s == pytest.approx(1e-4, rel=0.3)
    # And back.
    for _ in range(40):
        Device(1e-5, 1.6e-6).serve(costs, 2_000, 1_000_000, random)
    assert costs.read_s == pytest.approx(1e-5, rel=0.3)


def test_slow_transfer_makes_gaps_not_worth_reading() -> None:
    random, costs = np.random.default_rng(SEED), ReadCosts(read_s=1e-5, page_s=1.6e-6)
    before = costs.gap_pages
    for _ in range(60):
        Device(1e-5, 2e-5).serve(costs, 60_000, 400_000, random)
    assert costs.gap_pages < before


def test_calibrated_costs_count_as_long_as_nothing_else_is_known() -> None:
    costs = ReadCosts(read_s=1e-5, page_s=2e-6)
    costs.begin_with(5e-5, 1e-6)
    assert (costs.read_s, costs.page_s) == pytest.approx((5e-5, 1e-6))
    for _ in range(100):
        costs.note(1_000, 1_000, 1_000 * 2.4e-5)
    seen = costs.read_s, costs.page_s
    assert sum(seen) == pytest.approx(2.4e-5, rel=0.1)
    costs.begin_with(1e-4, 1e-6)
    assert costs.read_s + costs.page_s == pytest.approx(2.4e-5, rel=0.2)


@pytest.mark.parametrize("observed", [(0, 100, 1.0), (10, 10, 1.0), (100, 100, 0.0)])
def test_observations_that_say_nothing_change_nothing(observed: tuple[float, float, float]) -> None:
    costs = ReadCosts()
    before = costs.read_s, costs.page_s
    costs.note(*observed)
    assert (costs.read_s, costs.page_s) == before
    assert costs.seconds(0, 100) == costs.seconds(10, 0) == 0.0


def test_one_read_that_hangs_does_not_turn_the_costs_over() -> None:
    costs = ReadCosts(read_s=1e-5, page_s=2e-6)
    costs.note(1_000, 1_000, 60.0)
    assert costs.read_s < 1e-5 * 3
    assert costs.page_s < 2e-6 * 3


# -------------------------------------------------------------------- what stays in memory


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(300, (False, False, False)), (200, (False, False, True)), (30, (False, True, True)), (10, (True, True, True))],
)
def test_what_fits_in_half_of_the_memory_stays(memory: int, expected: tuple[bool, bool, bool]) -> None:
    assert DropBehind.of(8, 12, 120, memory) == DropBehind(*expected)


def fake_host(directory: Path, group: str, meminfo_kb: int = 1_000_000) -> Path:
    (directory / "self").mkdir(parents=True)
    (directory / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:  {meminfo_kb} kB\n")
    (directory / "self" / "cgroup").write_text(group)
    return directory


def test_memory_is_what_is_available_without_a_group(tmp_path: Path) -> None:
    process = fake_host(tmp_path / "proc", "")
    assert available_memory(tmp_path / "none", process) == 1_000_000 * 1024


def test_limit_of_a_group_counts_without_the_anonymous_memory_in_it(tmp_path: Path) -> None:
    group = tmp_path / "cgroup" / "memory" / "a"
    group.mkdir(parents=True)
    (group / "memory.stat").write_text("total_cache 5\nhierarchical_memory_limit 900000\ntotal_rss 200000\n")
    process = fake_host(tmp_path / "proc", "7:cpu:/x\n9:memory:/a\n")
    assert available_memory(tmp_path / "cgroup", process) == 700_000


def test_limit_of_a_parent_binds_too(tmp_path: Path) -> None:
    inner = tmp_path / "cgroup" / "a" / "b"
    inner.mkdir(parents=True)
    for group, limit, anonymous in ((inner, "max", 5), (inner.parent, "600000", 100_000)):
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.stat").write_text(f"anon {anonymous}\nfile 3\n")
    process = fake_host(tmp_path / "proc", "0::/a/b\n")
    assert available_memory(tmp_path / "cgroup", process) == 500_000


def test_group_of_a_container_is_the_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup" / "memory"
    root.mkdir(parents=True)
    (root / "memory.stat").write_text("hierarchical_memory_limit 800\ntotal_rss 100\n")
    process = fake_host(tmp_path / "proc", "9:memory:/docker/1234\n")
    assert available_memory(tmp_path / "cgroup", process) == 700


def test_files_of_one_device_share_costs_and_a_file_that_is_gone_has_its_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).touch()
    shared = read_costs_of(str(tmp_path / "one"))
    assert read_costs_of(str(tmp_path / "two")) is shared
    (tmp_path / "two").unlink()
    assert read_costs_of(str(tmp_path / "two")) is not shared
