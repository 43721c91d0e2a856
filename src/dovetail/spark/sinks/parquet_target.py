"""The directory that Parquet files are published to: who may publish, and what is there.

::

    <target>/batch-<b>-<n>-<flow>-<attempt>.parquet    what readers see
             _dovetail/<flow>/<claim>.json             one per driver that took the target over
                              <claim>/<b>-<attempt>/   staged by that driver
                              <claim>/done.<b>-<attempt>/   its files were published

``<flow>`` is the flow's id. Claims are numbered here and not in the checkpoint, so that two copies of a checkpoint have
an order, too. A driver publishes only if its claim is the highest, and renames staged files only from the directory of
its own claim. A driver that takes over first moves the staged files of lower claims to its own directory. So a driver
replaced before its check is refused; one replaced after its check finds nothing to rename, because its files were
staged before. Spark and other readers skip names with an underscore.

A receipt names the previous micro-batch that published something. The target's last must be that one or the receipt's
own; otherwise a copy of the checkpoint has published as well.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.core.errors import StateError
from dovetail.core.faultpoints import fault_point
from dovetail.spark.flow.ownership import Owner
from dovetail.storage.documents import create_document, read_document, storage_errors
from dovetail.storage.interface import Storage

__all__ = ["ParquetTarget"]

_HIDDEN = "_dovetail"
_PUBLISHED = re.compile(r"batch-(\d+)-\d+-([0-9a-f]{32}[^-]*)-([0-9a-f]{32})\.parquet")
_CLAIM = re.compile(r"\d{6}(\.json)?")
_STAGED = re.compile(r"(done\.)?(\d+)-([0-9a-f]{32})")


class _Staged(NamedTuple):
    is_done: bool
    batch: int
    attempt: str
    path: Path


class ParquetTarget:
    """One flow's part of a target, as seen by one driver."""

    def __init__(self, path: Path, storage: Storage, owner: Owner, place: str = "main") -> None:
        self._path, self._storage = path, storage
        self._flow = owner.flow_id if place == "main" else f"{owner.flow_id}.{place}"
        self._owner, self._flow_directory = owner, path / _HIDDEN / self._flow
        self.staging = self._flow_directory
        self._last: dict[str, Any] | None = None  # the newest micro-batch with files, before the one at hand

    # ================================================================ taking over

    def claim(self, batch: int | None, receipt: Mapping[str, Any] | None) -> None:
        """See `dovetail.spark.flow.sink.Sink.claim`."""
        with storage_errors(self._path):
            self._storage.make_directory(self._flow_directory)
            # Before the claim: an older copy started by mistake must not stop the running driver.
            self._require_known(batch, receipt)
            self.staging = self._flow_directory / f"{self._claimed():06d}"
            self._storage.make_directory(self.staging)
            self._fence()
            self._require_known(batch, receipt)

    def _claimed(self) -> int:
        number = max(self._claims(), default=0) + 1
        while not create_document(
            self._flow_directory / f"{number:06d}.json",
            asdict(self._owner.epoch),
            "sink.parquet.claim",
            self._storage,
        ):
            number += 1
        return number

    def _claims(self) -> list[int]:
        names = self._storage.names(self._flow_directory)
        return sorted({int(name[:6]) for name in names if _CLAIM.fullmatch(name)})

    def _fence(self) -> None:
        """Move the staged files of lower claims to this one."""
        moved = False
        for other in self._claims():
            directory = self._flow_directory / f"{other:06d}"
            if not directory.name < self.staging.name:
                continue
            for name in self._storage.names(directory):
                if _STAGED.fullmatch(name) and not self._storage.exists(self.staging / name):
                    try:
                        self._storage.rename(directory / name, self.staging / name)
                    except FileNotFoundError:
                        continue  # its driver has just renamed it; the next pass finds the new name
                    moved = True
                    fault_point("sink.parquet.fenced")
            # Only if empty: a late driver may just be staging and committing.
            if self._storage.remove_directory(directory):
                self._storage.delete(directory.with_suffix(".json"))
        if moved:
            self._storage.sync([self.staging, self._flow_directory])

    def _require_known(self, batch: int | None, receipt: Mapping[str, Any] | None) -> None:
        """Refuse a target with later or other micro-batches of this flow than the checkpoint knows."""
        directories = [self._flow_directory / f"{claim:06d}" for claim in self._claims()]
        done = [entry for directory in directories for entry in self._staged(directory) if entry.is_done]
        present = {(entry.batch, entry.attempt) for entry in done} | set(self._published())
        newest = max((number for number, _ in present), default=-1)
        if newest > (-1 if batch is None else batch):
            raise self._ahead(newest, batch)
        if newest >= 0 and receipt is not None and "last" in receipt:
            own, last = _last_with_files(receipt), receipt["last"]
            expected = {part["attempt"] for part in (own, last) if part is not None and part["batch"] == newest}
            # Older than both: newer files were removed from the target, so nothing can be concluded.
            is_older = last is not None and newest < last["batch"]
            if not is_older and not {attempt for number, attempt in present if number == newest} <= expected:
                raise self._diverged(newest)

    def _diverged(self, newest: int) -> StateError:
        return StateError(
            f"{self._path} has micro-batch {newest} of this flow from another run than the checkpoint's: a copy of "
            "the checkpoint has run as well.",
            hint="Go on with the copy that published last, or start with a new checkpoint and an empty target.",
        )

    def _ahead(self, newest: int, batch: int | None) -> StateError:
        have = "no micro-batch" if batch is None else f"micro-batch {batch}"
        return StateError(
            f"{self._path} has micro-batch {newest} of this flow, the checkpoint has {have}: it is an older copy. "
            "Going on would publish rows again.",
            hint="Restore the newest copy of the checkpoint, or start with a new checkpoint and an empty target.",
        )

    def _published(self) -> Iterator[tuple[int, str]]:
        """The micro-batches and attempts of published files."""
        for name in self._storage.names(self._path):
            match = _PUBLISHED.fullmatch(name)
            if match is not None and match[2] == self._flow:
                yield int(match[1]), match[3]

    def _staged(self, directory: Path) -> Iterator[_Staged]:
        for name in self._storage.names(directory):
            match = _STAGED.fullmatch(name)
            if match is not None:
                yield _Staged(match[1] is not None, int(match[2]), match[3], directory / name)

    # ================================================================ a micro-batch

    def receipt(self, batch: int, attempt: str, files: Sequence[tuple[str, int]]) -> dict[str, Any]:
        """The receipt of files staged in ``staging/<batch>-<attempt>``."""
        named = [
            {"staged": file, "name": f"batch-{batch:08d}-{number:05d}-{self._flow}-{attempt}.parquet", "rows": rows}
            for number, (file, rows) in enumerate(files)
        ]
        rows = sum(rows for _, rows in files)
        return {
            "batch": batch,
            "path": str(self._path),
            "attempt": attempt,
            "files": named,
            "rows": rows,
            "last": self._last,
        }

    def publish(self, receipt: Mapping[str, Any]) -> None:
        """Rename the staged files into the target, each whole or not at all; idempotent."""
        directory = self._directory(receipt)
        done = directory.with_name(f"done.{directory.name}")
        # The target may have moved since; format 1 used the path of that time.
        target = Path(receipt["path"]) if "directory" in receipt else self._path
        with storage_errors(target):
            if receipt["files"] and self._storage.exists(done):
                return
            self.require_not_replaced()
            if not receipt["files"]:
                return
            for file in receipt["files"]:
                self._publish_file(directory / file["staged"], target / file["name"], Path(receipt["path"]))
                fault_point("sink.parquet.renamed")
            self._storage.sync([target])
            fault_point("sink.parquet.published")
            if self._storage.exists(directory):
                self._storage.rename(directory, done)
                self._storage.sync([directory.parent])

    def require_not_replaced(self) -> None:
        """Refuse to publish files staged after another driver took over, which could not move them away."""
        highest = max(self._claims(), default=0)
        path = self._flow_directory / f"{highest:06d}.json"
        holder = read_document(path, self._storage) or {}
        # The number is not enough: after an older copy of the target was restored, numbers are reused.
        if path.stem == self.staging.name and holder.get("token") == self._owner.epoch.token:
            return
        who = f"process {holder['pid']} on {holder['host']}" if holder else "another driver"
        raise StateError(
            f"This driver was replaced: {who} has taken over {self._path} for this flow. What this one did was not "
            "published.",
            hint="Let the other driver run. To run the flow here, stop the other one and start the flow again.",
        )

    def _publish_file(self, staged: Path, published: Path, planned: Path) -> None:
        for attempt in ("as it is", "after taking over what a late driver has staged"):
            try:
                self._storage.rename(staged, published)
            except FileNotFoundError:
                if self._storage.exists(published) or self._storage.exists(planned / published.name):
                    return
                if attempt == "as it is":
                    self._fence()
            else:
                return
        if planned != published.parent:
            raise StateError(
                f"{published.name} was committed for {planned} and is neither staged nor published in "
                f"{published.parent}.",
                hint=f"If {planned} is still there, start the flow once with the target {planned}; then it can "
                "continue with another.",
            )
        raise StateError(
            f"{staged} was committed but is neither staged nor published: another driver of this flow has taken over "
            f"{published.parent}, or somebody removed it.",
            hint="Let the other driver run. If there is none, restore the checkpoint and the target from one copy.",
        )

    def forget(self, receipt: Mapping[str, Any]) -> None:
        """Remove the rest of a published micro-batch, and attempts at it that were never committed."""
        fault_point("sink.parquet.forget")
        # From the commit that the next one is based on: another driver may have made it.
        self._last = _last_with_files(receipt)
        staged = list(self._staged(self.staging))
        # The newest is kept: by it, an older copy of the checkpoint sees that the target is ahead.
        newest = max((entry.batch for entry in staged if entry.is_done), default=-1)
        for entry in staged:
            if entry.batch <= receipt["batch"] and not (entry.is_done and entry.batch == newest):
                self._storage.delete(entry.path)
        if "directory" in receipt:
            self._forget_format_1(receipt)

    def _directory(self, receipt: Mapping[str, Any]) -> Path:
        if "directory" in receipt:  # of format 1, which named staging by the checkpoint's path
            return Path(receipt["path"]) / str(receipt["directory"])
        return self.staging / f"{receipt['batch']:08d}-{receipt['attempt']}"

    def _forget_format_1(self, receipt: Mapping[str, Any]) -> None:
        parent = self._directory(receipt).parent
        for name in self._storage.names(parent):
            number = name.removeprefix("done.").partition("-")[0]
            if number.isdigit() and int(number) <= receipt["batch"]:
                self._storage.delete(parent / name)


def _last_with_files(receipt: Mapping[str, Any]) -> dict[str, Any] | None:
    """The newest micro-batch, at most the receipt's, that published something, if any was recorded."""
    if receipt["files"]:
        return {"batch": receipt["batch"], "attempt": receipt.get("attempt")}
    return receipt.get("last")
