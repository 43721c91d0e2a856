"""The state machine at full size: ``make test-machine``.

Runs 10,000 actions and more per seed, then every guard taken out, then the explorations, and prints what was tried.
"""

import argparse
import time
from collections import Counter

from exploration import Bounds, explore
from mutations import GUARDS, found_without
from power_cuts import cut_everywhere
from protocol_machine import run_machine
from relation_machine import run_relation_machine
from relation_mutations import RELATION_GUARDS, relation_found_without
from relation_power_cuts import crash_everywhere, cut_relation_everywhere

ACTIONS_PER_EXAMPLE = 40
FULL = [
    Bounds(micro_batches=3, switches=1, crashes=0, starts=1),
    Bounds(micro_batches=1, switches=1, crashes=0, starts=1, glues=False),
    Bounds(micro_batches=1, switches=2, crashes=0, starts=1),
    Bounds(micro_batches=1, switches=1, crashes=1, starts=2),
    Bounds(micro_batches=2, switches=1, crashes=1, starts=2),
    Bounds(micro_batches=3, switches=1, crashes=1, starts=2),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--actions", type=int, default=10_000, help="at least, of each seed")
    parser.add_argument("--examples", type=int, default=1_000, help="at most, to find that a guard is out")
    parser.add_argument("--only", choices=["machine", "guards", "exploration", "relation"])
    chosen = parser.parse_args()
    if chosen.only in (None, "machine"):
        show_machine(chosen.seeds, chosen.actions)
    if chosen.only in (None, "guards"):
        show_guards(chosen.seeds, chosen.examples)
    if chosen.only in (None, "exploration"):
        show_exploration()
    if chosen.only in (None, "relation"):
        show_relation(chosen.seeds, chosen.actions, chosen.examples)


def show_relation(seeds: int, actions: int, examples: int) -> None:
    """The same for a relation's versions, pins and vacuums."""
    for seed in range(1, seeds + 1):
        started = time.perf_counter()
        tally = run_relation_machine(seed, actions // ACTIONS_PER_EXAMPLE, ACTIONS_PER_EXAMPLE)
        print(
            f"relation, seed {seed}: {tally.actions.total():,} actions, {tally.steps:,} steps on the disk, "
            f"{len(tally.disks):,} states after power cuts, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    for guard in RELATION_GUARDS:
        for seed in range(1, seeds + 1):
            print(f"  without {guard}, seed {seed}: ", end="", flush=True)
            print(relation_found_without(guard, seed, examples, ACTIONS_PER_EXAMPLE) or "no failure", flush=True)
    cuts = cut_relation_everywhere(most_states=16)
    print(f"power cuts at each of {cuts.steps} steps: {len(cuts.disks):,} distinct states, all go on")
    print(f"crashes at each of {crash_everywhere(cuts=4)} steps, then power cuts: all go on", flush=True)


def show_machine(seeds: int, actions: int) -> None:
    disks, refusals = set[int](), Counter[str]()
    for seed in range(1, seeds + 1):
        started, done, examples, steps, part = time.perf_counter(), 0, 0, 0, 0
        while done < actions:
            tally = run_machine(seed + 1_000 * part, 200, ACTIONS_PER_EXAMPLE)
            part += 1
            done += tally.actions.total()
            examples += tally.examples
            steps += tally.steps
            disks |= tally.disks
            refusals += tally.refusals
        seconds = time.perf_counter() - started
        print(
            f"seed {seed}: {done:,} actions in {examples} examples, {steps:,} steps on the disk, {seconds:.0f} s "
            f"({done / seconds:,.0f} actions/s, {steps / seconds:,.0f} steps/s)",
            flush=True,
        )
    print(f"distinct states of the disk after power cuts: {len(disks):,}")
    print("refusals:")
    for reason, count in refusals.most_common():
        print(f"  {count:6,}  {reason}")


def show_guards(seeds: int, examples: int) -> None:
    """Each guard taken out; and first none, with the same seeds and sizes: what fails there says nothing of a guard."""
    for guard in (None, *GUARDS):
        print("with every guard" if guard is None else f"without {guard}", flush=True)
        for seed in range(1, seeds + 1):
            found = found_without(guard, seed, examples, ACTIONS_PER_EXAMPLE)
            says = (
                "no failure"
                if found is None
                else f"{found.examples} examples, {found.actions:,} actions: {found.violation}"
            )
            print(f"  seed {seed}: {says}", flush=True)


def show_exploration() -> None:
    cuts = cut_everywhere(micro_batches=3, most_states=512)
    print(
        f"power cuts at each of {cuts.steps} steps: {len(cuts.disks):,} distinct states, of {cuts.not_all_tried} steps "
        "not all; all go on to the right rows",
        flush=True,
    )
    for bounds in FULL:
        started = time.perf_counter()
        explored = explore(bounds)
        print(
            f"{bounds}: {explored.states:,} states, {len(explored.disks):,} states of the disk, "
            f"{explored.ends:,} ends, {time.perf_counter() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
