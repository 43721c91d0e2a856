"""From what a user names, pipeline files or checkpoints, to the checkpoints to look at."""

import os
from collections.abc import Sequence
from pathlib import Path

from dovetail.core.errors import PlanError

__all__ = ["checkpoint_of", "checkpoints_of"]

_DEPTH = 4


def checkpoint_of(place: str) -> str:
    """The checkpoint that a pipeline file names, or that a directory is."""
    if os.path.isdir(place):
        return os.path.abspath(place)
    from dovetail.pipeline.checks import local_path
    from dovetail.pipeline.loading import parse_pipeline

    described, file = parse_pipeline(place)
    return local_path(described.checkpoint, file)


def checkpoints_of(places: Sequence[str]) -> list[str]:
    """The checkpoints that were named; without names, those below the working directory."""
    found = [checkpoint_of(place) for place in places] or _below(Path.cwd())
    if not found:
        raise PlanError(
            "There is no flow's checkpoint in or below this directory.",
            hint="Name a pipeline file, or the checkpoint directory of a flow.",
        )
    return list(dict.fromkeys(found))


def _below(root: Path) -> list[str]:
    """Checkpoints a few directories deep; nothing below a checkpoint, and nothing hidden, is searched."""
    found, level = [], [root]
    for _ in range(_DEPTH):
        deeper: list[Path] = []
        for directory in level:
            if (directory / "dovetail" / "flow.json").is_file():
                found.append(str(directory))
                continue
            try:
                inside = sorted(path for path in directory.iterdir() if path.name[0] not in "._" and path.is_dir())
            except OSError:
                continue
            deeper += inside
        level = deeper
    return found
