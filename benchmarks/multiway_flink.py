"""Three streams joined by Flink: run by an interpreter that has PyFlink, for `multiway.py`; prints one line of JSON.

``multiway_flink.py ROWS chain|multi``: ROWS of every stream, unique keys, heap state, no checkpoints, parallelism 2, a
source that gives rows as fast as they are taken, a sink that drops them. ``chain`` is Flink's usual plan, two joins one
after the other; ``multi`` is its operator for several inputs.
"""

import json
import sys
import time

from pyflink.common import Configuration
from pyflink.table import EnvironmentSettings, TableEnvironment

SETTINGS = {
    "parallelism.default": "2",
    "taskmanager.memory.process.size": "6g",
    "taskmanager.memory.task.heap.size": "4g",
    "taskmanager.memory.managed.size": "1g",
    "state.backend.type": "hashmap",
}
QUERY = """
insert into nowhere select s1.id, s1.v, s2.v, s3.v from s1 join s2 on s1.id = s2.id join s3 on s1.id = s3.id
"""


def main(rows: int, plan: str) -> None:
    """Run the join to its end."""
    configuration = Configuration()
    for name, value in SETTINGS.items():
        configuration.set_string(name, value)
    settings = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
    tables = TableEnvironment.create(settings)
    if plan == "multi":
        tables.get_config().set("table.optimizer.multi-join.enabled", "true")
    for number in (1, 2, 3):
        tables.execute_sql(
            f"create table s{number} (id bigint, v bigint) with ('connector' = 'datagen', "
            f"'rows-per-second' = '100000000', 'number-of-rows' = '{rows}', 'fields.id.kind' = 'sequence', "
            f"'fields.id.start' = '1', 'fields.id.end' = '{rows}', 'fields.v.kind' = 'random')"
        )
    tables.execute_sql(
        "create table nowhere (k bigint, v1 bigint, v2 bigint, v3 bigint) with ('connector' = 'blackhole')"
    )
    has_operator = "MultiJoin" in tables.explain_sql(QUERY)
    started = time.monotonic()
    tables.execute_sql(QUERY).wait()
    seconds = time.monotonic() - started
    told = {"plan": f"flink-{plan}", "rows": rows, "seconds": seconds, "multi_join_operator": has_operator}
    print(json.dumps(told | {"tuples_per_s": 3 * rows / seconds}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
