"""Rows of one task for side outputs: kept on disk while it runs, then written as tables of its state."""

from pathlib import Path

import pyarrow as pa

__all__ = ["LATE_PREFIX", "QUARANTINE_PREFIX", "SHED_TABLE", "LateWriter"]

LATE_PREFIX = "late "
QUARANTINE_PREFIX = "quarantined "
SHED_TABLE = "shed"


class LateWriter:
    """Takes a task's late rows, rows that broke a promise, and rows dropped for lack of room; they wait on disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, tuple[pa.ipc.RecordBatchStreamWriter, pa.OSFile, Path]] = {}

    def add(self, name: str, rows: pa.RecordBatch) -> None:
        """Add late rows of an input."""
        self._write(f"{LATE_PREFIX}{name}", rows)

    def add_quarantined(self, name: str, rows: pa.RecordBatch) -> None:
        """Add rows of an input that broke a promise, with the reason in their last column."""
        self._write(f"{QUARANTINE_PREFIX}{name}", rows)

    def add_shed(self, rows: pa.RecordBatch) -> None:
        """Add rows dropped for lack of room."""
        self._write(SHED_TABLE, rows)

    def _write(self, table: str, rows: pa.RecordBatch) -> None:
        if table not in self._writers:
            path = self._directory / f"late-{len(self._writers)}.arrow"
            file = pa.OSFile(str(path), "wb")
            self._writers[table] = (pa.ipc.new_stream(file, rows.schema), file, path)
        self._writers[table][0].write_batch(rows)

    def tables(self) -> list[tuple[str, pa.Table]]:
        """All rows, mapped, by table name; the files disappear with these tables."""
        found = []
        for table, (writer, file, path) in self._writers.items():
            writer.close()
            file.close()
            with pa.memory_map(str(path)) as mapped:
                found.append((table, pa.ipc.open_stream(mapped.read_buffer()).read_all()))
            path.unlink()
        self._writers.clear()
        return found
