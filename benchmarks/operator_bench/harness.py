"""Sizes and lines of the benchmark; what is measured, and how, is the lab's (`dovetail_lab.measure`)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail_lab.subjects import Subject, measured_factors, synthetic


@dataclass(frozen=True)
class Bar:
    """One line of the result: what was measured, what was asked for, and whether it was met (None: no bar)."""

    section: str
    point: str
    value: float
    bar: str
    is_met: bool | None
    details: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        verdict = {True: "met", False: "NOT met", None: ""}[self.is_met]
        notes = ", ".join(f"{name} {_short(value)}" for name, value in self.details.items())
        return f"  {self.point:<44} {_short(self.value):>9}   {self.bar:<34} {verdict:<8} {notes}".rstrip()


def _short(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, int | float)
        else str(value)
    )


class Report:
    """Collects bars and prints them as they come."""

    def __init__(self) -> None:
        self.bars: list[Bar] = []

    def heading(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def add(
        self, section: str, point: str, value: float, bar: str = "", is_met: bool | None = None, **details: Any
    ) -> None:
        self.bars.append(Bar(section, point, float(value), bar, is_met, details))
        print(self.bars[-1].line(), flush=True)


@dataclass(frozen=True)
class Sizes:
    """How much is measured: the default, and what ``--quick`` makes of it."""

    rows: int
    exponents: tuple[float, ...]
    budgets: tuple[float, ...]
    max_seconds: float

    def of_budgets(self, wanted: tuple[float, ...]) -> list[float]:
        """Those of a section's own budgets that are measured at this size."""
        return [percent for percent in wanted if percent in self.budgets]

    def of_exponents(self, wanted: tuple[float, ...]) -> list[float]:
        """Those of a section's own exponents that are measured at this size."""
        return [exponent for exponent in wanted if exponent in self.exponents]


FULL = Sizes(3_500_000, (0.0, 0.25, 0.5, 1.0), (0.5, 1.0, 5.0, 10.0), 1.2)
QUICK = Sizes(400_000, (0.0, 1.0), (1.0, 10.0), 0.12)


class Data(Subject):
    """The lab's synthetic relation at the benchmark's size; cost factors are measured in this run."""

    def __init__(self, directory: Path, sizes: Sizes) -> None:
        made = synthetic(directory, sizes.rows)
        source = made.stream(0.0, "ranked")
        super().__init__(made.relation, made.columns, source, lambda: measured_factors(directory))
        self.sizes = sizes
        self.directory = directory
