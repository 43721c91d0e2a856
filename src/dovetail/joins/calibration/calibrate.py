"""Measures the cost factors of this machine with the operators' own kernels, and stores them."""

import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dovetail.core.errors import PlanError
from dovetail.costs.costs import CostFactors, Curve
from dovetail.costs.host import (
    MAX_AGE_DAYS,
    HostCosts,
    default_path,
    fingerprint,
    load_costs,
    store_costs,
)
from dovetail.joins.calibration.cpu import measure_cpu
from dovetail.joins.calibration.disk import DiskTimes, measure_disk

__all__ = ["calibrate", "host_costs", "measure"]

DiskAccess = Literal["direct", "cached"]

_TABLE_ENTRIES = (1 << 12, 1 << 16, 1 << 20)
_QUICK_ENTRIES, _QUICK_BYTES = (1 << 12, 1 << 14), 1 << 24


def calibrate(
    path: str | os.PathLike[str] | None = None,
    force: bool = False,
    *,
    disk: DiskAccess = "direct",
    directory: str | os.PathLike[str] | None = None,
    max_age_days: float = MAX_AGE_DAYS,
) -> CostFactors:
    """This machine's cost factors, measured if they are not stored yet.

    Measuring takes a few seconds and a scratch file of 256 MB.

    Parameters
    ----------
    path
        Where the factors are stored; by default `default_path`.
    force
        Measure even if the stored factors are still valid.
    disk
        ``"direct"``: reads that go to the disk. ``"cached"``: reads of pages that are in memory.
    directory
        A directory on the disk to measure; by default the one for temporary files.
    max_age_days
        Older stored factors are measured again.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> kept = CostFactors.of_papers()
    >>> with tempfile.TemporaryDirectory() as scratch:
    ...     path = pathlib.Path(scratch) / "factors.json"
    ...     store_costs(path, fingerprint(scratch), HostCosts(kept, kept))
    ...     calibrate(path, directory=scratch) == kept
    True
    """
    if disk not in ("direct", "cached"):
        raise PlanError(f"disk={disk!r} is not a way to read.", hint="Use 'direct' or 'cached'.")
    target = default_path() if path is None else Path(path)
    machine = fingerprint(directory)
    kept = None if force else load_costs(target, machine, max_age_days)
    if kept is None or kept.is_quick:
        measured = measure(directory)
        kept = HostCosts(measured["direct"], measured["cached"])
        _keep(target, machine, kept)
    return kept.direct if disk == "direct" else kept.cached


def host_costs() -> HostCosts:
    """This host's costs: stored ones, or a quick measurement, which is stored until there is a better one."""
    target, machine = default_path(), fingerprint()
    kept = load_costs(target, machine)
    if kept is None:
        measured = measure(table_entries=_QUICK_ENTRIES, scratch_bytes=_QUICK_BYTES, repeats=1)
        kept = HostCosts(measured["direct"], measured["cached"], is_quick=True)
        _keep(target, machine, kept)
    return kept


def _keep(path: Path, machine: dict[str, Any], costs: HostCosts) -> None:
    try:
        store_costs(path, machine, costs)
    except OSError as error:
        warnings.warn(f"The cost factors could not be stored in {path}: {error}", RuntimeWarning, stacklevel=3)


def measure(
    directory: str | os.PathLike[str] | None = None,
    *,
    table_entries: Sequence[int] = _TABLE_ENTRIES,
    scratch_bytes: int = 1 << 28,
    repeats: int = 7,
) -> dict[DiskAccess, CostFactors]:
    """Measure every factor now; returns them for reads from the disk (``"direct"``) and cached pages (``"cached"``).

    The scratch file is in `directory`, by default the one for temporary files. Each value is the median of `repeats`
    measurements; hash tables are measured at the ascending sizes `table_entries`.

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
            page_read_s=Curve(times.page_read_s),
            **cpu,
        )
        for access, times in disks.items()
    }
