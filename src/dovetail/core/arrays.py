"""Types of numpy arrays."""

import numpy as np
import numpy.typing as npt

__all__ = ["BoolArray", "Int32Array", "Int64Array", "UInt8Array", "UInt32Array"]

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
