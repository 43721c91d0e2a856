"""The demo in the terminal: bars that move, and what has happened; plain lines where there is no terminal."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

__all__ = ["Lane", "Screen"]

_BLOCKS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 30
_POINTS = 24
_PLAIN_SECONDS = 5.0
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


@dataclass
class Lane:
    """One line with a bar: how much of how much, and figures beside it."""

    name: str
    style: str
    done: float = 0.0
    total: float = 1.0
    text: str = ""
    history: list[float] = field(default_factory=list)

    def bar(self) -> Text:
        """
        >>> Lane("ours", "cyan", done=1, total=2).bar().plain.rstrip() == "█" * 15
        True
        """
        eighths = round(8 * _BAR_CELLS * min(1.0, self.done / self.total if self.total else 0.0))
        full, rest = divmod(eighths, 8)
        return Text(("█" * full + (_BLOCKS[rest] if rest else "")).ljust(_BAR_CELLS), self.style)


class Screen:
    """What the audience sees. `tick` redraws; use it as a context manager."""

    def __init__(self, console: Console, title: str) -> None:
        self.title, self.lanes = title, list[Lane]()
        self.notes: list[str] = []
        self.footer = ""
        self._console, self._begun = console, time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._plain_at = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.tick(is_last=True)
        if self._live is not None:
            self._live.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    def note(self, text: str) -> int:
        """Say that something happened; gives its number, for `extend_note`."""
        self.notes.append(f"[dim]{self.elapsed_s:5.1f} s[/]  {text}")
        if self._live is None:
            self._console.print(self.notes[-1])
        return len(self.notes) - 1

    def extend_note(self, number: int, text: str) -> None:
        """Say how it went on."""
        self.notes[number] += text
        if self._live is None:
            self._console.print(self.notes[number])

    def tick(self, is_last: bool = False) -> None:
        if self._live is not None:
            self._live.update(self._drawn(), refresh=True)
        elif is_last or time.monotonic() - self._plain_at > _PLAIN_SECONDS:
            self._plain_at = time.monotonic()
            for lane in self.lanes:
                self._console.print(f"{self.elapsed_s:5.1f} s  {lane.name}: {lane.text}", highlight=False)

    def _drawn(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        sign = _SPINNER[int(time.monotonic() * 10) % len(_SPINNER)]
        for lane in self.lanes:
            grid.add_row(Text(lane.name, lane.style), lane.bar(), Text(lane.text))
        rows: list[RenderableType] = [
            Text.from_markup(f"[bold]{self.title}[/]  [dim]{sign} {self.elapsed_s:.0f} s[/]"),
            Text(),
            grid,
        ]
        curves = [lane for lane in self.lanes if lane.history]
        if curves:
            rows += [Text(), self._curves(curves)]
        rows += [Text(), *map(Text.from_markup, self.notes)]
        if self.footer:
            rows += [Text(), Text.from_markup(self.footer)]
        return Group(*rows)

    def _curves(self, lanes: Sequence[Lane]) -> Table:
        """How old orders were when they could be read: one curve per lane, on one scale."""
        grid = Table.grid(padding=(0, 1))
        most = max(max(lane.history) for lane in lanes) or 1.0
        for lane in lanes:
            points = lane.history[-_POINTS:]
            curve = "".join(_LEVELS[min(7, int(8 * point / most))] for point in points).rjust(_POINTS)
            grid.add_row(
                Text(f"{lane.name}: age of an order when it can be read", "dim"),
                Text(curve, lane.style),
                Text(f"{points[-1]:5.1f} s", lane.style),
            )
        return grid
