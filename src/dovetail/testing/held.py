"""The memory that an object holds, measured independently of an operator's ``size()``."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["held_array_bytes"]

_ArrowTabular = (pa.RecordBatch, pa.Table)
_NOT_HELD = (str, bytes, int, float, type, ModuleType, FunctionType, BuiltinFunctionType, type(None))


def held_array_bytes(root: Any, exclude: Iterable[Any] = ()) -> int:
    """Bytes of all numpy arrays and Arrow buffers reachable from an object, each buffer counted once.

    A view counts with all the memory that it keeps alive: a one-row slice of a large batch holds the large batch.
    Python objects themselves (dicts, lists, ints) are not counted, nor anything hidden in a C extension. ``exclude``
    are objects to skip, such as the shard reader that an operator borrows.

    >>> batch = pa.record_batch({"k": pa.array(range(1000), pa.int64())})
    >>> held_array_bytes([batch, batch.slice(5, 1)])
    8000
    >>> held_array_bytes([batch], exclude=[batch])
    0
    """
    bytes_by_address: dict[int, int] = {}
    seen = {id(item) for item in exclude}
    # Keep every visited object alive, so that the id of a freed temporary is not mistaken for a visited object.
    visited: list[Any] = []
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _NOT_HELD):
            continue
        seen.add(id(item))
        visited.append(item)
        for address, size_bytes in _memory_of(item):
            bytes_by_address[address] = max(size_bytes, bytes_by_address.get(address, 0))
        waiting.extend(_parts_of(item))
    return sum(bytes_by_address.values())


def _memory_of(item: Any) -> Iterator[tuple[int, int]]:
    """Address and size of the memory that this object owns, or whose owner only it knows."""
    if isinstance(item, np.ndarray) and item.base is None:
        yield item.__array_interface__["data"][0], item.nbytes
    elif isinstance(item, pa.Buffer):
        yield item.address, item.size
    elif isinstance(item, bytearray):
        yield id(item), len(item)


def _parts_of(item: Any) -> Collection[Any]:
    if isinstance(item, np.ndarray):
        # A view leads to its owner. A view of a mapped file leads to no array and takes no memory.
        return [item.base] if item.dtype != object else [item.base, *item.flat]
    if isinstance(item, memoryview):
        return [item.obj]
    if isinstance(item, _ArrowTabular):
        return list(item.columns)
    if isinstance(item, pa.ChunkedArray):
        return list(item.chunks)
    if isinstance(item, pa.DictionaryArray):
        return [item.dictionary, *item.indices.buffers()]
    if isinstance(item, pa.Array):
        return list(item.buffers())
    if isinstance(item, pa.Buffer):
        return []
    if isinstance(item, MethodType):
        return [item.__self__]
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values()]
    if isinstance(item, Collection):
        return [*item, *_attributes_of(item)]
    return _attributes_of(item)


def _attributes_of(item: Any) -> list[Any]:
    slots = [
        getattr(item, name)
        for kind in type(item).__mro__
        for name in _slot_names(kind)
        if not name.startswith("__") and hasattr(item, name)
    ]
    return [*vars(item).values(), *slots] if hasattr(item, "__dict__") else slots


def _slot_names(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else slots
