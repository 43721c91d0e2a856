"""Metadata-aware joins against the oracle: with truthful promises of every kind and mix, the results are the same.

An example is a join of 2 to 4 inputs, or a tree of joins of 3 to 7, whose rows are made so that promises about them are
true: unique, clustered and ordered inputs, and punctuations of every form that no later row matches. The oracle knows
nothing of promises. Besides the results, every call checks that the operator holds no more than it says and its budget
allows, and that no row comes out after a punctuation that matches it was passed on. Everything follows from one seed,
which a failure prints.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from dovetail.joins.multiway import TimeWindow, TupleWindow, mjoin_spec
from dovetail.joins.multiway.planner import plan_multiway
from dovetail.joins.promises import Metadata, MetadataJoin, MetadataTree, Order, Punctuation, Range
from dovetail.joins.promises.punctuation import BoundPunctuation
from dovetail.testing.held import held_array_bytes
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.rows import assert_same_rows, rows_of
from dovetail.testing.snapshots import through_storage

EXAMPLES = max(3, settings().max_examples // 12)
PROMISES = ["none", "unique", "clustered", "ascending", "descending", "punctuated", "unique punctuated"]
VALUES = 24


@dataclass
class Case:
    """A join, its rows and what is promised of them; all of it follows from the seed."""

    seed: int
    promises: list[str]
    how: str = "inner"
    keys: str = "integer"
    window: str | None = None
    flushing: str = "coordinated"
    purging: str = "batched"
    rows: int = 120
    spills: bool = True
    plan: Any = None
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.names = list("abcdefgh"[: len(self.promises)])
        kinds = {"integer": [pa.int64()], "text": [pa.string()], "composite": [pa.string(), pa.int32()]}[self.keys]
        self.key_columns = [f"k{n}" for n in range(len(kinds))]
        self.schemas = {
            n: pa.schema([*zip(self.key_columns, kinds, strict=True), (f"t{n}", pa.int64()), (n, pa.string())])
            for n in self.names
        }
        # A tuple must fit a small part of the budget; what spills is labelled as long as it takes.
        minimum = MetadataJoin.minimum_budget(mjoin_spec(self.schemas, self.key_columns, partitions=8))
        self.label_bytes = minimum * 9 // (4 * self.rows) if self.spills else 30
        # Nodes of a tree have the columns of several inputs.
        minimum *= 1 if self.plan is None else 3 * len(self.names)
        self.budget = minimum * 3 // 2 if self.spills else minimum * 100
        self.streams = {n: self._stream(n, p) for n, p in zip(self.names, self.promises, strict=True)}

    def key(self, number: int | None) -> tuple[Any, ...]:
        if number is None:
            return (None,) * len(self.key_columns)
        text = f"key {number:04d}"
        return {"integer": (number,), "text": (text,), "composite": (text, number % 3)}[self.keys]

    def _stream(self, name: str, promise: str) -> list[dict[str, Any]]:
        """The rows of an input, in the order in which they come."""
        numbers: list[int | None] = []
        count = self.rows // len(self.names)
        if "unique" in promise:
            numbers = list(self.chance.sample(range(VALUES), min(VALUES, count)))
        else:
            numbers = [self.chance.randrange(VALUES) for _ in range(count)]
        if promise == "clustered":
            order = self.chance.sample(range(VALUES), VALUES)
            numbers.sort(key=lambda number: order.index(number or 0))
        if promise in ("ascending", "descending"):
            sign = 1 if promise == "ascending" else -1
            slack = 3 if self.keys == "integer" else 0
            numbers.sort(key=lambda number: sign * (number or 0) + self.chance.random() * (slack + 0.5))
            furthest = None
            for place, number in enumerate(numbers):
                assert number is not None
                furthest = number if furthest is None else max(furthest * sign, number * sign) * sign
                if (furthest - number) * sign > slack:
                    numbers[place] = furthest
        for place in self.chance.sample(range(len(numbers)), len(numbers) // 20):
            numbers[place] = None
        rows = []
        for place, number in enumerate(numbers):
            time = None if self.chance.random() < 0.03 else 2 * place + self.chance.randint(0, 6)
            label = f"{name}{place % 7}:{place}:" + "x" * self.chance.randint(
                self.label_bytes // 2, self.label_bytes * 3 // 2
            )
            rows.append(dict(zip(self.key_columns, self.key(number), strict=True)) | {f"t{name}": time, name: label})
        return rows

    def metadata(self) -> Metadata:
        by_name = dict(zip(self.names, self.promises, strict=True))
        slack = 3 if self.keys == "integer" else 0
        return Metadata(
            keys=[n for n, p in by_name.items() if "unique" in p],
            clustered=[n for n, p in by_name.items() if p == "clustered"],
            ordered={n: Order(p, slack) for n, p in by_name.items() if p in ("ascending", "descending")},
            purging=self.purging,  # type: ignore[arg-type]
            purge_count=self.chance.choice([None, 1, 7]),
        )

    def join(self, directory: Path) -> MetadataJoin | MetadataTree:
        window = {None: None, "time": TimeWindow(30, {n: f"t{n}" for n in self.names}), "tuples": TupleWindow(40)}
        options: dict[str, Any] = {"how": self.how, "window": window[self.window], "flushing": self.flushing}
        options |= {"partitions": 8, "seed": self.seed, "spill_directory": directory}
        self.chance, kept = random.Random(self.seed), self.chance
        metadata = self.metadata()
        self.chance = kept
        spec = mjoin_spec(self.schemas, self.key_columns, budget=self.budget, **options)
        if self.plan is None:
            return MetadataJoin(spec, metadata)
        return MetadataTree(spec, plan_multiway(spec.graph, force=self.plan), metadata)

    def punctuation(self, name: str, sent: int) -> Punctuation | None:
        """Something that no later row of the input matches, of a random form."""
        rest = self.streams[name][sent:]
        ahead = {tuple(row[c] for c in self.key_columns) for row in rest}
        over = [number for number in range(VALUES + 3) if self.key(number) not in ahead]
        if not over:
            return None
        form = self.chance.choice(["equals", "one of", "range", "other column", "part of the key", "everything"])
        first = self.key_columns[0]
        if form == "everything":
            return Punctuation({}) if not rest else None
        if form == "other column":
            gone = [n for n in range(7) if not any(row[name].startswith(f"{name}{n}:") for row in rest)]
            if not gone:
                return None
            n = self.chance.choice(gone)
            return Punctuation({name: Range(f"{name}{n}:", f"{name}{n};", self.chance.choice(["left", "neither"]))})
        if form == "equals" or (form == "one of" and len(self.key_columns) > 1):
            return Punctuation(dict(zip(self.key_columns, self.key(self.chance.choice(over)), strict=True)))
        if form == "one of":
            return Punctuation.one_of(first, [self.key(n)[0] for n in self.chance.sample(over, min(3, len(over)))])
        if form == "part of the key" and len(self.key_columns) > 1:
            thirds = [n for n in range(3) if n not in {row[self.key_columns[1]] for row in rest}]
            return Punctuation({self.key_columns[1]: thirds[0]}) if thirds else None
        return self._range(over, ahead)

    def _range(self, over: list[int], ahead: set[tuple[Any, ...]]) -> Punctuation:
        low = high = self.chance.choice(over)
        while self.key(high + 1) not in ahead and self.chance.random() < 0.9 and high < VALUES:
            high += 1
        ends: list[Any] = [self.key(low)[0], self.key(high)[0]]
        closed = "both"
        if not any(key[0] is not None and key[0] <= ends[1] for key in ahead) and self.chance.random() < 0.5:
            ends[0] = None
        if high > low and ends[0] is not None:
            closed = self.chance.choice(["both", "left", "right"] + ["neither"] * (high > low + 1))
        return Punctuation.between(self.key_columns[0], *ends, closed=closed)


def drive(case: Case, directory: Path) -> MetadataJoin | MetadataTree:
    """Run a case and compare; gives the operator for what else a test wants to know."""
    join, chance, restarts = case.join(directory / "0"), random.Random(case.seed + 1), 0
    spec = join.spec
    sent = dict.fromkeys(case.names, 0)
    data: dict[str, list[dict[str, Any]]] = {name: [] for name in case.names}
    out: list[dict[str, Any]] = []
    passed_on: list[BoundPunctuation] = []
    number, watermark = 0, None

    def collect(batches: Any) -> None:
        for batch in batches:
            for punctuation in passed_on:
                assert not punctuation.matches(batch).any(), f"{punctuation} was passed on before {batch.to_pylist()}"
            out.extend(rows_of([batch]))
        for punctuation in join.take_punctuations():
            passed_on.append(BoundPunctuation.of(punctuation, "out", join.output_schema))
        assert join.size() <= spec.budget.total_bytes
        specs = [spec, *(each.spec for each in join.joins)] if isinstance(join, MetadataTree) else [spec]
        assert held_array_bytes(join, exclude=specs) <= join.size()

    promised: dict[str, list[BoundPunctuation]] = {name: [] for name in case.names}
    while any(sent[name] < len(case.streams[name]) for name in case.names):
        name = chance.choice([n for n in case.names if sent[n] < len(case.streams[n])])
        rows = case.streams[name][sent[name] : sent[name] + chance.randint(1, 9)]
        for row in rows:
            time = row[f"t{name}"]
            if not (case.window == "time" and watermark is not None and time is not None and time < watermark):
                data[name].append(row | {"place": number})
            number += 1
        batch = pa.RecordBatch.from_pylist(rows, schema=case.schemas[name])
        collect(join.offer(name, batch if isinstance(join, MetadataTree) else spec.with_codes(name, batch)))
        sent[name] += len(rows)
        if "punctuated" in case.promises[case.names.index(name)]:
            given = [p for _ in range(chance.randint(0, 3)) if (p := case.punctuation(name, sent[name])) is not None]
            promised[name] += [BoundPunctuation.of(p, name, case.schemas[name]) for p in given]
            collect(join.punctuate(name, *given))
        collect(join.step(idle=chance.random() < 0.2))
        if case.window == "time" and chance.random() < 0.3:
            watermark = max(watermark or -100, min(2 * sent[n] for n in case.names) - 10)
            collect(join.advance(watermark))
        if chance.random() < 0.1:
            collect(join.drain())
        if chance.random() < 0.1:
            restarts += 1
            saved = through_storage(join.snapshot())
            join = case.join(directory / str(restarts))
            join.restore(saved)
    for name in case.names:
        join.finish(name)
    collect(join.drain())
    assert sum(join.state_rows().values()) == 0
    assert join.metrics.broken_promises == {}

    times, width = None, None
    if case.window is not None:
        times = {name: f"t{name}" if case.window == "time" else "place" for name in case.names}
        width = spec.window.width
    equalities = [((case.names[0], c), (name, c)) for c in case.key_columns for name in case.names[1:]]
    shown = {name: [*case.schemas[name].names, "place"] for name in case.names}
    expected = multiway_oracle(data, equalities, case.how, None, times, width, shown)  # type: ignore[arg-type]
    order = join.output_schema.names
    assert_same_rows(out, [{column: row[column] for column in order} for row in expected], context=f"{case}")
    _check_all_passed_on(case, join, promised, passed_on)
    return join


def _check_all_passed_on(
    case: Case,
    join: MetadataJoin | MetadataTree,
    promised: dict[str, list[BoundPunctuation]],
    passed_on: list[BoundPunctuation],
) -> None:
    """Every key that a punctuation closed has been passed on by the end, unless promises were forgotten."""
    # In the least memory, promises are forgotten, or wait for room to be passed on.
    if case.spills:
        return
    assert join.metrics.punctuations_forgotten == 0
    of = {"left": "a", "anti": "a", "right": "b"}.get(case.how)
    promised = {name: given for name, given in promised.items() if of in (None, name) and case.how != "full"}
    schema = pa.schema([case.schemas["a"].field(c) for c in case.key_columns])
    every = [dict(zip(case.key_columns, case.key(n), strict=True)) for n in range(VALUES)]
    keys = pa.RecordBatch.from_pylist(every, schema=schema)
    every_bound = [bound for of_input in promised.values() for bound in of_input]
    for bound in (bound for bound in every_bound if set(bound.columns) <= set(case.key_columns)):
        closed = bound.matches(keys)
        for p in passed_on:
            if set(p.columns) <= set(case.key_columns):
                closed = closed & ~p.matches(keys)
        assert not closed.any(), f"{bound} was not passed on: {keys.filter(pa.array(closed)).to_pylist()}"


SEEDS = st.integers(0, 2**32)
MIXES = st.lists(st.sampled_from(PROMISES), min_size=2, max_size=4)
PURGING = st.sampled_from(["immediate", "batched"])
FLUSHING = st.sampled_from(["coordinated", "random"])
WINDOWS = st.sampled_from([None, "time", "tuples"])
KEYS = st.sampled_from(["integer", "text", "composite"])


def drive_example(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    note(f"seed {case.seed}")
    drive(case, tmp_path_factory.mktemp("spill"))


def allowed(promises: list[str], keys: str) -> list[str]:
    """An order is of one column: with composite keys such an input is punctuated instead."""
    return ["punctuated" if keys == "composite" and "scending" in p else p for p in promises]


@settings(max_examples=EXAMPLES)
@given(seed=SEEDS, promises=MIXES, keys=KEYS, purging=PURGING, flushing=FLUSHING, spills=st.booleans())
def test_oracle_truthful_promises_change_no_result(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    promises: list[str],
    keys: str,
    purging: str,
    flushing: str,
    spills: bool,
) -> None:
    case = Case(seed, allowed(promises, keys), keys=keys, purging=purging, flushing=flushing, spills=spills)
    drive_example(case, tmp_path_factory)


@settings(max_examples=EXAMPLES)
@given(seed=SEEDS, promises=MIXES, window=WINDOWS, purging=PURGING, flushing=FLUSHING)
def test_oracle_truthful_promises_in_windows(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    promises: list[str],
    window: str | None,
    purging: str,
    flushing: str,
) -> None:
    drive_example(Case(seed, promises, window=window, purging=purging, flushing=flushing), tmp_path_factory)


def random_tree(chance: random.Random, names: list[str]) -> Any:
    """Any tree of these inputs with more than one node."""
    parts: list[Any] = chance.sample(names, len(names))
    while len(parts) > 3 or (len(parts) == 3 and all(isinstance(part, str) for part in parts)):
        count = chance.randint(2, min(3, len(parts) - 1))
        parts = [*parts[count:], parts[:count]]
    return parts


@settings(max_examples=EXAMPLES)
@given(
    seed=SEEDS,
    promises=st.lists(st.sampled_from(PROMISES), min_size=3, max_size=7),
    keys=KEYS,
    window=WINDOWS,
    purging=PURGING,
    flushing=FLUSHING,
    spills=st.booleans(),
)
def test_oracle_truthful_promises_in_trees(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    promises: list[str],
    keys: str,
    window: str | None,
    purging: str,
    flushing: str,
    spills: bool,
) -> None:
    plan = random_tree(random.Random(seed), list("abcdefgh"[: len(promises)]))
    note(f"plan {plan}")
    options: dict[str, Any] = {"keys": keys, "window": window, "purging": purging, "flushing": flushing}
    drive_example(Case(seed, allowed(promises, keys), spills=spills, plan=plan, **options), tmp_path_factory)


@settings(max_examples=EXAMPLES)
@given(
    seed=SEEDS,
    promises=st.lists(st.sampled_from(PROMISES), min_size=2, max_size=2),
    how=st.sampled_from(["left", "right", "full", "semi", "anti"]),
    keys=st.sampled_from(["integer", "text"]),
    window=WINDOWS,
    purging=PURGING,
    flushing=FLUSHING,
    spills=st.booleans(),
)
def test_oracle_truthful_promises_of_outer_semi_and_anti_joins(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    promises: list[str],
    how: str,
    keys: str,
    window: str | None,
    purging: str,
    flushing: str,
    spills: bool,
) -> None:
    if how == "left" and random.Random(seed).random() < 0.5:
        promises = [*promises, random.Random(seed).choice(PROMISES)]
    options: dict[str, Any] = {"keys": keys, "window": window, "purging": purging, "flushing": flushing}
    drive_example(Case(seed, promises, how=how, spills=spills, **options), tmp_path_factory)


@pytest.mark.parametrize(("flushing", "purging"), [("coordinated", "immediate"), ("random", "batched")])
@pytest.mark.parametrize("promises", [["none", "punctuated"], ["punctuated", "clustered", "punctuated"]])
def test_oracle_promises_are_used_while_partitions_are_on_disk(
    tmp_path: Path, promises: list[str], flushing: str, purging: str
) -> None:
    join = drive(Case(6, promises, purging=purging, flushing=flushing, rows=200), tmp_path)
    assert join.metrics.flushed_rows > 0
    assert join.metrics.closed_rows + join.metrics.dropped_on_arrival > 0
