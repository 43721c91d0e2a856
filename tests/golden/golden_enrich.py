"""Golden flows that join a stream with a relation."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from golden_case import BEGIN, CHECKPOINT, OUT, Case, Input, published, starter
from golden_files import plain_rows
from golden_plain import Row, lookup_join

import dovetail as dt

KEYS = 10_000
CITIES: list[Row] = [{"k": key, "city": f"c{key % 17}"} for key in range(0, KEYS, 2)]
NEW_CITIES: list[Row] = [{"k": key, "city": "new"} for key in range(0, KEYS, 3)]
MAYORS: list[Row] = [{"city": f"c{number}", "mayor": f"m{number}"} for number in range(12)]
ORDERS = pa.schema({"n": pa.int64(), "k": pa.int64(), "t": pa.timestamp("us", "UTC"), "note": pa.string()})


def order(number: int) -> Row:
    """A row of the stream; half of the keys are in the relation, and some are NULL."""
    return {
        "n": number,
        "k": None if number % 37 == 0 else number * 7919 % KEYS,
        "t": BEGIN + timedelta(seconds=number, microseconds=number),
        "note": None if number % 11 == 0 else f"nöte {number}",
    }


def _orders() -> Input:
    files = [[order(number) for number in range(start, start + 60)] for start in range(0, 240, 60)]
    return Input(ORDERS, "n long, k long, t timestamp, note string", files[:2], files[2:])


def _build_cities(root: Path) -> None:
    dt.Relation.build(pa.Table.from_pylist(CITIES), root / "cities", on="k", shards=2)


def _change_cities(root: Path) -> None:
    dt.Relation.open(root / "cities").upsert(pa.Table.from_pylist(NEW_CITIES))


def _enrich(strategy: str, how: str, least_waiting: int = 1, suffix: str = "", **options: Any) -> Case:
    # By itself it waits only where the budget has room for many: then the scan is cheaper than the index.
    budget = "900kB" if strategy == "auto" else "120kB"
    wanted: dict[str, Any] = {"on": "k", "how": how, "budget": budget, "max_delay": "1 hour"}
    wanted |= {"strategy": strategy} if strategy != "auto" else {}

    def define(streams: dict[str, Any], root: Path) -> Any:
        return dt.stream(streams["orders"], "orders").enrich(
            dt.Relation.open(root / "cities"), **wanted, **options.get("enrich", {})
        )

    return Case(
        f"enrich-{strategy}{suffix}".replace("_", "-"),
        {"orders": _orders()},
        starter(define),
        lambda case: {OUT: lookup_join(case.inputs["orders"].rows, CITIES, "k", how, options.get("condition"))},
        prepare=_build_cities,
        least_waiting=least_waiting,
        has_state=strategy != "index_nested_loop",
        killed_at=options.get("killed_at"),
    )


def _enrich_two_versions() -> Case:
    """Tuples wait for the relation's first version when the newest is the second one."""

    def define(streams: dict[str, Any], root: Path) -> Any:
        cities = dt.Relation.open(root / "cities")
        return dt.stream(streams["orders"], "versions").enrich(
            cities, on="k", how="left", strategy="mesh", budget="120kB", max_delay="1 hour", refresh="batch"
        )

    def expected(case: Case) -> dict[str, list[Row]]:
        orders = case.inputs["orders"]
        changed = {row["k"] for row in NEW_CITIES}
        newest = [row for row in CITIES if row["k"] not in changed] + NEW_CITIES
        before = [row for rows in orders.first for row in rows]
        after = [row for rows in orders.later for row in rows]
        return {OUT: lookup_join(before, CITIES, "k", "left") + lookup_join(after, newest, "k", "left")}

    return Case(
        "enrich-versions",
        {"orders": _orders()},
        starter(define),
        expected,
        prepare=_build_cities,
        between=_change_cities,
        least_waiting=1,
    )


def _enrich_chain() -> Case:
    """Two joins with a transformation between them; rows that leave before the first one have a sink of their own."""

    def build(root: Path) -> None:
        _build_cities(root)
        dt.Relation.build(pa.Table.from_pylist(MAYORS), root / "mayors", on="city", shards=2)

    def define(streams: dict[str, Any], root: Path) -> Any:
        return (
            dt.stream(streams["orders"], "chain")
            .divert("n % 10 = 3", dt.sinks.parquet(root / "aside"), columns=["n", "note"])
            .enrich(dt.Relation.open(root / "cities"), on="k", strategy="mesh", budget="120kB", max_delay="1 hour")
            .transform(lambda rows: rows.selectExpr("n", "city", "n * 2 AS twice"))
            .enrich(dt.Relation.open(root / "mayors"), on="city", how="left", max_delay="1 hour")
        )

    def expected(case: Case) -> dict[str, list[Row]]:
        rows = case.inputs["orders"].rows
        staying = [row for row in rows if row["n"] % 10 != 3]
        joined = lookup_join(staying, CITIES, "k", "inner")
        changed = [{"n": row["n"], "city": row["city"], "twice": row["n"] * 2} for row in joined]
        leaving = [{"n": row["n"], "note": row["note"]} for row in rows if row["n"] % 10 == 3]
        return {OUT: lookup_join(changed, MAYORS, "city", "left"), "aside": leaving}

    return Case(
        "enrich-chain",
        {"orders": _orders()},
        starter(define),
        expected,
        found=lambda root: {name: published(root / name) for name in (OUT, "aside")},
        prepare=build,
        least_waiting=1,
    )


def _enrich_called() -> Case:
    """A function is given each micro-batch; the copy's last one was committed, and the function not yet called."""

    def start(spark: Any, case: Case, root: Path, trigger: str, is_resumed: bool = False) -> Any:
        def note(rows: Any, batch: int) -> None:
            # A batch that comes again writes the same file.
            text = json.dumps(plain_rows(row.asDict() for row in rows.collect()))
            (root / OUT).mkdir(exist_ok=True)
            draft = root / OUT / f".{batch}"
            draft.write_text(text, encoding="utf-8")
            os.rename(draft, root / OUT / f"{batch}.json")

        flow = dt.stream(case.streams(spark, root, is_resumed)["orders"], "called").enrich(
            dt.Relation.open(root / "cities"), on="k", how="left", strategy="mesh", budget="120kB", max_delay="1 hour"
        )
        sink = dt.sinks.foreach_batch(note)
        return flow.write(sink, checkpoint=root / CHECKPOINT, trigger=trigger, keep_commits=2)

    def found(root: Path) -> dict[str, list[Row]]:
        return {OUT: [row for path in sorted((root / OUT).glob("*.json")) for row in json.loads(path.read_text())]}

    return Case(
        "enrich-called",
        {"orders": _orders()},
        start,
        lambda case: {OUT: lookup_join(case.inputs["orders"].rows, CITIES, "k", "left")},
        found,
        prepare=_build_cities,
        killed_at="flow.commit.after:2",
    )


def _wait_for(name: str, deadline: str, has_side: bool) -> Case:
    """Early facts: what waits for a master row that comes before the flow goes on, and what has waited too long."""
    master = [{"k": key, "name": f"m{key}"} for key in range(0, 40, 2)]
    more = [{"k": key, "name": f"m{key}"} for key in range(1, 20, 2)]
    schema = pa.schema({"n": pa.int64(), "k": pa.int64()})
    files = [[{"n": n, "k": None if n % 13 == 0 else n * 7 % 40} for n in range(s, s + 30)] for s in (0, 30, 60, 90)]

    def define(streams: dict[str, Any], root: Path) -> Any:
        side = {"expired": dt.sinks.parquet(root / "expired")} if has_side else {}
        return dt.stream(streams["facts"], name).wait_for(root / "master", on="k", deadline=deadline, **side)

    def expected(case: Case) -> dict[str, list[Row]]:
        facts = case.inputs["facts"]
        joined = lookup_join(facts.rows, master + more, "k", "left")
        early = {row["n"] for rows in facts.first for row in rows}
        results: dict[str, list[Row]] = {OUT: []}
        if has_side:
            results["expired"] = []
        for row in joined:
            is_known = row["name"] is not None
            if is_known:
                results[OUT].append(row)
            elif row["k"] is None or (has_side and row["n"] in early):
                # The latter's time was up long ago. What arrives now and finds nothing is still in its time.
                results["expired" if has_side else OUT].append(row)
        return results

    return Case(
        name,
        {"facts": Input(schema, "n long, k long", files[:2], files[2:])},
        starter(define),
        expected,
        found=lambda root: {each: published(root / each) for each in ((OUT, "expired") if has_side else (OUT,))},
        prepare=lambda root: dt.Relation.build(pa.Table.from_pylist(master), root / "master", on="k", shards=2),
        between=lambda root: dt.Relation.open(root / "master").append(pa.Table.from_pylist(more)),
        least_waiting=1,
    )


ENRICH = [
    _enrich("auto", "inner"),
    _enrich("mesh", "left"),
    _enrich("hybrid", "semi"),
    _enrich("balanced", "left"),
    _enrich("index_nested_loop", "inner", least_waiting=0),
    _enrich(
        "mesh",
        "anti",
        suffix="-condition",
        enrich={"condition": "city < note"},
        condition=lambda row, match: row["note"] is not None and match["city"] < row["note"],
    ),
    _enrich("mesh", "left", suffix="-replayed", least_waiting=0, killed_at="flow.intent.after:2"),
    _enrich("balanced", "left", suffix="-unpublished", least_waiting=0, killed_at="flow.commit.after:2"),
    _enrich_two_versions(),
    _enrich_chain(),
    _enrich_called(),
    _wait_for("wait-for", "36500 days", has_side=False),
    _wait_for("wait-for-expired", "30 seconds", has_side=True),
]
