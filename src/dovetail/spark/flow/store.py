"""The state directory of one flow: fingerprint, intents, commits, and which files can be removed.

::

    <checkpoint>/dovetail/flow.json                              what the flow is
                          identity.json                          its id, the same wherever the checkpoint is
                          epochs/<n>.json                        one per start of a driver
                          intents/<batch>.json                   what micro-batch b was going to do
                          commits/<batch>.json                   what it did: state files, staged output, metrics
                          state/<operator>/<shard>/<b>-<uuid>.arrow
                          staged/                                output of sinks without a staging place of their own

Every name is created exactly once. A state file counts only through a commit: no directory is ever listed to find
state, and a file that no kept commit names is garbage as soon as its batch is committed.
"""

import errno
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.core.errors import PlanError, StateError
from dovetail.core.faultpoints import fault_point
from dovetail.spark.flow.fingerprint import FlowFingerprint
from dovetail.spark.flow.ownership import Epoch, Owner, document_numbers, read_or_make_id, require_newest, take_epoch
from dovetail.spark.flow.spark_half import SparkHalf
from dovetail.storage.documents import create_document, read_document, require_fields, storage_errors
from dovetail.storage.interface import Storage
from dovetail.storage.local import LOCAL
from dovetail.storage.state_files import StateFile, shard_directory
from dovetail.storage.verified import forget_marks

__all__ = ["CleanupReport", "FlowStore"]

_INTENT_FIELDS = {"batch": int, "query": str, "time_ms": int, "drain": bool, "operators": dict}
_COMMIT_FIELDS = {**_INTENT_FIELDS, "sink": str, "receipt": dict, "rows": dict}

RESUME_BEGUN, RESUME_DONE = "resume-begun.json", "resume-done.json"
FEWEST_COMMITS_KEPT = 2
"""The last batch may be replayed, and starts from the previous one."""


@dataclass(frozen=True, slots=True)
class CleanupReport:
    """What a cleanup removed."""

    commits: int
    files: int


class FlowStore:
    """The durable side of one flow."""

    def __init__(self, checkpoint: str | os.PathLike[str], storage: Storage = LOCAL) -> None:
        self.checkpoint = local_path(checkpoint, "checkpoint")
        self.storage = storage
        self.root = self.checkpoint / "dovetail"
        self.state_root = self.root / "state"
        self.staged_root = self.root / "staged"
        self.spark_half = SparkHalf(self.checkpoint, storage)

    # ================================================================ opening

    def open(self, fingerprint: FlowFingerprint) -> None:
        """Initialise the directory for the flow, or refuse one of another flow."""
        with storage_errors(self.root):
            for directory in ("intents", "commits", "epochs", "state", "staged"):
                self.storage.make_directory(self.root / directory)
        self._require_exclusive_create()
        moved = read_document(self.root / "moved.json", self.storage)
        if moved is not None:
            raise StateError(
                f"{self.checkpoint} was resumed in {moved['to']}: the flow continues there.",
                hint="Use that checkpoint, or resume from it.",
            )
        begun = read_document(self.root / RESUME_BEGUN, self.storage)
        if begun is not None and read_document(self.root / RESUME_DONE, self.storage) is None:
            raise StateError(
                f"{self.checkpoint} was to be resumed from {begun['from']}, and that was cut off.",
                hint=f"Start the flow with resume_from={begun['from']!r} again.",
            )
        path = self.root / "flow.json"
        saved = read_document(path, self.storage)
        if saved is None and self.last_batch() is not None:
            raise StateError(
                f"{self.root} has commits but no flow.json.",
                hint="Restore the whole checkpoint directory from one copy, or start the flow with a new checkpoint.",
            )
        if saved is None and self.spark_half.newest() is not None:
            # A flow writes its documents before Spark plans anything.
            raise StateError(
                f"Spark's part of the checkpoint {self.checkpoint} has micro-batches, but {self.root} has no commit "
                "and no flow.json: the flow's part was lost.",
                hint="Restore the whole checkpoint directory from one copy, or use a new one and an empty target.",
            )
        if saved is None and not create_document(path, fingerprint.as_dict(), "flow.fingerprint", self.storage):
            saved = read_document(path, self.storage)
        if saved is not None:
            require_fields(path, saved, {"flow": str, "operators": list})
            fingerprint.require_same(FlowFingerprint.from_dict(saved), self.checkpoint)
        newest = self.newest_commit() or {}
        self._flow_id = read_or_make_id(self.root, self.storage, newest.get("flow"))
        with storage_errors(self.root):
            for operator in fingerprint.operators:
                self._make_shard_directories(operator["name"], operator["shards"])

    def _require_exclusive_create(self) -> None:
        probe = self.root / f".probe-{uuid.uuid4().hex}"
        try:
            self.storage.create(probe, b"")
            self.storage.delete(probe)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise PlanError(
                    f"checkpoint={str(self.checkpoint)!r} is on a file system that cannot create a file exclusively "
                    f"({os.strerror(error.errno)}).",
                    hint="Use a disk such as ext4 or xfs or, on a cluster, NFS.",
                ) from None
            with storage_errors(self.root):
                raise

    def take_over(self) -> Owner:
        """Become the flow's newest driver; called once, when nothing can refuse the start any more."""
        with storage_errors(self.root):
            self._epoch = take_epoch(self.root, self.storage)
        return self.owner

    @property
    def flow_id(self) -> str:
        return self._flow_id

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def owner(self) -> Owner:
        return Owner(self._flow_id, self._epoch)

    def require_newest(self, batch: int) -> None:
        """Refuse to publish for a driver that was replaced, or a micro-batch that is not the newest."""
        require_newest(self.root, self.storage, self._epoch)
        newest = self.last_batch()
        if newest is not None and newest > batch:
            raise StateError(
                f"Micro-batch {newest} of {self.root} is committed already; this driver is still at {batch}. What it "
                "did was not published.",
                hint="Another driver runs this flow: let it run, or stop it and start the flow again here.",
            )

    def _make_shard_directories(self, operator: str, shards: int) -> None:
        present = set(self.storage.names(self.state_root / operator))
        missing = [s for s in range(shards) if shard_directory(operator, s).rpartition("/")[2] not in present]
        for shard in missing:
            self.storage.make_directory(self.state_root / shard_directory(operator, shard))

    # ================================================================ intents and commits

    def intent(self, batch: int) -> dict[str, Any] | None:
        return self._read(self._intent_path(batch), _INTENT_FIELDS)

    def create_intent(self, batch: int, body: Mapping[str, Any]) -> dict[str, Any]:
        """Write the intent of a micro-batch; returns the one that was written first."""
        path = self._intent_path(batch)
        if create_document(path, body, "flow.intent", self.storage):
            return dict(body)
        return self._must_exist(path, _INTENT_FIELDS)

    def commit(self, batch: int) -> dict[str, Any] | None:
        return self._read(self._commit_path(batch), _COMMIT_FIELDS)

    def create_commit(self, batch: int, body: Mapping[str, Any]) -> dict[str, Any]:
        """Commit a micro-batch; returns the commit that was written first."""
        path = self._commit_path(batch)
        if create_document(path, body, "flow.commit", self.storage):
            return dict(body)
        return self._must_exist(path, _COMMIT_FIELDS)

    def last_batch(self) -> int | None:
        """The newest committed micro-batch."""
        return max(document_numbers(self.root / "commits", self.storage), default=None)

    def last_intent(self) -> int | None:
        """The newest micro-batch that was begun."""
        return max(document_numbers(self.root / "intents", self.storage), default=None)

    def newest_commit(self) -> dict[str, Any] | None:
        batch = self.last_batch()
        return None if batch is None else self.commit(batch)

    def _read(self, path: Path, fields: Mapping[str, type]) -> dict[str, Any] | None:
        document = read_document(path, self.storage)
        if document is not None:
            require_fields(path, document, fields)
        return document

    def _must_exist(self, path: Path, fields: Mapping[str, type]) -> dict[str, Any]:
        document = self._read(path, fields)
        if document is None:
            raise StateError(f"{path} disappeared while the flow was running.", hint="Keep the checkpoint to one flow.")
        return document

    def _intent_path(self, batch: int) -> Path:
        return self.root / "intents" / f"{batch:08d}.json"

    def _commit_path(self, batch: int) -> Path:
        return self.root / "commits" / f"{batch:08d}.json"

    # ================================================================ cleaning up

    def clean(self, keep: int) -> CleanupReport:
        """Remove older commits than the newest `keep`, and files of committed batches that no kept commit names.

        Only batches up to the last committed one are considered: they cannot be committed any more, so a running task
        of the current micro-batch never loses a file.
        """
        if keep < FEWEST_COMMITS_KEPT:
            raise PlanError(f"keep={keep!r}: a replay needs at least {FEWEST_COMMITS_KEPT} commits.")
        numbers = document_numbers(self.root / "commits", self.storage)
        if not numbers:
            return CleanupReport(0, 0)
        last, old = numbers[-1], numbers[:-keep]
        kept = [commit for number in numbers[-keep:] if (commit := self.commit(number)) is not None]
        tables = [file for commit in kept for file in files_of(commit)]
        named = {file.name for file in tables}
        # By table: a file of several may stay for one of them.
        gone = {file.digest for number in old for file in self._files_once_named(number)}
        gone -= {file.digest for file in tables}
        removed_commits = self._remove_documents("commits", old, last)
        intents = document_numbers(self.root / "intents", self.storage)
        self._remove_documents("intents", [n for n in intents if n < numbers[-keep:][0]], last)
        removed_files = self._remove_files(named, last)
        forget_marks(gone)
        return CleanupReport(removed_commits, removed_files)

    def _files_once_named(self, number: int) -> list[StateFile]:
        """The files of a commit that is about to be removed; none if it cannot be read."""
        with suppress(StateError):
            commit = self.commit(number)
            return [] if commit is None else files_of(commit)
        return []

    def _remove_documents(self, directory: str, numbers: Iterable[int], last: int) -> int:
        count = 0
        for number in numbers:
            self.storage.delete(self.root / directory / f"{number:08d}.json")
            fault_point("flow.cleanup.document")
            count += 1
        for name in self.storage.names(self.root / directory):
            # A draft left by a killed process; one of a later batch may be in use.
            if name.startswith(".") and _batch_of(name[1:].partition(".")[0], default=last + 1) <= last:
                self.storage.delete(self.root / directory / name)
        return count

    def _remove_files(self, named: set[str], last: int) -> int:
        removed = 0
        for operator in self.storage.names(self.state_root):
            for shard in self.storage.names(self.state_root / operator):
                for file in self.storage.names(self.state_root / operator / shard):
                    name = f"{operator}/{shard}/{file}"
                    if name in named or not _batch_of(file, default=last + 1) <= last:
                        continue
                    self.storage.delete(self.state_root / name)
                    removed += 1
                    fault_point("flow.cleanup.file")
        return removed


def files_of(commit: Mapping[str, Any]) -> list[StateFile]:
    return [
        StateFile.from_dict(file)
        for operator in commit["operators"].values()
        for shard in operator
        for file in shard["files"]
    ]


def local_path(path: str | os.PathLike[str], what: str) -> Path:
    """The absolute path on a local disk; a `PlanError` if it is an address of something else."""
    text = os.fspath(path)
    if text.startswith("file:"):
        text = "/" + text.removeprefix("file:").lstrip("/")
    # A scheme is before the first slash; a later colon is part of a name.
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text):
        raise PlanError(
            f"{what}={text!r}: a flow needs a file system that can create a file exclusively and rename it.",
            hint="Use a local directory or, on a cluster, one that all nodes mount.",
        )
    return Path(text).expanduser().absolute()


def _batch_of(name: str, default: int) -> int:
    number = name.partition("-")[0]
    return int(number) if number.isdigit() else default
