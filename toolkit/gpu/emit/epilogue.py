"""Constant weights and epilogues of matrix products and convolutions, read from a group."""

from dataclasses import replace

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.int8_gemm import Int8Epilogue
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.dtypes import ELEMENT_TYPES
from toolkit.gpu.ir.expressions import extract_scalars, has_float8
from toolkit.gpu.ir.gemm import Epilogue
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div
from toolkit.gpu.target import GpuTarget


def read_epilogue(
    ctx: LoweringContext,
    group: Group,
    bias: str,
    columns: int,
    int8: Int8Epilogue | None = None,
    *,
    factors: Array | None = None,
) -> tuple[Epilogue, str | None]:
    """Return the epilogue of a group's product, and the name of its residual.

    A constant `bias`, one number or one for each of `columns`, is packed in FP32; that of a
    convolution may be computed while running. `factors`: of the columns of a product in floats. A
    fourth input of a product has factors of its columns with the bias. Raises NotCoveredError:
    another bias.
    """
    op = group.root_operation
    packed, scale = None, None
    column_factors = ctx.network.constants.get(op.input(3), np.float32(1))
    if int8 is not None:
        scale = ctx.weights.pack(int8.factors * column_factors, "float32")
        packed = None if int8.bias is None else ctx.weights.pack(int8.bias, "int32")
    elif bias and op.kind == "Conv" and bias not in ctx.network.constants:
        packed = ctx.read(bias, "float or integer", "row-major")
    elif bias:
        values = ctx.network.constants[bias]
        if values.size not in (1, columns) or (values.size > 1 and values.shape[-1] != columns):
            raise NotCoveredError(
                f"node {op.name!r} ({op.kind}) adds {list(values.shape)}; kernels take one number "
                f"for each of {columns} columns"
            )
        terms = np.broadcast_to(values.reshape(-1), (columns,))
        terms = terms if factors is None else terms / factors
        packed = ctx.weights.pack(terms, "float32")
    if factors is not None:
        scale = ctx.weights.pack(factors * column_factors, "float32")
    elif int8 is None and column_factors.ndim:
        scale = ctx.weights.pack(column_factors, "float32")
    expression = ctx.expression(op.outputs[0], group.after)
    residual = expression.operands[1] if len(expression.operands) > 1 else None
    ops, scalars = expression.ops, None
    if int8 is not None or has_float8(ops):
        ops, numbers = extract_scalars(ops)
        scalars = ctx.weights.pack(np.array(numbers), "float32") if numbers else None
    return Epilogue(ops, packed, scale, scalars), residual


def weight_matrix(ctx: LoweringContext, values: Array, dtype: str) -> View:
    """Pack the right operand of a product, (..., depth, columns), with the depth fastest.

    Tensor cores of sm_90 read INT8 in no other way, and FP16 fastest so. Each column starts at a
    multiple of 16 bytes, so that it is loaded in vectors of that size.
    """
    *batch, depth, columns = values.shape
    pitch = ceil_div(depth * ELEMENT_TYPES[dtype].bytes, 16) * 16 // ELEMENT_TYPES[dtype].bytes
    packed = np.zeros((*batch, columns, pitch), values.dtype)
    packed[..., :depth] = np.moveaxis(values, -1, -2)
    view = ctx.weights.pack(packed, dtype)
    order = (*range(len(batch)), len(batch) + 1, len(batch))
    return replace(view.permuted(order), shape=values.shape)


def pixel_pitch(y: View) -> int:
    """Return the elements from pixel to pixel; raises NotCoveredError unless channels-last."""
    pitch = y.pixel_pitch()
    if pitch is None:
        raise NotCoveredError(f"tensor {y.base!r} is not stored channels-last")
    return pitch


def precision_of(gpu: GpuTarget, dtype: str) -> str:
    """Return how kernels multiply operands of a type, as their parameter PRECISION."""
    if dtype == "int8":
        return "int8" if gpu.has_matrix_units else "int8 as fp16"
    return gpu.fp32_precision if dtype == "float32" else "ieee"
