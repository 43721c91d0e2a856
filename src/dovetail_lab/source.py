"""Which code a result is of, and how busy the machine was."""

import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path

from dovetail.core import version

__all__ = ["commit", "load", "source_digest"]

_PACKAGES = (Path(version.__file__).parent.parent, Path(__file__).parent)


@cache
def source_digest() -> str:
    """A digest of the Python code of the engine and of the lab: what a result depends on, whatever else a commit has.

    Examples
    --------
    >>> len(source_digest())
    16
    """
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted(package.rglob("*.py")):
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def commit() -> str:
    """The commit of a checkout, with "+" if files were changed since; empty outside of one."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--dirty=+"],
            cwd=_PACKAGES[1],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def load() -> float:
    """Processes that ran or waited for a core, on average over the last minute."""
    return round(os.getloadavg()[0], 2)
