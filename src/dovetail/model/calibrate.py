"""Measure the cost factors on this machine, with the operators' own kernels, and keep them.

What is kept is a JSON file in the user's cache directory, with a fingerprint of the machine (processor,
cores, versions of what was measured). It is measured again when the fingerprint differs, when it is older
than a month, or on request.
"""

import json
import os
import platform
import tempfile
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numba

from dovetail.errors import PlanError
from dovetail.kernels.hashing import FORCE_BUCKETS
from dovetail.model._cpu import measure_cpu
from dovetail.model._disk import DiskTimes, measure_disk
from dovetail.model.costs import CostFactors

__all__ = ["calibrate", "default_path", "fingerprint", "measure"]

DiskAccess = Literal["direct", "cached"]

_FORMAT = 3
_MAX_AGE_DAYS = 30
_TABLE_ENTRIES = (1 << 12, 1 << 16, 1 << 20)


def calibrate(
    path: str | os.PathLike[str] | None = None,
    force: bool = False,
    *,
    disk: DiskAccess = "direct",
    directory: str | os.PathLike[str] | None = None,
    max_age_days: float = _MAX_AGE_DAYS,
) -> CostFactors:
    """Give this machine's cost factors, measuring them if they are not known yet.

    Measuring takes a few seconds and a scratch file of 256 MB.

    Parameters
    ----------
    path
        Where the factors are kept; by default `default_path`.
    force
        Measure even if what is kept is still valid.
    disk
        ``"direct"``: reads that go to the disk. ``"cached"``: reads of pages that are in memory.
    directory
        A directory on the disk to be measured; by default the one for temporary files.
    max_age_days
        What is kept counts as stale when it is older.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> kept = CostFactors.of_papers()
    >>> with tempfile.TemporaryDirectory() as scratch:
    ...     path = pathlib.Path(scratch) / "factors.json"
    ...     _store(path, fingerprint(scratch), {"direct": kept, "cached": kept})
    ...     calibrate(path, directory=scratch) == kept
    True
    """
    if disk not in ("direct", "cached"):
        raise PlanError(f"disk={disk!r} is not a way to read.", hint="Use 'direct' or 'cached'.")
    target = default_path() if path is None else Path(path)
    machine = fingerprint(directory)
    if not force:
        kept = _load(target, machine, max_age_days)
        if kept is not None:
            return kept[disk]
    measured = measure(directory)
    try:
        _store(target, machine, measured)
    except OSError as error:
        warnings.warn(f"The cost factors could not be kept in {target}: {error}", RuntimeWarning, stacklevel=2)
    return measured[disk]


def default_path() -> Path:
    """The file in which cost factors are kept: ``calibration.json`` in the user's cache directory.

    Examples
    --------
    >>> default_path().name
    'calibration.json'
    """
    configured = os.environ.get("XDG_CACHE_HOME")
    parent = Path(configured) if configured else Path.home() / ".cache"
    return parent / "dovetail" / "calibration.json"


def fingerprint(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """What measured costs depend on: processor, cores, versions, and the device of the scratch directory.

    Examples
    --------
    >>> fingerprint() == fingerprint()
    True
    """
    scratch = Path(tempfile.gettempdir() if directory is None else directory)
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("dovetail", "numba", "numpy", "pyarrow")},
        "compiled": not numba.config.DISABLE_JIT,
        "force_buckets": FORCE_BUCKETS,
        "device": scratch.stat().st_dev,
    }


def measure(
    directory: str | os.PathLike[str] | None = None,
    *,
    table_entries: Sequence[int] = _TABLE_ENTRIES,
    scratch_bytes: int = 1 << 28,
    repeats: int = 7,
) -> dict[DiskAccess, CostFactors]:
    """Measure every factor now.

    Parameters
    ----------
    directory
        Where the scratch file is written; by default the directory for temporary files.
    table_entries
        Sizes at which hash tables are measured, ascending.
    scratch_bytes
        Size of the scratch file.
    repeats
        Each measurement is repeated so often, and the median taken.

    Returns
    -------
    dict
        The factors with reads that go to the disk (``"direct"``) and with reads of cached pages
        (``"cached"``).

    Examples
    --------
    >>> factors = measure(table_entries=(256,), scratch_bytes=1 << 23, repeats=1)
    >>> sorted(factors), factors["direct"].probe_s.at(256) > 0
    (['cached', 'direct'], True)
    """
    scratch = Path(tempfile.gettempdir() if directory is None else directory)
    cpu = measure_cpu(tuple(table_entries), repeats)
    reads = 32 * repeats
    disks: dict[DiskAccess, DiskTimes] = {
        "direct": measure_disk(scratch, scratch_bytes, bypass_page_cache=True, reads=reads),
        "cached": measure_disk(scratch, scratch_bytes, bypass_page_cache=False, reads=reads),
    }
    return {
        access: CostFactors(
            seek_s=times.seek_s,
            bandwidth_bytes_per_s=times.bandwidth_bytes_per_s,
            read_call_s=times.read_call_s,
            **cpu,
        )
        for access, times in disks.items()
    }


def _processor() -> str:
    """The processor's model name; the platform module knows it on few systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _load(path: Path, machine: dict[str, Any], max_age_days: float) -> dict[DiskAccess, CostFactors] | None:
    """What is kept, or None if there is nothing, or nothing that is valid here and now."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        warnings.warn(f"{path} cannot be read and is measured again: {error}", RuntimeWarning, stacklevel=3)
        return None
    if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("machine") != machine:
        return None
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(data["measured_at"])
        factors: dict[DiskAccess, CostFactors] = {
            "direct": CostFactors.from_dict(data["factors"]["direct"]),
            "cached": CostFactors.from_dict(data["factors"]["cached"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        warnings.warn(f"{path} is damaged and is measured again: {error}", RuntimeWarning, stacklevel=3)
        return None
    # A date in the future is a clock that was wrong then, or is now.
    return factors if 0 <= age.total_seconds() <= max_age_days * 86_400 else None


def _store(path: Path, machine: dict[str, Any], measured: dict[DiskAccess, CostFactors]) -> None:
    data = {
        "format": _FORMAT,
        "measured_at": datetime.now(UTC).isoformat(),
        "machine": machine,
        "factors": {access: factors.as_dict() for access, factors in measured.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that a reader never meets half a file.
    descriptor, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, allow_nan=False)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
