"""The state directory of one flow: fingerprint, intents, commits, and which files may go.

::

    <checkpoint>/dovetail/flow.json                              what the flow is
                          intents/<batch>.json                   what micro-batch b was going to do
                          commits/<batch>.json                   what it did: state files, staged output, metrics
                          state/<operator>/<shard>/<b>-<uuid>.arrow
                          staged/                                output of sinks that have no place of their own

Every name is created exactly once. A commit is the only thing that makes a state file count: no directory is ever
listed to find state, and a file that no kept commit names is rubbish as soon as its batch is committed.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.errors import PlanError, StateError
from dovetail.faultpoints import fault_point
from dovetail.relation.files import sync_directory
from dovetail.relation.verified import forget_marks
from dovetail.state.documents import create_document, read_document, storage_errors
from dovetail.state.fingerprint import FlowFingerprint
from dovetail.state.state_files import StateFile, shard_directory

__all__ = ["CleanupReport", "FlowStore", "ShardState"]

FEWEST_COMMITS_KEPT = 2
"""The last batch may be replayed, and it starts from the one before."""


@dataclass(frozen=True)
class ShardState:
    """One shard's state after one micro-batch.

    Attributes
    ----------
    state_id
        Unique to this state: an operator that is still alive may go on only from the very same one.
    files
        The Arrow files that hold it; those that did not change are named again.
    values
        What else belongs to it, ready for JSON.
    """

    state_id: str
    files: tuple[StateFile, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; the inverse of `from_dict`."""
        return {"id": self.state_id, "files": [f.as_dict() for f in self.files], "values": dict(self.values)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "ShardState":
        """Read what `as_dict` gave."""
        return cls(saved["id"], tuple(map(StateFile.from_dict, saved["files"])), saved["values"])


@dataclass(frozen=True, slots=True)
class CleanupReport:
    """What a cleanup removed."""

    commits: int
    files: int


class FlowStore:
    """The durable side of one flow.

    Parameters
    ----------
    checkpoint
        The flow's checkpoint directory; on a cluster, one that all nodes share.

    Examples
    --------
    >>> import tempfile
    >>> store = FlowStore(tempfile.mkdtemp())
    >>> store.open(FlowFingerprint("orders", ({"name": "1-enrich", "shards": 2},)))
    >>> store.last_batch() is None
    True
    >>> store.create_intent(0, {"time_ms": 5})["time_ms"]
    5
    >>> store.create_intent(0, {"time_ms": 6})["time_ms"]  # the first one counts
    5
    """

    def __init__(self, checkpoint: str | os.PathLike[str]) -> None:
        self.checkpoint = local_path(checkpoint, "checkpoint")
        self.root = self.checkpoint / "dovetail"
        self.state_root = self.root / "state"
        self.staged_root = self.root / "staged"

    # ================================================================ opening

    def open(self, fingerprint: FlowFingerprint) -> None:
        """Make the directory the flow's own, or refuse one that is another's."""
        with storage_errors(self.root):
            for directory in ("intents", "commits", "state", "staged"):
                (self.root / directory).mkdir(parents=True, exist_ok=True)
            sync_directory(self.root)
            sync_directory(self.checkpoint)
        path = self.root / "flow.json"
        saved = read_document(path)
        if saved is None and self.last_batch() is not None:
            raise StateError(
                f"{self.root} has commits but no flow.json.",
                hint="Restore the checkpoint from a copy, or start the flow with a new one.",
            )
        if saved is None and not create_document(path, fingerprint.as_dict(), "flow.fingerprint"):
            saved = read_document(path)
        if saved is not None:
            fingerprint.require_same(FlowFingerprint.from_dict(saved), self.checkpoint)
        with storage_errors(self.root):
            for operator in fingerprint.operators:
                self._make_shard_directories(operator["name"], operator["shards"])

    def _make_shard_directories(self, operator: str, shards: int) -> None:
        parent = self.state_root / operator
        missing = [s for s in range(shards) if not (self.state_root / shard_directory(operator, s)).is_dir()]
        for shard in missing:
            (self.state_root / shard_directory(operator, shard)).mkdir(parents=True, exist_ok=True)
        if missing:
            sync_directory(parent)
            sync_directory(self.state_root)

    # ================================================================ intents and commits

    def intent(self, batch: int) -> dict[str, Any] | None:
        """What micro-batch ``batch`` was going to do, if that was written."""
        return read_document(self._intent_path(batch))

    def create_intent(self, batch: int, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write down what a micro-batch is going to do; gives what counts, which is what was written first."""
        path = self._intent_path(batch)
        if create_document(path, body, "flow.intent"):
            return dict(body)
        return self._must_exist(path)

    def commit(self, batch: int) -> dict[str, Any] | None:
        """What micro-batch ``batch`` did, if it was committed."""
        return read_document(self._commit_path(batch))

    def create_commit(self, batch: int, body: Mapping[str, Any]) -> dict[str, Any]:
        """Commit a micro-batch; gives what counts, which is what was committed first."""
        path = self._commit_path(batch)
        if create_document(path, body, "flow.commit"):
            return dict(body)
        return self._must_exist(path)

    def last_batch(self) -> int | None:
        """The newest committed micro-batch."""
        return max(self._numbers("commits"), default=None)

    def _must_exist(self, path: Path) -> dict[str, Any]:
        document = read_document(path)
        if document is None:
            raise StateError(f"{path} disappeared while the flow was running.", hint="Keep the checkpoint to one flow.")
        return document

    def _intent_path(self, batch: int) -> Path:
        return self.root / "intents" / f"{batch:08d}.json"

    def _commit_path(self, batch: int) -> Path:
        return self.root / "commits" / f"{batch:08d}.json"

    def _numbers(self, directory: str) -> list[int]:
        with suppress(FileNotFoundError):
            names = os.listdir(self.root / directory)
            return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())
        return []

    # ================================================================ cleaning up

    def clean(self, keep: int) -> CleanupReport:
        """Keep the newest commits and what they name; remove older ones, and files of committed batches that no kept
        commit names.

        Only batches up to the last committed one are looked at: nobody can commit those any more, so a running task
        of the current micro-batch never loses a file.
        """
        if keep < FEWEST_COMMITS_KEPT:
            raise PlanError(f"keep={keep!r}: a replay needs at least {FEWEST_COMMITS_KEPT} commits.")
        numbers = self._numbers("commits")
        if not numbers:
            return CleanupReport(0, 0)
        last, old = numbers[-1], numbers[:-keep]
        kept = [commit for number in numbers[-keep:] if (commit := self.commit(number)) is not None]
        named = {file.name for commit in kept for file in files_of(commit)}
        gone = [file for number in old for file in self._files_once_named(number) if file.name not in named]
        removed_commits = self._remove_documents("commits", old, last)
        self._remove_documents("intents", [n for n in self._numbers("intents") if n < numbers[-keep:][0]], last)
        removed_files = self._remove_files(named, last)
        forget_marks(file.digest for file in gone)
        return CleanupReport(removed_commits, removed_files)

    def _files_once_named(self, number: int) -> list[StateFile]:
        """The files of a commit that is about to go; one that cannot be read names none."""
        with suppress(StateError):
            commit = self.commit(number)
            return [] if commit is None else files_of(commit)
        return []

    def _remove_documents(self, directory: str, numbers: Iterable[int], last: int) -> int:
        count = 0
        for number in numbers:
            (self.root / directory / f"{number:08d}.json").unlink(missing_ok=True)
            fault_point("flow.cleanup.document")
            count += 1
        for entry in os.scandir(self.root / directory):
            # A draft that a killed process left; one of a later batch may be somebody's at this moment.
            is_draft = entry.name.startswith(".")
            if is_draft and _batch_of(entry.name[1:].partition(".")[0], default=last + 1) <= last:
                Path(entry.path).unlink(missing_ok=True)
        return count

    def _remove_files(self, named: set[str], last: int) -> int:
        removed = 0
        for operator in _directories(self.state_root):
            for shard in _directories(operator.path):
                for entry in os.scandir(shard.path):
                    name = f"{operator.name}/{shard.name}/{entry.name}"
                    if name in named or not _batch_of(entry.name, default=last + 1) <= last:
                        continue
                    Path(entry.path).unlink(missing_ok=True)
                    removed += 1
                    fault_point("flow.cleanup.file")
        return removed


def _directories(parent: str | Path) -> list[os.DirEntry[str]]:
    return [entry for entry in os.scandir(parent) if entry.is_dir()]


def files_of(commit: Mapping[str, Any]) -> list[StateFile]:
    """Every state file that a commit names."""
    return [
        StateFile.from_dict(file)
        for operator in commit["operators"].values()
        for shard in operator
        for file in shard["files"]
    ]


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """A path on a disk that this process can write, or the error that says what would be one."""
    text = os.fspath(path)
    if text.startswith("file:"):
        text = "/" + text.removeprefix("file:").lstrip("/")
    if "://" in text:
        raise PlanError(
            f"{what}={text!r}: a flow needs a file system that can create a file exclusively and rename it.",
            hint="Use a local directory or, on a cluster, one that all nodes mount.",
        )
    return Path(text).expanduser().absolute()


def _batch_of(name: str, default: int) -> int:
    number = name.partition("-")[0]
    return int(number) if number.isdigit() else default
