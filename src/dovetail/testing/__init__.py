"""The public test harness: what Dovetail's own tests stand on, and yours may.

- `dovetail.testing.oracle`: what a join must give, from scratch in plain Python;
- `dovetail.testing.rows`: compare rows as multisets or in stream order, with a readable difference;
- `dovetail.testing.batches`: stream batches with their codes from plain rows;
- `dovetail.testing.driver`: run any semi-stream join through a schedule of actions and check it after each;
- `dovetail.testing.schedules`: which action comes when; `dovetail.testing.snapshots`: a snapshot through storage;
- `dovetail.testing.held`: the bytes an object really holds; `dovetail.testing.shard`: a relation's shard in memory;
- `dovetail.testing.strategies`: hypothesis strategies for streams and relations (needs ``hypothesis``);
- `dovetail.testing.faults`: kill a process at a named point, or at any moment;
- `dovetail.testing.sessions`: a quiet local Spark; `dovetail.testing.flows`: files for a stream, and what a flow left.
"""
