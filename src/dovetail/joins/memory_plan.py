"""How an operator divides its budget: a block buffer, output on its way, and the window, which gets the rest."""

from dataclasses import dataclass, replace

from dovetail.errors import BudgetError
from dovetail.memory import format_bytes
from dovetail.operators.output import OutputPlan
from dovetail.operators.spec import JoinSpec
from dovetail.operators.tuple_store import TupleStore
from dovetail.operators.window import StreamWindow

__all__ = ["MemoryPlan", "plan_memory", "with_blocks_in_place"]

MAX_BATCH_ROWS = 65_536
_MAX_BLOCK_ROWS = 65_536
_CODE_BYTES = 8
_PAIR_BYTES = 32  # a pair's row, position, sequence number and place in the batch, while it is looked at
_BLOCK_SHARE = 8
_OUTPUT_SHARE = 16
_FEWEST_ROWS = 16


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and the numbers of rows that follow.

    Attributes
    ----------
    block_rows, block_bytes
        b, and what a block of b rows takes of the budget: nothing where it is a view of mapped pages.
    read_bytes
        What b rows of the mean length have, wherever they lie.
    output_rows, output_bytes
        The most pairs looked at and rows put out together, and what they take.
    window_bytes
        What the window may take, with the index, tuples and all that belongs to them.
    """

    block_rows: int
    block_bytes: int
    read_bytes: int
    output_rows: int
    output_bytes: int
    window_bytes: int


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
    """Divide a budget.

    Parameters
    ----------
    spec
        The join, with its budget and perhaps its b.
    who
        The operator, for messages.
    bytes_per_tuple
        What the operator keeps per waiting tuple besides the window.
    other_bytes
        What the operator keeps besides all of this, such as a cache or a resident index; what shedding keeps is added.
    has_window
        Whether tuples wait at all.
    output_share
        The part of what is not needed at least that is for output on its way, as a divisor.
    is_block_in_place
        Whether a block is a view of the page cache, which is not this process's memory. It costs nothing then, and is
        as long as a record batch unless the spec says otherwise.

    Raises
    ------
    BudgetError
        If the budget is too small; `minimum_bytes` says what would do.
    """
    total = spec.budget.total_bytes
    other_bytes += 0 if spec.shed is None else spec.shed.start().nbytes
    relation_row_bytes = max(1.0, spec.shard.row_bytes) + _CODE_BYTES
    output_row_bytes = OutputPlan(spec).row_bytes + _PAIR_BYTES
    if spec.condition is not None:
        output_row_bytes *= 2  # the condition's own copy of the pairs' columns
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
    """The same division with blocks as long as a record batch: for blocks that are views and take no memory."""
    rows = _rounded(max(1, min(_MAX_BLOCK_ROWS, spec.shard.num_rows)))
    row_bytes = max(1.0, spec.shard.row_bytes) + _CODE_BYTES
    return replace(plan, block_rows=rows, read_bytes=int(rows * row_bytes))


def _rounded(rows: int) -> int:
    """The power of two below: such blocks lie within the relation's record batches, and need no copy to be one."""
    return 1 << (rows.bit_length() - 1)


def _window_bytes(spec: JoinSpec, capacity: int, bytes_per_tuple: int) -> int:
    columns = spec.stream_columns
    per_tuple = bytes_per_tuple + TupleStore.guess_paged_bytes(columns)
    held = int(capacity * OutputPlan(spec).row_bytes) if spec.ordered else 0
    return StreamWindow.bytes_for(columns, capacity, spec.ordered) + capacity * per_tuple + held
