"""Codes are Spark's ``xxhash64`` bit for bit, and keys are compared by Spark's rules."""

import datetime as dt
import math
import struct
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dovetail.kernels import spark_hash
from dovetail.relation import compute_codes, keys_equal

NAN = float("nan")
PAYLOAD_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_BEEF))[0]


def signed(hashed: int) -> int:
    return hashed - 2**64 if hashed >= 2**63 else hashed


# -------------------------------------------------------------------- the naive twin: the bytes that Spark hashes


def int_bytes(value: int) -> bytes:
    return struct.pack("<i", value)


def long_bytes(value: int) -> bytes:
    return struct.pack("<q", value)


def float_bytes(value: float) -> bytes:
    return b"\x00\x00\xc0\x7f" if value != value else struct.pack("<f", value + 0.0)


def double_bytes(value: float) -> bytes:
    return b"\x00\x00\x00\x00\x00\x00\xf8\x7f" if value != value else struct.pack("<d", value + 0.0)


def wide_decimal_bytes(value: Decimal, scale: int) -> bytes:
    with localcontext(prec=60):
        unscaled = int(value.scaleb(scale))
    length = (unscaled if unscaled >= 0 else ~unscaled).bit_length() // 8 + 1
    return unscaled.to_bytes(length, "big", signed=True)


EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def micros(value: dt.datetime) -> int:
    return (value.replace(tzinfo=dt.UTC) - EPOCH) // dt.timedelta(microseconds=1)


KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any], Callable[[Any], bytes]]] = {
    "boolean": (pa.bool_(), st.booleans(), int_bytes),
    "byte": (pa.int8(), st.integers(-(2**7), 2**7 - 1), int_bytes),
    "short": (pa.int16(), st.integers(-(2**15), 2**15 - 1), int_bytes),
    "int": (pa.int32(), st.integers(-(2**31), 2**31 - 1), int_bytes),
    "long": (pa.int64(), st.integers(-(2**63), 2**63 - 1), long_bytes),
    "float": (pa.float32(), st.floats(width=32), float_bytes),
    "double": (pa.float64(), st.floats(), double_bytes),
    "decimal of 18 digits": (
        pa.decimal128(18, 4),
        st.decimals(-(10**14) + 1, 10**14 - 1, places=4),
        lambda value: long_bytes(int(value.scaleb(4))),
    ),
    "decimal of 38 digits": (
        pa.decimal128(38, 3),
        st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: Decimal(f"{n}E-3")),
        lambda value: wide_decimal_bytes(value, 3),
    ),
    "string": (pa.string(), st.text(max_size=70), lambda value: value.encode()),
    "binary": (pa.binary(), st.binary(max_size=70), bytes),
    "date": (pa.date32(), st.dates(), lambda value: int_bytes((value - dt.date(1970, 1, 1)).days)),
    "timestamp": (pa.timestamp("us"), st.datetimes(), lambda value: long_bytes(micros(value))),
}


def naive_code(values: tuple[Any, ...], kinds: list[str]) -> int | None:
    if any(value is None for value in values):
        return None
    seed = 42
    for value, kind in zip(values, kinds, strict=True):
        seed = xxhash.xxh64_intdigest(KINDS[kind][2](value), seed)
    return signed(seed)


@given(st.data())
def test_hashed_codes_are_the_naive_twins(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(list(KINDS)), min_size=2, max_size=4))
    rows = data.draw(st.lists(st.tuples(*(st.none() | KINDS[kind][1] for kind in kinds)), min_size=1, max_size=8))
    columns = [pa.array(column, KINDS[kind][0]) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
    names = [f"c{i}" for i in range(len(kinds))]
    table = pa.table(columns, names=names)
    expected = [naive_code(row, kinds) for row in rows]
    assert compute_codes(table, names).to_pylist() == expected
    # Batches come sliced and tables in chunks.
    start = data.draw(st.integers(0, len(rows)))
    assert compute_codes(table.to_batches()[0].slice(start), names).to_pylist() == expected[start:]
    chunked = pa.concat_tables([table.slice(start), table.slice(0, start)])
    assert compute_codes(chunked, names).to_pylist() == expected[start:] + expected[:start]


@pytest.mark.parametrize(
    "kind", ["boolean", "float", "double", "decimal of 18 digits", "decimal of 38 digits", "string", "binary"]
)
def test_single_column_of_these_is_hashed(kind: str) -> None:
    @given(st.lists(st.none() | KINDS[kind][1], max_size=20))
    def check(values: list[Any]) -> None:
        table = pa.table({"k": pa.array(values, KINDS[kind][0])})
        assert compute_codes(table, ["k"]).to_pylist() == [naive_code((value,), [kind]) for value in values]

    check()


def test_single_integral_date_or_timestamp_is_its_own_code() -> None:
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64()):
        assert compute_codes(pa.table({"k": pa.array([-5, None, 100], kind)}), ["k"]).to_pylist() == [-5, None, 100]
    dates = pa.array([dt.date(1969, 12, 31), None, dt.date(1970, 1, 2)])
    assert compute_codes(pa.table({"k": dates}), ["k"]).to_pylist() == [-1, None, 1]
    for zone in (None, "UTC", "Europe/Rome"):
        moments = pa.array([-1, None, 10**15], pa.timestamp("us", tz=zone))
        assert compute_codes(pa.table({"k": moments}), ["k"]).to_pylist() == [-1, None, 10**15]
    assert compute_codes(pa.table({"k": pa.array([], pa.string())}), ["k"]).to_pylist() == []


VECTORS = {
    "s": [-7444071767201028348, -8582455328737087284, -4294468057691064905, -53467124739864197],
    "d": [-5252525462095825812, -5252525462095825812, -3127944061524951246, 7738255526519901366],
    "m": [-8959994473701255385, -4006032525457443936, 879945414100663330, 1409737168217643118],
    "isd": [6842311485289746673, -6736356428048086040, -1467646982749906759, 4822341045605812940],
}


def test_vectors_that_spark_printed() -> None:
    """From ``spark.sql("SELECT xxhash64(...)")``, so that a twin wrong in the same way cannot hide an error."""
    table = pa.table(
        {
            "s": ["", "a", "Spark", "a string longer than thirty-two bytes, é"],
            "i": pa.array([0, 1, -1, 2**31 - 1], pa.int32()),
            "d": [0.0, -0.0, NAN, 1.5],
            "m": pa.array([Decimal(n) for n in (0, -1, 255, 12345678901234567890123)], pa.decimal128(38, 0)),
        }
    )
    assert {names: compute_codes(table, list(names)).to_pylist() for names in VECTORS} == VECTORS


def test_one_zero_and_one_nan() -> None:
    for kind in (pa.float32(), pa.float64()):
        zeros = compute_codes(pa.table({"k": pa.array([0.0, -0.0], kind)}), ["k"]).to_pylist()
        nans = compute_codes(pa.table({"k": pa.array([NAN, -NAN, PAYLOAD_NAN], kind)}), ["k"]).to_pylist()
        assert len(set(zeros)) == len(set(nans)) == 1
        assert zeros != nans[:2]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.integers(1, 65_536))
def test_shard_of_a_code_is_the_naive_twins(codes: list[int], shards: int) -> None:
    expected = [signed(xxhash.xxh64_intdigest(long_bytes(code), 42)) % shards for code in codes]
    assert spark_hash.shard_of_codes(np.array(codes, np.int64), shards).tolist() == expected


def naively_equal(left: Any, right: Any) -> bool:
    if left is None or right is None:
        return False
    if isinstance(left, float) and left != left:
        return bool(right != right)
    return bool(left == right)


SAMPLES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "double": (pa.float64(), [None, NAN, PAYLOAD_NAN, 0.0, -0.0, 1.0, math.inf, -math.inf]),
    "float": (pa.float32(), [None, NAN, 0.0, -0.0, 1.5]),
    "string": (pa.string(), [None, "", "a", "A", "é", "e\u0301"]),
    "binary": (pa.binary(), [None, b"", b"\x00", b"\x00\x00"]),
    "boolean": (pa.bool_(), [None, True, False]),
    "decimal": (pa.decimal128(38, 2), [None, Decimal("1.00"), Decimal("-1.00"), Decimal("1.01")]),
    "date": (pa.date32(), [None, dt.date(1, 1, 1), dt.date(2024, 1, 1)]),
    "timestamp": (pa.timestamp("us", tz="UTC"), [None, EPOCH, EPOCH - dt.timedelta(microseconds=1)]),
    "long": (pa.int64(), [None, 0, -1, 2**63 - 1]),
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_keys_are_compared_pair_by_pair_as_the_naive_twin_does(kind: str) -> None:
    data_type, values = SAMPLES[kind]
    pairs = [(a, b) for a in values for b in values]
    left = pa.array([a for a, _ in pairs], data_type)
    right = pa.array([b for _, b in pairs], data_type)
    assert keys_equal([left], [right]).tolist() == [naively_equal(a, b) for a, b in pairs]


def test_composite_keys_are_equal_when_all_parts_are() -> None:
    left = [pa.array([1, 1, None, 1]), pa.array(["a", "b", "a", None])]
    right = [pa.array([1, 1, None, 1]), pa.array(["a", "a", "a", None])]
    assert keys_equal(left, right).tolist() == [True, False, False, False]
    assert keys_equal([pa.array([], pa.string())], [pa.array([], pa.string())]).tolist() == []


def test_moments_in_two_zones_are_compared_as_moments() -> None:
    left = pa.array([0, 1], pa.timestamp("us", tz="UTC"))
    right = pa.array([0, 2], pa.timestamp("us", tz="America/New_York"))
    assert keys_equal([left], [right]).tolist() == [True, False]


@given(st.data())
def test_equal_keys_have_equal_codes(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(SAMPLES)))
    data_type, values = SAMPLES[kind]
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(values), st.sampled_from(values)), min_size=1))
    left, right = (pa.array([pair[i] for pair in pairs], data_type) for i in (0, 1))
    codes = [compute_codes(pa.table({"k": side}), ["k"]).to_pylist() for side in (left, right)]
    for equal, a, b in zip(keys_equal([left], [right]).tolist(), *codes, strict=True):
        if equal:
            assert a == b
