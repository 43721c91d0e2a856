"""What is known of the inputs before they start, and what to do with it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, get_args

import pyarrow as pa

from dovetail.errors import PlanError, SchemaError
from dovetail.operators.mjoin.spec import MJoinSpec

__all__ = ["BrokenPromisePolicy", "Goal", "Metadata", "Order", "Purging"]

Goal = Literal["rate", "memory"]
Purging = Literal["immediate", "batched"]
BrokenPromisePolicy = Literal["error", "quarantine", "count"]
Direction = Literal["ascending", "descending"]


@dataclass(frozen=True, slots=True)
class Order:
    """Rows arrive in the order of their join column, but for a slack.

    Parameters
    ----------
    direction
        ``"ascending"`` or ``"descending"``.
    slack
        How far behind the furthest value so far a row may be, in the units of the column; a `timedelta` for timestamps
        (microseconds) and dates (days). 0: not behind at all, though as often the same value as it likes.

    Examples
    --------
    >>> Order("descending", slack=5).slack
    5
    """

    direction: Direction = "ascending"
    slack: int | timedelta = 0

    def __post_init__(self) -> None:
        if self.direction not in get_args(Direction):
            raise PlanError(f"An order is ascending or descending, not {self.direction!r}.")
        units = self.slack // timedelta(microseconds=1) if isinstance(self.slack, timedelta) else self.slack
        if isinstance(units, bool) or not isinstance(units, int) or units < 0:
            raise PlanError(f"slack={self.slack!r}: a slack is a whole number, not below zero.")

    @classmethod
    def of(cls, written: "Order | str") -> "Order":
        """Read an order as users write it: an `Order`, ``"ascending"`` or ``"descending"``."""
        return written if isinstance(written, Order) else cls(written)  # type: ignore[arg-type]

    def slack_units(self, kind: pa.DataType) -> int:
        """The slack in the units of a column."""
        if isinstance(self.slack, timedelta):
            return self.slack // (timedelta(days=1) if pa.types.is_date(kind) else timedelta(microseconds=1))
        return self.slack


@dataclass(frozen=True)
class Metadata:
    """What a join may rely on and how it is to use it; punctuations come with the data.

    Parameters
    ----------
    keys
        Inputs in which no join value comes twice: the "one" of a one-to-many join.
    clustered
        Inputs whose rows of a join value come one after the other: when another value comes, that one is over.
    ordered
        Inputs that are ordered by the join column: ``"ascending"``, ``"descending"`` or an `Order`, by name.
    goal
        ``"rate"``: give results as fast as possible; ``"memory"``: hold as little as possible. It decides `purging`
        where that is not given.
    purging
        ``"immediate"``: what a punctuation closes goes when it arrives. ``"batched"``: when enough has come together.
    purge_count
        Batched: so many closed values (punctuations, ends of clusters, matched keys) are purged together. None: a
        sixteenth of the rows held, and at least 100.
    purge_memory
        Batched: purge when so much of the memory for state is taken.
    purge_when_idle
        Batched: purge when no input has anything to do.
    propagate
        Whether punctuations are passed on, to be fetched by `MetadataJoin.take_punctuations`.
    on_broken_promise
        What becomes of a row that its own input had promised not to send: ``"error"`` refuses it, ``"quarantine"`` puts
        it aside with the reason, ``"count"`` drops and counts it. It is never joined.
    memory_share
        The part of the budget for what was promised; past it, the join forgets promises, which is safe.
    is_batchwise
        Whether rows are offered in micro-batches within which their order is lost, each ended by
        `MetadataJoin.end_batch`. Order and clusters are then judged by micro-batches: a cluster has ended when a
        micro-batch has rows and none of it.

    Examples
    --------
    >>> Metadata(keys=["news"], goal="memory").purging_used
    'immediate'
    """

    keys: Collection[str] = ()
    clustered: Collection[str] = ()
    ordered: Mapping[str, Order | str] = field(default_factory=dict)
    goal: Goal = "rate"
    purging: Purging | None = None
    purge_count: int | None = None
    purge_memory: float = 0.9
    purge_when_idle: bool = True
    propagate: bool = True
    on_broken_promise: BrokenPromisePolicy = "error"
    memory_share: float = 0.0625
    is_batchwise: bool = False

    def __post_init__(self) -> None:
        choices: list[tuple[str, Any]] = [
            ("goal", Goal), ("purging", Purging), ("on_broken_promise", BrokenPromisePolicy),
        ]  # fmt: skip
        for name, allowed in choices:
            value = getattr(self, name)
            if value not in get_args(allowed) and not (name == "purging" and value is None):
                raise PlanError(f"{name}={value!r} is none of {', '.join(get_args(allowed))}.")
        count = self.purge_count
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise PlanError(f"purge_count={count!r}: values are purged together from 1 upwards.")
        if not 0 < self.purge_memory <= 1:
            raise PlanError(f"purge_memory={self.purge_memory!r}: a part of the memory is above 0 and at most 1.")
        if not 0 < self.memory_share <= 0.25:
            raise PlanError(f"memory_share={self.memory_share!r}: promises get at most a quarter of the budget.")
        for name in ("keys", "clustered"):
            if isinstance(getattr(self, name), str):
                raise PlanError(f"{name}={getattr(self, name)!r}: give the names of inputs, in a list.")
        orders = {name: Order.of(order) for name, order in self.ordered.items()}
        object.__setattr__(self, "ordered", orders)

    @property
    def purging_used(self) -> Purging:
        """How state is purged, by the goal where nothing else was said."""
        if self.purging is not None:
            return self.purging
        return "immediate" if self.goal == "memory" else "batched"

    def check(self, spec: MJoinSpec) -> None:
        """Refuse what cannot be promised of the inputs of this join."""
        if not spec.is_star or len(spec.attributes) > 1:
            raise PlanError(
                "Metadata speaks of the one join attribute that all inputs share, and these do not share one.",
                hint="Join inputs on the same columns, or leave the metadata out.",
            )
        for option in ("keys", "clustered", "ordered"):
            for name in getattr(self, option):
                if name not in spec.names:
                    raise PlanError(f"{option}= names {name!r}; the inputs are {', '.join(spec.names)}.")
        for name, order in self.ordered.items():
            assert isinstance(order, Order)
            columns = spec.attributes[0].columns[name]
            if len(columns) > 1:
                raise PlanError(
                    f"ordered= for {name!r}: an order is of one join column, and there are {len(columns)}.",
                    hint="Use clustered=, or punctuations on one of the columns.",
                )
            kind = spec.schemas[name].field(columns[0]).type
            if spec.hashed[0] and (order.slack != 0 or pa.types.is_boolean(kind)):
                raise SchemaError(
                    f"ordered= for {name!r}: {kind} values have no distance that a slack could be.",
                    hint="Leave the slack out.",
                )

    def fingerprint(self) -> dict[str, Any]:
        """What saved state depends on."""
        orders = {name: Order.of(order) for name, order in self.ordered.items()}
        return {
            "keys": sorted(self.keys),
            "clustered": sorted(self.clustered),
            "ordered": {name: [order.direction, str(order.slack)] for name, order in sorted(orders.items())},
        }

    def algorithm(self, spec: MJoinSpec) -> str:
        """Which of the paper's algorithms this is: ``1-NP``, ``1-NC``, or ``general`` where it names none.

        A one-to-many join has all inputs but one unique by the join column; it is 1-NC where the "many" is clustered or
        ordered, 1-NP otherwise.
        """
        many = [name for name in spec.names if name not in self.keys]
        if len(many) > 1 or not self.keys:
            return "general"
        return "1-NC" if set(many) & (set(self.clustered) | set(self.ordered)) else "1-NP"
