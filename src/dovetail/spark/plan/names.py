"""Resolves column names as the session does: case-sensitively or not, and never ambiguously."""

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import SparkSession

from dovetail.core.errors import PlanError

__all__ = ["NameResolver"]


@dataclass(frozen=True)
class NameResolver:
    """Finds a column by the name a user gave.

    Examples
    --------
    >>> NameResolver(is_case_sensitive=False).number_of("ID", ["name", "id"], "the stream")
    1
    """

    is_case_sensitive: bool

    @classmethod
    def of(cls, spark: SparkSession) -> "NameResolver":
        """The rules of a session."""
        return cls(spark.conf.get("spark.sql.caseSensitive") == "true")

    def number_of(self, name: str, names: Sequence[str], owner: str) -> int:
        """The number of the column called ``name``; a `PlanError` if there is none, or more than one."""
        found = self.numbers_of(name, names)
        if not found:
            raise PlanError(f"{owner} has no column {name!r}.", hint=f"Its columns are {', '.join(names)}.")
        if len(found) > 1:
            raise PlanError(f"{owner} has {len(found)} columns called {name!r}.", hint="Rename all but one of them.")
        return found[0]

    def numbers_of(self, name: str, names: Sequence[str]) -> list[int]:
        """The numbers of all columns called ``name``."""
        if self.is_case_sensitive:
            return [number for number, other in enumerate(names) if other == name]
        return [number for number, other in enumerate(names) if other.casefold() == name.casefold()]

    def spelling(self, name: str, names: Sequence[str]) -> str | None:
        """The spelling of the one column called ``name``; None if there is none, or more than one."""
        found = self.numbers_of(name, names)
        return names[found[0]] if len(found) == 1 else None
