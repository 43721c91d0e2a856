"""Verdicts: whether a paper's claim holds here, and what a check was before it was changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

__all__ = ["OUTCOMES", "ChangedCheck", "Half", "Outcome", "Verdict"]

Outcome = Literal["confirmed", "confirmed with a different factor", "not testable here", "not confirmed"]
OUTCOMES: tuple[Outcome, ...] = (
    "confirmed",
    "confirmed with a different factor",
    "not testable here",
    "not confirmed",
)
"""From the best for the paper to the worst."""


@dataclass(frozen=True)
class Half:
    """The verdict of one half of a claim that says two things."""

    claim: str  # a few words, such as "model"
    outcome: Outcome


@dataclass(frozen=True)
class ChangedCheck:
    """A check that was changed after results had been seen, which a reader must know."""

    old: str
    new: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """Whether the paper's claim holds here.

    Examples
    --------
    >>> Verdict.of(shape=True, factor=False, numbers="3.1 times", explanation="the window's entries are larger").outcome
    'confirmed with a different factor'
    >>> Verdict.of(shape=False, numbers="0.8 times", explanation="a seek costs as much as 480 kB").outcome
    'not confirmed'
    >>> Verdict.of_halves({"model": "confirmed", "small buffers": "not confirmed"}, numbers="2 %").text
    'model: confirmed; small buffers: not confirmed'
    """

    outcome: Outcome  # "with a different factor": the shape holds, the numbers differ; of halves: the worst
    numbers: str  # the measured values, as a sentence
    explanation: str = ""  # why it differs from the paper, if it does
    halves: tuple[Half, ...] = ()  # where a claim says two things

    @classmethod
    def of(cls, *, shape: bool, factor: bool = True, numbers: str, explanation: str = "") -> Self:
        """The verdict of two checks: whether the claim's shape and its factor hold."""
        outcome: Outcome = "not confirmed"
        if shape:
            outcome = "confirmed" if factor else "confirmed with a different factor"
        return cls(outcome, numbers, explanation)

    @classmethod
    def of_halves(cls, halves: Mapping[str, Outcome], *, numbers: str, explanation: str = "") -> Self:
        """The verdicts of a claim that says several things."""
        worst = max(halves.values(), key=OUTCOMES.index)
        return cls(worst, numbers, explanation, tuple(Half(claim, outcome) for claim, outcome in halves.items()))

    @classmethod
    def not_testable(cls, *, numbers: str, explanation: str) -> Self:
        """The claim is about something that cannot be had here, such as data that nobody published."""
        return cls("not testable here", numbers, explanation)

    @property
    def text(self) -> str:
        """The outcome, or those of the halves."""
        return "; ".join(f"{half.claim}: {half.outcome}" for half in self.halves) or self.outcome
