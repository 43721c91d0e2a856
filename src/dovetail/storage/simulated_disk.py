"""A disk in memory that can lose power.

The fault model. What a process sees is always the newest state; a power cut leaves what was flushed, and of the rest
whatever these rules allow:

- *Content.* Of a file that was not flushed, any prefix is left, none of it included. A file that was written over has
  its old content or any prefix of the new one.
- *Names.* Every change of a directory that was not flushed, be it a new name or one that went, is kept or lost by
  itself, in any order with respect to other names. The changes of one name happen in their order: there is a point up
  to which they are kept.
- *Renames.* The old name of a file goes only if the new one is kept. So there may be both names, never neither.
  A directory has one name: it is renamed or it is not.
- *Flushing.* A flushed file keeps its content, not its name. A flushed directory keeps its names, and what the rules
  above make them depend on; the content of the files is not flushed with it, nor is the directory's own name.

Not simulated: a flush that reports success and does nothing, damage to what was flushed, a full disk, and permissions.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Choose", "SimulatedDisk"]

Choose = Callable[[Sequence[int]], int]
"""Decides what a power cut leaves: one of several numbers, such as the length of what is left of a file."""

_ROOT = 0
_LOST, _KEPT = 0, 1

Entry = tuple[int, str]  # the number of a directory, and a name in it


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    flushed: bytes | None  # None: never flushed
    written_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Change:
    """Names that change in one go, each with what it stands for from now on; None: nothing."""

    number: int
    effects: tuple[tuple[Entry, int | None], ...]
    requires: int | None = None  # a change without which this one is not kept


class SimulatedDisk:
    """Files and directories by number, as on a disk; paths are absolute.

    Examples
    --------
    >>> disk = SimulatedDisk()
    >>> disk.write(Path("/a"), b"flushed")
    >>> disk.flush(Path("/a")), disk.flush(Path("/"))
    (None, None)
    >>> disk.write(Path("/b"), b"forgotten")
    >>> disk.power_cut(min)
    >>> disk.names(Path("/"))
    ['a']
    """

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._directories: dict[int, dict[str, int]] = {_ROOT: {}}  # as processes see them
        self._flushed: dict[int, dict[str, int]] = {_ROOT: {}}  # as they are after a power cut that loses all it may
        self._pending: list[_Change] = []
        self._unflushed: set[int] = set()  # directories that may have pending changes
        self.clock_s = 0.0
        self.locks: dict[tuple[str, Path], str] = {}  # by host and path, who has it
        self._next = 1  # number of the next file, directory or change

    def copy(self) -> "SimulatedDisk":
        """The same state, to go on with independently."""
        other = SimulatedDisk()
        other._files = self._files.copy()
        other._directories = {number: names.copy() for number, names in self._directories.items()}
        other._flushed = {number: names.copy() for number, names in self._flushed.items()}
        other._pending = self._pending.copy()
        other._unflushed = self._unflushed.copy()
        other._next = self._next
        other.clock_s = self.clock_s
        other.locks = self.locks.copy()
        return other

    # ================================================================ looking

    def exists(self, path: Path) -> bool:
        """Whether there is a file or directory of this name."""
        return self._find(path) is not None

    def read(self, path: Path) -> bytes:
        """The content of a file."""
        number = self._find(path)
        if number is None:
            raise _error(errno.ENOENT, path)
        if number in self._directories:
            raise _error(errno.EISDIR, path)
        return self._files[number].content

    def age_s(self, path: Path) -> float:
        """Seconds since a file was written, by ``clock_s``."""
        number = self._find(path)
        if number not in self._files:
            raise _error(errno.ENOENT, path)
        return self.clock_s - self._files[number].written_s

    def names(self, path: Path) -> list[str]:
        """The names in a directory; none if there is no such directory."""
        number = self._find(path)
        if number is None:
            return []
        if number not in self._directories:
            raise _error(errno.ENOTDIR, path)
        return sorted(self._directories[number])

    def is_directory(self, path: Path) -> bool:
        """Whether there is a directory of this name."""
        return self._find(path) in self._directories

    def files(self, path: Path) -> Iterator[Path]:
        """All files below a directory."""
        for name in self.names(path):
            if self.is_directory(path / name):
                yield from self.files(path / name)
            else:
                yield path / name

    def fingerprint(self, *, with_pending: bool = False) -> int:
        """The same for the same tree, in this process; with ``with_pending`` for the same choices of a power cut."""
        lines: list[object] = []
        numbers: dict[int, int] = {}
        self._describe(_ROOT, self._directories, numbers, lines)
        if with_pending:
            self._describe(_ROOT, self._flushed, numbers, lines)
            order = {change.number: place for place, change in enumerate(self._pending)}
            for change in self._pending:
                effects = tuple(
                    (numbers.get(where, -1), name, -2 if new is None else numbers.get(new, -1))
                    for (where, name), new in change.effects
                )
                lines.append((effects, order.get(change.requires or -1)))
            lines.append(frozenset((numbers[n], f.flushed) for n, f in self._files.items() if n in numbers))
        return hash(tuple(lines))

    def _describe(
        self, number: int, tree: dict[int, dict[str, int]], numbers: dict[int, int], lines: list[object]
    ) -> None:
        numbers.setdefault(number, len(numbers))
        for name, child in sorted(tree[number].items()):
            seen = child in numbers
            lines.append((numbers[number], name, numbers.setdefault(child, len(numbers))))
            if child in tree:
                self._describe(child, tree, numbers, lines)
            elif not seen:
                lines.append(self._files[child].content)

    # ================================================================ changing

    def write(self, path: Path, data: bytes) -> None:
        """Write a file as a program does that flushes nothing: Spark, for one. Makes the directories above it."""
        self.make_directories(path.parent)
        number = self._find(path)
        if number is None:
            number = self._new_number()
            self._files[number] = _File(data, None, self.clock_s)
            self._change(((self._entry(path), number),))
        elif number in self._directories:
            raise _error(errno.EISDIR, path)
        else:
            self._files[number] = _File(data, self._files[number].flushed, self.clock_s)

    def make_directories(self, path: Path) -> None:
        """Make a directory and those above it, where missing."""
        place = Path(path.anchor)
        for part in path.parts[1:]:
            place = place / part
            number = self._find(place)
            if number is None:
                number = self._new_number()
                self._directories[number] = {}
                self._flushed[number] = {}
                self._change(((self._entry(place), number),))
            elif number not in self._directories:
                raise _error(errno.ENOTDIR, place)

    def link(self, old: Path, new: Path) -> None:
        """Give a file one more name, which must be free."""
        number = self._find(old)
        if number is None:
            raise _error(errno.ENOENT, old)
        if self._find(new) is not None:
            raise _error(errno.EEXIST, new)
        self._change(((self._entry(new), number),))

    def unlink(self, path: Path) -> None:
        """Remove one name of a file, or an empty directory."""
        number = self._find(path)
        if number is None:
            raise _error(errno.ENOENT, path)
        if self._directories.get(number):
            raise _error(errno.ENOTEMPTY, path)
        self._change(((self._entry(path), None),))

    def remove_tree(self, path: Path) -> None:
        """Remove a file or directory as an operator does who flushes it afterwards; nothing happens if it is gone."""
        if self._find(path) is not None:
            self._change(((self._entry(path), None),))
            self.flush(path.parent)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or directory another name; one that has it already is replaced."""
        number, replaced = self._find(old), self._find(new)
        if number is None:
            raise _error(errno.ENOENT, old)
        source, target = self._entry(old), self._entry(new)
        if number == replaced:
            return  # two names of one file: as POSIX has it, both stay
        if number in self._directories:
            if replaced is not None and replaced not in self._directories:
                raise _error(errno.ENOTDIR, new)
            if replaced is not None and self._directories[replaced]:
                raise _error(errno.ENOTEMPTY, new)
            self._change(((target, number), (source, None)))
        else:
            if replaced in self._directories:
                raise _error(errno.EISDIR, new)
            linked = self._change(((target, number),))
            self._change(((source, None),), requires=linked)

    def copy_tree(self, old: Path, new: Path) -> None:
        """Copy a file or directory as an operator does who flushes it afterwards."""
        self._copy(old, new)
        for place in new.parents:
            self.flush(place)

    def _copy(self, old: Path, new: Path) -> None:
        if self.is_directory(old):
            self.make_directories(new)
            for name in self.names(old):
                self._copy(old / name, new / name)
        else:
            self.write(new, self.read(old))
        self.flush(new)

    # ================================================================ flushing and losing

    def flush(self, path: Path) -> None:
        """Make the content of a file, or the names in a directory, survive a power cut."""
        number = self._find(path)
        if number is None:
            raise _error(errno.ENOENT, path)
        if number in self._directories:
            self._flush_names(number)
        else:
            content = self._files[number].content
            self._files[number] = _File(content, content, self._files[number].written_s)

    def _flush_names(self, directory: int) -> None:
        if directory not in self._unflushed:
            return
        self._unflushed.remove(directory)
        needed, entries, numbers = set[int](), set[Entry](), set[int]()
        for change in reversed(self._pending):
            touched = [entry for entry, _ in change.effects]
            if change.number in numbers or any(entry[0] == directory or entry in entries for entry in touched):
                needed.add(change.number)
                entries.update(touched)
                if change.requires is not None:
                    numbers.add(change.requires)
        if needed:
            for change in self._pending:
                if change.number in needed:
                    _apply(change, self._flushed)
            self._pending = [change for change in self._pending if change.number not in needed]

    def is_flushed(self) -> bool:
        """Whether a power cut would leave everything as it is."""
        return not self._pending and all(file.content == file.flushed for file in self._files.values())

    def power_cut(self, choose: Choose) -> None:
        """Lose power: everything is as one of the states that the rules allow, and flushed; locks are gone."""
        self.locks.clear()
        lost_numbers, lost_entries = set[int](), set[Entry]()
        for change in self._pending:
            touched = [entry for entry, _ in change.effects]
            is_possible = change.requires not in lost_numbers and lost_entries.isdisjoint(touched)
            if is_possible and choose((_LOST, _KEPT)) == _KEPT:
                _apply(change, self._flushed)
            else:
                lost_numbers.add(change.number)
                lost_entries.update(touched)
        self._pending = []
        self._unflushed = set()
        found = self._reachable(_ROOT)
        self._directories = {number: names.copy() for number, names in self._flushed.items() if number in found}
        self._flushed = {number: names.copy() for number, names in self._directories.items()}
        self._files = {number: _left_of(file, choose) for number, file in self._files.items() if number in found}

    def _reachable(self, number: int) -> set[int]:
        found = {number}
        for child in self._flushed.get(number, {}).values():
            found |= self._reachable(child)
        return found

    # ================================================================ inside

    def _find(self, path: Path) -> int | None:
        number = _ROOT
        for part in path.parts[1:]:
            found = self._directories.get(number, {}).get(part)
            if found is None:
                return None
            number = found
        return number

    def _entry(self, path: Path) -> Entry:
        parent = self._find(path.parent)
        if parent is None:
            raise _error(errno.ENOENT, path)
        if parent not in self._directories:
            raise _error(errno.ENOTDIR, path)
        return parent, path.name

    def _change(self, effects: tuple[tuple[Entry, int | None], ...], requires: int | None = None) -> int:
        change = _Change(self._new_number(), effects, requires)
        self._pending.append(change)
        self._unflushed.update(directory for (directory, _), _ in effects)
        _apply(change, self._directories)
        return change.number

    def _new_number(self) -> int:
        self._next += 1
        return self._next - 1


def _apply(change: _Change, directories: dict[int, dict[str, int]]) -> None:
    for (directory, name), number in change.effects:
        if number is None:
            directories[directory].pop(name, None)
        else:
            directories[directory][name] = number


def _left_of(file: _File, choose: Choose) -> _File:
    if file.content == file.flushed:
        return file
    # One more than the lengths of the new content: nothing of it has reached the disk, and the old one is there.
    length = choose(range(len(file.content) + 1 + (file.flushed is not None)))
    content = file.content[:length] if length <= len(file.content) else file.flushed or b""
    return _File(content, content, file.written_s)


def _error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))
