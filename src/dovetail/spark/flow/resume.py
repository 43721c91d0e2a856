"""Continue an older flow with a changed one: ``flow.write(checkpoint=new, resume_from=old)``.

The new checkpoint takes over the flow's id, its batch numbers, Spark's offsets and the logs of its sources, and the
state of every unchanged step. An added step starts without state. A step that was removed or changed must hold no rows:
the old flow was stopped with ``drain=True``. The old checkpoint is marked, and refused from then on: two flows that
continue from one place would each process the rows that follow.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.core.errors import PlanError, StateError
from dovetail.spark.flow.fingerprint import FlowFingerprint
from dovetail.spark.flow.ownership import read_or_make_id, take_epoch
from dovetail.spark.flow.step import Step
from dovetail.spark.flow.store import RESUME_BEGUN, RESUME_DONE, FlowStore
from dovetail.storage.documents import create_document, read_document, storage_errors
from dovetail.storage.local import LOCAL
from dovetail.storage.running import RunnerLock
from dovetail.storage.state_files import ShardState, StateFile

__all__ = ["resume"]

_DRAIN = "Stop the old flow with stop(drain=True), and try again."


def resume(store: FlowStore, old_path: str, fingerprint: FlowFingerprint, steps: Sequence[Step]) -> None:
    """Fill a new checkpoint from an older one; does nothing if that was done before."""
    old = FlowStore(old_path)
    if old.checkpoint == store.checkpoint:
        raise PlanError(f"resume_from={old_path!r} is the checkpoint itself.", hint="Name a new checkpoint.")
    begun = read_document(store.root / RESUME_BEGUN)
    if begun is not None and begun["from"] != str(old.checkpoint):
        raise StateError(
            f"{store.checkpoint} was resumed from {begun['from']}, not from {old.checkpoint}.",
            hint="Use a new checkpoint.",
        )
    if read_document(store.root / RESUME_DONE) is not None:
        return
    if begun is None and (store.last_batch() is not None or store.spark_half.query_id() is not None):
        raise StateError(
            f"{store.checkpoint} is in use already; resume_from needs a new checkpoint.",
            hint="Use a new directory, or leave resume_from out to continue with this one.",
        )
    lock = RunnerLock(old.checkpoint, "resume")
    try:
        with storage_errors(store.root):
            _resume(store, old, fingerprint, steps)
    finally:
        lock.release()


def _resume(store: FlowStore, old: FlowStore, fingerprint: FlowFingerprint, steps: Sequence[Step]) -> None:
    commit, saved = old.newest_commit(), read_document(old.root / "flow.json")
    if commit is None or saved is None:
        raise StateError(f"{old.checkpoint} has no commit to continue from.", hint="Start without resume_from.")
    if saved["flow"] != fingerprint.flow:
        raise StateError(
            f"{old.checkpoint} is the checkpoint of the flow {saved['flow']!r}, this flow is {fingerprint.flow!r}.",
            hint="Give this flow the old name.",
        )
    moved = read_document(old.root / "moved.json")
    if moved is not None and moved["to"] != str(store.checkpoint):
        raise StateError(f"{old.checkpoint} was resumed in {moved['to']} already.", hint="Go on with that one.")
    operators = _carried_states(commit, saved["operators"], steps)
    create_document(store.root / RESUME_BEGUN, {"from": str(old.checkpoint)}, "flow.resume.begun")
    # From here on, no driver of the old checkpoint publishes, on any host.
    take_epoch(old.root, old.storage)
    create_document(old.root / "moved.json", {"to": str(store.checkpoint)}, "flow.moved")
    # The files of an interrupted resume are written again.
    for name in ("offsets", "commits", "sources", "metadata"):
        LOCAL.delete(store.checkpoint / name)
    for directory in ("commits", "state"):
        LOCAL.delete(store.root / directory)
        LOCAL.make_directory(store.root / directory)
    _copy_spark_half(old, store, commit["batch"])
    copied = {
        name: [{**shard, **_copied(old, store, name, ShardState.from_dict(shard)).as_dict()} for shard in shards]
        for name, shards in operators.items()
    }
    for name in ("identity.json", "flow.json"):
        LOCAL.delete(store.root / name)
    create_document(store.root / "flow.json", fingerprint.as_dict(), "flow.fingerprint")
    create_document(store.root / "identity.json", {"id": read_or_make_id(old.root, old.storage)}, "flow.identity")
    body = {**commit, "operators": copied, "rows": {}, "side": [], "resumed": True}
    store.create_commit(commit["batch"], body)
    create_document(store.root / RESUME_DONE, {"from": str(old.checkpoint)}, "flow.resume.done")


def _carried_states(
    commit: Mapping[str, Any], saved: Sequence[Mapping[str, Any]], steps: Sequence[Step]
) -> dict[str, list[dict[str, Any]]]:
    """The states that the new flow's steps continue with, by their new names."""
    left = {operator["name"]: operator for operator in saved}
    carried = {}
    for step in steps:
        match = next((name for name, operator in left.items() if step.can_go_on_from(operator)), None)
        if match is not None:
            del left[match]
            carried[step.name] = commit["operators"][match]
    for name in left:
        shards = commit["operators"][name]
        rows = sum(file["rows"] for shard in shards for file in shard["files"])
        waiting = sum(int(shard["report"].get("pending") or 0) for shard in shards)
        if rows or waiting:
            raise StateError(
                f"The step {name!r} of the old flow is not in the new one as it was, and holds {max(rows, waiting)} "
                "rows that would be lost.",
                hint=_DRAIN if waiting else "Leave this step as it was.",
            )
    return carried


def _copied(old: FlowStore, store: FlowStore, step: str, state: ShardState) -> ShardState:
    """A shard's state with its files in the new checkpoint."""
    files = []
    for file in state.files:
        _, shard, name = file.name.split("/")
        moved = f"{step}/{shard}/{name}"
        (store.state_root / step / shard).mkdir(parents=True, exist_ok=True)
        if not (store.state_root / moved).exists():
            shutil.copyfile(old.state_root / file.name, store.state_root / moved)
            LOCAL.sync([store.state_root / moved])
        files.append(StateFile.from_dict({**file.as_dict(), "name": moved}))
    for directory in {(store.state_root / file.name).parent for file in files}:
        LOCAL.sync([directory, directory.parent])
    return replace(state, files=tuple(files))


def _copy_spark_half(old: FlowStore, store: FlowStore, batch: int) -> None:
    """Copy offsets and logs up to a micro-batch; a later one that Spark has planned is planned again."""
    offsets = old.spark_half.offsets(batch)
    if offsets is None or not (old.checkpoint / "commits" / str(batch)).exists():
        raise StateError(
            f"Micro-batch {batch} of {old.checkpoint} is not through.",
            hint="Start the old flow once more, and stop it with stop(drain=True).",
        )
    if any((old.checkpoint / "state").glob("*")):
        raise StateError(
            f"{old.checkpoint} has state of Spark's own operators before the flow, which cannot move.",
            hint="Drop the watermark, aggregation or deduplication upstream, or start with a new checkpoint.",
        )
    for name in ("offsets", "commits"):
        for path in sorted((old.checkpoint / name).iterdir()):
            if path.name.isdigit() and int(path.name) <= batch:
                _copy(path, store.checkpoint / name / path.name)
    for number, line in enumerate(offsets.text.splitlines()[2:]):
        directory = old.checkpoint / "sources" / str(number)
        for path in sorted(directory.iterdir()) if directory.is_dir() else []:
            entry = path.name.partition(".")[0]
            if entry.isdigit() and _is_later(int(entry), line):
                if path.name.endswith(".compact"):
                    raise StateError(
                        f"{path} holds files of a micro-batch that is not through.",
                        hint="Start the old flow once more, and stop it with stop(drain=True).",
                    )
            elif not path.name.startswith("."):
                _copy(path, store.checkpoint / "sources" / str(number) / path.name)
    _copy(old.checkpoint / "metadata", store.checkpoint / "metadata")


def _is_later(entry: int, offset: str) -> bool:
    """Whether an entry of a file source's log is after its offset; other sources have a single entry, the start."""
    try:
        return entry > int(json.loads(offset)["logOffset"])
    except (ValueError, KeyError, TypeError):
        return False


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    LOCAL.sync([target, target.parent, target.parent.parent])
