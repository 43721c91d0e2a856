"""Divides an operator's budget: a block buffer, output in flight, and the window, which gets the rest."""

from dataclasses import dataclass, replace

from dovetail.core.errors import BudgetError
from dovetail.core.memory import format_bytes
from dovetail.joins.output.columns import OutputPlan
from dovetail.joins.spec import JoinSpec
from dovetail.joins.window.stream_window import StreamWindow
from dovetail.joins.window.tuple_store import TupleStore

__all__ = ["MemoryPlan", "plan_memory", "with_blocks_in_place"]

MAX_BATCH_ROWS = 65_536
_MAX_BLOCK_ROWS = 65_536
_CODE_BYTES = 8
_PAIR_BYTES = 32  # a pair's row, position, sequence number and place in the batch, while it is examined
_BLOCK_SHARE = 8
_OUTPUT_SHARE = 16
_FEWEST_ROWS = 16


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and the numbers of rows that follow."""

    block_rows: int  # b
    block_bytes: int  # the part of the budget for a block: 0 if it is a view of mapped pages
    read_bytes: int  # of b rows of the mean length, wherever they lie
    output_rows: int  # the maximum number of pairs examined and rows emitted together
    output_bytes: int
    window_bytes: int  # for the window with its index and tuples


def plan_memory(
    spec: JoinSpec,
    *,
    who: str,
    bytes_per_tuple: int = 0,
    other_bytes: int = 0,
    has_window: bool = True,
    output_share: int = _OUTPUT_SHARE,
    is_block_in_place: bool = False,
) -> MemoryPlan:
    """Divide a budget; raises a `BudgetError` with `minimum_bytes` if it is too small.

    `bytes_per_tuple` and `other_bytes` are what the operator keeps per waiting tuple and in total, besides the window;
    the needs of shedding are added. Output gets one part in `output_share` of what remains above the minimum. A block
    in place is a view of the page cache: it costs nothing, and is as long as a record batch unless the spec says
    otherwise.
    """
    total = spec.budget.total_bytes
    other_bytes += 0 if spec.shed is None else spec.shed.start().nbytes
    relation_row_bytes = max(1.0, spec.shard.row_bytes) + _CODE_BYTES
    output_row_bytes = OutputPlan(spec).row_bytes + _PAIR_BYTES
    if spec.condition is not None:
        output_row_bytes *= 2  # for the condition's copy of the pairs' columns
    fewest_block_rows = spec.block_rows or max(1, min(spec.shard.num_rows, _FEWEST_ROWS))
    held_row_bytes = 0.0 if is_block_in_place else relation_row_bytes
    least_block_bytes = int(fewest_block_rows * held_row_bytes)
    least_output_bytes = int(_FEWEST_ROWS * output_row_bytes)
    least_window_bytes = _window_bytes(spec, _FEWEST_ROWS, bytes_per_tuple) if has_window else 0
    minimum = least_block_bytes + least_output_bytes + least_window_bytes + other_bytes
    if total < minimum:
        raise BudgetError(
            f"A budget of {total} bytes is too small: {who} on this relation needs at least {minimum} bytes "
            f"({format_bytes(minimum)}): block {least_block_bytes}, output {least_output_bytes}, window "
            f"{least_window_bytes}, other {other_bytes}.",
            minimum_bytes=minimum,
        )
    usable = total - minimum
    block_rows = spec.block_rows
    if block_rows is None:
        extra_rows = _MAX_BLOCK_ROWS if is_block_in_place else int(usable // _BLOCK_SHARE / relation_row_bytes)
        block_rows = _rounded(max(1, min(fewest_block_rows + extra_rows, _MAX_BLOCK_ROWS, spec.shard.num_rows)))
    block_bytes = int(block_rows * held_row_bytes)
    extra_rows = int(usable // output_share / output_row_bytes)
    output_rows = min(_FEWEST_ROWS + extra_rows, MAX_BATCH_ROWS)
    output_bytes = int(output_rows * output_row_bytes)
    return MemoryPlan(
        block_rows=block_rows,
        block_bytes=block_bytes,
        read_bytes=int(block_rows * relation_row_bytes),
        output_rows=output_rows,
        output_bytes=output_bytes,
        window_bytes=total - block_bytes - output_bytes - other_bytes if has_window else 0,
    )


def with_blocks_in_place(plan: MemoryPlan, spec: JoinSpec) -> MemoryPlan:
    """The same division with blocks as long as a record batch, for blocks that are views."""
    rows = _rounded(max(1, min(_MAX_BLOCK_ROWS, spec.shard.num_rows)))
    row_bytes = max(1.0, spec.shard.row_bytes) + _CODE_BYTES
    return replace(plan, block_rows=rows, read_bytes=int(rows * row_bytes))


def _rounded(rows: int) -> int:
    """The power of two below: such blocks lie within the relation's record batches and need no copy."""
    return 1 << (rows.bit_length() - 1)


def _window_bytes(spec: JoinSpec, capacity: int, bytes_per_tuple: int) -> int:
    columns = spec.stream_columns
    per_tuple = bytes_per_tuple + TupleStore.guess_paged_bytes(columns)
    held = int(capacity * OutputPlan(spec).row_bytes) if spec.ordered else 0
    return StreamWindow.bytes_for(columns, capacity, spec.ordered) + capacity * per_tuple + held
