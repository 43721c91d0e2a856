"""The sizes of the data sets in the papers' tables, so that an experiment names them instead of repeating numbers."""

from dataclasses import dataclass, replace

from dovetail.errors import PlanError

__all__ = ["PAPER_DATA", "PaperData"]


@dataclass(frozen=True)
class PaperData:
    """A relation and a stream as a paper describes them.

    Attributes
    ----------
    paper, name
        Where they are described.
    relation_rows, relation_row_bytes
        Of the relation.
    stream_row_bytes
        Of a stream tuple.
    stream_rows
        Of the whole stream; None where it has no end.
    key_values
        Size of the domain of join values; None where every relation row has its own.

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
    stream_rows: int | None = None
    key_values: int | None = None

    @property
    def relation_bytes(self) -> int:
        """Of all rows."""
        return self.relation_rows * self.relation_row_bytes

    def scaled(self, factor: float) -> "PaperData":
        """The same with fewer rows; widths and domain stay."""
        if not factor > 0:
            raise PlanError(f"factor={factor}: a data set is scaled by more than 0.")
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
