"""A progress bar on standard error while long work goes on; nothing at all where nobody watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Activity:
    """The one line that says what is being done now.

    Examples
    --------
    >>> with showing_activity(Console(file=None, force_terminal=False)) as activity:
    ...     report = activity.stage("Writing")
    ...     report(1, 2)
    """

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=None)

    def stage(self, title: str) -> Callable[[int, int], None]:
        """Begin a stage; call what is returned with (parts done, parts in all) as they become known."""
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
