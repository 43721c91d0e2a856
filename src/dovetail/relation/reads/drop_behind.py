"""What a pass over a relation leaves in memory, and how much memory there is.

A table that fits in memory stays there. Of one that does not, the parts that are asked for most per byte should stay:
the codes and the columns of fixed width, of which a page serves hundreds of rows. Long reads of the rest leave memory
as soon as they are used; else one pass over the table would replace everything else that the host has in memory.
"""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["DropBehind", "available_memory"]

_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DropBehind:
    """Which parts of a relation are dropped behind a long read."""

    codes: bool = False
    fixed: bool = False  # validity, values of fixed width, bounds of the others
    values: bool = False  # values of variable length

    @classmethod
    def of(cls, codes_bytes: int, fixed_bytes: int, rows_bytes: int, memory_bytes: int) -> "DropBehind":
        """Keep what fits in half of the memory: the codes first, then columns of fixed width, then everything.

        >>> DropBehind.of(8, 12, 120, memory_bytes=60)
        DropBehind(codes=False, fixed=False, values=True)
        """
        half = memory_bytes // 2
        return cls(
            codes=codes_bytes > half,
            fixed=codes_bytes + fixed_bytes > half,
            values=codes_bytes + rows_bytes > half,
        )


def available_memory(groups: Path = _GROUPS, process: Path = Path("/proc")) -> int:
    """Bytes that this process and the page cache can use: what is available, within the limit of its cgroup."""
    available = _field(process / "meminfo", "MemAvailable:") * 1024
    for line in _text(process / "self" / "cgroup").splitlines():
        number, kinds, path = line.split(":", 2)
        if number == "0" and not kinds:
            available = min(available, _left_in_v2(groups, path))
        elif "memory" in kinds.split(","):
            available = min(available, _left_in_v1(groups / "memory", path))
    return max(0, available)


def _left_in_v1(root: Path, path: str) -> int:
    # Within a container the path is that of the host, and the root is the container's own group.
    group = next((at for at in (root / path.lstrip("/"), root) if (at / "memory.stat").exists()), None)
    if group is None:
        return 1 << 62
    limit = _field(group / "memory.stat", "hierarchical_memory_limit", 1 << 62)
    return limit - _field(group / "memory.stat", "total_rss")


def _left_in_v2(root: Path, path: str) -> int:
    group, left = root / path.lstrip("/"), 1 << 62
    while group.is_relative_to(root):
        limit = _text(group / "memory.max").strip()
        if limit.isdigit():
            left = min(left, int(limit) - _field(group / "memory.stat", "anon"))
        group = group.parent
    return left


def _field(file: Path, name: str, default: int = 0) -> int:
    words = next((line.split() for line in _text(file).splitlines() if line.startswith(name)), None)
    return default if words is None else int(words[1])


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
