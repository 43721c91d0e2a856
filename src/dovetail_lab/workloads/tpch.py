"""The tables of TPC-H that the SSBJ paper joins: customer as master data, orders as the stream.

They are made by ``tpchgen-cli``, an optional package (``pip install dovetail[lab]``) that writes the tables of the
benchmark's own generator, byte for byte. Scale factor 1 has 150,000 customers and 1.5 million orders; the paper has
factor 100. There is hardly any skew: customers whose number is a multiple of three have no order, those after them
about 20 each, the others about 10.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dovetail.errors import PlanError

__all__ = ["make_tpch", "read_tpch"]

_PROGRAM = "tpchgen-cli"
_TABLES = ("customer", "orders", "lineitem", "nation", "region", "part", "partsupp", "supplier")


def make_tpch(
    directory: str | os.PathLike[str], scale_factor: float, tables: Sequence[str] = ("customer", "orders")
) -> dict[str, Path]:
    """Write tables as Parquet files, unless they are there; gives the files.

    Parameters
    ----------
    directory
        Where the files go, in a directory of its own for each scale factor.
    scale_factor
        1 is about a gigabyte of all tables; customer and orders are a fifth of it.
    tables
        Which.

    Raises
    ------
    PlanError
        A table or a scale factor that there is not, or the generator is not installed, or it failed.
    """
    unknown = [name for name in tables if name not in _TABLES]
    if unknown or not tables:
        raise PlanError(f"{unknown or 'nothing'} is not a table of TPC-H.", hint=f"Use {', '.join(_TABLES)}.")
    if not 0 < scale_factor <= 100:
        raise PlanError(f"scale_factor={scale_factor}: scale factors up to 100 are made here.")
    target = Path(directory) / f"sf{scale_factor:g}"
    files = {name: target / f"{name}.parquet" for name in tables}
    missing = [name for name, path in files.items() if not path.exists()]
    if missing:
        draft = target.with_name(f".{target.name}-{os.getpid()}")
        try:
            _generate(draft, scale_factor, missing)
            target.mkdir(parents=True, exist_ok=True)
            for name in missing:
                (draft / f"{name}.parquet").replace(files[name])
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return files


def read_tpch(file: str | os.PathLike[str], columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table with plain strings, as relations and operators take them."""
    table = pq.read_table(file, columns=None if columns is None else list(columns))
    fields = [pa.field(f.name, pa.string() if pa.types.is_string_view(f.type) else f.type) for f in table.schema]
    return table.cast(pa.schema(fields))


def _generate(directory: Path, scale_factor: float, tables: Sequence[str]) -> None:
    # Beside this interpreter first: it need not be on the PATH of whoever runs it.
    program = shutil.which(_PROGRAM, path=str(Path(sys.executable).parent)) or shutil.which(_PROGRAM)
    if program is None:
        raise PlanError(f"{_PROGRAM} is not installed.", hint="pip install dovetail[lab] brings it.")
    directory.mkdir(parents=True)
    command = [program, "parquet", "-s", f"{scale_factor:g}", f"--tables={','.join(tables)}", "--quiet"]
    finished = subprocess.run([*command, f"--output-dir={directory}"], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise PlanError(f"{_PROGRAM} ended with {finished.returncode}: {finished.stderr.strip()}")
