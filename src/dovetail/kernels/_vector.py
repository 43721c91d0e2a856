"""What table kernels need of the processor beyond plain loops: comparing a cache line at once, reading ahead.

Each has a plain Python form that is used when the JIT is off, so that kernels read the same either way.
"""

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

LINE = 8  # int64 per cache line of 64 bytes


if numba.config.DISABLE_JIT:

    def match_line(array: Any, start: Any, value: Any) -> Any:
        """Give a bit for each of the 8 elements from `start` on, the first one lowest, set where equal."""
        return sum(1 << i for i in range(LINE) if array[start + i] == value)

    def lowest_bit(bits: Any) -> Any:
        """Give the index of the lowest bit that is set; there must be one."""
        return (int(bits) & -int(bits)).bit_length() - 1

    def prefetch(array: Any, index: Any) -> None:
        """Ask for the cache line of an element, without waiting for it."""

else:
    _INT1, _INT32, _INT64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
    _VECTOR = ir.VectorType(_INT64, LINE)

    def _pointer_to(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
        data = context.make_array(array_type)(context, builder, array).data
        return builder.gep(data, [index])

    @intrinsic
    def match_line(typing_context: Any, array: Any, start: Any, value: Any) -> Any:
        """Give a bit for each of the 8 elements from `start` on, the first one lowest, set where equal."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _pointer_to(context, builder, signature.args[0], arguments[0], arguments[1])
            elements = builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=8)
            undefined = ir.Constant(_VECTOR, ir.Undefined)
            first = builder.insert_element(undefined, arguments[2], ir.Constant(_INT32, 0))
            lanes = ir.Constant(ir.VectorType(_INT32, LINE), [0] * LINE)
            repeated = builder.shuffle_vector(first, undefined, lanes)
            is_equal = builder.icmp_signed("==", elements, repeated)
            return builder.zext(builder.bitcast(is_equal, ir.IntType(LINE)), _INT64)

        return types.int64(array, types.int64, types.int64), generate

    @intrinsic
    def lowest_bit(typing_context: Any, bits: Any) -> Any:
        """Give the index of the lowest bit that is set; there must be one."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.cttz(arguments[0], ir.Constant(_INT1, 1))

        return types.int64(types.int64), generate

    @intrinsic
    def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
        """Ask for the cache line of an element, without waiting for it."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _pointer_to(context, builder, signature.args[0], arguments[0], arguments[1])
            pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
            function = builder.module.declare_intrinsic(
                "llvm.prefetch",
                [pointer.type],
                ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32]),
            )
            for_reading, keep_close, data = (ir.Constant(_INT32, number) for number in (0, 3, 1))
            builder.call(function, [pointer, for_reading, keep_close, data])
            return context.get_dummy_value()

        return types.void(array, types.int64), generate
