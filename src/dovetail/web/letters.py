"""A few of the rows that left a flow by a side output: dead letters, quarantined, late, shed or expired rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["examples_of"]

_MOST_ROWS = 5
_MOST_TEXT = 300


def examples_of(node: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of the newest file of a side output in Parquet, every value as text, long ones cut off.

    ``node`` is its node in the flow's picture. Other outputs have no rows that can be shown.
    """
    found: dict[str, Any] = {"id": node["id"], "kind": node["title"], "target": node["detail"], "rows": []}
    if node["title"] != "parquet":
        return found
    try:
        files = [path for path in Path(node["detail"]).glob("*.parquet") if path.name[0] not in "._"]
        newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None:
            batch = next(pq.ParquetFile(newest).iter_batches(_MOST_ROWS), None)
            found["rows"] = [] if batch is None else [_as_text(row) for row in batch.to_pylist()]
    except (OSError, pa.ArrowException) as error:
        # Another process may be writing or removing files here.
        found["problem"] = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
    return found


def _as_text(row: Mapping[str, Any]) -> dict[str, str | None]:
    texts = {name: None if value is None else str(value) for name, value in row.items()}
    return {
        name: text if text is None or len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
        for name, text in texts.items()
    }
