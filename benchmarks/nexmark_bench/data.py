"""The data set: Apache Beam's Nexmark events, once, as Parquet files that every engine reads.

``<data>/<events>-<slices>/all/{person,auction,bid}/NNNN.parquet``: a file per kind of event and slice of the events, in
their order; ``prefix/`` has the first slices again, as hard links. The side inputs are next to it. Times are
milliseconds since 1970, as in Beam: engines make their own event time of them.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

ROOT = Path(__file__).parent.parent.parent
JARS = ROOT / "jars" / "nexmark"
BASE_TIME_MS = 1_700_000_000_000
EVENTS_PER_SECOND = 100  # of event time: what each of the generators gives that Beam runs side by side
_FETCHED = "beam-sdks-java-nexmark-2.76.0.jar"
_TEXT, _LONG = pa.string(), pa.int64()
SCHEMAS = {
    "person": {
        "id": _LONG,
        "name": _TEXT,
        "emailAddress": _TEXT,
        "creditCard": _TEXT,
        "city": _TEXT,
        "state": _TEXT,
        "dateTime": _LONG,
        "extra": _TEXT,
    },
    "auction": {
        "id": _LONG,
        "itemName": _TEXT,
        "description": _TEXT,
        "initialBid": _LONG,
        "reserve": _LONG,
        "dateTime": _LONG,
        "expires": _LONG,
        "seller": _LONG,
        "category": _LONG,
        "extra": _TEXT,
    },
    "bid": {"auction": _LONG, "bidder": _LONG, "price": _LONG, "dateTime": _LONG, "extra": _TEXT},
}


def fetch_jars() -> None:
    """Beam's generator and Flink's Parquet format, by Maven."""
    if not (JARS / _FETCHED).exists():
        script = ROOT / "scripts" / "fetch-jars"
        pom = {"JARS_POM": str(Path(__file__).with_name("pom.xml"))}
        subprocess.run([str(script), str(JARS)], check=True, env={**os.environ, **pom})


def make_events(directory: Path, events: int, slices: int, prefix_slices: int) -> Path:
    """Generate the events, unless they are there; the directory that has ``all`` and ``prefix``."""
    target = directory / f"{events}-{slices}"
    if (target / "complete.json").exists():
        return target
    if shutil.which("javac") is None:
        subprocess.run([str(ROOT / "scripts" / "apt-install"), "default-jdk-headless"], check=True)
    shutil.rmtree(target, ignore_errors=True)
    draft = target / "draft"
    draft.mkdir(parents=True)
    command = ["java", "-cp", f"{JARS}/*", str(Path(__file__).with_name("NexmarkEvents.java")), str(draft)]
    arguments = (events, slices, BASE_TIME_MS, EVENTS_PER_SECOND)
    with subprocess.Popen([*command, *map(str, arguments)], stdout=subprocess.PIPE, text=True) as generator:
        assert generator.stdout is not None
        for line in generator.stdout:
            for kind in SCHEMAS:
                _convert(draft / f"{kind}-{int(line):04d}.tsv", kind, target, int(line), prefix_slices)
    if generator.returncode:
        raise SystemExit("The generator of Nexmark events failed: see above.")
    rows = {
        part: {
            kind: [pq.read_metadata(path).num_rows for path in sorted((target / part / kind).iterdir())]
            for kind in SCHEMAS
        }
        for part in ("all", "prefix")
    }
    if sum(map(sum, rows["all"].values())) != events:
        raise SystemExit(f"{target} has not {events:,} events: {rows}")
    draft.rmdir()
    (target / "complete.json").write_text(json.dumps(rows))
    return target


def _convert(text: Path, kind: str, target: Path, number: int, prefix_slices: int) -> None:
    """A slice as Parquet; its time of modification is its number, since Spark reads the oldest file first."""
    table = pyarrow.csv.read_csv(
        text,
        read_options=pyarrow.csv.ReadOptions(column_names=list(SCHEMAS[kind])),
        parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False, escape_char=False),
        convert_options=pyarrow.csv.ConvertOptions(column_types=SCHEMAS[kind], strings_can_be_null=False),
    )
    path = target / "all" / kind / f"{number:04d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    text.unlink()
    if number < prefix_slices:
        linked = target / "prefix" / kind / path.name
        linked.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, linked)


def rows_of(events: Path, part: str) -> dict[str, list[int]]:
    """The rows of every file of ``all`` or ``prefix``, by kind of event."""
    rows: dict[str, list[int]] = json.loads((events / "complete.json").read_text())[part]
    return rows


def make_side_input(directory: Path, rows: int) -> Path:
    """The side input of query 13: keys 0 to `rows` - 1, and a text for each, in a directory with one Parquet file."""
    target = directory / f"side-{rows}"
    path = target / "side.parquet"
    if not path.exists():
        target.mkdir(parents=True, exist_ok=True)
        draft = directory / f"side-{rows}.draft"
        with pq.ParquetWriter(draft, pa.schema({"key": _LONG, "value": _TEXT})) as writer:
            for start in range(0, rows, 1_000_000):
                keys = pa.array(np.arange(start, min(rows, start + 1_000_000)))
                writer.write_table(pa.table({"key": keys, "value": keys.cast(_TEXT)}))
        draft.replace(path)
    return target


def make_relation(directory: Path, rows: int) -> Path:
    """The side input as a relation, built once from the Parquet file."""
    from dovetail.relation import Relation

    target = directory / f"relation-{rows}"
    if not target.exists():
        draft = directory / f"relation-{rows}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        source = pq.ParquetFile(make_side_input(directory, rows) / "side.parquet")
        reader = pa.RecordBatchReader.from_batches(source.schema_arrow, source.iter_batches())
        Relation.build(reader, draft, on="key")
        draft.rename(target)
    return target
