"""The directory of compiled kernels, shared by processes."""

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import numba

FORCE_BUCKETS_VARIABLE = "DOVETAIL_FORCE_BUCKETS"


def choose_cache_directory(configured: str = "") -> Path:
    """Return a directory for compiled code that only this user can write to, creating it if necessary.

    It is below `configured` (numba's own setting) if given, else below ``$XDG_CACHE_HOME/dovetail`` or
    ``~/.cache/dovetail``. If neither can be used, it is a temporary directory, removed at exit.
    """
    name = _directory_name()
    parents = [Path(configured)] if configured else _default_parents()
    for parent in parents:
        directory = parent / name
        if _is_private(directory):
            return directory
    temporary = Path(tempfile.mkdtemp(prefix="dovetail-kernels-"))
    # A forked child may run this hook too: only the creator removes the directory.
    creator = os.getpid()
    atexit.register(lambda: shutil.rmtree(temporary, ignore_errors=True) if os.getpid() == creator else None)
    return temporary


def _directory_name() -> str:
    """A name that covers everything the compiled code depends on.

    numba recompiles a function when its own file changes, but not when a function inlined from another file changes.
    The name therefore contains a hash of all kernel sources.
    """
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = f"numba-{numba.__version__}-py{version}-{sources.hexdigest()[:12]}"
    buckets = os.environ.get(FORCE_BUCKETS_VARIABLE, "")
    return f"{name}-buckets-{buckets}" if buckets else name


def _default_parents() -> list[Path]:
    parents = []
    if configured := os.environ.get("XDG_CACHE_HOME"):
        parents.append(Path(configured) / "dovetail")
    # Without a home directory, only the temporary directory remains.
    with contextlib.suppress(RuntimeError):
        parents.append(Path.home() / ".cache" / "dovetail")
    return parents


def _is_private(directory: Path) -> bool:
    """Create `directory` if missing and return whether only this user can write to it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError:
        return False
    is_ours = status.st_uid == os.geteuid()
    is_closed_to_others = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_ours and is_closed_to_others and os.access(directory, os.W_OK | os.X_OK)
