"""Pins: versions of a relation that a vacuum must not remove, because somebody is going to open them again.

::

    <path>/pins/<holder>.json             {"format": 1, "versions": [3, 7], "lease_s": 600, "holder": {...}}
    <path>/pins/<query id>/<batch>.json   {"format": 1, "version": 3}: of a micro-batch, see `dovetail.runtime.pins`

A pin is a lease: its holder writes it again from time to time, and a vacuum removes it when its last modification is
more than ``lease_s`` seconds ago. So the pin of a process that was killed, or of a flow that nobody starts again, goes
some time later, and nobody has to find out whether a process on another host is alive. A holder that was suspended for
longer gets an error when it opens its version, never other rows.

Times are those of the file system: a vacuum compares a pin with a file that it has just written beside it, so that the
clocks of hosts do not matter.
"""

import json
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.core.errors import RelationCorrupt
from dovetail.storage.interface import Storage
from dovetail.storage.local import LOCAL

__all__ = ["BATCH_LEASE_S", "FORMAT_VERSION", "damaged", "hold", "holders", "pinned_versions", "read_pin", "release"]

FORMAT_VERSION = 1

BATCH_LEASE_S = 7 * 86_400
"""How long the pins of a query's micro-batches count after the last one was made."""

_REPLAYED_BATCHES = 2
_EXPIRED = "-expired"


def hold(
    root: Path,
    holder: str,
    versions: Collection[int],
    lease_s: int,
    about: Mapping[str, Any],
    storage: Storage = LOCAL,
) -> bool:
    """Pin versions, in place of those that the holder had before, or renew the pin. Durable: flows need it.

    Returns False if the directory cannot be written, so that nothing is pinned.

    Examples
    --------
    >>> import tempfile
    >>> root = Path(tempfile.mkdtemp())
    >>> (root / "versions").mkdir()
    >>> hold(root, "reader", [3], 600, {"pid": 1}), pinned_versions(root)
    (True, {3})
    """
    directory = root / "pins"
    body = {"format": FORMAT_VERSION, "versions": sorted(versions), "lease_s": lease_s, "holder": dict(about)}
    try:
        if not storage.exists(directory):
            # A relation that was removed must not be there again.
            if not storage.exists(root):
                return False
            storage.make_directory(directory)
        storage.put(directory / f"{holder}.json", json.dumps(body).encode())
        # Another holder may have made the directory, and a writer the version, and been killed before it was durable.
        storage.sync([root, root / "versions"])
    except OSError:
        # Whoever may not write here may read; without a pin, a vacuum ends that with a clear error.
        return False
    return True


def release(root: Path, holder: str, storage: Storage = LOCAL) -> None:
    """Remove a pin; there may be none any more."""
    with suppress(OSError):
        storage.delete(root / "pins" / f"{holder}.json")


def pinned_versions(root: Path, storage: Storage = LOCAL) -> set[int]:
    """The versions that are pinned. Pins that have expired are removed."""
    directory = root / "pins"
    found: set[int] = set()
    for name in storage.names(directory):
        path = directory / name
        if path.suffix == ".json" and not name.startswith("."):
            found |= _of_holder(path, storage)
        elif storage.size(path) is None:
            found |= _of_query(path, storage)
        elif _age_s(path, storage) > BATCH_LEASE_S:
            storage.delete(path)  # a draft of a holder that was killed
    return found


def holders(root: Path, storage: Storage = LOCAL) -> list[str]:
    """The checkpoints of flows that have pinned a version."""
    directory, found = root / "pins", set()
    for name in storage.names(directory):
        pin = read_pin(directory / name, storage) if name.endswith(".json") and not name.startswith(".") else None
        about = {} if pin is None else pin.get("holder", {})
        if isinstance(about, dict) and "checkpoint" in about:
            found.add(str(about["checkpoint"]))
    return sorted(found)


def _of_holder(path: Path, storage: Storage) -> set[int]:
    age_s = _age_s(path, storage)
    pin = read_pin(path, storage)
    if pin is None:
        return set()
    try:
        lease_s, versions = float(pin["lease_s"]), {int(version) for version in pin["versions"]}
    except (KeyError, TypeError, ValueError):
        raise damaged(path) from None
    if age_s <= lease_s:
        return versions
    if path.stem.endswith(_EXPIRED):
        storage.delete(path)
        return set()
    # Its holder may renew it at this moment. Under another name it is nobody's, and counts if it was renewed.
    expired = path.with_name(f"{path.stem}-{uuid.uuid4().hex}{_EXPIRED}.json")
    try:
        storage.rename(path, expired)
    except FileNotFoundError:
        return set()
    return _of_holder(expired, storage)


def _of_query(directory: Path, storage: Storage) -> set[int]:
    """The versions of the last micro-batches of a query: those that Spark may run again."""
    names = storage.names(directory)
    numbers = sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())
    last = [directory / f"{number}.json" for number in numbers[-_REPLAYED_BATCHES:]]
    if not last or min(_age_s(path, storage) for path in last) > BATCH_LEASE_S:
        for name in names:
            storage.delete(directory / name)
        storage.remove_directory(directory)  # unless the query has just begun again
        return set()
    found = set()
    for path in last:
        pin = read_pin(path, storage)
        try:
            found |= set() if pin is None else {int(pin["version"])}
        except (KeyError, TypeError, ValueError):
            raise damaged(path) from None
    return found


def read_pin(path: Path, storage: Storage = LOCAL) -> dict[str, Any] | None:
    """Read a pin; None if there is none."""
    try:
        pin = json.loads(storage.read(path))
    except FileNotFoundError:
        return None
    except ValueError:
        raise damaged(path) from None
    # The first pins of micro-batches had no format version.
    if not isinstance(pin, dict) or pin.get("format", FORMAT_VERSION) != FORMAT_VERSION:
        raise damaged(path)
    return pin


def damaged(path: Path) -> RelationCorrupt:
    """The error for a pin that cannot be understood."""
    return RelationCorrupt(
        f"{path} does not name a version: it was damaged, or written by a newer Dovetail.",
        hint="Remove it, or upgrade, and start the query again.",
    )


def _age_s(path: Path, storage: Storage) -> float:
    try:
        return storage.age_s(path)
    except FileNotFoundError:
        return 0.0
