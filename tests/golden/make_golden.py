"""Write golden copies of everything that Dovetail stores, for tests that later versions still open it.

Run once per stored format, with the version that writes it, and never again: a copy that is made anew proves nothing
about older ones. It writes ``format-<number>/``, for each case an archive and the rows that must come of it:

- relations with several versions, by `dovetail.Relation` alone;
- snapshots of the operators, in state files and commits;
- flows on Spark that were stopped, or killed, with state in their checkpoints. They run below the directory
  ``golden_files.ROOT``, because checkpoints name files by absolute paths.

::

    scripts/with-env python tests/golden/make_golden.py            # all
    scripts/with-env python tests/golden/make_golden.py multi-tree # some
"""

import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from golden_case import CHECKPOINT, LATER, Case
from golden_cases import CASES
from golden_files import ARCHIVES, ROOT, locked, pack, plain_rows, write_expected
from golden_relations import RELATIONS, RelationCase
from golden_snapshots import NAME as SNAPSHOTS_NAME
from golden_snapshots import SNAPSHOTS, build_cities, shown

import dovetail as dt
from dovetail.testing.faults import run_driver
from dovetail.testing.flows import state_bytes, wait_until
from dovetail.testing.rows import rows_of
from dovetail.testing.sessions import SHORT_LIVED, local_session

_VICTIM = "--victim"
_NEVER_AGAIN = "10 hours"
"""A trigger: the first micro-batch begins at once, and no other."""


def make_relation(case: RelationCase) -> None:
    """Write a relation, version by version."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "relation"
        for change in case.changes:
            case.apply(path, change)
        pack(path, case.name)
    versions = {str(number): plain_rows(rows) for number, rows in enumerate(case.versions(), start=1)}
    write_expected(case.name, versions)


def make_snapshots() -> None:
    """Write the snapshots of all operators, and what came out before they were taken."""
    expected: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        copy.mkdir()
        build_cities(copy)
        for case in SNAPSHOTS:
            join = case.make(copy, Path(scratch) / "spill" / case.name)
            expected[f"{case.name}: before"] = shown(rows_of(case.first(join)))
            waits = join.pending if hasattr(join, "pending") else join.waiting_bytes
            holds = sum(join.state_rows().values()) if hasattr(join, "state_rows") else 0
            print(f"{case.name}: {waits} wait, {holds} held")
            assert waits or holds or not case.must_wait, case.name
            case.save(join, copy)
            expected[f"{case.name}: in the end"] = shown(case.expected())
        pack(copy, SNAPSHOTS_NAME)
    write_expected(SNAPSHOTS_NAME, expected)


def make_flow(case: Case, spark: Any) -> None:
    """Run a flow up to the state that is kept, and check that there is some."""
    root = ROOT / case.name
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    case.prepare(root)
    if case.killed_at is None:
        waiting = run_first_half(case, spark, root)
        print(f"{case.name}: {waiting} wait")
        assert waiting >= case.least_waiting, f"{case.name}: {waiting} wait"
    else:
        command = [sys.executable, __file__, _VICTIM, case.name]
        log = Path(tempfile.gettempdir()) / f"golden-{case.name}.log"
        code = run_driver(command, log, case.killed_at)
        assert code == -signal.SIGKILL, f"{case.name} was to be killed, and ended with {code}: {log.read_text()}"
        log.unlink()
        print(f"{case.name}: killed")
    expected: dict[str, Any] = {name: plain_rows(rows) for name, rows in case.expected(case).items()}
    for name in case.kept:
        expected[f"kept: {name}"] = plain_rows(dt.Relation.open(root / name).to_arrow().to_pylist())
    _, live_bytes = state_bytes(root / CHECKPOINT)
    assert (live_bytes > 0) == case.has_state, f"{case.name}: {live_bytes} bytes of state"
    case.add_files(root / LATER, case.batches)
    pack(root, case.name)
    write_expected(case.name, expected)
    shutil.rmtree(root)


def run_first_half(case: Case, spark: Any, root: Path) -> int:
    """A micro-batch for each of the first files, each in a run of its own; gives how many tuples wait in the end."""
    waiting = 0
    for number in range(case.batches):
        case.add_files(root, number, number + 1)
        query = case.start(spark, case, root, _NEVER_AGAIN)
        # Until Spark has committed it as well.
        done = root / CHECKPOINT / "commits" / str(number)
        wait_until(lambda done=done, query=query: done.exists() or not query.isActive, f"batch {number} of {case.name}")
        query.stop()
        if query.exception() is not None:
            raise query.exception()
        waiting = query.progress.pending
    return waiting


def main(arguments: list[str]) -> None:
    """Make all copies, or those that are named."""
    if arguments[:1] == [_VICTIM]:
        (case,) = [case for case in CASES if case.name == arguments[1]]
        run_first_half(case, local_session(settings=SHORT_LIVED), ROOT / case.name)
        return

    def is_wanted(name: str) -> bool:
        return not arguments or name in arguments

    with locked():
        for relation in filter(lambda each: is_wanted(each.name), RELATIONS):
            make_relation(relation)
        if is_wanted(SNAPSHOTS_NAME):
            make_snapshots()
        flows = [case for case in CASES if is_wanted(case.name)]
        spark = local_session(settings=SHORT_LIVED) if flows else None
        for case in flows:
            make_flow(case, spark)
    print(f"{sum(path.stat().st_size for path in ARCHIVES.iterdir()):,} bytes in {ARCHIVES.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
