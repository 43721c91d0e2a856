"""Row counts that must agree before a commit.

Every number is counted where the rows are: by tasks, in their trailers, one run of each; and by the driver, in the
staged files. Spark's observed sums are useless here: they double when map tasks run again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dovetail.core.errors import InternalError, StateError
from dovetail.core.metrics import OperatorMetrics
from dovetail.spark.flow.stages import Stage
from dovetail.spark.flow.step import Step, StepRecord

__all__ = ["require_counts", "require_state_files"]

_SHARE = "On a cluster, checkpoint and target must be directories that the driver and all workers mount."


def require_counts(
    stages: Sequence[Stage],
    before: Mapping[str, StepRecord] | None,
    after: Mapping[str, StepRecord],
    emitted: Mapping[str, int],
    staged_rows: int | None,
) -> None:
    """Refuse a micro-batch in which rows were lost or repeated between tasks, or on their way to the sink."""
    for upstream, stage in zip([None, *stages], stages, strict=False):
        if not isinstance(stage, Step) or not stage.accounts_for_tuples:
            continue
        totals, pending = _totals(after[stage.name]), sum(int(r["pending"]) for r in after[stage.name].reports)
        if totals.stream_tuples_in != totals.tuples_left + pending:
            raise InternalError(
                f"{stage.name} has taken {totals.stream_tuples_in} tuples since the flow began; {totals.tuples_left} "
                f"have left and {pending} wait. The micro-batch was not committed."
            )
        if isinstance(upstream, Step) and stage.takes is None:
            earlier = None if before is None else before.get(stage.name)
            received = totals.stream_tuples_in - (0 if earlier is None else _totals(earlier).stream_tuples_in)
            if received != emitted[upstream.name]:
                raise InternalError(
                    f"{upstream.name} has emitted {emitted[upstream.name]} rows, {stage.name} has received {received}. "
                    "The micro-batch was not committed."
                )
    last = stages[-1] if stages else None
    if isinstance(last, Step) and staged_rows is not None and staged_rows != emitted[last.name]:
        raise StateError(
            f"{last.name} has emitted {emitted[last.name]} rows, but {staged_rows} were staged for the sink. The "
            "micro-batch was not committed.",
            hint=_SHARE,
        )


def require_state_files(state_root: Path, batch: int, after: Mapping[str, StepRecord]) -> None:
    """Refuse to commit state that the driver cannot see."""
    new = {
        file.name for record in after.values() for state in record.states for file in state.files if file.batch == batch
    }
    for name in sorted(new):
        if not (state_root / name).exists():
            raise StateError(
                f"A task has written the state file {state_root / name}, but the driver does not see it. The "
                "micro-batch was not committed.",
                hint=_SHARE,
            )


def _totals(record: StepRecord) -> OperatorMetrics:
    return OperatorMetrics.total(OperatorMetrics.from_dict(report["metrics"]) for report in record.reports)
