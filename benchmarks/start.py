"""How long `dovetail run` takes from the key press to the first row, on the starter pipeline.

Axes
----
src         the code that is measured: this one, and with ``--src DIRECTORY`` an older one, in turns

Figures
-------
sign of life    until the command has written something to its terminal
first row       until the first Parquet file is in the target
end             until the command has ended: the starter's trigger is available-now
cpu             processor time of the command, its JVM and its Python workers

Every round begins with a copy of the starter, whose relation has to be built. Times by the wall depend on what else the
machine does, so its load is printed; processor time hardly does. Always ends with exit code 0.
"""

import argparse
import os
import pty
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from dovetail.pipeline.starter import write_starter

HERE = Path(__file__).parents[1] / "src"
_POLL_SECONDS = 0.01


def measure(source: Path, root: Path) -> dict[str, float]:
    """One start with the code in a directory."""
    write_starter(root)
    begun, seen = time.monotonic(), [float("nan")]
    terminal, far_end = pty.openpty()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, "-m", "dovetail.cli.main", "run", str(root / "pipeline.yaml")],
        env={**os.environ, "PYTHONPATH": str(source), "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=far_end,
    )
    os.close(far_end)
    reader = threading.Thread(target=_read, args=(terminal, begun, seen), daemon=True)
    reader.start()
    first_row = float("nan")
    while process.poll() is None:
        if first_row != first_row and any((root / "warehouse" / "orders").glob("*.parquet")):
            first_row = time.monotonic() - begun
        time.sleep(_POLL_SECONDS)
    end = time.monotonic() - begun
    reader.join()
    os.close(terminal)
    if process.returncode:
        raise SystemExit(f"dovetail run ended with exit code {process.returncode}.")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"sign of life": seen[0], "first row": first_row, "end": end, "cpu": cpu}


def _read(terminal: int, begun: float, seen: list[float]) -> None:
    """Read what the command shows, and note when the first of it came."""
    while True:
        try:
            chunk = os.read(terminal, 65_536)
        except OSError:  # Linux reports the end of a pseudo terminal as an error
            return
        if not chunk:
            return
        if seen[0] != seen[0]:
            seen[0] = time.monotonic() - begun


def main() -> None:
    """Measure in turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--src", type=Path, action="append", default=[], help="another src directory; may be repeated")
    given = parser.parse_args()
    sources = [HERE, *given.src]
    found: dict[Path, list[dict[str, float]]] = {source: [] for source in sources}
    print(f"load {os.getloadavg()[0]:.1f} at the beginning, {os.cpu_count()} cores")
    for _ in range(given.rounds):
        for source in sources:
            root = Path(tempfile.mkdtemp(prefix="dovetail-start-"))
            try:
                found[source].append(measure(source.absolute(), root))
            finally:
                shutil.rmtree(root, ignore_errors=True)
    names = list(found[HERE][0])
    print(f"{'src':<40}" + "".join(f"{name:>15}" for name in names))
    for source, rounds in found.items():
        medians = (statistics.median(one[name] for one in rounds) for name in names)
        print(f"{str(source)[-38:]:<40}" + "".join(f"{value:>13.1f} s" for value in medians))
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
