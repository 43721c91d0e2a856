"""Relations and snapshots that earlier versions wrote: they hold what they held, and can be gone on with."""

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "golden"))

from golden_files import ARCHIVES, formats, plain_rows, read_expected, unpack
from golden_relations import RELATIONS, RelationCase
from golden_snapshots import NAME as SNAPSHOTS_NAME
from golden_snapshots import SNAPSHOTS, SnapshotCase, shown

import dovetail as dt
from dovetail.testing.rows import assert_same_rows, rows_of

KEPT = "kept: "


@pytest.fixture(autouse=True)
def unmarked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file counts as checked already: every digest is compared."""
    (tmp_path / "marks").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "marks"))


def copies(*names: str) -> list[Path]:
    """The copies of some names in all formats."""
    found = [directory / f"{name}.tar.gz" for directory in formats() for name in names]
    return [copy for copy in found if copy.exists()]


def label(value: object) -> str:
    """A copy as a part of a test's name."""
    if isinstance(value, Path):
        return f"{value.parent.name}-{value.name.removesuffix('.tar.gz')}"
    return str(getattr(value, "name", value))


def test_everything_has_a_copy() -> None:
    names = [*(case.name for case in RELATIONS), SNAPSHOTS_NAME]
    assert [name for name in names if not (ARCHIVES / f"{name}.tar.gz").exists()] == []


@pytest.mark.parametrize(
    ("copy", "case"), [(copy, case) for case in RELATIONS for copy in copies(case.name)], ids=label
)
def test_relation_holds_the_rows_of_every_version_and_takes_changes(
    tmp_path: Path, copy: Path, case: RelationCase
) -> None:
    path = tmp_path / "relation"
    unpack(copy, path)
    expected = read_expected(copy)
    relation = dt.Relation.open(path)
    assert [str(info.version) for info in relation.versions()] == list(expected)
    assert (relation.key, relation.num_shards, relation.is_unique_key) == (case.key, case.shards, case.is_unique)
    assert relation.schema.names == case.schema.names
    assert relation.schema.types == case.schema.types
    for version, rows in expected.items():
        opened = dt.Relation.open(path, version=int(version))
        assert_same_rows(plain_rows(opened.to_arrow().to_pylist()), rows, f"version {version}")
        assert opened.stats.rows == len(rows)
    rows = case.versions()[-1]
    for change in case.later:
        case.apply(path, change)
        rows = case.rows_after(rows, change)
        found = dt.Relation.open(path).to_arrow().to_pylist()
        assert_same_rows(plain_rows(found), plain_rows(rows), f"after {change.operation}")
    dt.Relation.open(path).vacuum(keep=1)
    assert_same_rows(plain_rows(dt.Relation.open(path).to_arrow().to_pylist()), plain_rows(rows), "after a vacuum")


def kept_relations() -> list[tuple[Path, str]]:
    """Copies of flows with the relations that they keep."""
    flows = [file.with_suffix(".tar.gz") for directory in formats() for file in sorted(directory.glob("*.json"))]
    return [(copy, name.removeprefix(KEPT)) for copy in flows for name in read_expected(copy) if name.startswith(KEPT)]


@pytest.mark.parametrize(("copy", "name"), kept_relations(), ids=label)
def test_relation_that_a_flow_keeps_holds_what_it_held(tmp_path: Path, copy: Path, name: str) -> None:
    unpack(copy, tmp_path / "flow")
    relation = dt.Relation.open(tmp_path / "flow" / name)
    assert_same_rows(plain_rows(relation.to_arrow().to_pylist()), read_expected(copy)[f"{KEPT}{name}"], name)


REFUSED = {("format-1", "mjoin-tree"): "Drain the tree with that release"}
"""Snapshots that are refused, and what the refusal says to do."""

SNAPSHOT_COPIES = [(copy, case) for case in SNAPSHOTS for copy in copies(SNAPSHOTS_NAME)]


def is_refused(copy: Path, case: SnapshotCase) -> bool:
    return (copy.parent.name, case.name) in REFUSED


@pytest.mark.parametrize(("copy", "case"), [one for one in SNAPSHOT_COPIES if is_refused(*one)], ids=label)
def test_snapshot_that_cannot_be_gone_on_with_says_what_to_do(tmp_path: Path, copy: Path, case: SnapshotCase) -> None:
    unpack(copy, tmp_path / "copy")
    with pytest.raises(dt.errors.StateError, match=REFUSED[copy.parent.name, case.name]):
        case.restored(tmp_path / "copy", tmp_path / "spill")


@pytest.mark.parametrize(("copy", "case"), [one for one in SNAPSHOT_COPIES if not is_refused(*one)], ids=label)
def test_operator_goes_on_from_its_snapshot_with_every_row_exactly_once(
    tmp_path: Path, copy: Path, case: SnapshotCase
) -> None:
    unpack(copy, tmp_path / "copy")
    expected = read_expected(copy)
    join = case.restored(tmp_path / "copy", tmp_path / "spill")
    rows = [*expected[f"{case.name}: before"], *shown(rows_of(case.later(join)))]
    assert_same_rows(rows, expected[f"{case.name}: in the end"], case.name)
