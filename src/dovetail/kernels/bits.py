"""Setting flag bits in place at many positions."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

UInt8Array = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64] | npt.NDArray[np.int32]


@njit(cache=True)
def _set_bits(flags: Any, positions: Any, bits: Any) -> Any:
    """Return whether all positions are in range; nothing is set if not."""
    is_outside = False
    for i in range(positions.size):
        is_outside |= (positions[i] < 0) | (positions[i] >= flags.size)
    if is_outside:
        return False
    for i in range(positions.size):
        flags[positions[i]] |= bits
    return True


def set_bits(flags: UInt8Array, positions: Positions, bits: np.uint8) -> None:
    """Set bits of the flags at these positions, in place. Positions may repeat."""
    if not _set_bits(flags, positions, bits):
        raise IndexError(f"A position is out of range for {flags.size} flags.")
