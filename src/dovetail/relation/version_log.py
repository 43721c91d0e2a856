"""The versions of a relation: which exist, reading one, committing the next, removing old ones."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dovetail.errors import RelationConflict, RelationCorrupt, RelationError, RelationNotFound
from dovetail.faultpoints import fault_point
from dovetail.relation.files import RelationFiles, create_exclusively, storage_errors, sync_directory
from dovetail.relation.format import FORMAT_VERSION, Manifest
from dovetail.relation.verified import forget_marks

MARKER = "RELATION"


@dataclass(frozen=True)
class VacuumReport:
    """What a vacuum removed."""

    versions: tuple[int, ...]
    files: int
    bytes: int


class VersionLog:
    """Manifests in ``versions/``, one per version, numbered from 1."""

    def __init__(self, files: RelationFiles) -> None:
        self._files = files

    def numbers(self) -> list[int]:
        """The versions that exist, oldest first."""
        names = self._files.names("versions")
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit())

    def read(self, version: int | None = None) -> Manifest:
        """One version, by default the newest."""
        numbers = self.numbers()
        if not numbers:
            raise RelationNotFound(self._why_none())
        if version is None:
            version = numbers[-1]
        if version not in numbers:
            raise RelationNotFound(
                f"{self._files.root} has no version {version!r}: it has {', '.join(map(str, numbers))}. A version that "
                "was vacuumed cannot be opened again."
            )
        name = _name(version)
        return Manifest.from_json(self._files.read(name).decode(errors="replace"), self._files.path(name))

    def _why_none(self) -> str:
        root = self._files.root
        if self._files.size("") is None:
            return f"{root} does not exist. Build the relation first, or check the path."
        if self._files.size(MARKER) is None:
            return f"{root} is not a relation: it holds something else. Check the path."
        return f"{root} has no complete version: its first build did not finish. Build it again."

    def commit(self, root: Path, manifest: Manifest) -> None:
        """Make ``manifest`` the newest version, or fail because somebody else committed first."""
        fault_point("relation.manifest.before")
        path = root / _name(manifest.version)
        self._require_files(manifest)
        try:
            with storage_errors(root):
                create_exclusively(path, manifest.to_json())
        except FileExistsError:
            raise RelationConflict(
                f"another writer committed version {manifest.version} of {root} first. Nothing of this "
                f"{manifest.operation} was kept; open the newest version and try again."
            ) from None
        except RelationError as error:
            if not path.exists():
                raise
            raise RelationError(
                f"version {manifest.version} of {root} was written, but the disk failed before it was certain to "
                f"outlast a power cut ({error}). Look whether it is there before trying again."
            ) from None
        fault_point("relation.manifest.after")

    def _require_files(self, manifest: Manifest) -> None:
        """Refuse to commit what a vacuum on another host has taken for leftovers: no lock reaches that far."""
        gone = [name for name in manifest.data_files() if self._files.size(f"data/{name}") is None]
        if gone:
            raise RelationConflict(
                f"{self._files.path('data')}/{gone[0]} is gone: a vacuum ran on another host during this "
                f"{manifest.operation}. Nothing was changed; try again, and run vacuums where the writer runs."
            )

    def vacuum(self, root: Path, keep: int) -> VacuumReport:
        """Remove all but the newest ``keep`` versions, and every data file that no kept version names."""
        numbers = self.numbers()
        old = numbers[:-keep]
        kept = [self.read(number) for number in numbers[-keep:]]
        forgotten = self._digests(old) - _digests_of(kept)
        for number in old:
            (root / _name(number)).unlink()
            fault_point("relation.vacuum.manifest")
        sync_directory(root / "versions")
        for draft in (root / "versions").glob(".*"):
            draft.unlink()
        named = _named(kept)
        removed = [file for file in _data_files(root) if file not in named]
        size = 0
        for file in removed:
            size += (root / "data" / file).stat().st_size
            (root / "data" / file).unlink()
            fault_point("relation.vacuum.file")
        forget_marks(forgotten)
        return VacuumReport(tuple(old), len(removed), size)

    def _digests(self, versions: Sequence[int]) -> set[str]:
        """The index digests of the segments of versions; a manifest that cannot be read tells none."""
        found: set[str] = set()
        for version in versions:
            with suppress(RelationCorrupt):
                found |= _digests_of([self.read(version)])
        return found


def prepare(files: RelationFiles) -> None:
    """Make a directory and mark it as a relation.

    The mark is the first thing in it: a build that is killed later leaves a directory that can be built in again.
    """
    root = files.writable()
    with storage_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        fault_point("relation.directory.made")
        marker = root / MARKER
        if not marker.exists():
            marker.write_text(f"A Dovetail relation, format {FORMAT_VERSION}. Open it with dovetail.Relation.open.\n")
            sync_directory(root)
            sync_directory(root.parent)
        fault_point("relation.directory.marked")


def check_is_free(files: RelationFiles) -> None:
    """Refuse to build where something that is not a relation lies."""
    root = files.writable()
    if not os.path.lexists(root):
        return
    if not root.is_dir():
        raise RelationError(f"{root} is a file, not a directory: choose another path.")
    if any(root.iterdir()) and not (root / MARKER).exists():
        raise RelationError(
            f"{root} holds something that is not a relation, and would be mixed up with it: choose an empty or new "
            "directory."
        )


def _name(version: int) -> str:
    return f"versions/{version:08d}.json"


def _data_files(root: Path) -> list[str]:
    return [f"{file.parent.name}/{file.name}" for file in (root / "data").glob("*/*")]


def _digests_of(manifests: Sequence[Manifest]) -> set[str]:
    return {segment.index_digest for manifest in manifests for shard in manifest.shards for segment in shard.segments}


def _named(manifests: Sequence[Manifest]) -> set[str]:
    return set().union(*(manifest.data_files() for manifest in manifests))
