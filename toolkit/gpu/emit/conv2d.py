"""A 2-D convolution with its tensors channels-last, before a kernel is chosen."""

from dataclasses import dataclass

from toolkit.gpu.ir.gemm import Epilogue, Im2colLoader
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
            "bias": self.epilogue.bias,
            "scale": self.epilogue.scale,
            "scalars": self.epilogue.scalars,
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
