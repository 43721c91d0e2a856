"""The processes whose memory is measured: each joins one stream, and is looked at from outside meanwhile.

Run as a program it is their nursery: it imports everything, joins a few rows with every strategy, and forks a child per
request, so that a child has compiled kernels and loaded libraries before its floor is taken, and nothing else. Requests
and answers are JSON lines on stdin and stdout.

A child prepares its stream, says so, and waits. The nursery notes the child's anonymous memory as the floor, lets it go
on, and reads it again every millisecond until the child ends. Anonymous memory (RssAnon) is what the process allocated;
pages of mapped files are not part of it. Looked at from outside, a kernel that keeps the interpreter to itself hides
nothing.
"""

import gc
import json
import os
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.errors import BudgetError
from dovetail.joins import OPERATORS, SemiStreamOperator, join_spec
from dovetail.relation import Relation

_SAMPLE_SECONDS = 0.001


def stream_keys(name: str, distinct: int, tuples: int) -> np.ndarray:
    """The keys of a stream: uniform, by Zipf's law, or one hot key alone. The same ones in every process."""
    generator = np.random.default_rng([17, len(name)])
    if name == "hot":
        return np.zeros(tuples, np.int64)
    if name == "uniform":
        return generator.integers(0, distinct, tuples)
    # Ranks by Zipf's law with exponent 1; hot keys lie all over the relation.
    ranks = np.exp(generator.random(tuples) * np.log(distinct)).astype(np.int64) - 1
    return (ranks * 7_919) % distinct


# ================================================================ in the child


def batches_of(request: dict[str, Any]) -> Iterator[list[pa.RecordBatch]]:
    """The streams of a request, one after the other, each as batches that are slices of what is in memory already."""
    size = request["batch_rows"]
    # The text is the same in all batches: however wide a stream is, its own memory is that of one batch.
    text = (
        pa.array([f"{number:0{request['text_bytes']}d}" for number in range(size)]) if request["text_bytes"] else None
    )
    for name in request["streams"]:
        keys = stream_keys(name, request["distinct"], request["tuples"]) + request.get("shift", 0)
        columns = [pa.array(keys), pa.array(np.arange(keys.size))]
        batches = []
        for start in range(0, keys.size, size):
            key, number = (column.slice(start, size) for column in columns)
            named = {"__code": key, "id": key, "t": number}
            batches.append(pa.record_batch(named if text is None else {**named, "text": text.slice(0, len(key))}))
        yield batches


class _Sums:
    """What comes out, in a few numbers, so that nothing of it is held."""

    def __init__(self) -> None:
        self.rows = self.of_tuples = self.of_rows = self.most_bytes = 0

    def take(self, results: Iterator[pa.RecordBatch]) -> None:
        for batch in results:
            self.rows += batch.num_rows
            self.of_tuples += pc.sum(batch.column("t")).as_py() or 0
            self.of_rows += pc.sum(batch.column("n")).as_py() or 0
            self.most_bytes = max(self.most_bytes, int(batch.nbytes))
            del batch


def join_streams(request: dict[str, Any], streams: list[list[pa.RecordBatch]]) -> dict[str, Any]:
    """Join every stream for its time, and let nothing wait at the end of each; tells what came out."""
    relation = Relation.open(request["relation"])
    schema = streams[0][0].schema
    spec = join_spec(relation, schema, budget=request["budget"], io=request["io"], how=request["how"])
    join: SemiStreamOperator = OPERATORS[request["kind"]](spec)
    parts, most_held = [], 0
    for batches in streams:
        sums, offered, began = _Sums(), 0, time.monotonic()
        for batch in batches:
            sums.take(join.offer(batch))
            most_held = max(most_held, join.size())
            offered += batch.num_rows
            if offered >= request["least"] and time.monotonic() - began > request["seconds"]:
                break
        sums.take(join.drain())
        parts.append({**vars(sums), "tuples": offered})
    return {"parts": parts, "held": most_held}


def _be_a_child(request: dict[str, Any], ready: int, go: int) -> dict[str, Any]:
    streams = list(batches_of(request))
    _return_free_memory()
    os.write(ready, b"r")
    os.read(go, 1)
    try:
        return join_streams(request, streams)
    except BudgetError as error:
        return {"error": str(error), "minimum_bytes": error.minimum_bytes}


def _return_free_memory() -> None:
    """Give back what allocators keep for later: it would be reused, and hide as much of what the join takes."""
    gc.collect()
    pa.default_memory_pool().release_unused()


# ================================================================ in the nursery


def anonymous_bytes(pid: int) -> int:
    """What a process allocated and touched; 0 if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Fork a child that serves a request, and watch it."""
    (ready_out, ready), (go, go_in), (answer_out, answer) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            result = _be_a_child(request, ready, go)
            os.write(answer, json.dumps(result).encode())
            status = 0
        except BaseException:  # noqa: BLE001 -- a child must never return into the nursery's loop
            os.write(answer, json.dumps({"failure": traceback.format_exc()[-4_000:]}).encode())
        finally:
            os._exit(status)
    for end in (ready, go, answer):
        os.close(end)
    os.read(ready_out, 1)
    floor = most = anonymous_bytes(pid)
    samples = 0
    os.write(go_in, b"g")
    while not select.select([answer_out], [], [], _SAMPLE_SECONDS)[0]:
        most, samples = max(most, anonymous_bytes(pid)), samples + 1
    most = max(most, anonymous_bytes(pid))
    with os.fdopen(answer_out, "rb") as told:
        text = told.read()
    os.close(ready_out)
    os.close(go_in)
    _, status = os.waitpid(pid, 0)
    result = json.loads(text) if text else {"failure": f"it ended with {os.waitstatus_to_exitcode(status)}"}
    return {**result, "floor": floor, "above": most - floor, "samples": samples}


def warm_up(directory: str) -> None:
    """Join a few rows in every way, so that all is compiled and loaded."""
    numbers = np.arange(3_000)
    rows = pa.table({"id": numbers // 2, "n": numbers, "pay": [f"{number:020d}" for number in numbers]})
    path = str(Relation.build(rows, f"{directory}/r", on="id", shards=1).path)
    base = {
        "relation": path,
        "budget": 1_000_000,
        "how": "inner",
        "distinct": 1_600,
        "tuples": 2_000,
        "least": 0,
        "seconds": 60,
    }
    for text_bytes in (0, 200):
        request = {**base, "batch_rows": 500, "text_bytes": text_bytes, "streams": ["uniform", "zipf", "hot"]}
        streams = list(batches_of(request))
        for kind in OPERATORS:
            for io in ("map", "buffered"):
                join_streams({**request, "kind": kind, "io": io}, streams)


def main() -> None:
    """Serve requests until stdin ends."""
    with tempfile.TemporaryDirectory() as directory:
        warm_up(directory)
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
