"""The README's example is code that runs."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

README = Path(__file__).parents[2] / "README.md"


def test_usage_example_runs_and_finds_the_upserted_row(tmp_path: Path) -> None:
    example, joining = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert "/data/" in example
    everyone = np.arange(1000)
    names: dict[str, Any] = {
        "df": pa.table({"customer_id": everyone, "segment": ["basic"] * 1000}),
        "changes": pa.table({"customer_id": everyone[:500], "segment": ["premium"] * 500}),
        "gone": pa.table({"customer_id": everyone[900:]}),
        "codes": everyone,
        "customers": pa.table({"customer_id": everyone, "segment": ["basic"] * 1000}),
        "orders": pa.record_batch({"customer_id": [7, 7, 5000], "amount": [1, 2, 3]}),
    }
    exec(example.replace("/data/", f"{tmp_path}/"), names)
    assert names["relation"].stats.rows == 900
    found = names["rows"].to_pylist()
    assert found
    assert all((row["segment"] == "premium") == (row["customer_id"] < 500) for row in found)
    assert names["block"].rows.num_rows == len(found)
    exec(joining.replace("/data/", f"{tmp_path}/"), names)
    joined = sorted((row for batch in names["joined"] for row in batch.to_pylist()), key=lambda row: row["amount"])
    assert joined == [
        {"customer_id": 7, "amount": 1, "segment": "basic"},
        {"customer_id": 7, "amount": 2, "segment": "basic"},
        {"customer_id": 5000, "amount": 3, "segment": None},
    ]
