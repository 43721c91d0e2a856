"""The costs of operations on this host, measured once and stored.

They are in a JSON file in the user's cache directory, with a fingerprint of the machine (processor, cores, versions of
what was measured). They are measured again when the fingerprint or the format differs, when they are older than a
month, or on request.
"""

import json
import logging
import os
import platform
import tempfile
import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba

from dovetail.costs.costs import CostFactors
from dovetail.kernels.hashing import FORCE_BUCKETS

__all__ = ["MAX_AGE_DAYS", "HostCosts", "default_path", "fingerprint", "load_costs", "store_costs"]

MAX_AGE_DAYS = 30.0
_FORMAT = 5
_LOG = logging.getLogger("dovetail")
_SAID: set[tuple[Path, str]] = set()


@dataclass(frozen=True)
class HostCosts:
    """Cost factors with reads that go to the disk, and with reads of pages in memory."""

    direct: CostFactors
    cached: CostFactors
    is_quick: bool = False  # measured in a second or two, to be replaced by `dovetail calibrate`


def default_path() -> Path:
    """``calibration.json`` in the user's cache directory."""
    configured = os.environ.get("XDG_CACHE_HOME")
    parent = Path(configured) if configured else Path.home() / ".cache"
    return parent / "dovetail" / "calibration.json"


def fingerprint(directory: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """What measured costs depend on: processor, cores, versions, and the device of the scratch directory."""
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


def _processor() -> str:
    """The processor's model name; the platform module knows it on few systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def load_costs(path: Path, machine: dict[str, Any], max_age_days: float = MAX_AGE_DAYS) -> HostCosts | None:
    """The stored costs; None if there are none, or none that are valid here and now."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        warnings.warn(f"{path} cannot be read and is measured again: {error}", RuntimeWarning, stacklevel=3)
        return None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        _say_once(path, f"has format {found}, and this version writes {_FORMAT}")
        return None
    if data.get("machine") != machine:
        _say_once(path, "was measured on another host, or with other versions")
        return None
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(data["measured_at"])
        costs = HostCosts(
            CostFactors.from_dict(data["factors"]["direct"]),
            CostFactors.from_dict(data["factors"]["cached"]),
            bool(data["quick"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        warnings.warn(f"{path} is damaged and is measured again: {error}", RuntimeWarning, stacklevel=3)
        return None
    if age.total_seconds() > max_age_days * 86_400:
        _say_once(path, f"is older than {max_age_days:g} days")
        return None
    if age.total_seconds() < 0:
        _say_once(path, "is of the future: a clock was wrong then, or is now")
        return None
    return costs


def _say_once(path: Path, why: str) -> None:
    """Log why stored costs are not used, once per process: every plan would repeat it."""
    if (path, why) not in _SAID:
        _SAID.add((path, why))
        _LOG.warning("The cost factors in %s are measured again: the file %s.", path, why)


def store_costs(path: Path, machine: dict[str, Any], costs: HostCosts) -> None:
    data = {
        "format": _FORMAT,
        "measured_at": datetime.now(UTC).isoformat(),
        "machine": machine,
        "quick": costs.is_quick,
        "factors": {"direct": costs.direct.as_dict(), "cached": costs.cached.as_dict()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary file and renamed, so that no reader sees half a file.
    descriptor, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, allow_nan=False)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
