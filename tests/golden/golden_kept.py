"""Golden flows that keep relations, and a pipeline file."""

import json
import os
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from golden_case import OUT, Case, Input, moment, numbered, published, starter
from golden_files import plain_rows
from golden_plain import Row, dimension, first_rows, lookup_join, with_changes

import dovetail as dt

END_OF_TIME = datetime(9999, 12, 31)


SOURCES = pa.schema(
    {"source": pa.string(), "id": pa.int64(), "city": pa.string(), "ts": pa.timestamp("us", "UTC"), "n": pa.int64()}
)


def _source_rows(numbers: range) -> list[Row]:
    """Rows whose key comes again and again, with another city from time to time."""
    return [
        {
            "source": ("web", "shop")[n % 2],
            "id": None if n % 17 == 0 else n * 7 % 23,
            "city": f"city {n // 20 % 3}",
            "ts": moment(n),
            "n": n,
        }
        for n in numbers
    ]


def _sources() -> Input:
    files = [_source_rows(range(start, start + 40)) for start in range(0, 160, 40)]
    return Input(SOURCES, "source string, id long, city string, ts timestamp, n long", files[:2], files[2:])


def _kept_keys() -> Case:
    """Surrogate keys and a dimension of type 1; the budgets are so small that changes are folded into the relations."""

    def define(streams: dict[str, Any], root: Path) -> Any:
        return (
            dt.stream(streams["sources"], "keyed")
            .surrogate_key("sk", root / "keys", on=["source", "id"], budget="600 B", shards=2)
            .upsert(root / "dim", on={"sk": "key"}, columns=["city"], order_by="n", budget="400 B", shards=2)
        )

    def expected(case: Case) -> dict[str, list[Row]]:
        rows = case.inputs["sources"].rows
        first: dict[Any, int] = {}
        for row in rows:
            first.setdefault((row["source"], row["id"]), row["n"])
        keyed = [{**r, "sk": None if r["id"] is None else first[r["source"], r["id"]]} for r in rows]
        return {OUT: with_changes(keyed, lambda row: row["sk"], ["city"])}

    return Case(
        "kept-keys",
        {"sources": _sources()},
        starter(define),
        expected,
        found=lambda root: {OUT: numbered(published(root / OUT))},
        kept=("keys", "dim"),
    )


def _kept_state() -> Case:
    """Duplicates, surrogate keys and changes whose relations are still empty: everything is in the state."""

    def define(streams: dict[str, Any], root: Path) -> Any:
        return (
            dt.stream(streams["sources"], "unfolded")
            .deduplicate(root / "seen", on=["source", "id", "city"], order_by="n", shards=2)
            .surrogate_key("sk", root / "keys", on="id", shards=2)
            .detect_changes(root / "hashes", on=["source", "id"], compare=["city"], order_by="n", shards=2)
        )

    def expected(case: Case) -> dict[str, list[Row]]:
        passed = first_rows(case.inputs["sources"].rows, ["source", "id", "city"])
        first: dict[int, int] = {}
        for row in passed:
            first.setdefault(row["id"], row["n"])
        keyed = [{**row, "sk": None if row["id"] is None else first[row["id"]]} for row in passed]
        known = with_changes(keyed, lambda r: None if r["id"] is None else (r["source"], r["id"]), ["city"])
        return {OUT: known}

    return Case(
        "kept-state",
        {"sources": _sources()},
        starter(define),
        expected,
        found=lambda root: {OUT: numbered(published(root / OUT))},
        kept=("seen", "keys", "hashes"),
    )


def _kept_seen() -> Case:
    """Duplicates that are marked; the relation of keys was filled before the flow began, and takes all that follow."""
    seen = [{"id": number} for number in range(5)]

    def define(streams: dict[str, Any], root: Path) -> Any:
        return dt.stream(streams["sources"], "seen").deduplicate(
            root / "seen", on="id", order_by="n", mark="is_duplicate", budget="200 B", shards=2
        )

    def expected(case: Case) -> dict[str, list[Row]]:
        known = {row["id"] for row in seen}
        marked = []
        for row in case.inputs["sources"].rows:
            marked.append({**row, "is_duplicate": row["id"] is not None and row["id"] in known})
            known.add(row["id"])
        return {OUT: marked}

    def prepare(root: Path) -> None:
        schema = pa.schema({"id": pa.int64()})
        dt.Relation.build(pa.Table.from_pylist(seen, schema=schema), root / "seen", on="id", shards=2, unique=True)

    inputs = {"sources": _sources()}
    # Everything is folded: what is left is that the commit names the relation's version.
    return Case("kept-seen", inputs, starter(define), expected, prepare=prepare, has_state=False, kept=("seen",))


def _kept_history() -> Case:
    """A dimension of type 2, with changes that come late."""
    files = []
    for start in range(0, 160, 40):
        rows = _source_rows(range(start, start + 40))
        # A few speak of a time before the last micro-batch.
        files.append([{**r, "ts": r["ts"] - timedelta(seconds=50.5)} if r["n"] % 13 == 6 else r for r in rows])
    columns = "source string, id long, city string, ts timestamp, n long"
    inputs = {"sources": Input(SOURCES, columns, files[:2], files[2:])}

    def define(streams: dict[str, Any], root: Path) -> Any:
        return dt.stream(streams["sources"], "history").history(
            root / "history", on="id", time="ts", columns=["city"], shards=2, budget="1 kB"
        )

    def expected(case: Case) -> dict[str, list[Row]]:
        given = case.inputs["sources"]
        # What comes after the copy is one micro-batch.
        batches = [*given.first, [row for rows in given.later for row in rows]]
        plain = [[{**row, "ts": row["ts"].replace(tzinfo=None)} for row in rows] for rows in batches]
        return {OUT: dimension(plain, "id", "ts", "city", END_OF_TIME)}

    def found(root: Path) -> dict[str, list[Row]]:
        last: dict[Any, Row] = {}
        rows = plain_rows(published(root / OUT))
        assert len({tuple(row.values()) for row in rows}) == len(rows), "a version came out twice"
        for row in rows:
            begin = (row["id"], row["valid_from"])
            # A version that comes out again has ended earlier.
            if begin not in last or row["valid_to"] < last[begin]["valid_to"]:
                last[begin] = row
        return {OUT: list(last.values())}

    return Case("kept-history", inputs, starter(define), expected, found, kept=("history",))


# ==================================================================== a pipeline file

PIPELINE = """\
name: shop
checkpoint: checkpoint
keep_commits: 2
sources:
  orders:
    format: json
    path: orders
    schema: order_id bigint, customer_id bigint, amount double
    malformed: dead-letter
    dead_letter: {path: letters}
relations:
  customers:
    path: customers
    build:
      format: csv
      path: master.csv
      options: {header: true}
      schema: customer_id bigint, name string
      on: customer_id
      shards: 2
  seen: {path: seen}
  keys: {path: keys}
steps:
  - where: amount > 0
  - deduplicate: {relation: seen, on: order_id, order_by: amount}
  - surrogate_key: {relation: keys, column: sk, on: order_id}
  - enrich: {relation: customers, on: customer_id, how: left, strategy: mesh, budget: 120kB, max_delay: 1 hour}
  - with: {n: order_id}
sink: {format: parquet, path: out}
"""


@dataclass(frozen=True)
class PipelineCase(Case):
    """A pipeline file; its inputs are lines of JSON."""

    def add_files(self, root: Path, begin: int, end: int | None = None) -> None:
        """Put files of a numbered range into the landing directory."""
        (root / "orders").mkdir(parents=True, exist_ok=True)
        given = self.inputs["orders"]
        for rows in [*given.first, *given.later][begin:end]:
            number = len(list((root / "orders").glob("*.json")))
            path = root / "orders" / f"{number:06d}.json"
            lines = [row["line"] if "line" in row else json.dumps(row) for row in rows]
            draft = path.with_name(f".{path.name}")
            draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.utime(draft, (1_600_000_000 + number, 1_600_000_000 + number))
            os.rename(draft, path)


def start_pipeline(spark: Any, case: Case, root: Path, trigger: str, is_resumed: bool = False) -> Any:
    """Start the pipeline in a directory, or go on with it."""
    from dovetail.pipeline.checks import check_pipeline
    from dovetail.pipeline.loading import parse_pipeline
    from dovetail.pipeline.runner import plan_pipeline

    return plan_pipeline(spark, check_pipeline(*parse_pipeline(root / "pipeline.yaml"))).start(trigger)


def _pipeline() -> Case:
    customers = [{"customer_id": number, "name": f"n{number}"} for number in range(0, 6_000, 2)]
    letter = {"line": "this line is not JSON"}

    def orders(numbers: range) -> list[Row]:
        rows = [
            {"order_id": n * 5 % 97, "customer_id": n * 7919 % 6_000, "amount": float(n % 9) + n / 1024}
            for n in numbers
        ]
        return [*rows, letter]

    files = [orders(range(start, start + 40)) for start in range(0, 160, 40)]

    def prepare(root: Path) -> None:
        (root / "pipeline.yaml").write_text(PIPELINE, encoding="utf-8")
        lines = ["customer_id,name", *(f"{row['customer_id']},{row['name']}" for row in customers)]
        (root / "master.csv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def expected(case: Case) -> dict[str, list[Row]]:
        given = case.inputs["orders"]
        batches = [*given.first, [row for rows in given.later for row in rows]]
        ordered = []
        for rows in batches:
            ordered += sorted((r for r in rows if r is not letter and r["amount"] > 0), key=lambda row: row["amount"])
        passed = first_rows(ordered, ["order_id"])
        keyed = [{**row, "sk": row["order_id"]} for row in passed]
        joined = lookup_join(keyed, customers, "customer_id", "left")
        letters = [{"malformed": letter["line"], "reason": "not json of the schema of source orders"}] * len(files)
        return {OUT: [{**row, "n": row["order_id"]} for row in joined], "letters": letters}

    def found(root: Path) -> dict[str, list[Row]]:
        letters = [{n: row[n] for n in ("malformed", "reason")} for row in published(root / "letters")]
        return {OUT: numbered(published(root / OUT)), "letters": letters}

    return PipelineCase(
        "pipeline",
        {"orders": Input(pa.schema({}), "", files[:2], files[2:])},
        start_pipeline,
        expected,
        found,
        prepare=prepare,
        least_waiting=1,
        kept=("seen", "keys"),
    )


KEPT = [
    _kept_keys(),
    _kept_state(),
    _kept_seen(),
    _kept_history(),
    _pipeline(),
]
