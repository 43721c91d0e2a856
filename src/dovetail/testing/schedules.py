"""Schedules: sequences of actions in a test of a semi-stream join.

A schedule is a list of actions, each a tuple whose first item names it:

=============================  ======================================================================================
action                         what the driver does
=============================  ======================================================================================
``("offer", batch)``           offers a batch, or the one with this number among the driver's batches
``("step",)``                  one disk step
``("drain",)``                 steps until nothing waits
``(..., after)``               one of these three, but the iterator is closed after ``after`` batches; the part of an
                               offered batch that was not accepted is offered before the next offer or drain
``("snapshot_restore",)``      takes a snapshot, restores it in a new operator, and continues with that
``("call", fn)``               calls ``fn(operator)``: changes w, b or the budget
=============================  ======================================================================================

Examples
--------
>>> random_schedule(seed=2, n_batches=2, snapshots=False)
[('offer', 0), ('offer', 1), ('step',), ('drain',)]
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pyarrow as pa

__all__ = ["Action", "Call", "describe_action", "random_schedule"]

#: Changes a parameter of a running operator.
Call = Callable[[Any], object]

Action = (
    tuple[Literal["offer"], int | pa.RecordBatch]
    | tuple[Literal["offer"], int | pa.RecordBatch, int]
    | tuple[Literal["step", "drain"]]
    | tuple[Literal["step", "drain"], int]
    | tuple[Literal["snapshot_restore"]]
    | tuple[Literal["call"], Call]
)


def random_schedule(
    seed: int,
    n_batches: int,
    snapshots: bool = True,
    calls: Sequence[Call] = (),
    mean_actions_between: float = 1.5,
    give_ups: bool = False,
) -> list[Action]:
    """Offer all batches in order with other actions in between, and drain at the end; the same for the same seed.

    Parameters
    ----------
    snapshots
        Whether to snapshot and restore sometimes; needs a driver that can create a new operator.
    calls
        Changes to make, each any number of times.
    mean_actions_between
        The mean number of actions between two offers. 0 offers everything at once.
    give_ups
        Whether to close about every third iterator after a few batches.
    """
    chance = random.Random(seed)
    go_on = mean_actions_between / (1 + mean_actions_between)
    schedule: list[Action] = []
    # One round more than batches, for actions before the first offer.
    for number in range(n_batches + 1):
        while chance.random() < go_on:
            schedule.append(_perhaps_given_up(_random_action(chance, snapshots, calls), chance, give_ups))
        if number < n_batches:
            schedule.append(_perhaps_given_up(("offer", number), chance, give_ups))
    schedule.append(("drain",))
    return schedule


def describe_action(action: Action) -> str:
    """Describe the action in a few words, for messages.

    >>> describe_action(("offer", 3)), describe_action(("call", len)), describe_action(("drain", 2))
    ('offer 3', 'call len', 'drain, given up after 2')
    """
    match action:
        case ("offer", batch, int(after)):
            return f"{describe_action(('offer', batch))}, given up after {after}"
        case ("step" | "drain" as kind, int(after)):
            return f"{kind}, given up after {after}"
        case ("offer", int(number)):
            return f"offer {number}"
        case ("offer", batch):
            return f"offer {batch.num_rows} rows"
        case ("call", change):
            return f"call {getattr(change, '__name__', repr(change))}"
        case _:
            return action[0]


def _random_action(chance: random.Random, snapshots: bool, calls: Sequence[Call]) -> Action:
    weights = {"step": 10, "drain": 1, "snapshot_restore": 2 if snapshots else 0, "call": 3 if calls else 0}
    (kind,) = chance.choices(list(weights), list(weights.values()))
    match kind:
        case "call":
            return ("call", chance.choice(calls))
        case "snapshot_restore":
            return ("snapshot_restore",)
        case "drain":
            return ("drain",)
        case _:
            return ("step",)


def _perhaps_given_up(action: Action, chance: random.Random, give_ups: bool) -> Action:
    if not give_ups or chance.random() < 2 / 3:
        return action
    match action:
        case ("offer", int(number)):
            return ("offer", number, chance.randint(1, 3))
        case ("step",):
            return ("step", chance.randint(1, 2))
        case ("drain",):
            return ("drain", chance.randint(1, 4))
        case _:
            return action
