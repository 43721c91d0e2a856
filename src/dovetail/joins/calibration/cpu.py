"""Times the operators' kernels and their Arrow calls."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dovetail.costs.costs import Curve
from dovetail.joins.calibration.operators import measure_operators
from dovetail.kernels.multimap import DENSE_LOAD, MultiMap
from dovetail.kernels.sorted_codes import lookup_sorted, make_fences

_BLOCK_ROWS = 8192
_BATCH_ROWS = 1 << 16
_PAYLOAD_BYTES = 100
_FENCE_STRIDE = 256
# Most rows of R find no waiting tuple; where a cache is worthwhile, it serves most stream tuples.
_WINDOW_HIT_RATIO = 0.1
_CACHE_HIT_RATIO = 0.7
_OPERATOR_ROWS = 1 << 15


def measure_cpu(table_entries: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Measure every CPU factor of `CostFactors`; hash tables at the given sizes."""
    tables = [(entries, _measure_table(entries, repeats)) for entries in table_entries]
    curves: dict[str, Any] = {
        name: Curve(tuple((float(entries), costs[name]) for entries, costs in tables)) for name in tables[0][1]
    }
    rows = _measure_rows(repeats)
    # The kernels tell how costs depend on a table's size, the operators what they are at one size.
    size = min(_OPERATOR_ROWS, max(table_entries) * 4)
    times = measure_operators(size, repeats)
    # HYBRIDJOIN and MESHJOIN differ only in how tuples leave; the rest of a cycle is the same.
    remove_s = max(curves["remove_s"].at(size), curves["expire_s"].at(size) + times.removal_s)
    measured = curves["remove_s"].at(size)
    # With very small tables the difference may be below the clock's resolution.
    curves["remove_s"] = curves["remove_s"].scaled(remove_s / measured) if measured else Curve.constant(remove_s)
    curves["append_s"] = curves["append_s"].scaled(times.append_s / curves["append_s"].at(size))
    # A difference of two times; taking the row is its lower bound.
    rows["output_s"] = max(times.output_s, rows["gather_s"])
    # A hit is a probe and a result; the model has a separate term for the result.
    probe_s = max(curves["cache_probe_s"].at(size), times.hit_s - rows["output_s"])
    curves["cache_probe_s"] = curves["cache_probe_s"].scaled(probe_s / curves["cache_probe_s"].at(size))
    # A looked-up tuple costs more than finding, fetching and copying its row: the rest is added to finding it.
    rows["lookup_s"] = max(rows["lookup_s"], times.lookup_s - rows["gather_s"] - rows["output_s"])
    steps = {"step_s": times.step_s, "index_step_s": times.index_step_s, "lookup_call_s": times.lookup_call_s}
    return curves | rows | steps


def _measure_table(entries: int, repeats: int) -> dict[str, float]:
    """Costs per operation on a window, and on a cache, of `entries` entries."""
    generator = np.random.Generator(np.random.PCG64(entries))
    window, cache = _Window(entries), MultiMap(entries, DENSE_LOAD)
    chunk = max(1, min(entries // 2, _BLOCK_ROWS))
    codes = generator.permutation(np.arange(entries, dtype=np.int64))
    window.append(codes)
    cache.insert(codes)
    chunks = [generator.integers(0, entries, chunk, dtype=np.int64) for _ in range(repeats + 1)]
    rows = generator.integers(0, int(entries / _WINDOW_HIT_RATIO), _BLOCK_ROWS, dtype=np.int64)
    tuples = generator.integers(0, int(entries / _CACHE_HIT_RATIO), _BLOCK_ROWS, dtype=np.int64)
    expire_s, remove_s, append_s, probe_s, cache_probe_s = [], [], [], [], []
    for new_codes in chunks:
        expire_s.append(_seconds(lambda: window.index.remove_oldest(chunk)) / chunk)
        append_s.append(_seconds(partial(window.append, new_codes)) / chunk)
        probe_s.append(_seconds(lambda: window.index.probe(rows)) / _BLOCK_ROWS)
        cache_probe_s.append(_seconds(lambda: cache.probe(tuples)) / _BLOCK_ROWS)
    for _ in chunks:
        # Scattered codes leave, and others take their places.
        leaving = generator.permutation(window.index.codes_of(window.index.live_seqs()))[:chunk]
        removal_s = _seconds(partial(window.index.remove_codes, leaving))
        room = entries - len(window.index)
        refill_s = _seconds(partial(window.append, generator.integers(0, entries, room, dtype=np.int64)))
        remove_s.append((removal_s + refill_s) / room)
    append = statistics.median(append_s[1:])
    return {
        # The first round compiles the kernels.
        "probe_s": statistics.median(probe_s[1:]),
        "cache_probe_s": statistics.median(cache_probe_s[1:]),
        "expire_s": statistics.median(expire_s[1:]),
        "remove_s": max(0.0, statistics.median(remove_s[1:]) - append),
        "append_s": append,
    }


def _measure_rows(repeats: int) -> dict[str, float]:
    """Costs per row or tuple that do not depend on a hash table's size."""
    generator = np.random.Generator(np.random.PCG64(7))
    relation = _relation_batch(_BATCH_ROWS)
    block = relation.slice(0, _BLOCK_ROWS)
    stream = _stream_batch(_BATCH_ROWS)
    results = 2048
    block_rows = pa.array(np.sort(generator.integers(0, _BLOCK_ROWS, results)))
    relation_rows = pa.array(generator.integers(0, _BATCH_ROWS, results))
    stored = np.arange(0, 4 * (1 << 18), 4, dtype=np.int64)
    fences = make_fences(stored, _FENCE_STRIDE)
    queries = generator.integers(0, int(stored[-1]), _BLOCK_ROWS, dtype=np.int64)
    cached_codes = np.arange(results, dtype=np.int64)
    cache = MultiMap(results, DENSE_LOAD)

    def switch() -> None:
        cache.clear()
        cache.insert(cached_codes)
        block.take(block_rows)

    def read_stream() -> NDArray[np.int64]:
        taken: NDArray[np.int64] = np.ascontiguousarray(stream.slice(0, _BLOCK_ROWS).column(0).to_numpy())
        return taken + 0

    return {
        "gather_s": _median(lambda: relation.take(relation_rows), repeats) / results,
        "stream_read_s": _median(read_stream, repeats) / _BLOCK_ROWS,
        "switch_s": _median(switch, repeats) / results,
        "lookup_s": _median(lambda: lookup_sorted(fences, _FENCE_STRIDE, stored, queries), repeats) / _BLOCK_ROWS,
    }


class _Window:
    """A multi-map with the columns of 20-byte stream tuples, as in the operators' windows."""

    def __init__(self, capacity: int) -> None:
        self.index = MultiMap(capacity, DENSE_LOAD)
        self._columns = [np.zeros(self.index.ring_size, dtype) for dtype in (np.int64, np.int64, np.int32)]

    def append(self, codes: NDArray[np.int64]) -> None:
        positions = self.index.positions_of(self.index.insert(codes))
        for column in self._columns:
            column[positions] = codes


def _relation_batch(rows: int) -> pa.RecordBatch:
    numbers = np.arange(rows, dtype=np.int64)
    letters = np.full(rows * _PAYLOAD_BYTES, ord("x"), dtype=np.uint8)
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(_PAYLOAD_BYTES)
    payload = pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(letters))
    return pa.RecordBatch.from_arrays([pa.array(numbers), pa.array(numbers), payload], names=["k", "sk", "pay"])


def _stream_batch(rows: int) -> pa.RecordBatch:
    numbers = np.arange(rows, dtype=np.int64)
    columns = [pa.array(numbers), pa.array(numbers), pa.array(numbers.astype(np.int32))]
    return pa.RecordBatch.from_arrays(columns, names=["k", "v", "q"])


def _seconds(action: Callable[[], object]) -> float:
    # CPU time: other load on the machine does not count.
    started = time.process_time()
    action()
    return time.process_time() - started


def _median(action: Callable[[], object], repeats: int) -> float:
    action()  # compiles the kernels and touches the memory
    return statistics.median(_seconds(action) for _ in range(repeats))
