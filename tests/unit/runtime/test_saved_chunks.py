"""Windows saved chunk by chunk: what comes back is what was saved, and little is written for it."""

import random

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import StateError
from dovetail.runtime.saved_chunks import load_window, save_window
from dovetail.storage.state_files import StateFile

SEED = 1_234


class Shelf:
    """State files in memory, and the last state saved."""

    def __init__(self) -> None:
        self.content: dict[str, pa.Table] = {}
        self.files: tuple[StateFile, ...] = ()
        self.chunks: list[tuple[int, int, int]] = []
        self.places: tuple[tuple[int, int], ...] = ()
        self.rows_written = 0

    def save(self, window: pa.Table, chunks: list[tuple[int, int, int]]) -> None:
        saved = save_window(window, chunks, self.files, self.chunks, self.places)
        written = []
        for name, table in saved.tables:
            file = StateFile(f"{len(self.content)}", name, 0, table.nbytes, table.num_rows, "")
            self.content[file.name] = table
            written.append(file)
            self.rows_written += table.num_rows if name == "window" else 0
        self.files, self.chunks, self.places = (*saved.kept, *written), chunks, saved.places

    def load(self) -> pa.Table:
        tables = {number: self.content[file.name] for number, file in enumerate(self.files)}
        return load_window(self.files, tables, self.chunks, self.places)


class Window:
    """A window as operators have it: chunks that come at one end and leave at the other, some losing tuples before."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.chunks: list[tuple[int, list[int]]] = []
        self.matched: dict[int, int] = {}
        self.arrivals = 0

    def change(self, shrinks: bool) -> None:
        for _ in range(self.chance.randrange(3)):
            count = self.chance.randrange(1, 40)
            self.chunks.append((self.arrivals, list(range(self.arrivals, self.arrivals + count))))
            self.arrivals += count
        while len(self.chunks) > 1 and self.chance.random() < 0.5:
            del self.chunks[0]
        if shrinks and self.chunks:
            place = self.chance.randrange(len(self.chunks))
            arrival, tuples = self.chunks[place]
            kept = [n for n in tuples if self.chance.random() < 0.7]
            self.chunks[place : place + 1] = [(arrival, kept)] if kept else []
        for _, tuples in self.chunks:
            for n in tuples:
                if self.chance.random() < 0.05:
                    self.matched[n] = 1

    def table(self) -> pa.Table:
        numbers = [n for _, tuples in self.chunks for n in tuples]
        flags = np.array([self.matched.get(n, 0) for n in numbers], np.uint8)
        return pa.table(
            {"n": pa.array(numbers, pa.int64()), "__code": pa.array(numbers, pa.int64()), "__matched": flags}
        )

    def snapshot(self) -> list[tuple[int, int, int]]:
        return [(len(tuples), arrival, 10**9) for arrival, tuples in self.chunks]


@pytest.mark.parametrize("shrinks", [False, True])
def test_window_comes_back_as_it_was_after_every_change(shrinks: bool) -> None:
    print("seed", SEED)
    window, shelf = Window(SEED), Shelf()
    for _ in range(300):
        window.change(shrinks)
        if not window.chunks:
            continue
        shelf.save(window.table(), window.snapshot())
        assert shelf.load().equals(window.table())
    if not shrinks:
        # Each row once, and once more for every compaction that it lived to see.
        assert shelf.rows_written < 2 * window.arrivals


def test_chunk_that_did_not_change_is_not_written_again() -> None:
    shelf = Shelf()
    rows = pa.table({"n": list(range(100)), "__matched": np.zeros(100, np.uint8)})
    shelf.save(rows, [(60, 0, 5), (40, 60, 7)])
    shelf.save(rows, [(60, 0, 5), (40, 60, 7)])
    assert shelf.rows_written == 100
    shelf.save(rows.slice(60), [(40, 60, 7)])
    # Less than half of the file was still needed.
    assert shelf.rows_written == 140
    assert [file.rows for file in shelf.files] == [40]


def test_file_that_lacks_rows_is_refused() -> None:
    shelf = Shelf()
    shelf.save(pa.table({"n": [1, 2, 3], "__matched": np.zeros(3, np.uint8)}), [(3, 0, 5)])
    shelf.content = {name: table.slice(1) for name, table in shelf.content.items()}
    with pytest.raises(StateError, match="lacks rows of a chunk"):
        shelf.load()
