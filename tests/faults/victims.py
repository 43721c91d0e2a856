"""The processes that the fault tests kill: each does one piece of work on a relation.

Run as a program it is their nursery: it imports everything once and forks a child per request, so that a kill costs
milliseconds instead of the start of an interpreter. Requests and answers are JSON lines on stdin and stdout.
"""

import fcntl
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import pyarrow as pa

from dovetail import Relation
from dovetail.core import faultpoints
from dovetail.core.errors import RelationConflict, RelationError
from dovetail.relation import version_log

SHARDS = 3
KEYS = 400
SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("text", pa.string())])

DONE, FAILED, CONFLICT, REFUSED = 0, 1, 3, 4
"""Exit codes: the work was done; it failed in a way nobody expected; another writer was first; a clear error."""

Row = dict[str, Any]


def rows_of(operation: str, seed: int) -> list[Row]:
    """What a build, append, upsert or delete number ``seed`` is given."""
    if operation == "build":
        rows = [{"k": f"{key}", "n": seed, "text": f"{key} " * 20} for key in range(KEYS)]
        return [*rows, {"k": None, "n": seed, "text": "no key"}]
    keys = range(seed % 5, KEYS + 20 * (seed % 7), 5)
    return [{"k": f"{key}", "n": seed, "text": f"{operation} {seed}"} for key in keys]


def after(before: list[Row], operation: str, seed: int) -> list[Row]:
    """What the relation holds after the work, if it held ``before``."""
    rows = rows_of(operation, seed)
    if operation == "build":
        return rows
    keys = {row["k"] for row in rows}
    kept = before if operation == "append" else [row for row in before if row["k"] not in keys]
    return kept if operation == "delete" else kept + rows


def work(root: str, operation: str, seed: int) -> None:
    """Do one piece of work."""
    if operation == "read":
        Relation.open(root).to_arrow()
        return
    if operation == "vacuum":
        Relation.open(root).vacuum(keep=1)
        return
    table = pa.Table.from_pylist(rows_of(operation, seed), schema=SCHEMA)
    if operation == "build":
        Relation.build(table, root, on="k", shards=SHARDS, mode="overwrite")
    else:
        getattr(Relation.open(root), operation)(table)


def _be_a_child(request: dict[str, Any]) -> int:
    """What happens in a forked child; gives its exit code."""
    tempfile.tempdir = request["temp"]
    os.environ.update(request.get("env", {}))
    faultpoints._ARMED = faultpoints._armed_by_environment()
    if request.get("file_bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], resource.RLIM_INFINITY))
    if request.get("meet"):
        _meet_before_commit(Path(request["meet"]))
    if request.get("no_lock"):
        # As if on another host, where this host's locks are not seen.
        fcntl.flock = lambda *arguments: None
    time.sleep(max(0.0, request.get("start_at", 0.0) - time.time()))
    try:
        work(request["root"], request["operation"], request["seed"])
    except RelationConflict as error:
        Path(request["report"]).write_text(str(error))
        return CONFLICT
    except RelationError as error:
        Path(request["report"]).write_text(str(error))
        return REFUSED
    return DONE


def _meet_before_commit(place: Path) -> None:
    """Commit only when another writer stands at the same place."""
    commit = version_log.VersionLog.commit

    def meet(self: version_log.VersionLog, root: Path, manifest: Any) -> None:
        (place / str(os.getpid())).touch()
        give_up_at = time.monotonic() + 60
        while len(os.listdir(place)) < 2:
            if time.monotonic() > give_up_at:
                raise TimeoutError("the other writer did not come")
            time.sleep(0.001)
        commit(self, root, manifest)

    version_log.VersionLog.commit = meet  # type: ignore[method-assign]


def _fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = FAILED
    try:
        status = _be_a_child(request)
    except BaseException:  # noqa: BLE001 -- a child must never return into the nursery's loop
        Path(request["report"]).write_text(traceback.format_exc())
    finally:
        os._exit(status)


def main() -> None:
    """Serve requests until stdin ends."""
    # Compile or load every kernel before the first fork, so that no child spends its short life on that.
    with tempfile.TemporaryDirectory() as directory:
        root = f"{directory}/warm"
        for operation in ("build", "upsert", "append", "delete", "read", "vacuum"):
            work(root, operation, 1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
        else:
            print(json.dumps({"pid": _fork(request)}), flush=True)


if __name__ == "__main__":
    main()
