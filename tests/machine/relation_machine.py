"""Random lives of a relation on a simulated disk, by seed."""

import itertools
import random
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
from relation_world import RelationTally, World

from dovetail.relation import segment_reader, shard_writer, version_log

__all__ = ["run_relation_machine"]

WRITES = ("build", "append", "upsert", "upsert", "upsert_if_latest", "delete")
MOST_PROCESSES = 3
HOLDERS = 2


def run_relation_machine(seed: int, examples: int, actions: int) -> RelationTally:
    """Try this many examples of this many actions. A `Violation` says how to come back to it."""
    tally = RelationTally()
    for example in range(examples):
        tally.examples += 1
        generator = random.Random(f"{seed}/{example}")
        try:
            with alone(generator):
                live(World(tally, generator), generator, actions)
        except Exception as error:
            tally.failed_after = (tally.examples, tally.actions.total())
            error.add_note(f"seed {seed}, example {example}, {actions} actions an example")
            error.tally = tally  # type: ignore[attr-defined]
            raise
    return tally


def live(world: World, generator: random.Random, actions: int) -> None:
    """One example."""
    first = world.start("build")
    if generator.random() < 0.7:
        world.run_to_end(first)
    for _ in range(actions):
        act = generator.choices(("begin", "advance", "end", "kill", "power cut", "time"), weights=(8, 12, 6, 1, 1, 1))[
            0
        ]
        world.tally.actions[act] += 1
        if act == "begin":
            begin(world, generator)
        elif act == "power cut":
            world.power_cut()
        elif act == "time":
            world.disk.clock_s += generator.choice((60, 400, 700))
        elif world.running:
            action = generator.choice(world.running)
            if act == "advance":
                world.advance(action, generator.choice((1, 2, 5, 20)))
            elif act == "end":
                world.run_to_end(action)
            else:
                world.kill(action)
    world.finish()


def begin(world: World, generator: random.Random) -> None:
    kind = generator.choice((*WRITES, "vacuum", "vacuum", "pin", "pin", "release", "read"))
    holders = [action for action in world.running if action.holder]
    if len(world.running) == MOST_PROCESSES or (kind in ("pin", "release") and len(holders) == HOLDERS):
        return
    if len(world.hosts) > 1:
        # A vacuum runs where the writers do: its lock does not reach others, see Relation.vacuum.
        others = {action.kind for action in world.running}
        if (kind == "vacuum" and others & {*WRITES, "vacuum"}) or (kind in WRITES and "vacuum" in others):
            return
    world.start(kind, keep=generator.choice((1, 1, 2)))


@contextmanager
def alone(generator: random.Random) -> Iterator[None]:
    """The same ids for the same seed, early merges, and nothing in the host's temporary directory."""
    numbers = itertools.count(1)

    def next_id() -> uuid.UUID:
        return uuid.UUID(int=(next(numbers) << 96) + generator.getrandbits(64))

    patches = [
        mock.patch.object(uuid, "uuid4", next_id),
        mock.patch.object(
            segment_reader, "verification_marks", lambda files, digest, n, unit="": np.zeros(n, np.uint8)
        ),
        mock.patch.object(version_log, "forget_marks"),
        mock.patch.object(shard_writer, "MAX_SEGMENTS", 2),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
