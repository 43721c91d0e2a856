"""One stream of orders, joined with a table by Spark's own join and by Dovetail, side by side.

Run it with ``make demo``. Both get the same files of orders, which land in bursts, and the same table, which is several
times Dovetail's budget; each runs half as many tasks at once as there are cores. On the way some customers change, and
Dovetail is killed by ``kill -9`` and started again. In the end every row is checked, and a report written. It needs no
service, and removes what it wrote except for the report.

Dovetail's side is ``dovetail run examples/retail/pipeline.yaml``; Spark's is ``examples/retail/spark_join.py``.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from retail.checking import Verdict, check
from retail.contenders import Arrivals, Contender, cache_bytes, dovetail_files, spark_files, tasks_of_each
from retail.data import Shops, change_customers, make_customers
from retail.report import Facts, write_report
from retail.screen import Lane, Screen
from rich.console import Console

import dovetail as dt
from dovetail.core.errors import DovetailError
from dovetail.core.memory import Budget, format_bytes
from dovetail.web.reading import FlowReader

PIPELINE = Path(__file__).with_name("retail") / "pipeline.yaml"
SPARK_JOIN = Path(__file__).with_name("retail") / "spark_join.py"
CHANGED_CUSTOMERS = 500
CHANGE_AT, KILL_AT = 0.25, 0.5  # of the time in which orders land
LOOK_SECONDS, STATE_SECONDS = 0.1, 0.5
PATIENCE_SECONDS = 120.0


@dataclass
class Happened:
    """When the demo did what, in seconds since the epoch; None: not yet."""

    landing: float | None = None
    change: float | None = None
    changed: float | None = None
    kill: float | None = None
    back: float | None = None
    caught_up: float | None = None
    loaded_at_kill: int = 0
    changed_rows: pa.Table | None = None


@dataclass
class Stage:
    """Everything the demo moves on its way."""

    given: argparse.Namespace
    root: Path
    screen: Screen
    relation: dt.Relation
    shops: Shops
    ours: Contender
    theirs: Contender
    reader: FlowReader
    lanes: dict[str, Lane]
    by_us: Arrivals = field(default_factory=Arrivals)
    by_spark: Arrivals = field(default_factory=Arrivals)
    happened: Happened = field(default_factory=Happened)
    states: list[dict[str, Any]] = field(default_factory=list)

    # ------------------------------------------------------------ looking

    def look(self) -> None:
        """See what is new, and show it."""
        for contender in (self.ours, self.theirs):
            contender.require_running()
        self.by_us.look(dovetail_files(self.root))
        self.by_spark.look(spark_files(self.root))
        if self.happened.landing is not None:
            self._show()
        self.screen.tick()

    def _show(self) -> None:
        total = self.given.rate * self.given.seconds
        offered = self.shops.offered
        self.lanes["landed"].total = self.lanes["spark"].total = self.lanes["ours"].total = max(total, offered)
        self.lanes["landed"].done = offered
        self.lanes["landed"].text = f"{offered:>9,}"
        for name, arrivals in (("spark", self.by_spark), ("ours", self.by_us)):
            lane, waiting = self.lanes[name], self.shops.waiting_since(arrivals.loaded)
            behind = 0.0 if waiting is None else time.time() - waiting
            lane.done = arrivals.loaded
            lane.text = f"{arrivals.loaded:>9,}  {arrivals.rate():>7,.0f}/s  {behind:4.1f} s behind"
            lane.history = [age for _, _, age in arrivals.points]
        state = self.states[-1] if self.states else None
        if state is not None and state["batch"] is not None:
            self.screen.footer = (
                f"[dim]Dovetail: micro-batch {state['batch']}, a cache of {format_bytes(state['cache_bytes'])} "
                f"in a budget of {format_bytes(state['budget_bytes'] or 0)}, {state['hit_ratio'] or 0:.0%} of the "
                f"orders answered by it, customers of version {state['version']}[/]"
            )

    def read_state(self) -> None:
        """What the flow says of itself in its checkpoint."""
        try:
            self.reader.refresh()
            view = self.reader.view()
        except (DovetailError, OSError):  # it is being written, or just killed
            return
        operators = view["operators"]
        if view["batch"] is None or (self.states and self.states[-1]["batch"] == view["batch"]):
            return
        names = ("batch", "budget_bytes", "hit_ratio", "rates")
        state = {name: view[name] for name in names}
        state |= {
            "at": time.time(),
            "version": operators[0]["relation_version"],
            "cache_bytes": cache_bytes(self.root / "local"),
        }
        self.states.append(state)

    def until(self, is_done: Callable[[], object], what: str, timeout_s: float = PATIENCE_SECONDS) -> None:
        """Keep looking until something is so."""
        give_up_at, state_at = time.monotonic() + timeout_s, 0.0
        while not is_done():
            if time.monotonic() > give_up_at:
                raise SystemExit(f"Gave up after {timeout_s:g} s: {what}.")
            self.look()
            if time.monotonic() - state_at > STATE_SECONDS:
                self.read_state()
                state_at = time.monotonic()
            time.sleep(LOOK_SECONDS)
        self.look()

    # ------------------------------------------------------------ the acts

    def start(self) -> None:
        """Start both, and wait until both take orders."""
        self.theirs.start()
        self.ours.start()
        begun = time.monotonic()
        is_ready: dict[str, Callable[[], bool]] = {
            "spark": (self.root / "spark-started").exists,
            "ours": lambda: bool(self.states),
        }

        def are_ready() -> bool:
            for name, test in is_ready.items():
                ready = test()
                waited = time.monotonic() - begun
                # Nobody knows how long Spark takes to start: the bar shows the time so far, of 15 s.
                self.lanes[name].done, self.lanes[name].total = (1, 1) if ready else (min(waited, 14.5), 15)
                self.lanes[name].text = "ready" if ready else f"starting Spark, {waited:.1f} s"
            return all(test() for test in is_ready.values())

        self.until(are_ready, "Spark has not started")
        self.screen.note(f"Both have started, in {time.monotonic() - begun:.1f} s; orders begin to land")

    def play(self) -> None:
        """Land orders, change customers, kill, start again, and wait until all orders are loaded."""
        happened, shops = self.happened, self.shops
        happened.landing = time.time()
        shops.start()
        self._wait_for(CHANGE_AT)
        changing = threading.Thread(target=self._change, daemon=True)
        number = self.screen.note(f"{CHANGED_CUSTOMERS} of the busiest customers change their segment")
        changing.start()
        self.until(lambda: self.by_us.first_changed_at, "no order has a changed customer")
        changing.join()
        assert happened.changed is not None
        assert self.by_us.first_changed_at is not None
        fresh = self.by_us.first_changed_at - happened.changed
        self.screen.extend_note(number, f": new version; the first order with it [green]{max(0, fresh):.1f} s[/] later")
        self._wait_for(KILL_AT)
        happened.kill, happened.loaded_at_kill = time.time(), self.by_us.loaded
        self.ours.kill()
        number = self.screen.note("[red]kill -9[/] of Dovetail, its JVM and its workers; it is started again")
        self.ours.start()
        self.until(lambda: self.by_us.loaded > happened.loaded_at_kill, "Dovetail does not come back")
        happened.back = time.time()
        shops.may_end.set()
        self.screen.extend_note(number, f"; back after [green]{happened.back - happened.kill:.1f} s[/]")
        self.until(self._has_caught_up, "Dovetail does not catch up")
        happened.caught_up = time.time()
        self.screen.note(f"Caught up, {happened.caught_up - happened.kill:.1f} s after the kill")
        self.until(lambda: not shops.is_alive() and self.by_us.loaded >= shops.offered, "orders are missing")
        share = self.by_spark.loaded / shops.offered
        self.screen.note(f"All orders are loaded by Dovetail; by Spark's join {share:.0%} of them")
        self.look()

    def _wait_for(self, share: float) -> None:
        assert self.happened.landing is not None
        due = self.happened.landing + share * self.given.seconds
        self.until(lambda: time.time() >= due, "the clock stands still", self.given.seconds + PATIENCE_SECONDS)

    def _change(self) -> None:
        self.happened.change = time.time()
        numbers = self.shops.hottest(CHANGED_CUSTOMERS)
        _, self.happened.changed_rows = change_customers(self.relation, numbers)
        self.happened.changed = time.time()

    def _has_caught_up(self) -> bool:
        waiting = self.shops.waiting_since(self.by_us.loaded)
        return waiting is None or time.time() - waiting < 2.0


@contextmanager
def on_stage(given: argparse.Namespace, root: Path, screen: Screen) -> Iterator[Stage]:
    """Make the table, and everything that the demo needs; ends the processes."""
    landed, spark, ours = Lane("orders landed", "white"), Lane("Spark's join", "yellow"), Lane("Dovetail", "cyan")
    making = Lane("customers", "white", total=given.customers)
    screen.lanes = [making]
    relation = _in_background(screen, making, lambda report: make_customers(given.customers, root, report))
    times = relation.stats.bytes / Budget.parse(given.budget).total_bytes
    screen.title = (
        f"{relation.stats.rows:,} customers, {format_bytes(relation.stats.bytes)}: {times:.0f} times Dovetail's budget "
        f"of {given.budget}"
    )
    screen.note("The table is made, as Parquet files for Spark and as a relation for Dovetail")
    screen.lanes = [landed, spark, ours]
    shops = Shops(root, given.customers, given.rate, given.seconds)
    tasks = tasks_of_each()
    run = ["-m", "dovetail.cli.main", "run", str(PIPELINE), "--master", f"local[{tasks}]"]
    by_spark = [str(SPARK_JOIN), str(root), str(tasks)]
    stage = Stage(
        given=given,
        root=root,
        screen=screen,
        relation=relation,
        shops=shops,
        ours=Contender("Dovetail", run, root / "dovetail.log", {"SPARK_LOCAL_DIRS": str(root / "local")}),
        theirs=Contender("Spark's join", by_spark, root / "spark.log"),
        reader=FlowReader(root / "checkpoint"),
        lanes={"landed": landed, "spark": spark, "ours": ours},
    )
    try:
        yield stage
    finally:
        shops.may_end.set()
        stage.theirs.kill()
        stage.ours.stop()
        stage.ours.kill()


def _in_background(screen: Screen, lane: Lane, work: Callable[[Callable[[int], None]], dt.Relation]) -> dt.Relation:
    """Make the table while the bar moves."""
    found: list[dt.Relation] = []

    def report(rows: int) -> None:
        lane.done += rows
        lane.text = f"{lane.done:>9,.0f} rows" + (", building the relation" if lane.done >= lane.total else "")

    thread = threading.Thread(target=lambda: found.append(work(report)), daemon=True)
    thread.start()
    while thread.is_alive():
        screen.tick()
        thread.join(LOOK_SECONDS)
    if not found:
        raise SystemExit("The table could not be made.")
    return found[0]


def say(console: Console, verdict: Verdict, facts: Facts, report: Path) -> None:
    """The summary."""
    word = "[green]every order exactly once[/]" if verdict.is_exact else "[red]NOT what was landed[/]"
    console.print(
        f"\n{'[green]✓[/]' if verdict.is_exact else '[red]✗[/]'} {verdict.landed:,} orders landed, {verdict.loaded:,} "
        f"rows loaded: {verdict.missing:,} missing, {verdict.repeated:,} repeated, {verdict.wrong:,} wrong: {word}"
    )
    console.print(
        f"  {verdict.compared:,} of them were loaded by Spark's join as well: {verdict.differing:,} differ; "
        f"{verdict.without_customer:,} orders of unknown customers"
    )
    console.print(
        f"  from landing to readable: median [bold]{facts.ours_median_s:.1f} s[/], 95 % within "
        f"{facts.ours_p95_s:.1f} s (with the kill); Spark's join: median [bold]{facts.theirs_median_s:.1f} s[/] of the "
        f"{facts.theirs_share:.0%} that it loaded"
    )
    console.print(f"  report: {report}")


def main() -> int:
    """Make the data, run both, check the target, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--customers", type=int, default=3_000_000, help="rows of the table")
    parser.add_argument("--budget", default="32MB", help="Dovetail's memory for the join")
    parser.add_argument("--rate", type=int, default=6_000, help="orders per second, on average")
    parser.add_argument("--seconds", type=float, default=45.0, help="how long orders land")
    parser.add_argument("--report", type=Path, default=Path("artifacts/demo/report.html"), help="where the report goes")
    given = parser.parse_args()
    console = Console(highlight=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # both processes would outlive a closed terminal
    begun = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="dovetail-retail-"))
    os.environ |= {"RETAIL_ROOT": str(root), "RETAIL_BUDGET": given.budget}
    (root / "landing").mkdir()
    try:
        with Screen(console, f"Making {given.customers:,} customers") as screen:
            with on_stage(given, root, screen) as stage:
                stage.start()
                stage.play()
            changed = stage.happened.changed_rows
            assert changed is not None
            ours, theirs = dovetail_files(root), spark_files(root)
            verdict = check(stage.shops.feed.files(), ours, theirs, given.customers, changed)
            facts = facts_of(stage, verdict, time.monotonic() - begun)
            report = write_report(given.report, facts, PIPELINE)
        say(console, verdict, facts, report)
        return 0 if verdict.is_exact else 1
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def facts_of(stage: Stage, verdict: Verdict, seconds: float) -> Facts:
    """What the report shows, as plain data."""
    ours, theirs, happened = stage.by_us.latencies(), stage.by_spark.latencies(), stage.happened
    assert happened.landing is not None
    zero = happened.landing
    moments = {
        name: None if at is None else at - zero
        for name, at in (
            ("change", happened.change),
            ("changed", happened.changed),
            ("first changed order", stage.by_us.first_changed_at),
            ("kill", happened.kill),
            ("back", happened.back),
            ("caught up", happened.caught_up),
        )
    }
    stage.reader.refresh()
    view = stage.reader.view()
    return Facts(
        options={name: str(value) for name, value in vars(stage.given).items() if name != "report"},
        cores=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        seconds=seconds,
        relation={"rows": stage.relation.stats.rows, "bytes": stage.relation.stats.bytes},
        verdict={**vars(verdict), "is_exact": verdict.is_exact},
        moments=moments,
        landed=[(at - zero, count) for at, count in stage.shops.landed],
        ours=[(at - zero, count, age) for at, count, age in stage.by_us.points],
        theirs=[(at - zero, count, age) for at, count, age in stage.by_spark.points],
        ours_ages=np.quantile(ours, np.linspace(0, 1, 101)).tolist(),
        theirs_ages=np.quantile(theirs, np.linspace(0, 1, 101)).tolist() if theirs.size else [],
        theirs_share=stage.by_spark.loaded / stage.shops.offered,
        states=[{**state, "at": state["at"] - zero} for state in stage.states],
        picture=view["picture"],
        journal=str(stage.root / "checkpoint" / "dovetail" / "journal"),
    )


if __name__ == "__main__":
    sys.exit(main())
