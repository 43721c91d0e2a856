"""Reading rows ahead: while the caller works on one part, the device reads the next.

Each part takes two rounds, because the bounds of values of variable length must be there, and verified, before they say
which pages hold the values. A part's first round has ended, and its second is under way, when the part before it is
handed out. What long ranges brought into memory is dropped once the caller is done with a part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from dovetail.kernels.pages import Pages
from dovetail.relation.reads.drop_behind import DropBehind
from dovetail.relation.reads.paged_file import Asked, PagedFile

__all__ = ["PagesAhead", "ScanAhead", "UnderWay", "read_parts"]

Part = TypeVar("Part")


@dataclass(frozen=True)
class PagesAhead:
    """The pages of a part: those to read first, and a function that finds those of its values."""

    fixed: Pages
    values: Callable[[], Pages] | None  # to be called when the first are there


class UnderWay:
    """One part whose values have been asked for."""

    def __init__(self, file: PagedFile, pages: PagesAhead, drops: DropBehind) -> None:
        self._file = file
        self._fixed = file.ask(pages.fixed, drops_behind=drops.fixed)
        self._find_values, self._drops_values = pages.values, drops.values
        self._values: Asked | None = None

    def ask_for_values(self) -> None:
        """The second round."""
        self._file.wait(self._fixed)
        if self._find_values is not None:
            self._values = self._file.ask(self._find_values(), drops_behind=self._drops_values)

    def finish(self) -> None:
        """Wait until all pages are there and verified."""
        self._file.wait(self._values)

    def drop(self) -> None:
        """The caller is done with the part."""
        self._file.drop(self._fixed)
        self._file.drop(self._values)


def read_parts(
    file: PagedFile, parts: list[Part], pages_of: Callable[[Part], PagesAhead], drops: DropBehind
) -> Iterator[Part]:
    """Hand out parts whose pages are there and verified, reading ahead by one part."""
    following = None
    for number, part in enumerate(parts):
        if following is None:
            following = UnderWay(file, pages_of(part), drops)
            following.ask_for_values()
        current, following = following, None
        if number + 1 < len(parts):
            following = UnderWay(file, pages_of(parts[number + 1]), drops)
        current.finish()
        if following is not None:
            following.ask_for_values()
        yield part
        current.drop()


class ScanAhead:
    """Reads a file block after block, one ahead of the caller."""

    def __init__(self, file: PagedFile, drops: DropBehind) -> None:
        self._file, self._drops = file, drops
        self._ahead: tuple[tuple[int, int, int], UnderWay] | None = None
        self._used: UnderWay | None = None

    def read(
        self,
        block: tuple[int, int, int],
        following: tuple[int, int, int] | None,
        pages_of: Callable[[tuple[int, int, int]], PagesAhead],
    ) -> None:
        """Make a block ready, (record batch, first row, last row + 1), and ask for the one that probably follows."""
        if self._ahead is not None and self._ahead[0] == block:
            current = self._ahead[1]
        else:
            if self._ahead is not None:
                self._ahead[1].drop()
            current = UnderWay(self._file, pages_of(block), self._drops)
            current.ask_for_values()
        self._ahead = None
        current.finish()
        if self._used is not None:
            # The caller may still have views of it, which then read it again; usually it does not.
            self._used.drop()
        self._used = current
        if following is not None:
            under_way = UnderWay(self._file, pages_of(following), self._drops)
            under_way.ask_for_values()
            self._ahead = following, under_way
