"""The joins of two streams: the symmetric hash join, and XJoin, which can also spill."""

from dovetail.core.errors import PlanError
from dovetail.joins.multiway.mjoin import MJoin
from dovetail.joins.multiway.spec import MJoinSpec

__all__ = ["SymmetricHashJoin", "XJoin"]


class SymmetricHashJoin(MJoin):
    """An in-memory join of two streams (Wilschut and Apers 1991): `MJoin` with two inputs and no spilling.

    Examples
    --------
    >>> import pyarrow as pa
    >>> from dovetail.joins.multiway import mjoin_spec
    >>> schemas = {n: pa.schema({"k": pa.int64(), n: pa.int64()}) for n in "ab"}
    >>> join = SymmetricHashJoin(mjoin_spec(schemas, on="k"))
    >>> list(join.offer("a", join.spec.with_codes("a", pa.record_batch({"k": [1], "a": [2]}))))
    []
    >>> [out.to_pylist() for out in join.offer("b", join.spec.with_codes("b", pa.record_batch({"k": [1], "b": [3]})))]
    [[{'k': 1, 'a': 2, 'b': 3}]]
    """

    def __init__(self, spec: MJoinSpec) -> None:
        _require_two(spec, "a symmetric hash join")
        if spec.spill_directory is not None:
            raise PlanError("A symmetric hash join does not spill.", hint="Use XJoin, or leave out spill_directory=.")
        super().__init__(spec)


class XJoin(MJoin):
    """A join of two streams that spills (Urhan and Franklin 2000): `MJoin` with two inputs and random flushing."""

    def __init__(self, spec: MJoinSpec) -> None:
        _require_two(spec, "XJoin")
        if spec.spill_directory is None or spec.flushing != "random":
            raise PlanError(
                "XJoin flushes partitions of either input.", hint='Pass spill_directory= and flushing="random".'
            )
        super().__init__(spec)


def _require_two(spec: MJoinSpec, what: str) -> None:
    if len(spec.names) != 2:
        raise PlanError(f"There are {len(spec.names)} inputs, and {what} has two.", hint="Use MJoin.")
