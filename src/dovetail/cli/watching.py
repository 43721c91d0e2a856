"""``dovetail top``, ``stop`` and ``ui``: looking at flows that run elsewhere, and ending them."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dovetail.cli.failures import Interrupted
from dovetail.cli.options import Debug, Json
from dovetail.cli.output import Output, TextOutput
from dovetail.cli.reporting import reporting
from dovetail.core.errors import StateError
from dovetail.core.memory import format_bytes

if TYPE_CHECKING:
    from dovetail.storage.journal import JournalReader

__all__ = ["Seconds", "register", "repeat", "watched"]

FlowPlace = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="A pipeline file, or a checkpoint.", show_default=False)
]
FlowPlaces = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PIPELINE|CHECKPOINT]...",
        help="Pipeline files or checkpoints; by default the checkpoints below this directory.",
        show_default=False,
    ),
]
Seconds = Annotated[float, typer.Option("--every", metavar="SECONDS", help="How often to look.", min=0.1)]
_BARS = " ▁▂▃▄▅▆▇█"
_STYLES = {"running": "green", "starting": "cyan", "stopping": "yellow", "failed": "red", "killed": "red"}
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 30.0
_WIDE = 120
_FOR_WIDE = ("oldest", "of budget", "fresh")


def register(app: typer.Typer) -> None:
    for command in (top, stop, ui):
        app.command()(command)


# -------------------------------------------------------------------- top


def top(
    flows: FlowPlaces = None,
    every: Seconds = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and exit.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show flows as they run: rates, latency, waiting rows, hits, memory. Ctrl-C ends it; the flows run on."""
    with reporting(json, debug) as output:
        from dovetail.web.finding import checkpoints_of
        from dovetail.web.reading import FlowReader

        readers = [FlowReader(checkpoint) for checkpoint in checkpoints_of(flows or [])]
        for reader in readers:
            reader.require_flow()

        def document() -> dict[str, Any]:
            for reader in readers:
                reader.refresh()
            return {"flows": [reader.summary() for reader in readers]}

        def overview() -> Group:
            found = document()["flows"]
            return _overview(found, [reader.history.series(32)["in"] for reader in readers], output.results.width)

        if once or json or not output.results.is_terminal:
            output.show(document(), lambda text: text.results.print(overview()))
            return
        with Live(console=output.results, auto_refresh=False, screen=True) as live:
            repeat(every, lambda: live.update(overview(), refresh=True))


def repeat(every_s: float, work: Callable[[], None]) -> None:
    """Do something again and again until Ctrl-C, which is how a user ends it."""
    try:
        while True:
            work()
            time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _overview(flows: Sequence[dict[str, Any]], rates: Sequence[Sequence[float | None]], width: int) -> Group:
    """A line per flow, with as many columns as the terminal has room for, and the problems below."""
    cells = [_cells(flow) for flow in flows]
    shown = [heading for heading in cells[0] if width >= _WIDE or heading not in _FOR_WIDE]
    table = Table(box=None, padding=(0, 2 if width >= _WIDE else 1, 0, 0), header_style="dim")
    table.add_column("flow", overflow="fold")
    table.add_column("state", no_wrap=True)
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    if width >= _WIDE:
        table.add_column("rate", no_wrap=True)
    problems = []
    for flow, found, rate in zip(flows, cells, rates, strict=True):
        state = Text(flow["state"], style=_STYLES.get(flow["state"], "dim"))
        row = [Text(flow["flow"]), state, *(Text(found[heading]) for heading in shown)]
        table.add_row(*row, *([_sparkline(rate)] if width >= _WIDE else []))
        if flow["problem"] is not None:
            hint = flow["problem"]["hint"]
            problems.append(Text(f"{flow['flow']}: {flow['problem']['message']}" + (f" {hint}" if hint else "")))
    return Group(table, *problems)


def _cells(flow: dict[str, Any]) -> dict[str, str]:
    budget, held = flow["budget_bytes"], flow["memory_bytes"]
    return {
        "batch": "-" if flow["batch"] is None else str(flow["batch"]),
        "in/s": f"{flow['rates']['in']:,.0f}",
        "out/s": f"{flow['rates']['out']:,.0f}",
        "took": "-" if flow["took_ms"] is None else f"{flow['took_ms'] / 1000:.1f} s",
        "waiting": f"{flow['pending']:,}",
        "oldest": "-" if flow["oldest_wait_ms"] is None else f"{flow['oldest_wait_ms'] / 1000:.1f} s",
        "hits": "-" if flow["hit_ratio"] is None else f"{flow['hit_ratio']:.0%}",
        "memory": format_bytes(held),
        "of budget": "-" if not budget else f"{held / budget:.0%}",
        # How old the newest row of the sink is; of a flow that has ended, how long ago that was.
        "fresh": "-" if flow["time_ms"] is None else f"{max(0, flow['now_ms'] - flow['time_ms']) / 1000:,.1f} s",
    }


def _sparkline(values: Sequence[float | None]) -> Text:
    """
    >>> _sparkline([0, None, 5, 10]).plain
    '▁ ▄█'
    """
    most = max((value for value in values if value), default=0) or 1
    return Text("".join(" " if value is None else _BARS[1 + int(value / most * 7.001)] for value in values), "cyan")


# -------------------------------------------------------------------- stop


def stop(
    pipeline: FlowPlace,
    drain: Annotated[
        bool, typer.Option("--drain", help="First run a micro-batch that leaves nothing waiting.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait until it has stopped.", min=0)
    ] = 600.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Stop a running flow, wherever it was started, and wait until it has ended. Nothing is lost."""
    with reporting(json, debug) as output:
        from dovetail.storage.journal import JournalReader
        from dovetail.storage.running import who_runs
        from dovetail.storage.stop_request import ask_to_stop
        from dovetail.web.finding import checkpoint_of
        from dovetail.web.reading import FlowReader

        checkpoint = checkpoint_of(pipeline)
        reader = FlowReader(checkpoint)
        reader.require_flow()
        runner, journal = who_runs(checkpoint), JournalReader(reader.store.root)
        journal.read_new()
        ask_to_stop(checkpoint, drain, timeout)
        try:
            # The flow gives up a drain after the same time, and says so.
            _wait_for_end(checkpoint, runner, journal, timeout, _GRACE_SECONDS if drain else 0.0)
        except KeyboardInterrupt:
            raise Interrupted("The flow was asked to stop, and will; this command no longer waits for it.") from None
        reader.refresh()
        summary = reader.summary()
        document = {
            "checkpoint": checkpoint,
            "flow": summary["flow"],
            "drained": drain,
            "state": summary["state"],
            "batch": summary["batch"],
            "waiting": summary["pending"],
        }
        where = "before its first micro-batch" if summary["batch"] is None else f"after micro-batch {summary['batch']}"
        waiting = f"; {summary['pending']:,} rows wait in its checkpoint" if summary["pending"] else ""
        output.show(document, lambda text: text.line(f"{summary['flow']} has stopped {where}{waiting}."))


def _wait_for_end(
    checkpoint: str, runner: dict[str, Any] | None, journal: "JournalReader", timeout_s: float, grace_s: float
) -> None:
    """Wait until the process that ran the flow has let go of it; ``journal`` has what it records from now on."""
    from dovetail.storage.running import who_runs

    give_up_at, has_ended = time.monotonic() + timeout_s, False
    while who_runs(checkpoint) == runner:
        kinds = [record["kind"] for record in journal.read_new()[1]]
        # `dovetail run` has the lock until its Spark has stopped as well.
        has_ended = has_ended or not {"stopped", "failed"}.isdisjoint(kinds)
        if "drain failed" in kinds:
            raise StateError(
                f"The flow did not drain within {timeout_s:g} s, and runs on.",
                hint="Give it more time with --timeout, or leave out --drain: waiting rows stay in the checkpoint.",
            )
        if time.monotonic() > give_up_at + (_GRACE_SECONDS if has_ended else grace_s):
            raise StateError(
                f"The flow has not stopped within {timeout_s:g} s; it still has the request.",
                hint="Its process may be busy or suspended: see dovetail status.",
            )
        time.sleep(_POLL_SECONDS)


# -------------------------------------------------------------------- the page


def ui(
    flows: FlowPlaces = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where it listens.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", help="Default: the first free one from 8610 on.", min=0, max=65_535, show_default=False
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="HOST",
            help="A further host name under which browsers reach it; may be repeated.",
            show_default=False,
        ),
    ] = None,
    examples: Annotated[
        bool, typer.Option("--examples", help="Show rows of side outputs, such as dead letters.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve a live page of flows, running or not, until Ctrl-C. Spark is not started; the flows run on."""
    with reporting(json, debug) as output:
        from dovetail.web.finding import checkpoints_of
        from dovetail.web.reading import FlowReader
        from dovetail.web.serving import open_page

        checkpoints = checkpoints_of(flows or [])
        for checkpoint in checkpoints:
            if flows and os.path.isdir(checkpoint):
                FlowReader(checkpoint).require_flow()
        with open_page(checkpoints, host=host, port=port, names=name or (), examples=examples) as page:
            document = {"address": page.address, "port": page.port, "checkpoints": checkpoints}
            output.show(document, lambda text: text.line(f"{page.address}\nCtrl-C ends it; the flows run on."))
            output.results.file.flush()
            repeat(1.0, lambda: None)


def _without_age(document: dict[str, Any]) -> dict[str, Any]:
    """A status without what changes by itself."""
    progress = document["progress"] or {}
    return {**document, "progress": {name: value for name, value in progress.items() if name != "staleness_ms"}}


def watched(
    output: Output,
    every_s: float,
    document: Callable[[], dict[str, Any]],
    show: Callable[[TextOutput, dict[str, Any]], None],
) -> None:
    """Show a document again and again until Ctrl-C: in place on a terminal, else whenever it has changed."""
    seen: dict[str, Any] | None = None

    def look() -> None:
        nonlocal seen
        found = document()
        if output.results.is_terminal:
            output.results.clear()
        elif _without_age(found) == seen:
            return
        seen = _without_age(found)
        output.show(found, lambda text: show(text, found))

    repeat(every_s, look)
