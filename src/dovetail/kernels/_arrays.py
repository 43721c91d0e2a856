"""Checks of the arrays passed to kernels."""

import numpy as np

from dovetail.core.arrays import Int64Array


def as_codes(codes: Int64Array, what: str = "Codes") -> Int64Array:
    """Return a read-only, one-dimensional int64 view; refuse anything else.

    There is no conversion, because it could change codes. The view is read-only like arrays that Arrow owns: a kernel
    would be compiled a second time for writable arrays.
    """
    if codes.dtype != np.int64 or codes.ndim != 1:
        raise TypeError(f"{what} must be a one-dimensional int64 array, not {codes.ndim}-dimensional {codes.dtype}.")
    view = np.ascontiguousarray(codes).view(np.ndarray)
    view.flags.writeable = False
    return view
