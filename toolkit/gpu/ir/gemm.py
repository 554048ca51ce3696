"""One matrix product, or a batch of them, as every schedule reads it.

    y[i, m, n] = epilogue(sum_k left[i, m, k] right[i, k, n], residual[i, m, n])

The loader of `left` reads a matrix, or the im2col matrix of a convolution, which is never stored.
Emitters describe an operator once, as a `GemmProblem`; `toolkit.gpu.emit.tiled_gemm` turns it into
launches.
"""

from dataclasses import dataclass
from typing import Literal

from toolkit.gpu.ir.elementwise_ops import ExprOp
from toolkit.gpu.ir.view import View
from toolkit.graph.window import Window
from toolkit.plugins import Constant

Three = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class MatrixStrides:
    """Elements from one row, column, matrix, and group of matrices to the next."""

    row: int
    column: int = 1
    batch: int = 0
    outer: int = 0


@dataclass(frozen=True, slots=True)
class DenseLoader:
    """`left` is stored as matrices."""

    view: View
    strides: MatrixStrides


@dataclass(frozen=True, slots=True)
class Im2colLoader:
    """Row m is an output pixel (image, row, column), k is (tap row, tap column, channel).

    `view` is channels-last with `pitch` elements from pixel to pixel. Sizes are (rows, columns);
    `channels` are those of one of `groups` groups. k under a tap outside the image is 0.
    `diagonal`: a block of `channels` filters reads as many channels of its own, and all are one
    group.
    """

    view: View
    pitch: int
    batch: int
    size: tuple[int, int]
    output_size: tuple[int, int]
    window: Window
    channels: int
    groups: int = 1
    diagonal: bool = False

    def size_constants(self) -> dict[str, Constant]:
        """Return the sizes of input and output as constants of a kernel."""
        return {"SIZE": self.size, "OUT": self.output_size, "X_PITCH": self.pitch}


@dataclass(frozen=True, slots=True)
class Im2col3dLoader:
    """The same in three dimensions; `strides` of `view` are (image, depth, row, column).

    `transposed`: a convolution for each of `phases` remainders of the output position by `step`.
    """

    view: View
    strides: tuple[int, int, int, int]
    size: Three
    output_size: Three
    taps: Three
    step: Three
    dilations: Three
    pads: Three
    channels: int
    groups: int
    phases: int
    transposed: bool


Loader = DenseLoader | Im2colLoader | Im2col3dLoader


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Element-wise work on the accumulators: y = ops((sum + bias) * scale, residual).

    INT8 products have `scale`, float32 for each column, an int32 `bias`, and `scalars`, the factors
    of `ops`. Products with weights of 4 bits have `scale`, and all others have none.
    """

    ops: tuple[ExprOp, ...]
    bias: View | None = None
    scale: View | None = None
    scalars: View | None = None

    def operands(self) -> dict[str, View | None]:
        """Return what it reads, by the names of a kernel's parameters."""
        return {"bias": self.bias, "scale": self.scale, "scalars": self.scalars}


IDENTITY = Epilogue((("same", 0),))  # stores the accumulators


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Sizes of `batch` equal matrix products, which tiles are chosen for.

    `unshared_depth`: the part of `depth` whose left elements no other row reads (a convolution: the
    channels under one tap). `item_bytes`: of an operand element. `stored_bytes`: of a result and
    its residual. `block_columns`: of every tile, if that is given. `float8`: operands are FP8.
    `holds_registers`: so does a window of three dimensions in the main loop, or a wide residual.
    """

    rows: int
    columns: int
    depth: int
    unshared_depth: int
    item_bytes: int
    stored_bytes: int
    batch: int = 1
    block_columns: int | None = None
    float8: bool = False
    holds_registers: bool = False

    @property
    def is_int8(self) -> bool:
        """Whether the operands are INT8."""
        return self.item_bytes == 1 and not self.float8


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """A matrix product before it is scheduled.

    `inner`: matrices of a group, where the batch has two dimensions. `layout` of y: "rows" has
    columns side by side, "nchw" has any strides. `residual_strides` matter with a residual alone.
    """

    shape: GemmShape
    left: Loader
    right: View
    right_strides: MatrixStrides
    y: View
    y_strides: MatrixStrides
    epilogue: Epilogue
    residual: View | None = None
    residual_strides: MatrixStrides = MatrixStrides(0)
    layout: Literal["rows", "nchw"] = "rows"
    inner: int = 1

    def epilogue_operands(self) -> dict[str, View | None]:
        """Return what the epilogue reads, by the names of a kernel's parameters."""
        return {**self.epilogue.operands(), "residual": self.residual}
