"""A 2-D convolution with its tensors channels-last, before a kernel is chosen."""

from dataclasses import dataclass

from toolkit.gpu.emit.epilogue import pixel_pitch
from toolkit.gpu.ir.gemm import (
    Epilogue,
    GemmProblem,
    GemmShape,
    Im2colLoader,
    Loader,
    MatrixStrides,
)
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import View
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


def pixel_product(
    left: Loader, right: View, y: View, epilogue: Epilogue, depth: int
) -> GemmProblem:
    """Return a product whose rows are the pixels of `y`, and whose columns are its channels."""
    return GemmProblem(
        shape=GemmShape(
            rows=y.shape[0] * y.shape[2] * y.shape[3],
            columns=y.shape[1],
            depth=depth,
            unshared_depth=depth,
            item_bytes=right.item_bytes,
            stored_bytes=y.item_bytes,
        ),
        left=left,
        right=right,
        right_strides=MatrixStrides(*right.strides),
        y=y,
        y_strides=MatrixStrides(pixel_pitch(y)),
        epilogue=epilogue,
    )
