"""A query on Flink, in an interpreter that has PyFlink; prints lines of JSON.

``on_flink.py JOB.json``: the job says what to do (see `engines.py`). ``rate``: the results on the first slices as
Parquet, which also warms everything up; when told ``go``, the query over all slices, timed, into nothing. ``live``:
over a directory that files are added to, until it is killed; prints every result's ``latest`` and when it was emitted.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from pyflink.common import Configuration
from pyflink.table import EnvironmentSettings, TableEnvironment

from nexmark_bench.queries import Query, queries
from nexmark_bench.usage import cpu_seconds

_TYPES = {"string": "STRING", "int64": "BIGINT"}


def environment(job: dict[str, Any]) -> TableEnvironment:
    """A streaming environment on this process' own mini cluster."""
    settings = {
        "parallelism.default": "2",
        "state.backend.type": job["state_backend"],
        "taskmanager.memory.managed.size": "1g",
        "execution.checkpointing.interval": f"{job['checkpoint_ms']} ms",
        "execution.checkpointing.storage": "filesystem",
        "execution.checkpointing.dir": Path(job["checkpoint"]).as_uri(),
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "table.optimizer.multi-join.enabled": str(job["is_multi"]).lower(),
        "pipeline.jars": ";".join(Path(jar).as_uri() for jar in job["jars"]),
        "table.local-time-zone": "UTC",
    }
    if job.get("restore"):
        settings["execution.state-recovery.path"] = Path(job["restore"]).as_uri()
    configuration = Configuration()
    for name, value in settings.items():
        configuration.set_string(name, value)
    made = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
    return TableEnvironment.create(made)


def declare(tables: TableEnvironment, job: dict[str, Any], query: Query, directory: str) -> None:
    """The query's inputs as tables over Parquet files."""
    for kind in query.inputs:
        columns = ", ".join(f"`{name}` {_TYPES[kind_of]}" for name, kind_of in job["schemas"][kind].items())
        options = {"connector": "filesystem", "format": "parquet", "path": Path(directory, kind).as_uri()}
        if job["mode"] == "live":
            options["source.monitor-interval"] = "100 ms"
        tables.execute_sql(
            f"CREATE TEMPORARY TABLE {kind} ({columns}, rt AS TO_TIMESTAMP_LTZ(`dateTime`, 3), "
            f"WATERMARK FOR rt AS rt - INTERVAL '10' SECOND) WITH ({_options(options)})"
        )
    if query.side:
        options = {"connector": "filesystem", "format": "parquet", "path": Path(job["side"]).as_uri()}
        tables.execute_sql(
            "CREATE TEMPORARY TABLE side (key BIGINT, `value` STRING, rt AS TO_TIMESTAMP_LTZ(0 * key, 3), "
            f"WATERMARK FOR rt AS rt, PRIMARY KEY (key) NOT ENFORCED) WITH ({_options(options)})"
        )


def _options(options: dict[str, str]) -> str:
    return ", ".join(f"'{name}' = '{value}'" for name, value in options.items())


def sink(tables: TableEnvironment, name: str, columns: str, options: dict[str, str]) -> None:
    tables.execute_sql(f"CREATE TEMPORARY TABLE {name} ({columns}) WITH ({_options(options)})")


def run(job: dict[str, Any]) -> None:
    query = queries(job["large_rows"])[job["query"]]
    tables = environment(job)
    if job["mode"] == "rate":
        declare(tables, job, query, f"{job['events']}/prefix")
        options = {"connector": "filesystem", "format": "parquet", "path": Path(job["output"]).as_uri()}
        sink(tables, "target", query.columns, options)
        tables.execute_sql(f"INSERT INTO target {query.for_flink}").wait()
        print(json.dumps({"rows": "written"}), flush=True)
        if sys.stdin.readline().strip() != "go":
            raise SystemExit("The results differ, so nothing was timed.")
        for kind in (*query.inputs, *(["side"] if query.side else [])):
            tables.execute_sql(f"DROP TEMPORARY TABLE {kind}")
        declare(tables, job, query, f"{job['events']}/all")
        sink(tables, "nowhere", query.columns, {"connector": "blackhole"})
        statement = f"INSERT INTO nowhere {query.for_flink}"
        has_multi_join = "MultiJoin" in tables.explain_sql(statement)
        began, cpu = time.monotonic(), cpu_seconds(os.getpid())
        tables.execute_sql(statement).wait()
        told = {"seconds": time.monotonic() - began, "cpu_seconds": cpu_seconds(os.getpid()) - cpu}
        print(json.dumps({**told, "has_multi_join": has_multi_join}), flush=True)
    else:
        declare(tables, job, query, job["events"])
        sink(tables, "printed", "latest BIGINT, emitted TIMESTAMP_LTZ(3)", {"connector": "print"})
        statement = f"INSERT INTO printed SELECT latest, CURRENT_ROW_TIMESTAMP() FROM ({query.for_flink})"
        tables.execute_sql(statement).wait()


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
