"""Kill drivers and workers of five flows a thousand times: ``make chaos``.

Every flow lives through some sessions: in each, workers are killed at named points and at random times while the flow
goes on, and at last the driver. After every session nothing may be repeated; at the end of a life the flow runs to its
end, and exactly the oracle's rows must be there. Then it begins again with an empty checkpoint.

Stop it at any time: started again with the same directory, it goes on where it was. It ends with exit code 1 if a check
failed; the files are left as they are then.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from campaign import SEED, Campaign
from kills import DRIVER, WORKER, Kills
from load import SERVERS, Load
from scenes import ClosedGroups, Enrich, History, MultiJoin, Scene

KINDS: list[type[Scene]] = [Enrich, Load, MultiJoin, ClosedGroups, History]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drivers", type=int, default=200, help="how many to kill, over all flows")
    parser.add_argument("--workers", type=int, default=800, help="how many to kill, over all flows")
    parser.add_argument("--kinds", nargs="+", default=[kind.__name__ for kind in KINDS])
    parser.add_argument("--side-by-side", type=int, default=2, help="how many flows run at once")
    parser.add_argument("--directory", type=Path, default=Path("artifacts/chaos"))
    chosen = parser.parse_args()
    chosen.directory.mkdir(parents=True, exist_ok=True)
    kills = Kills(chosen.directory / "kills.jsonl")
    share = len(chosen.kinds)
    campaigns = [
        Campaign(kind, chosen.directory.resolve(), kills, -(-chosen.drivers // share), -(-chosen.workers // share))
        for kind in KINDS
        if kind.__name__ in chosen.kinds
    ]
    stopped = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopped.set())
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())

    def run(campaign: Campaign) -> str | None:
        try:
            campaign.run(stopped)
        except Exception:  # noqa: BLE001 -- in the report; the others end after their session
            stopped.set()
            return traceback.format_exc()
        return None

    with _server(campaigns), ThreadPoolExecutor(chosen.side_by_side) as threads:
        failures = [failure for failure in threads.map(run, campaigns) if failure is not None]
    report = _report(campaigns, kills, failures)
    (chosen.directory / "report.md").write_text(report)
    print(report)
    return 1 if failures else 0


@contextmanager
def _server(campaigns: list[Campaign]) -> Iterator[None]:
    """PostgreSQL, if a flow loads into it. A life that an earlier server has seen half of begins again."""
    if not any(campaign.kind is Load for campaign in campaigns):
        yield
        return
    for campaign in campaigns:
        if campaign.kind is Load:
            campaign.begin_again()
    directory = Path(tempfile.mkdtemp(prefix="dovetail-postgres-"))
    server = SERVERS.Postgres(directory, SERVERS.postgres_programs(), SERVERS.free_port())
    try:
        server.create()
        server.start()
        Load.postgres = server
        yield
        server.stop("immediate")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _report(campaigns: list[Campaign], kills: Kills, failures: list[str]) -> str:
    lines = ["# Chaos", "", f"Seed {SEED}.", "", "| flow | drivers killed | workers killed | lives, each exact |"]
    lines.append("|---|---|---|---|")
    for campaign in campaigns:
        name = campaign.kind.__name__
        counts = f"{kills.count(DRIVER, name)} | {kills.count(WORKER, name)} | {campaign.lives}"
        lines.append(f"| {name} | {counts} |")
    lines.append(f"| all | {kills.count(DRIVER)} | {kills.count(WORKER)} | {sum(one.lives for one in campaigns)} |")
    hits = kills.by_point()
    lines += ["", "| point | kills |", "|---|---|"]
    lines += [f"| {point} | {hits[point]} |" for point in sorted(set(hits) | reached_by(campaigns))]
    if failures:
        lines += ["", "## Failures", "", *failures]
    return "\n".join(lines) + "\n"


def reached_by(campaigns: list[Campaign]) -> set[str]:
    """All points that the flows reach."""
    return {point for campaign in campaigns for point in campaign.points()}


if __name__ == "__main__":
    sys.exit(main())
