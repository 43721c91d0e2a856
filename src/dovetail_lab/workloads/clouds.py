"""Synoptic cloud reports: the real-life data set of the MESHJOIN and SSBJ papers, generated or read from its files.

The papers join months of the *Edited Synoptic Cloud Reports from Ships and Land Stations Over the Globe* (Hahn, Warren,
London; NDP-026B, and with more fields NDP-026C) on the longitude in hundredths of a degree: 36,000 values, many reports
each. The archive is not included. `cloud_reports` generates reports of the same shape, `load_cloud_reports` reads the
real files if you have them. Both return the same columns.

In generated reports the frequency of longitudes has a Zipf distribution, by default with exponent 1: the SSBJ paper
found its real reports to be similar.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dovetail.core.errors import PlanError, SchemaError
from dovetail.runtime.generator.zipf import Zipf

__all__ = ["CLOUD_SCHEMA", "LONGITUDES", "cloud_reports", "load_cloud_reports", "write_cloud_file"]

LONGITUDES = 36_000
# The fields of a report, in order: name, characters, and the missing value in a generated report. A report of
# NDP-026B has the first 20 (56 characters), one of NDP-026C all (80 characters).
REPORT_FIELDS: tuple[tuple[str, int, int], ...] = (
    ("time", 8, 0),
    ("sky_brightness", 1, 1),
    ("latitude", 5, 0),
    ("longitude", 5, 0),
    ("station", 5, 0),
    ("land_or_ocean", 1, 1),
    ("present_weather", 2, -1),
    ("total_cover", 1, 0),
    ("lower_amount", 2, -1),
    ("base_height", 2, -1),
    ("low_type", 2, -1),
    ("middle_type", 2, -1),
    ("high_type", 2, -1),
    ("middle_amount", 3, 900),
    ("high_amount", 3, 900),
    ("middle_visible", 1, 9),
    ("high_visible", 1, 9),
    ("change_code", 2, 0),
    ("solar_altitude", 4, 0),
    ("lunar_illuminance", 4, 0),
    ("pressure", 5, -1),
    ("wind_speed", 3, -1),
    ("wind_direction", 3, -1),
    ("air_temperature", 4, 900),
    ("dew_point_depression", 3, 900),
    ("elevation", 4, 9000),
    ("wind_indicator", 1, 9),
    ("pressure_flag", 1, 9),
)
_WIDE, _NARROW = 80, 56
# 32 bytes of numbers as in MESHJOIN; with these and the report's text 128 as in SSBJ.
_NARROW_COLUMNS = ("longitude", "id", "latitude", "station", "time", "total_cover")
_INT64 = ("longitude", "id")
CLOUD_SCHEMA = pa.schema(
    [pa.field(name, pa.int64() if name in _INT64 else pa.int32()) for name in _NARROW_COLUMNS]
    + [pa.field(name, pa.int32()) for name in ("present_weather", "low_type", "solar_altitude")]
    + [pa.field("report", pa.string())]
)
_ROW_BYTES = {32: len(_NARROW_COLUMNS), 128: len(CLOUD_SCHEMA)}
_ROWS_PER_BATCH = 1 << 16


def cloud_reports(
    rows: int, row_bytes: int = 128, *, months: Sequence[int] = (4, 8), exponent: float = 1.0, seed: int = 0
) -> Iterator[pa.RecordBatch]:
    """Generate reports in time order, a batch at a time.

    Parameters
    ----------
    rows
        The number of reports.
    row_bytes
        128, as in SSBJ, or 32, as in MESHJOIN.
    months
        Months of 1991 that the reports are spread over: 4 and 8 for SSBJ's master data, 12 for its stream.
    exponent
        Zipf exponent of the longitudes. The frequent longitudes are the same for every seed.
    seed
        The seed of everything else.

    Examples
    --------
    >>> batch = next(cloud_reports(1000))
    >>> batch.num_rows, batch.nbytes / batch.num_rows, batch.schema.names[:3]
    (1000, 128.0..., ['longitude', 'id', 'latitude'])
    """
    if row_bytes not in _ROW_BYTES:
        raise PlanError(f"row_bytes={row_bytes}: a report has 32 or 128 bytes.")
    if rows < 0 or not months or not all(1 <= month <= 12 for month in months):
        raise PlanError(f"rows={rows}, months={list(months)}: rows cannot be negative, and months are from 1 to 12.")
    return _made(rows, row_bytes, tuple(months), exponent, seed)


def _made(rows: int, row_bytes: int, months: tuple[int, ...], exponent: float, seed: int) -> Iterator[pa.RecordBatch]:
    # Unlike the draw, the permutation must not depend on the seed: relation and stream share their frequent places.
    places = Zipf(LONGITUDES, exponent, order="shuffled", seed=26)
    for start in range(0, rows, _ROWS_PER_BATCH):
        count = min(_ROWS_PER_BATCH, rows - start)
        random = np.random.default_rng([seed, 0xC10D, start])
        numbers = np.arange(start, start + count)
        fields = {name: np.full(count, missing) for name, _, missing in REPORT_FIELDS}
        fields["longitude"] = places.codes_of(places.ranks_at(random.random(count))) - 1
        fields["time"] = _times(numbers, rows, months)
        fields["latitude"] = random.integers(-9000, 9001, count)
        fields["station"] = random.integers(1000, 99_000, count)
        fields["present_weather"] = random.integers(-1, 100, count)
        fields["total_cover"] = random.integers(0, 9, count)
        fields["low_type"] = random.integers(-1, 12, count)
        fields["solar_altitude"] = random.integers(-900, 901, count)
        text = _format(fields) if row_bytes == 128 else None
        yield _batch({**fields, "id": numbers}, text, row_bytes)


def _times(numbers: NDArray[np.int64], rows: int, months: tuple[int, ...]) -> NDArray[np.int64]:
    """Year, month, day and hour as one number; one report time every three hours, 28 days in every month."""
    slots = len(months) * 28 * 8
    slot = numbers * slots // max(1, rows)
    month = np.array(months)[slot // (28 * 8)]
    within = slot % (28 * 8)
    return 91_000_000 + month * 10_000 + (within // 8 + 1) * 100 + within % 8 * 3


def load_cloud_reports(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], row_bytes: int = 128
) -> Iterator[pa.RecordBatch]:
    """Read the archive's files: one report per line, 56 characters (NDP-026B) or 80 (NDP-026C).

    Parameters
    ----------
    files
        One file or several, unpacked.
    row_bytes
        128 or 32, see `cloud_reports`; the text of a report of 56 characters is padded with blanks.

    Raises
    ------
    SchemaError
        A line that is not a report, or has an invalid longitude; the message names it.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "DEC91L")
    >>> write_cloud_file(cloud_reports(500, months=(12,)), path)
    500
    >>> sum(batch.num_rows for batch in load_cloud_reports(path))
    500
    """
    if row_bytes not in _ROW_BYTES:
        raise PlanError(f"row_bytes={row_bytes}: a report has 32 or 128 bytes.")
    paths = [files] if isinstance(files, str | os.PathLike) else list(files)
    return _loaded([Path(path) for path in paths], row_bytes)


def _loaded(paths: Sequence[Path], row_bytes: int) -> Iterator[pa.RecordBatch]:
    first = 0
    for path in paths:
        with path.open("rb") as file:
            line = file.readline()
            width = len(line.rstrip(b"\r\n"))
            if width not in (_NARROW, _WIDE):
                raise SchemaError(
                    f"{path}: the first line has {width} characters; a report has {_NARROW} or {_WIDE}.",
                    hint="Unpack the archive's files first.",
                )
            file.seek(0)
            number = 0
            while block := file.read(len(line) * _ROWS_PER_BATCH):
                text = _lines(path, block, len(line), width, number)
                fields = _parse(path, text, number)
                padded = np.full((len(text), _WIDE), ord(" "), dtype=np.uint8)
                padded[:, :width] = text
                ids = np.arange(first, first + len(text))
                yield _batch({**fields, "id": ids}, padded, row_bytes)
                first += len(text)
                number += len(text)


def _lines(path: Path, block: bytes, line_bytes: int, width: int, number: int) -> NDArray[np.uint8]:
    # The last line of a file may have no newline.
    letters = np.frombuffer(block + b"\n" * (-len(block) % line_bytes), dtype=np.uint8).reshape(-1, line_bytes)
    broken = np.flatnonzero((letters[:, :width] < 0x20).any(axis=1) | (letters[:, -1] != ord("\n")))
    if broken.size:
        raise SchemaError(f"{path}, line {number + int(broken[0]) + 1}: not a report of {width} characters.")
    return letters[:, :width]


def _parse(path: Path, text: NDArray[np.uint8], number: int) -> dict[str, NDArray[np.int64]]:
    fields: dict[str, NDArray[np.int64]] = {}
    at = 0
    for name, width, _ in REPORT_FIELDS:
        if name in CLOUD_SCHEMA.names:
            digits = np.ascontiguousarray(text[:, at : at + width]).view(f"S{width}").reshape(-1)
            try:
                fields[name] = np.char.strip(digits).astype(np.int64)
            except ValueError as error:
                raise SchemaError(
                    f"{path}, lines {number + 1} to {number + len(text)}: {name} is not a number: {error}"
                ) from error
        at += width
    strange = np.flatnonzero((fields["longitude"] < 0) | (fields["longitude"] > LONGITUDES))
    if strange.size:
        line = int(strange[0])
        raise SchemaError(f"{path}, line {number + line + 1}: longitude {fields['longitude'][line]} is beyond 36000.")
    return fields


def write_cloud_file(batches: Iterator[pa.RecordBatch], path: str | os.PathLike[str]) -> int:
    """Write the reports of 128-byte batches as a file like the archive's; return their number."""
    written = 0
    with open(path, "wb") as file:
        for batch in batches:
            file.write(pc.binary_join_element_wise(batch["report"], "", "\n").buffers()[2])
            written += batch.num_rows
    return written


def _batch(fields: dict[str, NDArray[np.int64]], text: NDArray[np.uint8] | None, row_bytes: int) -> pa.RecordBatch:
    columns: list[pa.Array] = []
    schema = pa.schema(list(CLOUD_SCHEMA)[: _ROW_BYTES[row_bytes]])
    for field in schema:
        if field.name != "report":
            columns.append(pa.array(fields[field.name]).cast(field.type))
        elif text is not None:
            offsets = np.arange(len(text) + 1, dtype=np.int32) * np.int32(_WIDE)
            buffers = pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(text).reshape(-1))
            columns.append(pa.StringArray.from_buffers(len(text), *buffers))
    return pa.record_batch(columns, schema=schema)


def _format(fields: dict[str, NDArray[np.int64]]) -> NDArray[np.uint8]:
    """The text of reports: every number in its columns, right-aligned and padded with zeros."""
    text = np.empty((len(fields["time"]), _WIDE), dtype=np.uint8)
    at = 0
    for name, width, _ in REPORT_FIELDS:
        size = np.abs(fields[name])
        for place in range(width):
            text[:, at + width - 1 - place] = ord("0") + size // 10**place % 10
        text[fields[name] < 0, at] = ord("-")
        at += width
    return text
