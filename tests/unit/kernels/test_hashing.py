"""The mixer, with and without the JIT, and the switch that makes codes collide."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.kernels import hashing

MASK = 2**64 - 1
SHOW_HOMES = """
import json
import numpy as np
from dovetail.kernels.hashing import home_slot, mix64
codes = np.array([0, 1, -1, 2**63 - 1, -(2**63), *range(100, 200)])
print(json.dumps({"hashes": [int(mix64(code)) for code in codes], "homes": [int(home_slot(c, 1000)) for c in codes]}))
"""


def murmur_finaliser(code):
    """MurmurHash3's fmix64, from its definition."""
    bits = code & MASK
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = ((bits ^ (bits >> 33)) * factor) & MASK
    return bits ^ (bits >> 33)


def run_python(program, **environment):
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 2**31))
def test_home_is_the_upper_half_of_the_mixed_code_scaled(code, slot_count):
    bits = murmur_finaliser(code)
    if hashing.FORCE_BUCKETS:
        bits = murmur_finaliser(bits % hashing.FORCE_BUCKETS)
    assert int(hashing.mix64(np.int64(code))) == bits
    home = int(hashing.home_slot(np.int64(code), slot_count))
    assert home == (bits >> 32) * slot_count >> 32
    assert 0 <= home < slot_count


def test_consecutive_codes_spread_evenly_over_the_slots():
    homes = np.array([hashing.home_slot(np.int64(code), 16) for code in range(4000)])
    counts = np.bincount(homes, minlength=16)
    if hashing.FORCE_BUCKETS:
        assert np.count_nonzero(counts) <= hashing.FORCE_BUCKETS
    else:
        assert counts.min() > 180, counts
        assert counts.max() < 320, counts


def test_interpreted_and_compiled_code_hash_alike(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert run_python(SHOW_HOMES, **home) == run_python(SHOW_HOMES, **home, NUMBA_DISABLE_JIT="1")


@pytest.mark.parametrize("jit", ["0", "1"])
def test_forced_buckets_leave_that_many_hashes(tmp_path, jit):
    printed = run_python(SHOW_HOMES, HOME=str(tmp_path), NUMBA_DISABLE_JIT=jit, DOVETAIL_FORCE_BUCKETS="3")
    assert len(set(json.loads(printed)["hashes"])) == 3


def test_a_negative_number_of_buckets_is_refused():
    completed = subprocess.run(
        [sys.executable, "-c", "import dovetail.kernels.hashing"],
        env={"DOVETAIL_FORCE_BUCKETS": "-1", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode != 0
    assert "DOVETAIL_FORCE_BUCKETS must be a positive number" in completed.stderr
