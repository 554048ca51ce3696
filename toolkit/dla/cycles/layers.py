"""Layers as shapes, without weights, names or graph: the input of the cycle functions."""

from dataclasses import dataclass
from typing import Literal

from device.errors import TandemError
from toolkit.dla.cycles.configurations import Precision

Stage = Literal["x", "y"]


class LayerError(TandemError):
    """A layer has an impossible size, or one that this DLA cannot compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Max or average pooling of `batch` frames of (channels, height, width).

    As the `pool` of a ConvLayer, these are of the convolution's output. Kernels beyond the
    hardware's 8 are computed in steps: give each step.
    """

    channels: int
    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    batch: int = 1
    precision: Precision = "int8"

    def __post_init__(self) -> None:
        _check_sizes(self, ("channels", "height", "width", "batch"))
        _check_window(self)

    @property
    def out_height(self) -> int:
        """Rows of the output."""
        return _positions(self.height + self.pads[0] + self.pads[2], self.kernel[0], self.stride[0])

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        return _positions(self.width + self.pads[1] + self.pads[3], self.kernel[1], self.stride[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvLayer:
    """A convolution (a fully connected layer is one with a 1x1 output) and its fused operations.

    Pairs are (rows, columns); `pads` is (top, left, bottom, right), like ONNX. `kernels` is the
    output channels of all groups. `image`: this layer may read the image through the image unit
    (first layer, 1, 3 or 4 channels). `eltwise`: a second tensor of the output's shape is read and
    combined in the first (`x`) or last (`y`) unit of the output stage. `table`: the activation is a
    table (sigmoid, tanh), in the last unit. `pool`: applied to the output, on the fly if possible.
    """

    channels: int
    height: int
    width: int
    kernels: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    batch: int = 1
    precision: Precision = "int8"
    image: bool = False
    eltwise: Stage | None = None
    table: bool = False
    pool: Pool | None = None

    def __post_init__(self) -> None:
        _check_sizes(self, ("channels", "height", "width", "kernels", "groups", "batch"))
        _check_window(self)
        if self.channels % self.groups or self.kernels % self.groups:
            raise LayerError(
                f"A convolution of {self.channels} channels and {self.kernels} kernels cannot have "
                f"{self.groups} groups; the number of groups must divide both."
            )

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns that the dilated kernel spans."""
        return (
            (self.kernel[0] - 1) * self.dilation[0] + 1,
            (self.kernel[1] - 1) * self.dilation[1] + 1,
        )

    @property
    def out_height(self) -> int:
        """Rows of the output, before a fused pooling."""
        return _positions(self.height + self.pads[0] + self.pads[2], self.extent[0], self.stride[0])

    @property
    def out_width(self) -> int:
        """Columns of the output, before a fused pooling."""
        return _positions(self.width + self.pads[1] + self.pads[3], self.extent[1], self.stride[1])

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the layer as written, without padding of channels."""
        taps = self.kernel[0] * self.kernel[1] * self.channels // self.groups
        return self.batch * self.out_height * self.out_width * self.kernels * taps


@dataclass(frozen=True, slots=True, kw_only=True)
class Deconvolution:
    """A transposed convolution: (channels, height, width) of the small input, stride upwards."""

    channels: int
    height: int
    width: int
    kernels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    groups: int = 1
    batch: int = 1
    precision: Precision = "int8"

    def __post_init__(self) -> None:
        _check_sizes(self, ("channels", "height", "width", "kernels", "groups", "batch"))
        if min(*self.kernel, *self.stride) < 1:
            raise LayerError(
                f"A Deconvolution has kernel {self.kernel} and stride {self.stride}; "
                "both must be at least 1."
            )

    @property
    def macs(self) -> int:
        """Multiply-accumulates: every input times every tap of the kernel."""
        taps = self.kernel[0] * self.kernel[1] * self.channels // self.groups
        return self.batch * self.height * self.width * self.kernels * taps


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """The output stage alone: scale, activation, sum of `operands` tensors, or a copy.

    `stage` is `y` for tables (sigmoid, tanh) and other operations of the last unit.
    """

    channels: int
    height: int
    width: int
    operands: int = 1
    stage: Stage = "x"
    batch: int = 1
    precision: Precision = "int8"

    def __post_init__(self) -> None:
        _check_sizes(self, ("channels", "height", "width", "operands", "batch"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lrn:
    """Local response normalisation across channels."""

    channels: int
    height: int
    width: int
    batch: int = 1
    precision: Precision = "int8"

    def __post_init__(self) -> None:
        _check_sizes(self, ("channels", "height", "width", "batch"))


Layer = ConvLayer | Deconvolution | Pointwise | Pool | Lrn


def _positions(padded: int, extent: int, stride: int) -> int:
    return (padded - extent) // stride + 1


def _check_sizes(layer: Layer, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(layer, name) < 1:
            raise LayerError(
                f"A {type(layer).__name__} has {name} {getattr(layer, name)}; "
                "it must be at least 1."
            )


def _check_window(layer: ConvLayer | Pool) -> None:
    if min(*layer.kernel, *layer.stride) < 1 or min(layer.pads) < 0:
        raise LayerError(
            f"A {type(layer).__name__} has kernel {layer.kernel}, stride {layer.stride} and pads "
            f"{layer.pads}; kernel and stride must be at least 1 and pads at least 0."
        )
    if layer.out_height < 1 or layer.out_width < 1:
        raise LayerError(
            f"A {type(layer).__name__} of kernel {layer.kernel} does not fit once into its padded "
            f"input of {layer.height} x {layer.width}; give it more padding or a smaller kernel."
        )
