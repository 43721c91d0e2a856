"""The order of a pipeline's steps: one chain from its sources to its sink."""

from dataclasses import dataclass

from dovetail.pipeline.documents import Document
from dovetail.pipeline.models import Pipeline
from dovetail.pipeline.problems import Problem, one_of

__all__ = ["Chain", "chain_of"]


@dataclass(frozen=True)
class Chain:
    """The steps in processing order."""

    inputs: tuple[str, ...]  # one source, or the inputs of a join of streams
    steps: tuple[int, ...]  # numbers of steps in the file


def chain_of(pipeline: Pipeline, document: Document) -> tuple[Chain, list[Problem]]:
    """Put the steps in order, and return any problems with the order."""
    problems: list[Problem] = []
    sources, steps = list(pipeline.sources), pipeline.steps
    numbers: dict[str, int] = {}
    for number, step in enumerate(steps):
        if step.name is None:
            continue
        if step.name in numbers or step.name in sources:
            problems.append(
                document.problem(("steps", number, "name"), f"{step.name!r} is already the name of another.")
            )
        numbers.setdefault(step.name, number)
    taken: dict[str | int, int] = {}
    input_of: dict[int, str | int] = {}
    for number, step in enumerate(steps):
        at = ("steps", number)
        wanted: list[str | int] = []
        if step.multi_join is not None:
            if step.source is not None:
                problems.append(document.problem((*at, "from"), "multi_join names its inputs itself.", "Remove from."))
            for place, name in enumerate(step.multi_join.inputs):
                if name not in sources:
                    where = (*at, "multi_join", "inputs", place)
                    problems.append(document.problem(where, f"There is no source {name!r}.", one_of(name, sources)))
                else:
                    wanted.append(name)
        elif step.source is not None:
            if step.source in numbers:
                wanted.append(numbers[step.source])
            elif step.source in sources:
                wanted.append(step.source)
            else:
                known = [*sources, *numbers]
                problem = document.problem(
                    (*at, "from"), f"There is no source or step {step.source!r}.", one_of(step.source, known)
                )
                problems.append(problem)
        elif number:
            wanted.append(number - 1)
        elif len(sources) == 1:
            wanted.append(sources[0])
        else:
            problems.append(
                document.problem(at, f"There are several sources: {', '.join(sources)}.", "Say which with from:.")
            )
        for one in wanted:
            if one in taken:
                told = one if isinstance(one, str) else steps[one].name or f"step {one}"
                problems.append(
                    document.problem(
                        (*at, "from"),
                        f"{told!r} is used by two steps, but a pipeline is one chain.",
                        "Write a second pipeline for the other branch.",
                    )
                )
            taken.setdefault(one, number)
        if wanted:
            input_of[number] = wanted[0]
    problems += _cycles(pipeline, document, input_of)
    if problems:
        return Chain((), ()), problems
    unused = [name for name in sources if name not in taken] if steps else sources[1:]
    problems += [
        document.problem(("sources", name), "No step uses this source.", "Remove it, or name it in from:.")
        for name in unused
    ]
    ends = [number for number in range(len(steps)) if number not in taken]
    if len(ends) > 1:
        told = " and ".join(steps[end].name or f"step {end}" for end in ends[:2])
        problems.append(
            document.problem(
                ("steps", ends[0]), f"There are two ends, {told}, but one sink.", "Join them in one chain."
            )
        )
    if problems:
        return Chain((), ()), problems
    return _ordered(pipeline, ends[0] if ends else None, input_of), []


def _ordered(pipeline: Pipeline, end: int | None, input_of: dict[int, str | int]) -> Chain:
    order: list[int] = []
    here: str | int | None = end
    while isinstance(here, int):
        order.append(here)
        here = input_of[here]
    order.reverse()
    first = pipeline.steps[order[0]].multi_join if order else None
    inputs = tuple(first.inputs) if first is not None else (str(here or next(iter(pipeline.sources))),)
    return Chain(inputs, tuple(order))


def _cycles(pipeline: Pipeline, document: Document, input_of: dict[int, str | int]) -> list[Problem]:
    for start in input_of:
        seen = [start]
        here = input_of[start]
        while isinstance(here, int) and here in input_of and here not in seen:
            seen.append(here)
            here = input_of[here]
        if here == start:
            names = [pipeline.steps[number].name or f"step {number}" for number in reversed([*seen, start])]
            told = " -> ".join(names)
            return [document.problem(("steps", start, "from"), f"The steps form a cycle: {told}.")]
    return []
