"""A small language for tests of multi-way joins: offer a value to an input, and see what comes out."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from dovetail.joins.multiway import MJoin, mjoin_spec
from dovetail.testing.held import held_array_bytes
from dovetail.testing.rows import rows_of


class Script:
    """A join of inputs that each have ``k`` and, named after the input, a label; results as tuples of labels.

    Every call checks that the operator holds no more than it says, and says no more than its budget.
    """

    def __init__(self, names: str = "abc", time: bool = False, **options: Any) -> None:
        columns = {"k": pa.string()} if options.pop("text", False) else {"k": pa.int64()}
        self.names = list(names)
        self.schemas = {
            name: pa.schema({**columns, **({f"t{name}": pa.int64()} if time else {}), name: pa.string()})
            for name in names
        }
        self.spec = mjoin_spec(self.schemas, on="k", **{"budget": "1MB", "partitions": 4, **options})
        self.join = MJoin(self.spec)

    def offer(self, name: str, *rows: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Offer rows of (key, [time,] label) in one batch."""
        schema = self.schemas[name]
        batch = pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema)
        return self.labels(self.join.offer(name, self.spec.with_codes(name, batch)))

    def labels(self, batches: Iterator[pa.RecordBatch]) -> list[tuple[Any, ...]]:
        """What comes out, as labels of the inputs, sorted."""
        found = []
        for batch in batches:
            assert self.join.size() <= self.spec.budget.total_bytes
            found += rows_of([batch])
        assert sum(self.join.sizes().values()) == self.join.size()
        assert held_array_bytes(self.join) <= self.join.size()
        labels = [tuple(row[name] for name in self.names if name in row) for row in found]
        return sorted(labels, key=lambda label: tuple("" if part is None else part for part in label))

    def end(self) -> list[tuple[Any, ...]]:
        """All inputs end; what is left comes out, and nothing stays."""
        for name in self.names:
            self.join.finish(name)
        left = self.labels(self.join.drain())
        assert sum(self.join.state_rows().values()) == 0
        assert self.join.size() == self.join.sizes()["bookkeeping"]
        return left
