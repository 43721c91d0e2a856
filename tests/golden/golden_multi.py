"""Golden flows that join streams with each other."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from golden_case import OUT, Case, Input, moment, published, starter
from golden_plain import Row, same_key, streams_join, within

import dovetail as dt

NAMES = ("a", "b", "c")


def _timed(name: str, number: int, text: str = "") -> Row:
    """A row of an input; its time is about `number` seconds after the beginning. Some keys and times are NULL."""
    place = NAMES.index(name)
    return {
        "k": None if number % 23 == 5 else (number * (5 + 2 * place) + place) % 17,
        f"t{name}": None if number % 29 == 11 else moment(number + 0.25 * place),
        f"v{name}": f"{name}{number}{text}",
    }


def _timed_input(name: str, first: list[list[Row]], later: list[list[Row]]) -> Input:
    schema = pa.schema({"k": pa.int64(), f"t{name}": pa.timestamp("us", "UTC"), f"v{name}": pa.string()})
    return Input(schema, f"k long, t{name} timestamp, v{name} string", first, later)


def _timed_inputs(names: str, text: str = "") -> dict[str, Input]:
    files = {name: [[_timed(name, n, text) for n in range(s, s + 20)] for s in range(0, 80, 20)] for name in names}
    return {name: _timed_input(name, each[:2], each[2:]) for name, each in files.items()}


def _times(names: str) -> dict[str, str]:
    return {name: f"t{name}" for name in names}


def _columns(names: str) -> dict[str, tuple[str, str]]:
    return {"k": (names[0], "k"), **{f"{c}{name}": (name, f"{c}{name}") for name in names for c in "tv"}}


def _multi(name: str, window_s: int, text: str = "", **options: Any) -> Case:
    def define(streams: dict[str, Any], root: Path) -> Any:
        return dt.multi_join(
            streams, on="k", window=f"{window_s} seconds", time=_times("abc"), shards=2, name=name, **options
        )

    def expected(case: Case) -> dict[str, list[Row]]:
        inputs = {each: given.rows for each, given in case.inputs.items()}
        joined = streams_join(inputs, lambda rows: same_key(rows) and within(rows, window_s), _columns("abc"))
        return {OUT: shown(joined)}

    def shown(rows: list[Row]) -> list[Row]:
        # Without what only makes the state large.
        return [{name: v.removesuffix(text) if isinstance(v, str) else v for name, v in row.items()} for row in rows]

    def found(root: Path) -> dict[str, list[Row]]:
        return {OUT: shown(published(root / OUT))}

    return Case(name, _timed_inputs("abc", text), starter(define), expected, found)


def _multi_tree() -> Case:
    """Two join attributes, so two joins, of which the upper one keeps results of the lower one."""
    schemas = {
        "a": pa.schema({"x": pa.int64(), "ta": pa.timestamp("us", "UTC"), "va": pa.string()}),
        "b": pa.schema({"x": pa.int64(), "y": pa.string(), "tb": pa.timestamp("us", "UTC")}),
        "c": pa.schema({"y": pa.string(), "tc": pa.timestamp("us", "UTC"), "vc": pa.string()}),
    }
    columns = {
        "a": "x long, ta timestamp, va string",
        "b": "x long, y string, tb timestamp",
        "c": "y string, tc timestamp, vc string",
    }

    def row(name: str, n: int) -> Row:
        every = {"x": None if n % 23 == 5 else n * 5 % 13, "y": f"y{n * 7 % 5}"}
        every |= {f"t{name}": moment(n), f"v{name}": f"{name}{n}"}
        return {column: every[column] for column in schemas[name].names}

    files = {name: [[row(name, n) for n in range(s, s + 20)] for s in range(0, 80, 20)] for name in NAMES}
    inputs = {name: Input(schemas[name], columns[name], files[name][:2], files[name][2:]) for name in NAMES}

    def define(streams: dict[str, Any], root: Path) -> Any:
        on = [("a.x", "b.x"), ("b.y", "c.y")]
        options: dict[str, Any] = {"window": "9 seconds", "time": _times("abc"), "plan": [["a", "b"], "c"]}
        return dt.multi_join(streams, on=on, shards=2, name="tree", **options)

    def expected(case: Case) -> dict[str, list[Row]]:
        def agree(rows: Mapping[str, Row]) -> bool:
            a, b, c = rows["a"], rows["b"], rows["c"]
            return a["x"] is not None and a["x"] == b["x"] and b["y"] == c["y"] and within(rows, 9)

        shown = {"x": ("a", "x"), "y": ("b", "y"), "ta": ("a", "ta"), "va": ("a", "va"), "tb": ("b", "tb")}
        shown |= {"tc": ("c", "tc"), "vc": ("c", "vc")}
        return {OUT: streams_join({name: given.rows for name, given in case.inputs.items()}, agree, shown)}

    return Case("multi-tree", inputs, starter(define), expected)


def _multi_outer() -> Case:
    """Rows without a match come out when their window has passed, and late rows go to a directory of their own."""
    normal = _timed_inputs("ab")
    far, late = {"k": -1}, {"k": 3}
    inputs = {}
    for name, given in normal.items():
        after = [{**far, f"t{name}": moment(3_600), f"v{name}": f"{name} far"}]
        behind = [{**late, f"t{name}": moment(30), f"v{name}": f"{name} late"}]
        # The watermark of a micro-batch is read off those before it.
        inputs[name] = _timed_input(name, given.first, [*given.later, after, behind])

    def define(streams: dict[str, Any], root: Path) -> Any:
        options: dict[str, Any] = {"late": "side", "late_path": root / "late", "shards": 2, "name": "outer"}
        return dt.multi_join(
            streams, on="k", how="left", window="4 seconds", time=_times("ab"), lateness="25 seconds", **options
        )

    def expected(case: Case) -> dict[str, list[Row]]:
        on_time = {name: [r for r in given.rows if "late" not in r[f"v{name}"]] for name, given in case.inputs.items()}
        joined = streams_join(on_time, lambda rows: same_key(rows) and within(rows, 4), _columns("ab"))
        found = {row["va"] for row in joined}
        alone = [row for row in on_time["a"] if row["va"] not in found]
        unmatched = [{**row, "tb": None, "vb": None} for row in alone]
        came_late = {f"late/{name}": [given.rows[-1]] for name, given in case.inputs.items()}
        return {OUT: joined + unmatched, **came_late}

    def found(root: Path) -> dict[str, list[Row]]:
        return {place: published(root / place) for place in (OUT, "late/a", "late/b")}

    return Case("multi-outer", inputs, starter(define), expected, found, files_per_trigger=1)


def _closed_groups() -> Case:
    """Groups that are counted and come out when they are closed; a row that breaks a promise is put aside."""
    news = pa.schema({"sno": pa.int64(), "title": pa.string()})
    access = pa.schema({"sno": pa.int64(), "n": pa.int64(), "over": pa.bool_()})

    def accesses(numbers: range, closed: range, broken: list[Row]) -> list[Row]:
        rows = [{"sno": n * 7 % 20 + 10 * (n // 40), "n": n, "over": False} for n in numbers]
        return [*rows, *broken, *({"sno": number, "n": None, "over": True} for number in closed)]

    def titles(numbers: range) -> list[Row]:
        return [{"sno": number, "title": f"title {number}"} for number in numbers]

    broken = [{"sno": 2, "n": -1, "over": False}]
    inputs = {
        "news": Input(
            news, "sno long, title string", [titles(range(12)), titles(range(12, 25))], [titles(range(25, 38)), []]
        ),
        "access": Input(
            access,
            "sno long, n long, over boolean",
            [accesses(range(40), range(0), []), accesses(range(40, 80), range(9), [])],
            [accesses(range(80, 120), range(9, 20), broken), accesses(range(0), range(20, 40), [])],
        ),
    }

    def define(streams: dict[str, Any], root: Path) -> Any:
        joined = dt.multi_join(
            streams,
            on="sno",
            keys=["news"],
            punctuations={"access": dt.Punctuation.where("over", data=False)},
            on_broken_promise="quarantine",
            quarantine_path=root / "aside",
            notices="notice",
            budget="16MB",
            shards=2,
            name="closed",
        )
        return joined.aggregate_closed({"accesses": "count", "total": ("sum", "n"), "last": ("max", "n")})

    def expected(case: Case) -> dict[str, list[Row]]:
        known = {row["sno"] for row in case.inputs["news"].rows}
        data = [row for row in case.inputs["access"].rows if not row["over"] and row not in broken]
        groups = []
        # A value without news stays open: the item may still come.
        for number in sorted(known):
            counted = [row["n"] for row in data if row["sno"] == number]
            of = {"total": sum(counted), "last": max(counted)} if counted else {"total": None, "last": None}
            groups.append({"sno": number, "accesses": len(counted), **of})
        return {OUT: groups, "aside/access": [{"sno": row["sno"], "n": row["n"]} for row in broken]}

    def found(root: Path) -> dict[str, list[Row]]:
        aside = published(root / "aside" / "access")
        assert all(row["__reason"] for row in aside)
        put_aside = [{"sno": row["sno"], "n": row["n"]} for row in aside]
        return {OUT: published(root / OUT), "aside/access": put_aside}

    return Case("closed-groups", inputs, starter(define), expected, found, files_per_trigger=1)


def _promises() -> Case:
    """A stream of punctuations, which wait for the watermark; a unique input; rows that broke a promise as notices."""
    time = pa.timestamp("us", "UTC")

    def a(*rows: tuple[str, int, int]) -> list[Row]:
        return [{"k": k, "ta": moment(t), "va": v} for k, t, v in rows]

    def b(*rows: tuple[str, int, int]) -> list[Row]:
        return [{"k": k, "tb": moment(t), "vb": v} for k, t, v in rows]

    def ends(*rows: tuple[str, int]) -> list[Row]:
        return [{"k": k, "tb": moment(t)} for k, t in rows]

    inputs = {
        "a": Input(
            pa.schema({"k": pa.string(), "ta": time, "va": pa.int64()}),
            "k string, ta timestamp, va long",
            [a(("x", 0, 1), ("y", 0, 2)), a(("v", 100, 3))],
            [a(("u", 200, 4)), a(("w", 201, 5))],
        ),
        "b": Input(
            pa.schema({"k": pa.string(), "tb": time, "vb": pa.int64()}),
            "k string, tb timestamp, vb long",
            [b(("x", 5, 10)), b(("x", 25, 11), ("y", 100, 12))],
            # The watermark is at 90 seconds in the first of them: x is over, and v is not.
            [b(("x", 201, 13), ("v", 201, 14)), b(("v", 202, 15), ("y", 202, 16))],
        ),
        "ends": Input(
            pa.schema({"k": pa.string(), "tb": time}),
            "k string, tb timestamp",
            [ends(("x", 30)), ends(("v", 150))],
            [[], []],
        ),
    }

    def define(streams: dict[str, Any], root: Path) -> Any:
        return dt.multi_join(
            {"a": streams["a"], "b": streams["b"]},
            on="k",
            window="1 hour",
            time={"a": "ta", "b": "tb"},
            lateness="10 seconds",
            keys=["a"],
            punctuations={"b": streams["ends"]},
            on_broken_promise="quarantine",
            notices="notice",
            shards=2,
            name="promises",
        )

    def expected(case: Case) -> dict[str, list[Row]]:
        told = {(13, "x"), (15, "v")}
        kept = {"a": case.inputs["a"].rows, "b": [r for r in case.inputs["b"].rows if (r["vb"], r["k"]) not in told]}
        columns = {"k": ("a", "k"), "va": ("a", "va"), "vb": ("b", "vb")}
        return {
            OUT: streams_join(kept, same_key, columns),
            "aside": [{"k": "x", "vb": 13}, {"k": "v", "vb": 15}],
            "closed": [{"k": "x"}, {"k": "v"}],
        }

    def found(root: Path) -> dict[str, list[Row]]:
        rows = published(root / OUT)
        return {
            OUT: [{"k": r["k"], "va": r["va"], "vb": r["vb"]} for r in rows if r["notice"] is None],
            "aside": [{"k": r["k"], "vb": r["vb"]} for r in rows if r["notice"] not in (None, "closed")],
            "closed": [{"k": r["k"]} for r in rows if r["notice"] == "closed"],
        }

    return Case("promises", inputs, starter(define), expected, found, files_per_trigger=1)


MULTI = [
    _multi("multi-window", 12),
    _multi("multi-spilled", 20, "-" * 300, budget="40kB", max_delay="1 hour"),
    _multi_tree(),
    _multi_outer(),
    _closed_groups(),
    _promises(),
]
