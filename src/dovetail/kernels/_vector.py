"""Vector operations of the table kernels: eight lanes at once, and prefetching.

The compiler cannot find these forms itself, because it must assume that a loop may write to the table it reads. Each
operation handles eight lanes of 64 bits. It compiles to a few instructions with AVX-512 and to more without. The plain
Python forms are for runs without the JIT; what they do is written at the compiled forms.
"""

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 8
LINE = 8  # int64 per cache line of 64 bytes: four slots, each a code and a word

if numba.config.DISABLE_JIT:

    def match_line(array: Any, start: Any, value: Any) -> Any:
        return sum(1 << i for i in range(LINE) if array[start + i] == value)

    def lowest_bit(bits: Any) -> Any:
        return (int(bits) & -int(bits)).bit_length() - 1

    def count_bits(bits: Any) -> Any:
        return int(bits).bit_count()

    def prefetch(array: Any, index: Any) -> None:
        """Prefetch the cache line of an element."""

    def find_eight(slots: Any, homes: Any, codes: Any, first: Any, out_words: Any) -> Any:
        unanswered = 0
        for i in range(first, first + LANES):
            line = LINE * int(homes[i])
            places = [place for place in range(0, LINE, 2) if slots[line + place] == codes[i]]
            out_words[i] = slots[line + (places[0] if places else LINE - 2) + 1]
            unanswered |= (not places and out_words[i] != 0) << (i - first)
        return unanswered

    def append_lanes(array: Any, position: Any, first: Any, lanes: Any) -> None:
        chosen = [first + lane for lane in range(LANES) if lanes >> lane & 1]
        array[position : position + len(chosen)] = chosen

    def emit_eight(
        words: Any,
        first: Any,
        first_row: Any,
        cursor: Any,
        before_cursor: Any,
        from_cursor: Any,
        out_rows: Any,
        out_places: Any,
        position: Any,
    ) -> Any:
        counts = [int(word) & 0xFFFFFFFF for word in words[first : first + LANES]]
        if max(counts) > 1:
            return -1
        for lane in range(LANES):
            if counts[lane]:
                place = int(words[first + lane]) >> 32
                out_rows[position] = first_row + lane
                out_places[position] = place + (from_cursor if place >= cursor else before_cursor)
                position += 1
        return sum(counts)

else:
    _INT1, _INT8, _INT32, _INT64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
    _BITS, _NARROW, _WIDE = (ir.VectorType(element, LANES) for element in (_INT1, _INT32, _INT64))

    def _pointer_to(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
        data = context.make_array(array_type)(context, builder, array).data
        return builder.gep(data, [index])

    def _load(builder: Any, pointer: Any, vector: Any, align: int) -> Any:
        return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=align)

    def _all(vector: Any, number: int) -> Any:
        return ir.Constant(vector, [number] * LANES)

    def _repeat(builder: Any, value: Any, vector: Any) -> Any:
        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, value, ir.Constant(_INT32, 0))
        return builder.shuffle_vector(first, undefined, _all(_NARROW, 0))

    def _lanes_from(builder: Any, value: Any, vector: Any) -> Any:
        """Return value, value + 1, ... in the lanes."""
        return builder.add(_repeat(builder, value, vector), ir.Constant(vector, list(range(LANES))))

    def _as_bits(builder: Any, flags: Any) -> Any:
        return builder.zext(builder.bitcast(flags, _INT8), _INT64)

    def _gather(builder: Any, data: Any, indexes: Any) -> Any:
        """Read the int64 elements at 8 indexes."""
        pointers = ir.VectorType(data.type, LANES)
        addresses = builder.add(
            _repeat(builder, builder.ptrtoint(data, _INT64), _WIDE), builder.shl(indexes, _all(_WIDE, 3))
        )
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(_WIDE, [pointers, _INT32, _BITS, _WIDE]),
            f"llvm.masked.gather.v8i64.v8{data.type.intrinsic_name}",
        )
        arguments = [ir.Constant(_INT32, 8), _all(_BITS, 1), ir.Constant(_WIDE, ir.Undefined)]
        return builder.call(function, [builder.inttoptr(addresses, pointers), *arguments])

    def _store_chosen(builder: Any, values: Any, pointer: Any, flags: Any) -> None:
        """Write the lanes whose flag is set, consecutively."""
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [values.type, pointer.type, _BITS]),
            f"llvm.masked.compressstore.v8{values.type.element.intrinsic_name}",
        )
        builder.call(function, [values, pointer, flags])

    @intrinsic
    def match_line(typing_context: Any, array: Any, start: Any, value: Any) -> Any:
        """Return a bit mask of the 8 elements from `start`, lowest bit first, set where an element equals `value`."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _pointer_to(context, builder, signature.args[0], arguments[0], arguments[1])
            elements = _load(builder, pointer, _WIDE, align=8)
            return _as_bits(builder, builder.icmp_signed("==", elements, _repeat(builder, arguments[2], _WIDE)))

        return types.int64(array, types.int64, types.int64), generate

    @intrinsic
    def lowest_bit(typing_context: Any, bits: Any) -> Any:
        """Return the index of the lowest set bit; at least one bit must be set."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.cttz(arguments[0], ir.Constant(_INT1, 1))

        return types.int64(types.int64), generate

    @intrinsic
    def count_bits(typing_context: Any, bits: Any) -> Any:
        """Return the number of set bits."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.ctpop(arguments[0])

        return types.int64(types.int64), generate

    @intrinsic
    def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
        """Prefetch the cache line of an element."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _pointer_to(context, builder, signature.args[0], arguments[0], arguments[1])
            pointer = builder.bitcast(pointer, _INT8.as_pointer())
            function = builder.module.declare_intrinsic(
                "llvm.prefetch",
                [pointer.type],
                ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32]),
            )
            for_reading, keep_close, data = (ir.Constant(_INT32, number) for number in (0, 3, 1))
            builder.call(function, [pointer, for_reading, keep_close, data])
            return context.get_dummy_value()

        return types.void(array, types.int64), generate

    @intrinsic
    def find_eight(typing_context: Any, slots: Any, homes: Any, codes: Any, first: Any, out_words: Any) -> Any:
        """Look up 8 codes from `first` in their home lines, and write the words found.

        A code that is not in its line gets the word of the line's last slot, which is 0 unless the line is full.
        Returns a bit mask, lowest bit first, of the codes that are not in their line and got a non-zero word.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def pointer_to(number: int, index: Any) -> Any:
                return _pointer_to(context, builder, signature.args[number], arguments[number], index)

            data = pointer_to(0, ir.Constant(_INT64, 0))
            homes = builder.zext(_load(builder, pointer_to(1, arguments[3]), _NARROW, align=4), _WIDE)
            wanted = _load(builder, pointer_to(2, arguments[3]), _WIDE, align=8)
            lines = builder.shl(homes, _all(_WIDE, 3))
            place = _all(_WIDE, LINE - 1)
            is_answered = _all(_BITS, 0)
            for code_place in range(LINE - 2, -1, -2):
                codes_there = _gather(builder, data, builder.add(lines, _all(_WIDE, code_place)))
                is_equal = builder.icmp_signed("==", codes_there, wanted)
                place = builder.select(is_equal, _all(_WIDE, code_place + 1), place)
                is_answered = builder.or_(is_answered, is_equal)
            words = _gather(builder, data, builder.add(lines, place))
            builder.store(words, builder.bitcast(pointer_to(4, arguments[3]), _WIDE.as_pointer()), align=8)
            is_taken = builder.icmp_signed("!=", words, _all(_WIDE, 0))
            return _as_bits(builder, builder.and_(is_taken, builder.not_(is_answered)))

        return types.int64(slots, homes, codes, types.int64, out_words), generate

    @intrinsic
    def append_lanes(typing_context: Any, array: Any, position: Any, first: Any, lanes: Any) -> Any:
        """Write ``first + lane`` for each bit set in `lanes`, consecutively from `position`."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _pointer_to(context, builder, signature.args[0], arguments[0], arguments[1])
            numbers = _lanes_from(builder, builder.trunc(arguments[2], _INT32), _NARROW)
            _store_chosen(builder, numbers, pointer, builder.bitcast(builder.trunc(arguments[3], _INT8), _BITS))
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int64, types.int64), generate

    @intrinsic
    def emit_eight(
        typing_context: Any,
        words: Any,
        first: Any,
        first_row: Any,
        cursor: Any,
        before_cursor: Any,
        from_cursor: Any,
        out_rows: Any,
        out_places: Any,
        position: Any,
    ) -> Any:
        """Write row and place of each of 8 words from `first` whose count is 1; see `probe_into`.

        Returns how many were written, or -1 if a count is larger than 1. In that case nothing is written.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def pointer_to(number: int, index: Any) -> Any:
                return _pointer_to(context, builder, signature.args[number], arguments[number], index)

            words = _load(builder, pointer_to(0, arguments[1]), _WIDE, align=8)
            counts = builder.and_(words, _all(_WIDE, 0xFFFFFFFF))
            is_several = builder.icmp_signed(">", counts, _all(_WIDE, 1))
            is_one = builder.icmp_signed("==", counts, _all(_WIDE, 1))
            result = cgutils.alloca_once_value(builder, ir.Constant(_INT64, -1))
            has_none_of_several = builder.icmp_signed("==", builder.bitcast(is_several, _INT8), ir.Constant(_INT8, 0))
            with builder.if_then(has_none_of_several, likely=True):
                places = builder.ashr(words, _all(_WIDE, 32))
                offsets = builder.select(
                    builder.icmp_signed(">=", places, _repeat(builder, arguments[3], _WIDE)),
                    _repeat(builder, arguments[5], _WIDE),
                    _repeat(builder, arguments[4], _WIDE),
                )
                places = builder.add(places, offsets)
                if signature.args[7].dtype == types.int32:
                    places = builder.trunc(places, _NARROW)
                rows = _lanes_from(builder, builder.trunc(arguments[2], _INT32), _NARROW)
                _store_chosen(builder, rows, pointer_to(6, arguments[8]), is_one)
                _store_chosen(builder, places, pointer_to(7, arguments[8]), is_one)
                builder.store(builder.ctpop(_as_bits(builder, is_one)), result)
            return builder.load(result)

        integer = types.int64
        arguments = (words, integer, integer, integer, integer, integer, out_rows, out_places, integer)
        return integer(*arguments), generate
