"""Checks of arrays at the door of the kernels."""

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def as_codes(codes: Int64Array, what: str = "Codes") -> Int64Array:
    """Give a read-only view of one dimension of int64; refuse anything else.

    A conversion would make other codes of what it was given, so there is none. The view is read-only because arrays
    that belong to Arrow are, and a kernel would be compiled once more for the other kind.
    """
    if codes.dtype != np.int64 or codes.ndim != 1:
        raise TypeError(f"{what} must be a one-dimensional int64 array, not {codes.ndim}-dimensional {codes.dtype}.")
    view = np.ascontiguousarray(codes).view(np.ndarray)
    view.flags.writeable = False
    return view
