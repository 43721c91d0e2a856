"""What comes back from storage is equal and independent; what cannot be stored is refused."""

from typing import Any

import pyarrow as pa
import pytest

from dovetail.joins.protocol import Snapshot
from dovetail.testing.held import held_array_bytes
from dovetail.testing.snapshots import through_storage


def test_snapshot_comes_back_equal_and_shares_no_memory() -> None:
    table = pa.table({"k": list(range(1000)), "s": ["x", None] * 500})
    saved = Snapshot("mesh", {"schema": ["k"]}, {"window": table, "empty": table.slice(0, 0)}, {"w": 3, "f": 0.5})
    back = through_storage(saved)
    assert back == saved
    assert held_array_bytes([back, saved]) == held_array_bytes(back) + held_array_bytes(saved)


@pytest.mark.parametrize("values", [{"x": {1}}, {"x": b"bytes"}, {"x": object()}])
def test_value_that_json_cannot_hold_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        through_storage(Snapshot("mesh", {}, {}, values))
