"""What a command does at the moment, on standard error: a bar on a terminal; elsewhere nothing, or a line per stage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dovetail.cli.row_rates import RowRates, RowsDone

__all__ = ["Activity", "showing_activity"]


class Activity:
    """The line that shows the current activity."""

    def __init__(self, bar: Progress | None, say: Callable[[str], None] | None = None) -> None:
        self._bar, self._say = bar, say
        self._task = None if bar is None else bar.add_task("", total=None, detail="")
        self._rates = RowRates()

    def stage(self, title: str) -> Callable[[int, int], None]:
        """Start a stage; call the result with (parts done, total parts) as they become known."""
        self._rates = RowRates()
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, total=None, description=title, detail="")
        elif self._say is not None:
            self._say(title)
        return self._report

    def rows(self, done: RowsDone) -> None:
        """Show how many rows have been read and written, how fast, and how long the rest will take."""
        if self._bar is not None and self._task is not None:
            shown = self._rates.add(done)
            self._bar.update(self._task, completed=shown.fraction * 100, total=shown.total * 100, detail=shown.text)

    def _report(self, done: int, total: int) -> None:
        if self._bar is not None and self._task is not None:
            # With rows to show, finished tasks say little; the end is the end.
            if done < total and self._rates.has_rows:
                return
            self._bar.update(self._task, completed=done, total=total, detail=f"{done}/{total}")


@contextmanager
def showing_activity(console: Console, lines: bool = False) -> Iterator[Activity]:
    """Show a bar on ``console`` if it is a terminal, and remove it at the end; else a line per stage, if asked."""
    if not console.is_terminal:
        yield Activity(None, (lambda title: console.print(title, markup=False, soft_wrap=True)) if lines else None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        yield Activity(bar)
