"""A progress bar on standard error during long work; nothing if it is not a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Activity:
    """The line that shows the current activity."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=None)

    def stage(self, title: str) -> Callable[[int, int], None]:
        """Start a stage; call the result with (parts done, total parts) as they become known."""
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, total=None, description=title)
        return self._report

    def _report(self, done: int, total: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)


@contextmanager
def showing_activity(console: Console) -> Iterator[Activity]:
    """Show a bar on ``console`` if it is a terminal, and remove it at the end."""
    if not console.is_terminal:
        yield Activity(None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        yield Activity(bar)
