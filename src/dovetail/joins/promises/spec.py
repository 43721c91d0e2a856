"""What is known about the inputs in advance, and how to use it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, get_args

import pyarrow as pa

from dovetail.core.errors import PlanError, SchemaError
from dovetail.joins.multiway.spec import MJoinSpec

__all__ = ["BrokenPromisePolicy", "Goal", "Metadata", "Order", "Purging"]

Goal = Literal["rate", "memory"]
Purging = Literal["immediate", "batched"]
BrokenPromisePolicy = Literal["error", "quarantine", "count"]
Direction = Literal["ascending", "descending"]


@dataclass(frozen=True, slots=True)
class Order:
    """Rows arrive in the order of their join column, up to a slack.

    Parameters
    ----------
    direction
        ``"ascending"`` or ``"descending"``.
    slack
        How far a row may be behind the furthest value so far, in units of the column; a `timedelta` for timestamps
        (microseconds) and dates (days). 0 allows repeated values, but none behind.

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
            raise PlanError(f"slack={self.slack!r}: a slack is an integer of at least 0.")

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
    """What a join may rely on and how it uses it; punctuations come with the data.

    Parameters
    ----------
    keys
        Inputs in which no join value occurs twice: the "one" of a one-to-many join. With a window, a second row is
        reported until the watermark has passed the window of the first; see `MetadataJoin`.
    clustered
        Inputs whose rows with one join value are contiguous: another value ends it.
    ordered
        Inputs ordered by the join column, by name: ``"ascending"``, ``"descending"`` or an `Order`.
    goal
        ``"rate"``: emit results as fast as possible; ``"memory"``: hold as little as possible. The default of `purging`
        depends on it.
    purging
        ``"immediate"``: purge what a punctuation closes when it arrives. ``"batched"``: when enough has accumulated.
    purge_count
        Batched: purge after this many closed values (punctuations, ends of clusters, matched keys). None: a sixteenth
        of the rows held, at least 100.
    purge_memory
        Batched: purge when this share of the memory for state is used.
    purge_when_idle
        Batched: purge when no input has work.
    propagate
        Whether punctuations are propagated, to be fetched with `MetadataJoin.take_punctuations`.
    on_broken_promise
        What to do with a row that its own input had promised not to send: ``"error"`` refuses it, ``"quarantine"``
        keeps it apart with the reason, ``"count"`` drops and counts it. It is never joined.
    memory_share
        The share of the budget for promises; beyond it the join forgets promises, which is safe.
    is_batchwise
        Whether rows are offered in micro-batches without order, each ended by `MetadataJoin.end_batch`. Order and
        clusters are then checked by micro-batch: a cluster has ended when a micro-batch has rows, but none of it.

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
            raise PlanError(f"purge_count={count!r}: must be at least 1.")
        if not 0 < self.purge_memory <= 1:
            raise PlanError(f"purge_memory={self.purge_memory!r}: must be above 0 and at most 1.")
        if not 0 < self.memory_share <= 0.25:
            raise PlanError(f"memory_share={self.memory_share!r}: promises get at most a quarter of the budget.")
        for name in ("keys", "clustered"):
            if isinstance(getattr(self, name), str):
                raise PlanError(f"{name}={getattr(self, name)!r}: give the names of inputs, in a list.")
        orders = {name: Order.of(order) for name, order in self.ordered.items()}
        object.__setattr__(self, "ordered", orders)

    @property
    def purging_used(self) -> Purging:
        """The purging mode, by default derived from the goal."""
        if self.purging is not None:
            return self.purging
        return "immediate" if self.goal == "memory" else "batched"

    def check(self, spec: MJoinSpec) -> None:
        """Refuse promises that make no sense for the inputs of this join."""
        if not spec.is_star or len(spec.attributes) > 1:
            attributes = " and ".join(f"{a.name} ({', '.join(a.inputs)})" for a in spec.attributes)
            raise PlanError(
                "Promises refer to one join attribute that all inputs share, but these inputs are joined on "
                f"{attributes}.",
                hint="Join all inputs on the same columns, or leave keys=, punctuations=, clustered= and ordered= out.",
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
                    f"ordered= for {name!r}: an order needs one join column, and there are {len(columns)}.",
                    hint="Use clustered=, or punctuations on one of the columns.",
                )
            kind = spec.schemas[name].field(columns[0]).type
            if spec.hashed[0] and (order.slack != 0 or pa.types.is_boolean(kind)):
                raise SchemaError(
                    f"ordered= for {name!r}: {kind} values have no distances, so they cannot have a slack.",
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
        """The paper's algorithm: ``1-NP``, ``1-NC``, or ``general`` if it names none.

        In a one-to-many join all inputs but one are unique by the join column. It is 1-NC if the "many" is clustered or
        ordered, else 1-NP.
        """
        many = [name for name in spec.names if name not in self.keys]
        if len(many) > 1 or not self.keys:
            return "general"
        return "1-NC" if set(many) & (set(self.clustered) | set(self.ordered)) else "1-NP"
