"""The state directory of a flow: what counts, what is refused, and what may go."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError, StateError
from dovetail.spark.flow.fingerprint import FlowFingerprint
from dovetail.spark.flow.store import FlowStore
from dovetail.storage.digests import digest_of
from dovetail.storage.documents import FORMAT_VERSION
from dovetail.storage.state_files import ShardState, read_table, write_tables
from dovetail.testing.flows import unnamed_state_files

OPERATOR = {"name": "1-enrich", "kind": "enrich auto", "shards": 2, "input": ["k bigint", "v string"], "how": "inner"}
FLOW = FlowFingerprint("orders", (OPERATOR,))


@pytest.fixture
def store(tmp_path: Path) -> FlowStore:
    store = FlowStore(tmp_path / "checkpoint")
    store.open(FLOW)
    return store


def save(store: FlowStore, batch: int, shard: int = 0, rows: int = 3) -> ShardState:
    (file,) = write_tables(store.state_root, "1-enrich", shard, batch, [("window", pa.table({"k": list(range(rows))}))])
    return ShardState(f"state-{batch}-{shard}", (file,), {"odometer": batch})


def commit(store: FlowStore, batch: int, *states: ShardState) -> dict[str, Any]:
    operators = {"1-enrich": [state.as_dict() for state in states]}
    body = intended(batch, operators=operators, sink="noop", receipt={}, rows={})
    return store.create_commit(batch, body)


def intended(batch: int, **fields: Any) -> dict[str, Any]:
    return {"batch": batch, "query": "q", "time_ms": 1, "drain": False, "operators": {}, **fields}


def rewrite(path: Path, **changes: Any) -> None:
    """Change a document and its digest with it."""
    content = json.loads(path.read_text()) | changes
    content.pop("digest")
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps(content | {"digest": digest_of(canonical)}))


def test_state_comes_back_as_it_was_saved(store: FlowStore) -> None:
    state = save(store, 0)
    assert ShardState.from_dict(json.loads(json.dumps(state.as_dict()))) == state
    assert read_table(store.state_root, state.files[0]).to_pydict() == {"k": [0, 1, 2]}


def test_the_first_intent_and_the_first_commit_count(store: FlowStore) -> None:
    assert store.intent(0) is None
    assert store.create_intent(0, intended(0)) == store.create_intent(0, intended(0, time_ms=2)) == intended(0)
    first, second = save(store, 0), save(store, 0)
    assert commit(store, 0, first) == commit(store, 0, second) == store.commit(0)
    assert store.last_batch() == 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (FlowFingerprint("payments", (OPERATOR,)), "belongs to the flow 'orders', this flow is 'payments'"),
        (FlowFingerprint("orders", (OPERATOR | {"shards": 4},)), "made with shards=2 .* this flow has shards=4"),
        (
            FlowFingerprint("orders", (OPERATOR | {"input": ["k int", "v string"]},)),
            "another input of operator '1-enrich': then there was k bigint; now there is k int",
        ),
        (
            FlowFingerprint("orders", (OPERATOR | {"input": ["v string", "k bigint"]},)),
            "another input of operator '1-enrich': the order is another",
        ),
        (FlowFingerprint("orders", (OPERATOR, OPERATOR | {"name": "2-enrich"})), "this flow has 1-enrich, 2-enrich"),
        (FlowFingerprint("orders", ()), "made with the operators 1-enrich; this flow has none"),
    ],
)
def test_checkpoint_of_something_else_is_refused(store: FlowStore, other: FlowFingerprint, message: str) -> None:
    with pytest.raises(StateError, match=message):
        FlowStore(store.checkpoint).open(other)
    FlowStore(store.checkpoint).open(FLOW)


def test_newer_format_is_refused_with_what_to_do(store: FlowStore) -> None:
    rewrite(store.root / "flow.json", format=FORMAT_VERSION + 1)
    with pytest.raises(StateError, match=f"has format {FORMAT_VERSION + 1}.* with the version of Dovetail that wrote"):
        FlowStore(store.checkpoint).open(FLOW)


@pytest.mark.parametrize("damage", [b"", b"{", b'"text"', b"\xff\xfe", b'{"format": 1, "digest": "0"}'])
def test_damaged_document_is_refused(store: FlowStore, damage: bytes) -> None:
    commit(store, 0, save(store, 0))
    (store.root / "commits" / "00000000.json").write_bytes(damage)
    with pytest.raises(StateError, match=r"00000000.json is damaged.* Restore the checkpoint from a copy"):
        store.commit(0)


def test_commits_without_a_flow_are_refused(store: FlowStore) -> None:
    commit(store, 0, save(store, 0))
    (store.root / "flow.json").unlink()
    with pytest.raises(StateError, match=r"has commits but no flow\.json"):
        store.open(FLOW)


def test_every_damage_of_a_state_file_is_found(store: FlowStore) -> None:
    (file,) = save(store, 0, rows=50).files
    path = store.state_root / file.name
    whole = path.read_bytes()
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(StateError, match=r"cannot be used: .* Restore the checkpoint"):
            read_table(store.state_root, file)
    path.write_bytes(whole[:-8])
    with pytest.raises(StateError, match=f"has {len(whole) - 8} bytes, but its commit needs {len(whole)}"):
        read_table(store.state_root, file)
    path.unlink()
    with pytest.raises(StateError, match="it does not exist"):
        read_table(store.state_root, file)
    path.write_bytes(whole)
    assert read_table(store.state_root, file).num_rows == 50


def test_cleanup_keeps_what_kept_commits_name_and_what_is_not_committed_yet(store: FlowStore) -> None:
    shared = save(store, 0, shard=1)
    states = [save(store, batch) for batch in range(4)]
    leftovers = [save(store, batch) for batch in (1, 3)]
    for batch, state in enumerate(states):
        store.create_intent(batch, intended(batch))
        commit(store, batch, state, shared)
    running = save(store, 4)
    (store.root / "commits" / ".00000002.json-abc").touch()
    (store.root / "commits" / ".00000004.json-abc").touch()
    report = store.clean(keep=2)
    assert (report.commits, report.files) == (2, 2 + len(leftovers))
    assert [path.name for path in sorted((store.root / "intents").iterdir())] == ["00000002.json", "00000003.json"]
    left = {str(path.relative_to(store.state_root)) for path in store.state_root.rglob("*.arrow")}
    assert left == {file.name for state in (shared, *states[2:], running) for file in state.files}
    assert unnamed_state_files(store.checkpoint) == {running.files[0].name, ".00000004.json-abc"}
    commit(store, 4, running, shared)
    store.clean(keep=2)
    assert unnamed_state_files(store.checkpoint) == set()
    assert store.clean(keep=2).files == 0


def test_cleanup_forgets_the_marks_of_tables_that_no_kept_commit_names(
    store: FlowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tables = {name: pa.table({name: [number]}) for number, name in enumerate(("early", "late"))}
    both = write_tables(store.state_root, "1-enrich", 0, 0, list(tables.items()))
    (late,) = (file for file in both if file.table == "late")
    for batch, files in enumerate((both, [late], [late], [late])):
        commit(store, batch, ShardState(f"state-{batch}", tuple(files)))
    for file in both:
        read_table(store.state_root, file)
    marks = tmp_path / f"dovetail-{os.getuid()}" / "verified"
    assert len(list(marks.iterdir())) == 2
    store.clean(keep=2)
    (left,) = marks.iterdir()
    assert left.name.startswith(late.digest)
    assert read_table(store.state_root, late) == tables["late"]


def test_cleanup_that_would_leave_too_little_to_replay_is_refused(store: FlowStore) -> None:
    with pytest.raises(PlanError, match="a replay needs at least 2 commits"):
        store.clean(keep=1)


def test_path_that_cannot_rename_is_refused() -> None:
    with pytest.raises(PlanError, match="one that all nodes mount"):
        FlowStore("s3://bucket/checkpoint")
    assert FlowStore("file:///tmp/c").checkpoint == FlowStore("/tmp/c").checkpoint
