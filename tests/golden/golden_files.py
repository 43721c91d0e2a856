"""Golden copies as files: where they lie, how a directory becomes an archive and back, and rows as JSON.

Spark's file source and the flows' documents name files by absolute paths. So the copy of a flow is made below `ROOT`,
and opened only there, under a lock: see `restored`.
"""

import fcntl
import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path("/tmp/dovetail-golden")
"""Where flows were when their copies were made, and where they must be to go on."""
HERE = Path(__file__).parent
FORMAT = 1
ARCHIVES = HERE / f"format-{FORMAT}"


def formats() -> list[Path]:
    """The directories of all formats that there are copies of."""
    return sorted(HERE.glob("format-*"))


def pack(directory: Path, name: str) -> Path:
    """Write a directory as an archive whose bytes depend on its files' content alone, hidden files included."""
    target = ARCHIVES / f"{name}.tar.gz"
    target.parent.mkdir(exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(directory.rglob("*")):
            entry = archive.gettarinfo(path, str(path.relative_to(directory)))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if path.is_dir() else 0o644
            with open(path, "rb") if path.is_file() else io.BytesIO() as content:
                archive.addfile(entry, content if path.is_file() else None)
    with open(target, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as compressed:
        compressed.write(packed.getvalue())
    return target


def unpack(archive: Path, directory: Path) -> None:
    """Write an archive's files to a new directory. They are as old as this moment: marks of files that were checked
    on this host before do not apply to them."""
    directory.mkdir(parents=True)

    def safe(entry: tarfile.TarInfo, place: str) -> tarfile.TarInfo:
        return tarfile.data_filter(entry, place).replace(mtime=None, deep=False)  # type: ignore[arg-type]

    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter=safe)


@contextmanager
def locked() -> Iterator[None]:
    """Be the only process that uses `ROOT`; others wait."""
    descriptor = os.open(f"{ROOT}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def restored(archive: Path) -> Iterator[Path]:
    """An archive's files at the place where they were made; removed in the end. Call it under `locked`."""
    directory = ROOT / archive.name.removesuffix(".tar.gz")
    shutil.rmtree(directory, ignore_errors=True)
    unpack(archive, directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# ==================================================================== rows


def write_expected(name: str, expected: Mapping[str, Any]) -> None:
    """Write what must come of a copy beside it, a row in a line."""
    lines = []
    for key, value in expected.items():
        if isinstance(value, list) and value:
            rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in value)
            lines.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    (ARCHIVES / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_expected(archive: Path) -> dict[str, Any]:
    """Read what must come of a copy."""
    text = archive.with_name(archive.name.replace(".tar.gz", ".json")).read_text(encoding="utf-8")
    expected: dict[str, Any] = json.loads(text)
    return expected


def plain_rows(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows with values that JSON can hold."""
    return [{name: plain(value) for name, value in row.items()} for row in rows]


def plain(value: Any) -> Any:
    """A value as JSON can hold it: moments in UTC and days as ISO text, decimals as text, bytes as hexadecimal text."""
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return value
