"""The progress of a running flow: a table that is updated in place on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dovetail.core.memory import format_bytes

if TYPE_CHECKING:
    from dovetail.spark.flow.progress import FlowProgress, OperatorProgress

__all__ = ["LiveProgress", "plain_line", "showing_progress"]

_LINE_SECONDS = 5.0


class LiveProgress:
    """Shows each micro-batch; created by `showing_progress`."""

    def __init__(self, console: Console, name: str, budgets: Mapping[str, int], live: Live | None) -> None:
        self._console, self._name, self._budgets, self._live = console, name, budgets, live
        self._shown, self._shown_at, self._begun = -1, 0.0, time.monotonic()

    def update(self, progress: "FlowProgress | None", is_last: bool = False) -> None:
        if progress is None:
            self._waiting()
            return
        if progress.batch == self._shown and self._live is None:
            return
        if self._live is not None:
            self._live.update(self._table(progress), refresh=True)
        elif is_last or time.monotonic() - self._shown_at >= _LINE_SECONDS:
            self._console.print(plain_line(progress, self._budgets), markup=False, soft_wrap=True)
            self._shown_at = time.monotonic()
        else:
            return
        self._shown = progress.batch

    def _waiting(self) -> None:
        """The first micro-batch takes longest: Spark compiles what it runs, and Python workers start."""
        if self._live is not None:
            waited = time.monotonic() - self._begun
            text = f"{self._name}: the first micro-batch runs, {waited:.0f} s so far. Ctrl-C stops it."
            self._live.update(Text(text), refresh=True)

    def _table(self, progress: "FlowProgress") -> Table:
        title = (
            f"{self._name}: micro-batch {progress.batch}, {progress.staleness_ms / 1000:.1f} s ago. Ctrl-C stops it."
        )
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("operator")
        for heading in ("in/s", "out/s", "hits", "waiting", "oldest", "memory", "of budget"):
            table.add_column(heading, justify="right")
        for operator in progress.operators:
            table.add_row(operator.name, *_figures(operator, self._budgets.get(operator.name)))
        return table


def _figures(operator: "OperatorProgress", budget_bytes: int | None) -> list[str]:
    held = sum(operator.memory_bytes.values())
    oldest = "-" if operator.oldest_wait_ms is None else f"{operator.oldest_wait_ms / 1000:.1f} s"
    return [
        f"{operator.tuples_per_second:,.0f}",
        f"{operator.rows_per_second:,.0f}",
        f"{operator.hit_ratio:.0%}",
        f"{operator.pending:,}",
        oldest,
        format_bytes(held),
        "-" if budget_bytes is None else f"{held / budget_bytes:.0%}",
    ]


def plain_line(progress: "FlowProgress", budgets: Mapping[str, int]) -> str:
    """One micro-batch as one line, for logs.

    >>> from dovetail.spark.flow.progress import FlowProgress
    >>> plain_line(FlowProgress(3, 0, 1200, 0, None, ()), {})
    'batch=3 staleness=1.2s waiting=0'
    """
    parts = [f"batch={progress.batch}", f"staleness={progress.staleness_ms / 1000:.1f}s", f"waiting={progress.pending}"]
    for operator in progress.operators:
        tuples, rows, hits, _, oldest, memory, share = _figures(operator, budgets.get(operator.name))
        parts.append(
            f"| {operator.name} in={tuples}/s out={rows}/s hits={hits} oldest={oldest.replace(' ', '')} "
            f"memory={memory.replace(' ', '')} of_budget={share}"
        )
    return " ".join(parts)


@contextmanager
def showing_progress(console: Console, name: str, budgets: Mapping[str, int]) -> Iterator[LiveProgress]:
    """Show progress on a console for the duration of a block. ``budgets`` has the budget per operator, in bytes."""
    if not console.is_terminal:
        yield LiveProgress(console, name, budgets, None)
        return
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        yield LiveProgress(console, name, budgets, live)
