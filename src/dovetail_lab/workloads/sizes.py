"""The sizes of the papers' data sets, so that experiments need not repeat the numbers."""

from dataclasses import dataclass, replace

from dovetail.core.errors import PlanError

__all__ = ["PAPER_DATA", "PaperData"]


@dataclass(frozen=True)
class PaperData:
    """A relation and a stream as described in a paper.

    Examples
    --------
    >>> PAPER_DATA["meshjoin"].relation_bytes
    420000000
    >>> PAPER_DATA["meshjoin"].scaled(0.1).relation_rows
    350000
    """

    paper: str
    name: str
    relation_rows: int
    relation_row_bytes: int
    stream_row_bytes: int
    stream_rows: int | None = None  # None: endless
    key_values: int | None = None  # number of distinct join values; None: unique in the relation

    @property
    def relation_bytes(self) -> int:
        """Bytes of all relation rows."""
        return self.relation_rows * self.relation_row_bytes

    def scaled(self, factor: float) -> "PaperData":
        """The same data set with a fraction of the rows; widths and the number of key values stay."""
        if not factor > 0:
            raise PlanError(f"factor={factor}: it must be above 0.")
        rows = None if self.stream_rows is None else max(1, round(self.stream_rows * factor))
        return replace(self, relation_rows=max(1, round(self.relation_rows * factor)), stream_rows=rows)


PAPER_DATA = {
    "meshjoin": PaperData("MESHJOIN 2007", "synthetic, table 2", 3_500_000, 120, 20),
    "meshjoin-clouds": PaperData("MESHJOIN 2007", "cloud reports", 10_000_000, 32, 32, 10_000_000, 36_000),
    "hybridjoin": PaperData("HYBRIDJOIN 2011", "synthetic, table 2", 2_000_000, 120, 20),
    "ssbj": PaperData("SSBJ 2018", "synthetic", 100_000_000, 120, 20),
    "ssbj-tpch": PaperData("SSBJ 2018", "TPC-H, factor 100", 15_000_000, 223, 138, 150_000_000),
    "ssbj-clouds": PaperData("SSBJ 2018", "cloud reports", 20_000_000, 128, 128, 6_000_000, 36_000),
}
