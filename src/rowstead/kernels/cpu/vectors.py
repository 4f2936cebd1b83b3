"""Short vectors for Numba: values of a fixed number of lanes that LLVM keeps in registers.

Numba itself has only arrays, which live in memory: a sum over many rows would be loaded and stored for each of them. LLVM
splits a vector of 64 lanes over as many registers as the processor needs.

Elements in memory are given by an int64 address and a scalar `like` whose type is their format: float32, float64, uint16 for
BF16 and int16 for FP16. 16-bit elements become float32 lanes. The caller keeps the arrays alive. (Passing arrays from one
compiled function to the next would cost a reference count each time.)
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_model

_INT1, _INT16, _INT32 = ir.IntType(1), ir.IntType(16), ir.IntType(32)
_LLVM = {types.float32: ir.FloatType(), types.float64: ir.DoubleType(), types.uint32: _INT32, types.boolean: _INT1}
_STORED = {types.float32: ir.FloatType(), types.float64: ir.DoubleType(), types.uint16: _INT16, types.int16: ir.HalfType()}
_BYTES = {types.float32: 4, types.float64: 8, types.uint16: 2, types.int16: 2}


class Vector(types.Type):
    """A number of lanes of one element type."""

    def __init__(self, element: Any, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vector({element}, {lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(_LLVM[self.element], self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


def _real(like: Any) -> Any:
    """The accumulation dtype of rows of a format."""
    return types.float64 if like == types.float64 else types.float32


def _filled(kind: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def _spread(builder: Any, value: Any, lanes: int) -> Any:
    kind = ir.VectorType(value.type, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, value, _INT32(0))
    return builder.shuffle_vector(first, undefined, _filled(ir.VectorType(_INT32, lanes), 0))


def _mask(builder: Any, count: Any, lanes: int) -> Any:
    """Lanes below `count`."""
    indices = ir.Constant(ir.VectorType(ir.IntType(64), lanes), list(range(lanes)))
    return builder.icmp_signed("<", indices, _spread(builder, count, lanes))


@intrinsic(prefer_literal=True)
def zeros(typingctx, like, lanes):  # type: ignore[no-untyped-def]
    """A vector of zeros with `lanes` lanes (a constant), in the accumulation dtype of rows like `like`."""
    vector = Vector(_real(like), lanes.literal_value)

    return vector(like, lanes), lambda context, builder, signature, args: _filled(vector.llvm, 0.0)


@intrinsic
def bytes_of(typingctx, like):  # type: ignore[no-untyped-def]
    """Bytes of one element like `like`, as a constant."""
    count = _BYTES[like] if like in _BYTES else like.bitwidth // 8

    return types.int64(like), lambda context, builder, signature, args: ir.IntType(64)(count)


@intrinsic
def cast(typingctx, number, like):  # type: ignore[no-untyped-def]
    """A scalar as float32 or float64, as `like` is."""

    return like(number, like), lambda context, builder, signature, args: context.cast(builder, args[0], number, like)


@intrinsic
def num_lanes(typingctx, vector):  # type: ignore[no-untyped-def]
    """How many lanes a vector has, as a constant."""

    return types.int64(vector), lambda context, builder, signature, args: ir.IntType(64)(vector.lanes)


@intrinsic
def load(typingctx, address, like, shape, count):  # type: ignore[no-untyped-def]
    """The elements at an address, stored like `like`, one for each lane of `shape`; with a `count`, only the first so many."""
    partly = count != types.none

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.VectorType(_STORED[like], shape.lanes)
        pointer = builder.inttoptr(args[0], kind.as_pointer())
        if partly:
            name, size = _masked_name("load", like, shape.lanes), _BYTES[like]
            function_type = ir.FunctionType(kind, [pointer.type, _INT32, ir.VectorType(_INT1, shape.lanes), kind])
            function = cgutils.get_or_insert_function(builder.module, function_type, name)
            nothing = ir.Constant(kind, None)
            stored = builder.call(function, [pointer, _INT32(size), _mask(builder, args[3], shape.lanes), nothing])
        else:
            stored = builder.load(pointer, align=_BYTES[like])
        if like == types.uint16:
            bits = ir.VectorType(_INT32, shape.lanes)
            return builder.bitcast(builder.shl(builder.zext(stored, bits), _filled(bits, 16)), shape.llvm)
        return builder.fpext(stored, shape.llvm) if like == types.int16 else stored

    return shape(types.int64, like, shape, types.int64 if partly else count), codegen


@intrinsic
def store(typingctx, vector, address, like, count):  # type: ignore[no-untyped-def]
    """Write a vector to an address, in the format of `like`; with a `count`, only the first so many lanes.

    Lanes must be representable in that format: BF16 drops the low bits.
    """
    partly = count != types.none

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind, size = ir.VectorType(_STORED[like], vector.lanes), _BYTES[like]
        value = args[0]
        if like == types.uint16:
            bits = ir.VectorType(_INT32, vector.lanes)
            value = builder.trunc(builder.lshr(builder.bitcast(value, bits), _filled(bits, 16)), kind)
        elif like == types.int16:
            value = builder.fptrunc(value, kind)
        pointer = builder.inttoptr(args[1], kind.as_pointer())
        if partly:
            name = _masked_name("store", like, vector.lanes)
            arguments = [kind, pointer.type, _INT32, ir.VectorType(_INT1, vector.lanes)]
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), arguments), name)
            builder.call(function, [value, pointer, _INT32(size), _mask(builder, args[3], vector.lanes)])
        else:
            builder.store(value, pointer, align=size)
        return context.get_dummy_value()

    return types.void(vector, types.int64, like, types.int64 if partly else count), codegen


def _masked_name(verb: str, like: Any, lanes: int) -> str:
    element = {types.float32: "f32", types.float64: "f64", types.uint16: "i16", types.int16: "f16"}[like]
    return f"llvm.masked.{verb}.v{lanes}{element}.p0"


@intrinsic
def broadcast(typingctx, value, shape):  # type: ignore[no-untyped-def]
    """A vector with one value in as many lanes as `shape` has: of uint32 if the value is, else of the type of `shape`."""
    vector = Vector(types.uint32 if value == types.uint32 else shape.element, shape.lanes)

    return vector(vector.element, shape), lambda context, builder, signature, args: _spread(builder, args[0], shape.lanes)


@intrinsic
def lane_indices(typingctx, shape):  # type: ignore[no-untyped-def]
    """0, 1, 2, … as uint32, in as many lanes as `shape` has."""
    vector = Vector(types.uint32, shape.lanes)

    return vector(shape), lambda context, builder, signature, args: ir.Constant(vector.llvm, list(range(shape.lanes)))


def _conversion(instruction: Any, element: Any) -> Any:
    @intrinsic
    def function(typingctx, given):  # type: ignore[no-untyped-def]
        vector = Vector(element, given.lanes)

        return vector(given), lambda context, builder, signature, args: instruction(builder, args[0], vector.llvm)

    return function


as_bits, as_floats = _conversion(ir.IRBuilder.bitcast, types.uint32), _conversion(ir.IRBuilder.bitcast, types.float32)
"""The bits of float32 lanes as uint32, and the reverse."""
to_floats = _conversion(ir.IRBuilder.uitofp, types.float32)
"""Lanes of uint32 numbers as float32 numbers of the same value."""


@intrinsic
def select(typingctx, condition, one, other):  # type: ignore[no-untyped-def]
    """Lanes of `one` where `condition` holds, of `other` elsewhere."""

    return one(condition, one, other), lambda context, builder, signature, args: builder.select(*args)


@intrinsic
def sum_lanes(typingctx, vector):  # type: ignore[no-untyped-def]
    """The sum of all lanes (a power of two of them), added by halves."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        value, lanes = args[0], vector.lanes
        while lanes > 1:
            lanes //= 2
            indices = ir.VectorType(_INT32, lanes)
            undefined = ir.Constant(value.type, ir.Undefined)
            low = builder.shuffle_vector(value, undefined, ir.Constant(indices, list(range(lanes))))
            high = builder.shuffle_vector(value, undefined, ir.Constant(indices, list(range(lanes, 2 * lanes))))
            value = builder.fadd(low, high)
        return builder.extract_element(value, _INT32(0))

    return vector.element(vector), codegen


def _unary(name: str) -> Any:
    @intrinsic
    def function(typingctx, vector):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            element = "f64" if vector.element == types.float64 else "f32"
            kind = ir.FunctionType(vector.llvm, [vector.llvm])
            name_of_kind = f"llvm.{name}.v{vector.lanes}{element}"
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name_of_kind), args)

        return vector(vector), codegen

    return function


sqrt, floor, absolute = _unary("sqrt"), _unary("floor"), _unary("fabs")
"""Square root, floor and absolute value of each lane."""


def _operator(symbol: Any, on_reals: Any, on_bits: Any, *, compares: bool = False) -> None:
    """Give vectors a Python operator: an instruction for lanes of real numbers, and one for lanes of uint32."""

    @intrinsic
    def function(typingctx, one, other):  # type: ignore[no-untyped-def]
        instruction = on_bits if one.element == types.uint32 else on_reals
        if instruction is None:
            return None

        vector = Vector(types.boolean, one.lanes) if compares else one
        return vector(one, other), lambda context, builder, signature, args: instruction(builder, *args)

    @overload(symbol)
    def _on_vectors(one, other):  # type: ignore[no-untyped-def]
        if isinstance(one, Vector) and one == other:
            return lambda one, other: function(one, other)
        return None


_operator(operator.add, ir.IRBuilder.fadd, ir.IRBuilder.add)
_operator(operator.sub, ir.IRBuilder.fsub, ir.IRBuilder.sub)
_operator(operator.mul, ir.IRBuilder.fmul, ir.IRBuilder.mul)
_operator(operator.truediv, ir.IRBuilder.fdiv, None)
_operator(operator.and_, None, ir.IRBuilder.and_)
_operator(operator.xor, None, ir.IRBuilder.xor)
_operator(operator.rshift, None, ir.IRBuilder.lshr)
_operator(operator.lt, lambda builder, *lanes: builder.fcmp_ordered("<", *lanes), None, compares=True)
_operator(operator.ge, lambda builder, *lanes: builder.fcmp_ordered(">=", *lanes), None, compares=True)
