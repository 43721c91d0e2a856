"""A small language for tests of metadata-aware joins: offer a value, promise something, and see what comes out."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from dovetail.joins.multiway import mjoin_spec
from dovetail.joins.promises import Metadata, MetadataJoin, Punctuation
from dovetail.testing.held import held_array_bytes
from dovetail.testing.rows import rows_of


class Script:
    """A join of inputs that each have ``k`` and, named after the input, a label; results as tuples of labels."""

    def __init__(self, names: str = "ab", metadata: Metadata | None = None, **options: Any) -> None:
        kind = {"text": pa.string(), "date": pa.date32(), "small": pa.int16()}.get(options.pop("keys", ""), pa.int64())
        time = options.pop("time", False)
        self.names = list(names)
        self.schemas = {
            name: pa.schema({"k": kind, **({f"t{name}": pa.int64()} if time else {}), name: pa.string()})
            for name in names
        }
        self.spec = mjoin_spec(self.schemas, on="k", **{"budget": "1MB", "partitions": 4, **options})
        self.join = MetadataJoin(self.spec, metadata)

    def batch(self, name: str, *rows: Sequence[Any]) -> pa.RecordBatch:
        """Rows of (key, [time,] label), with their codes."""
        schema = self.schemas[name]
        plain = pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
        return self.spec.with_codes(name, plain)

    def offer(self, name: str, *rows: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Offer rows in one batch."""
        return self.labels(self.join.offer(name, self.batch(name, *rows)))

    def promise(self, name: str, *columns: Any) -> list[tuple[Any, ...]]:
        """Give punctuations: on ``k`` where a plain value stands for one."""
        given = [c if isinstance(c, Punctuation) else Punctuation({"k": c}) for c in columns]
        return self.labels(self.join.punctuate(name, *given))

    def labels(self, batches: Iterator[pa.RecordBatch]) -> list[tuple[Any, ...]]:
        """What comes out, as labels of the inputs, sorted."""
        found = rows_of(list(batches))
        assert sum(self.join.sizes().values()) == self.join.size() <= self.spec.budget.total_bytes
        assert held_array_bytes(self.join, exclude=[self.spec]) <= self.join.size()
        labels = [tuple(row[name] for name in self.names if name in row) for row in found]
        return sorted(labels, key=lambda label: tuple("" if part is None else part for part in label))

    def passed_on(self) -> list[str]:
        """The punctuations that became true of the output, as text."""
        return [str(punctuation) for punctuation in self.join.take_punctuations()]

    def held(self) -> tuple[int, ...]:
        """Tuples held per input."""
        return tuple(self.join.state_rows().values())

    def state_bytes(self) -> int:
        """Bytes of tuples in memory."""
        sizes = self.join.sizes()
        return sizes["state"] + sizes["spill_buffer"]


@pytest.fixture
def script() -> type[Script]:
    """The class `Script`, to be called with the inputs, the metadata and the options of a join."""
    return Script
