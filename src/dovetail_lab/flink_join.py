"""A stream joined by Flink with a relation in its heap. Runs in an interpreter that has PyFlink.

``flink_join.py ROWS TUPLES``: a relation of ROWS rows of 120 bytes, TUPLES tuples with uniform keys, one regular join,
parallelism 2, heap state, no checkpoints, a sink that discards the results. Prints "ready" when the join has ended, and
exits when its input is closed, so that its CPU time can be read until then.
"""

import sys

_SETTINGS = {
    "parallelism.default": "2",
    "taskmanager.memory.process.size": "8g",
    "taskmanager.memory.task.heap.size": "6g",
    "taskmanager.memory.managed.size": "512m",
    "state.backend.type": "hashmap",
}
_SOURCE = "'connector' = 'datagen', 'rows-per-second' = '100000000', 'number-of-rows' = '{rows}'"
_RELATION = "create table r (k bigint, sk bigint, pay string) with ({source}, {fields})"
_STREAM = "create table s (k bigint, v int, q bigint) with ({source}, {fields})"
_SINK = "create table nowhere (k bigint, v int, q bigint, sk bigint, pay string) with ('connector' = 'blackhole')"
_JOIN = "insert into nowhere select s.k, s.v, s.q, r.sk, r.pay from s join r on s.k = r.k"


def main(rows: int, tuples: int) -> None:
    """Run the join to its end."""
    # Imported here, because Dovetail's own interpreter has no PyFlink.
    from pyflink.common import Configuration
    from pyflink.table import EnvironmentSettings, TableEnvironment

    configuration = Configuration()
    for name, value in _SETTINGS.items():
        configuration.set_string(name, value)
    settings = EnvironmentSettings.new_instance().in_streaming_mode().with_configuration(configuration).build()
    tables = TableEnvironment.create(settings)
    each_once = f"'fields.k.kind' = 'sequence', 'fields.k.start' = '1', 'fields.k.end' = '{rows}'"
    tables.execute_sql(
        _RELATION.format(source=_SOURCE.format(rows=rows), fields=f"{each_once}, 'fields.pay.length' = '104'")
    )
    uniform = f"'fields.k.kind' = 'random', 'fields.k.min' = '1', 'fields.k.max' = '{rows}'"
    tables.execute_sql(_STREAM.format(source=_SOURCE.format(rows=tuples), fields=uniform))
    tables.execute_sql(_SINK)
    tables.execute_sql(_JOIN).wait()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
