"""The versions of a relation: list, read, commit, vacuum."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import RelationConflict, RelationCorrupt, RelationError, RelationNotFound
from dovetail.core.faultpoints import fault_point
from dovetail.relation.format import FORMAT_VERSION, Manifest
from dovetail.relation.pins import pinned_versions
from dovetail.storage.files import RelationFiles, storage_errors
from dovetail.storage.verified import forget_marks

MARKER = "RELATION"
_LEAVING = ".leaving"


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
        self._storage = files.storage

    def numbers(self) -> list[int]:
        """The existing versions, oldest first."""
        return _numbered(self._files.names("versions"), ".json")

    def read(self, version: int | None = None) -> Manifest:
        """Read one version, by default the latest."""
        while True:
            numbers = self.numbers()
            if not numbers:
                raise RelationNotFound(self._why_none())
            wanted = numbers[-1] if version is None else version
            # A vacuum may rename it, and back, while it is looked for.
            is_there = wanted in numbers or wanted in self._leaving() or wanted in self.numbers()
            found = self._find(wanted) if is_there else None
            if found is not None:
                return found
            if version is None and self.numbers() not in ([], numbers):
                continue  # while this one was looked for, it was replaced and vacuumed
            raise RelationNotFound(
                f"{self._files.root} has no version {version!r}: it has {', '.join(map(str, numbers))}. A version that "
                "was vacuumed cannot be opened again."
            )

    def _find(self, version: int) -> Manifest | None:
        for name in (_name(version), _leaving_name(version), _name(version)):
            with suppress(RelationNotFound):
                return Manifest.from_json(self._files.read(name).decode(errors="replace"), self._files.path(name))
        return None

    def _why_none(self) -> str:
        root = self._files.root
        local = self._files.local
        if local is not None and self._storage.size(local) is not None:
            return (
                f"{root} is a file, not a relation. Build a relation from its rows, by Relation.build or by "
                "dovetail relation build."
            )
        if not self._files.exists():
            return f"{root} does not exist. Build the relation first, or check the path."
        if local is not None and not self._storage.names(local):
            return f"{root} is empty. Build the relation first, or check the path."
        if self._files.size(MARKER) is None:
            return f"{root} is not a relation: it contains other files. Check the path."
        return f"{root} has no complete version: its first build did not finish. Build it again."

    def commit(self, root: Path, manifest: Manifest) -> None:
        """Commit ``manifest`` as the latest version, or fail if another writer committed first."""
        fault_point("relation.manifest.before")
        path = root / _name(manifest.version)
        self._require_files(manifest)
        try:
            with storage_errors(root):
                # Shards write into directories that another process may have made, and not flushed.
                self._storage.sync([root / "data"])
                self._storage.create(path, manifest.to_json().encode(), "relation.manifest.linked")
        except FileExistsError:
            raise RelationConflict(
                f"Another writer committed version {manifest.version} of {root} first. Nothing of this "
                f"{manifest.operation} was kept; open the latest version and try again."
            ) from None
        except RelationError as error:
            if not self._storage.exists(path):
                raise
            raise RelationError(
                f"Version {manifest.version} of {root} was written, but the disk failed before it was durable "
                f"({error}). Check whether the version exists before trying again."
            ) from None
        fault_point("relation.manifest.after")

    def _require_files(self, manifest: Manifest) -> None:
        """Refuse to commit if a vacuum on another host removed the new files: the lock does not reach other hosts."""
        gone = [name for name in manifest.data_files() if self._files.size(f"data/{name}") is None]
        if gone:
            raise RelationConflict(
                f"{self._files.path('data')}/{gone[0]} no longer exists: a vacuum ran on another host during this "
                f"{manifest.operation}. Nothing was changed; try again, and run vacuums on the host of the writer."
            )

    def vacuum(self, root: Path, keep: int, also: Collection[int] = ()) -> VacuumReport:
        """Remove all versions but the newest ``keep``, those in ``also`` and pinned ones, and files of no version."""
        self._bring_back(root, self._leaving())  # a vacuum was killed
        numbers = self.numbers()
        wanted = {*numbers[-keep:], *also, *pinned_versions(root, self._storage)}
        kept = [self.read(number) for number in numbers if number in wanted]
        old = [number for number in numbers if number not in wanted]
        for number in old:
            self._storage.rename(root / _name(number), root / _leaving_name(number))
            fault_point("relation.vacuum.leaving")
        # Whoever has pinned a version since then, and still found it, has it.
        pinned = sorted(self._pinned_meanwhile(root).intersection(old))
        self._bring_back(root, pinned)
        kept += [self.read(number) for number in pinned]
        old = [number for number in old if number not in pinned]
        forgotten = self._digests(old) - _digests_of(kept)
        for number in old:
            self._storage.delete(root / _leaving_name(number))
            fault_point("relation.vacuum.manifest")
        # Before any file goes: a power cut must not bring back a version without its files.
        self._storage.sync([root / "versions"])
        for name in self._storage.names(root / "versions"):
            if name.startswith("."):
                self._storage.delete(root / "versions" / name)
        named = _named(kept)
        removed = [file for file in self._data_files(root) if file not in named]
        size = 0
        for file in removed:
            size += self._storage.size(root / "data" / file) or 0
            self._storage.delete(root / "data" / file)
            fault_point("relation.vacuum.file")
        forget_marks(forgotten)
        return VacuumReport(tuple(old), len(removed), size)

    def _pinned_meanwhile(self, root: Path) -> set[int]:
        return pinned_versions(root, self._storage)

    def _leaving(self) -> list[int]:
        """The versions that a vacuum is about to remove. They can be opened, but nobody begins to use them."""
        return _numbered(self._files.names("versions"), _LEAVING)

    def _bring_back(self, root: Path, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self._storage.exists(root / _name(number)):
                # A power cut has left both names. Of two names of one file, a rename removes none.
                self._storage.delete(root / _leaving_name(number))
            else:
                self._storage.rename(root / _leaving_name(number), root / _name(number))

    def _data_files(self, root: Path) -> list[str]:
        directories = self._storage.names(root / "data")
        return [f"{shard}/{file}" for shard in directories for file in self._storage.names(root / "data" / shard)]

    def _digests(self, versions: Sequence[int]) -> set[str]:
        """The index digests of the segments of these versions; none for a manifest that cannot be read."""
        found: set[str] = set()
        for version in versions:
            with suppress(RelationCorrupt):
                found |= _digests_of([self.read(version)])
        return found


def prepare(files: RelationFiles) -> None:
    """Create a directory and mark it as a relation.

    The marker is written first, so that a build can be repeated in the directory of a killed build.
    """
    root, storage = files.writable(), files.storage
    with storage_errors(root):
        try:
            storage.make_directory(root)
        except FileExistsError:
            raise _not_a_directory(root) from None
        fault_point("relation.directory.made")
        # No draft: in a directory that has anything but a marker, nobody could build again.
        with suppress(FileExistsError), storage.open_new(root / MARKER) as marker:
            marker.write(
                f"A Dovetail relation, format {FORMAT_VERSION}. Open it with dovetail.Relation.open.\n".encode()
            )
        # Before anything else is there, for the same reason; also if another process has made the marker.
        storage.sync([root])
        fault_point("relation.directory.marked")


def check_is_free(files: RelationFiles) -> None:
    """Refuse to build in a directory that contains anything but a relation."""
    root = files.writable()
    if files.storage.size(root) is not None:
        raise _not_a_directory(root)
    names = files.storage.names(root)
    if names and MARKER not in names:
        raise RelationError(f"{root} contains files that are not part of a relation: choose an empty or new directory.")


def _not_a_directory(root: Path) -> RelationError:
    return RelationError(f"{root} is a file, not a directory: choose another path.")


def _name(version: int) -> str:
    return f"versions/{version:08d}.json"


def _leaving_name(version: int) -> str:
    return f"versions/{version:08d}{_LEAVING}"


def _numbered(names: Iterable[str], ending: str) -> list[int]:
    numbers = (name.removesuffix(ending) for name in names if name.endswith(ending))
    return sorted(int(number) for number in numbers if number.isdigit())


def _digests_of(manifests: Sequence[Manifest]) -> set[str]:
    return {segment.index_digest for manifest in manifests for shard in manifest.shards for segment in shard.segments}


def _named(manifests: Sequence[Manifest]) -> set[str]:
    return set().union(*(manifest.data_files() for manifest in manifests))
