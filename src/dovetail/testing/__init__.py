"""The public test harness, used by Dovetail's own tests and available for yours.

- `dovetail.testing.oracle`: the expected result of a join, computed in plain Python;
- `dovetail.testing.rows`: compare rows as multisets or in stream order, with a readable difference;
- `dovetail.testing.batches`: stream batches with codes from plain rows;
- `dovetail.testing.driver`: run any semi-stream join through a schedule of actions and check it after each;
- `dovetail.testing.schedules`: sequences of actions; `dovetail.testing.snapshots`: a snapshot through storage;
- `dovetail.testing.held`: the bytes that an object holds; `dovetail.testing.shard`: a relation's shard in memory;
- `dovetail.testing.strategies`: hypothesis strategies for streams and relations (needs ``hypothesis``);
- `dovetail.testing.faults`: kill a process at a named point, or at a random time;
- `dovetail.testing.sessions`: a quiet local Spark; `dovetail.testing.flows`: input files for a flow, and its output.
"""
