"""Surrogate keys against the plain join, in one run: tuples per second of two flows over streams of the same size.

Axes: tuples per micro-batch (--tuples), part of them whose source key was never seen (--unseen), rows that the relation
has to begin with (--rows). Both flows read Parquet files, one per micro-batch, and write nowhere. The figure is tuples
divided by the median time from one commit to the next, the first ones left out.

Run it with ``make bench-warehouse``.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import dovetail as dt
from dovetail.spark.steps.stream import Flow
from dovetail.testing.flows import Feed, commits_of
from dovetail.testing.sessions import local_session

SEED, WARM_UP = 3, 3
SHOPS = np.array(["north", "south", "web"])


def rate_of(flow: Flow, root: Path, tuples: int) -> float:
    """Tuples per second of a flow that takes one file per micro-batch."""
    query = flow.write(dt.sinks.noop(), checkpoint=root, trigger="available-now", keep_commits=1000)
    query.awaitTermination()
    times = [commit["time_ms"] for commit in commits_of(root)]
    spans = [(later - earlier) / 1000 for earlier, later in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
    return float(tuples / statistics.median(spans))


def main() -> None:
    """Measure both, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tuples", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=14)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--unseen", type=float, default=0.2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chance = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as scratch:
        root = Path(scratch)
        known = np.arange(given.rows)
        keys = pa.table({"shop": SHOPS[known % 3], "order_id": known // 3, "sk": known})
        dt.Relation.build(keys, root / "keys", on=["shop", "order_id"], shards=2, unique=True)
        dt.Relation.build(keys, root / "master", on=["shop", "order_id"], shards=2, unique=True)
        feed, new = Feed(root / "feed"), int(given.tuples * given.unseen)
        for number in range(given.batches):
            old = chance.integers(0, given.rows, given.tuples - new)
            ids = np.concatenate([old, given.rows + number * new + np.arange(new)])
            feed.add(pa.table({"shop": SHOPS[ids % 3], "order_id": ids // 3, "amount": ids * 0.01}))
        spark = local_session(settings={"spark.driver.memory": "2g"})
        schema = "shop string, order_id long, amount double"
        rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(feed.directory))
        on = ["shop", "order_id"]
        flows = {
            "enrich": dt.stream(rows, "enrich").enrich(root / "master", on=on, how="left", budget="256MB"),
            "surrogate_key": dt.stream(rows, "keyed").surrogate_key("sk", root / "keys", on=on),
        }
        result: dict[str, Any] = {"tuples": given.tuples, "unseen": given.unseen, "rows": given.rows}
        for name, flow in flows.items():
            result[name] = rate_of(flow, root / f"checkpoint-{name}", given.tuples)
            print(f"{name:<32} {result[name]:>12,.0f} tuples/s")
        ratio = result["surrogate_key"] / result["enrich"]
        print(f"{'surrogate_key / enrich':<32} {ratio:>12.2f}")
        if given.json is not None:
            given.json.write_text(json.dumps({**result, "ratio": ratio}, indent=1))


if __name__ == "__main__":
    main()
