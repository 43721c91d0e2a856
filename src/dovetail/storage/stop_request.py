"""Asking a running flow to stop, from any process that can write to its checkpoint.

The request is a file, ``<checkpoint>/dovetail/stop.json``, which the flow's driver looks for. It works for flows
started by the command, from Python, and on other hosts that mount the checkpoint. It names the process that it is for,
as the lock does, so that a request which came too late does not stop the next run.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dovetail.core.errors import StateError
from dovetail.storage.documents import storage_errors
from dovetail.storage.local import LOCAL
from dovetail.storage.running import who_runs

__all__ = ["StopRequest", "ask_to_stop", "forget_stop_request", "stop_request"]

FORMAT_VERSION = 1
_HOLDER = ("pid", "host", "since_ms")


@dataclass(frozen=True)
class StopRequest:
    """What was asked: stop now, or after a micro-batch that leaves nothing waiting, within ``timeout_s``."""

    drain: bool
    timeout_s: float


def ask_to_stop(checkpoint: str | os.PathLike[str], drain: bool, timeout_s: float) -> None:
    """Ask the process that runs a flow to stop it; a `StateError` if none does. A second request replaces the first."""
    holder = who_runs(checkpoint)
    if holder is None:
        raise StateError(f"The flow of {os.fspath(checkpoint)} is not running.", hint="See: dovetail status")
    path = _path(checkpoint)
    body = {"format": FORMAT_VERSION, "for": {name: holder.get(name) for name in _HOLDER}}
    with storage_errors(path.parent):
        LOCAL.put(path, json.dumps({**body, **asdict(StopRequest(drain, timeout_s))}).encode())


def stop_request(checkpoint: str | os.PathLike[str]) -> StopRequest | None:
    """The request that is there for the process that runs the flow now, if any."""
    try:
        document = json.loads(LOCAL.read(_path(checkpoint)))
        request = StopRequest(bool(document["drain"]), float(document["timeout_s"]))
        asked, version = document["for"], int(document["format"])
    except OSError:
        return None  # there is none, or none that this process may read
    except (ValueError, KeyError, TypeError):
        return None  # not one of ours
    holder = who_runs(checkpoint)
    is_for_it = holder is not None and all(asked.get(name) == holder.get(name) for name in _HOLDER)
    return request if is_for_it and version <= FORMAT_VERSION else None


def forget_stop_request(checkpoint: str | os.PathLike[str]) -> None:
    """Remove a request that was carried out, could not be, or was for another process.

    One that stays, because its directory cannot be written any more, is for a process that has ended.
    """
    with suppress(OSError):
        LOCAL.delete(_path(checkpoint))


def _path(checkpoint: str | os.PathLike[str]) -> Path:
    return Path(checkpoint) / "dovetail" / "stop.json"
