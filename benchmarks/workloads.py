"""How fast the generators of the workloads are, on one core.

Axes
----
- Zipf codes: exponents 0, 0.5, 1, 1.5 and 2, ranked and shuffled, ten million codes. Bar: 5 million tuples a second
- every other generator: rows a second, for information

Times are CPU seconds of this process, the fastest of three runs.

    python benchmarks/workloads.py
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import get_args

from dovetail.runtime.generator.zipf import KeyOrder
from dovetail_lab.workloads import (
    BurstyStream,
    NewsWorkload,
    Zipf,
    cloud_reports,
    make_stream_batch,
    poisson_times,
    relation_batches,
    wisconsin_relation,
)

BAR = 5e6


def rate(make: Callable[[], int]) -> float:
    """Rows per CPU second; the first call also compiles."""
    make()
    best = 0.0
    for _ in range(3):
        started = time.process_time()
        rows = make()
        best = max(best, rows / (time.process_time() - started))
    return best


def zipf_rates(domain: int, draws: int) -> float:
    """Print the rate for every exponent and order; gives the least."""
    least = float("inf")
    for exponent in (0.0, 0.5, 1.0, 1.5, 2.0):
        for order in get_args(KeyOrder):
            codes = Zipf(domain, exponent, order=order, seed=1)
            found = rate(lambda codes=codes: codes.sample(draws).size)  # type: ignore[misc]
            least = min(least, found)
            print(f"Zipf {exponent:3.1f} {order:<9} {found / 1e6:8.1f} M tuples/s", flush=True)
    return least


def main() -> int:
    """Print all rates, and end with 1 if Zipf codes miss their bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2_000_000, help="codes drawn at a time")
    parser.add_argument("--domain", type=int, default=10_000_000, help="size of the domain")
    arguments = parser.parse_args()
    least = zipf_rates(arguments.domain, arguments.draws)

    bursty = BurstyStream(tuples_per_step=100.0)
    others: dict[str, Callable[[], int]] = {
        "stream tuples, 20 bytes": lambda: make_stream_batch(Zipf(1_000_000, 1.0), 1_000_000).num_rows,
        "bursty stream": lambda: bursty.batch(bursty.arrivals.start(), 10_000)[0].num_rows,
        "relation rows, 120 bytes": lambda: sum(batch.num_rows for batch in relation_batches(300_000)),
        "cloud reports, 128 bytes": lambda: sum(batch.num_rows for batch in cloud_reports(200_000)),
        "cloud reports, 32 bytes": lambda: sum(batch.num_rows for batch in cloud_reports(200_000, 32)),
        "Wisconsin tuples, whole": lambda: wisconsin_relation(100_000).num_rows,
        "Poisson moments": lambda: poisson_times(1_000_000, 1.0).size,
        "access records": lambda: NewsWorkload(20_000).accesses(0, 20_000).records.num_rows,
    }
    for name, make in others.items():
        print(f"{name:<25} {rate(make) / 1e6:8.2f} M rows/s", flush=True)
    is_reached = least >= BAR
    print(f"{'reached' if is_reached else 'MISSED'}  the slowest Zipf codes: {least / 1e6:.1f} M tuples/s (bar 5)")
    return 0 if is_reached else 1


if __name__ == "__main__":
    sys.exit(main())
