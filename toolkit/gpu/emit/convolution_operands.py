"""The operands of a 2-D convolution, channels-last, before a kernel is chosen."""

from dataclasses import dataclass
from math import prod

from toolkit.gpu.emit.context import LoweringContext, Numbers
from toolkit.gpu.emit.epilogue import read_epilogue
from toolkit.gpu.emit.float8_gemm import float8_weights
from toolkit.gpu.emit.int8_gemm import int8_weights
from toolkit.gpu.ir.gemm import (
    Epilogue,
    Im2colLoader,
)
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
from toolkit.gpu.passes.fusion import Group
from toolkit.graph.dtypes import FLOAT8
from toolkit.plugins import Constant


@dataclass(frozen=True, slots=True)
class Conv2d:
    """A convolution of channels-last tensors; weights (filter, channel of a group, row, column)."""

    left: Im2colLoader
    weights: Array
    y: View
    y_pitch: int
    residual: View | None
    r_pitch: int
    epilogue: Epilogue

    def operands(self) -> dict[str, View | int | None]:
        """Return all operands but the weights, by the names of a kernel's parameters."""
        return {
            "x": self.left.view,
            **self.epilogue.operands(),
            "residual": self.residual,
            "y": self.y,
            "batch": self.left.batch,
        }

    def constants(self) -> dict[str, Constant]:
        """Return sizes, pitches and epilogue as constants of a kernel."""
        return {
            **self.left.size_constants(),
            "CHANNELS": self.weights.shape[0],
            "Y_PITCH": self.y_pitch,
            "R_PITCH": self.r_pitch,
            "EPILOGUE": self.epilogue.ops,
        }


@dataclass(frozen=True, slots=True)
class Filters:
    """Weights of a convolution, (filter, channel of a group, row, column), and its epilogue.

    `is_int8`: an INT8 input is multiplied as it is stored. `residual`: the name of a tensor.
    """

    values: Array
    is_int8: bool
    epilogue: Epilogue
    residual: str | None

    @property
    def numbers(self) -> Numbers:
        """How the input is read."""
        if self.values.dtype.name == FLOAT8:
            return "stored"
        return "int8 or float" if self.is_int8 else "float"


def read_filters(ctx: LoweringContext, group: Group) -> Filters:
    """Return the weights of a convolution."""
    op = group.root_operation
    weights = ctx.network.constants[op.inputs[1]]
    filters, depth = weights.shape[0], prod(weights.shape[1:])
    float8 = float8_weights(ctx, op, filters)
    if float8 is not None:
        epilogue, residual = read_epilogue(ctx, group, op.input(2), filters, factors=float8.factors)
        return Filters(float8.values, False, epilogue, residual)
    int8 = int8_weights(ctx, op, 0, filters, depth)
    epilogue, residual = read_epilogue(ctx, group, op.input(2), filters, int8)
    return Filters(int8.values if int8 else weights, int8 is not None, epilogue, residual)
