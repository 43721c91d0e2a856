"""What it costs to read pages of a device, when many reads are asked for together.

Two numbers: what a read costs however long it is, and what each page adds. They begin with what calibration measured
and follow what reads take. From them follow

- the gap that is worth reading: where two pages are closer, one longer read is cheaper than two. The more rows of a
  table are asked for together, the more gaps close, up to one pass over the table at the speed of the device;
- the cost of any number of random pages of a table, which a join compares with that of a scan.
"""

import os
import threading
from dataclasses import dataclass

from dovetail.kernels.pages import PAGE_BYTES

__all__ = ["ReadCosts", "read_costs_of"]

_USUAL_READ_S, _USUAL_BYTES_PER_S = 1e-5, 2e9
_LEAST_PAGES = 64  # below this, what else a call does counts for more
_WEIGHT, _WEIGHT_OF_SURPRISES = 0.2, 0.5  # of the newest observation
_SURPRISE = 2.0  # times what was predicted, or less than predicted
_TRUST = 0.02  # in the costs to begin with, in observations
_MOST_CORRECTED = 4.0  # by a single observation: a read may hang
_LEAST_SHARE = 0.02  # of the costs to begin with
_USUAL_GAP, _MOST_GAP_GROWTH = 8, 4  # pages; times the gap to begin with
_LOCK = threading.Lock()  # passes are read by several threads
_CACHED_PAGE_S = 2e-6  # processor time for a page in the page cache: finding room, mapping it, dropping it


@dataclass
class ReadCosts:
    """The costs of reads of one device.

    Parameters
    ----------
    read_s
        A read of a page, besides its transfer, with many reads under way.
    page_s
        The transfer of a page.

    Examples
    --------
    >>> costs = ReadCosts(read_s=9e-6, page_s=1.5e-6)
    >>> costs.gap_pages
    6
    >>> round(costs.seconds(1_000, of_pages=1_000_000), 4), round(costs.seconds(900_000, of_pages=1_000_000), 2)
    (0.0105, 1.5)
    """

    read_s: float = _USUAL_READ_S
    page_s: float = PAGE_BYTES / _USUAL_BYTES_PER_S

    def __post_init__(self) -> None:
        self._begun_with = self.read_s, self.page_s
        # Weighted sums over observations, of the squares and products that a fit by least squares needs.
        self._seen = self._as_begun(1.0)
        self._unseen = 1.0  # the weight in them of what was there in the beginning
        self._tried = 0

    def _as_begun(self, weight: float) -> list[float]:
        """The sums if reads and pages had been observed apart, and had cost what they began with."""
        read_s, page_s = self._begun_with
        return [weight / read_s**2, 0.0, weight / page_s**2, weight / read_s, weight / page_s]

    def begin_with(self, read_s: float, page_s: float) -> None:
        """Take over what was calibrated. What was observed counts for more, where there is any."""
        if (read_s, page_s) != self._begun_with:
            # Exactly as much of the sums as is left of those from the beginning.
            old, self._begun_with = self._as_begun(self._unseen), (read_s, page_s)
            new = self._as_begun(self._unseen)
            self._seen = [seen - before + now for seen, before, now in zip(self._seen, old, new, strict=True)]
            self._fit()

    def prefers_pass(self, pages: float, of_pages: float) -> bool:
        """Whether reading all of a table past the page cache is cheaper than reading this many random pages of it."""
        if pages <= 0.0:
            return False
        through_cache_s = _CACHED_PAGE_S * self._transferred(pages, of_pages)
        return of_pages * self.page_s < self.seconds(pages, of_pages) + through_cache_s

    def note_pass(self, pages: float, seconds: float) -> None:
        """Record that one long read of so many pages took so long."""
        self.note(1.0, pages, seconds)

    @property
    def gap_pages(self) -> int:
        """The most pages between two others that are cheaper to read than a second read is.

        It is bounded, because a wrong guess reads many times what is wanted.
        """
        begun_read_s, begun_page_s = self._begun_with
        return int(min(self.read_s / self.page_s, max(_USUAL_GAP, _MOST_GAP_GROWTH * begun_read_s / begun_page_s)))

    def next_gap_pages(self) -> int:
        """The gap for the next reads: half or twice as long by turns, or the two costs could not be told apart."""
        self._tried += 1
        return int(self.gap_pages * (1.0, 0.5, 1.0, 2.0)[self._tried % 4])

    def seconds(self, pages: float, of_pages: float) -> float:
        """The cost of reading this many random pages of a table of `of_pages`, with the gaps that are worth it."""
        if pages <= 0.0 or of_pages <= 0.0:
            return 0.0
        # Gaps are distributed geometrically: a range ends at a gap that is longer than those worth reading.
        ranges = pages * (1.0 - min(1.0, pages / of_pages)) ** (self.gap_pages + 1)
        return ranges * self.read_s + self._transferred(pages, of_pages) * self.page_s

    def _transferred(self, pages: float, of_pages: float) -> float:
        """The pages that are read if so many random ones are wanted: with the gaps between them that are read too."""
        density, gap = min(1.0, pages / of_pages), self.gap_pages
        if density == 1.0:
            return of_pages
        is_short = 1.0 - (1.0 + gap * density) * (1.0 - density) ** gap
        return pages + pages * (1.0 - density) / density * max(0.0, is_short)

    def note(self, reads: float, pages: float, seconds: float) -> None:
        """Record that a device took this long for some reads of some pages together."""
        if pages < _LEAST_PAGES or reads <= 0.0 or seconds <= 0.0:
            return
        with _LOCK:
            predicted_s = reads * self.read_s + pages * self.page_s
            found = min(max(seconds / predicted_s, 1.0 / _MOST_CORRECTED), _MOST_CORRECTED)
            # A device that has changed makes what was seen before worthless.
            weight = _WEIGHT if 1 / _SURPRISE < found < _SURPRISE else _WEIGHT_OF_SURPRISES
            self._seen = [(1.0 - weight) * seen for seen in self._seen]
            self._unseen *= 1.0 - weight
            of_read, of_page = reads / predicted_s, pages / predicted_s
            for number, product in enumerate(
                (of_read * of_read, of_read * of_page, of_page * of_page, of_read * found, of_page * found)
            ):
                self._seen[number] += weight * product
            self._fit()

    def _fit(self) -> None:
        """The two costs that explain what was seen best; where it says nothing, they are what they began with."""
        begun_read_s, begun_page_s = self._begun_with
        read_read, read_page, page_page, read_found, page_found = self._seen
        # A little trust in the beginning, in proportion to what the costs are now: it decides what nothing else does.
        trust = _TRUST / max(begun_read_s, self.read_s) ** 2
        read_read, read_found = read_read + trust, read_found + trust * begun_read_s
        trust = _TRUST / max(begun_page_s, self.page_s) ** 2
        page_page, page_found = page_page + trust, page_found + trust * begun_page_s
        determinant = read_read * page_page - read_page * read_page
        read_s = (read_found * page_page - page_found * read_page) / determinant
        page_s = (page_found * read_read - read_found * read_page) / determinant
        # A cost below zero explains noise: then the other one explains everything.
        if read_s <= 0.0:
            read_s, page_s = 0.0, page_found / page_page
        elif page_s <= 0.0:
            read_s, page_s = read_found / read_read, 0.0
        self.read_s, self.page_s = max(read_s, _LEAST_SHARE * begun_read_s), max(page_s, _LEAST_SHARE * begun_page_s)


_OF_DEVICES: dict[int, ReadCosts] = {}


def read_costs_of(path: str) -> ReadCosts:
    """The costs of the device that a file is on, as this process knows them.

    A file that is gone (it may be removed once it is mapped), or that is on a simulated disk, has its own.
    """
    try:
        device = os.stat(path).st_dev
    except FileNotFoundError:
        return ReadCosts()
    return _OF_DEVICES.setdefault(device, ReadCosts())
