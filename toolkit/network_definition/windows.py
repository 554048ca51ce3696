"""Strides, padding and weights of convolutions and poolings, as ONNX writes them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.errors import NetworkError
from toolkit.network_definition.layers import Layer

Attributes = dict[str, str | int | float | Sequence[int]]


class PaddingMode(Enum):
    """How padding is found; SAME modes keep size / stride, rounded up."""

    EXPLICIT_ROUND_DOWN = auto()
    EXPLICIT_ROUND_UP = auto()
    SAME_UPPER = auto()
    SAME_LOWER = auto()


PADDING_MODES: Mapping[PaddingMode, Attributes] = {
    PaddingMode.EXPLICIT_ROUND_DOWN: {},
    PaddingMode.EXPLICIT_ROUND_UP: {"ceil_mode": 1},
    PaddingMode.SAME_UPPER: {"auto_pad": "SAME_UPPER"},
    PaddingMode.SAME_LOWER: {"auto_pad": "SAME_LOWER"},
}


@dataclass(frozen=True, slots=True)
class Window:
    """A window of `sizes` that moves over a tensor; `post_padding` None: the same as `padding`.

    `rounds_up`: whether its operator can round sizes up.
    """

    layer: str
    sizes: Sequence[int]
    stride_nd: Sequence[int] | None
    padding_nd: Sequence[int] | None
    post_padding: Sequence[int] | None
    dilation_nd: Sequence[int] | None = None
    padding_mode: PaddingMode = PaddingMode.EXPLICIT_ROUND_DOWN
    rounds_up: bool = False

    def attributes(self) -> Attributes:
        """Return the attributes of ONNX. Raises NetworkError: a list has another length."""
        dimensions = len(self.sizes)
        for name in ("stride_nd", "padding_nd", "post_padding", "dilation_nd"):
            values = getattr(self, name)
            if values is not None and len(values) != dimensions:
                raise NetworkError(
                    f"layer {self.layer!r}: {name} has {len(values)} values, but the window has "
                    f"{dimensions} dimensions ({'x'.join(map(str, self.sizes))}); give one for each"
                )
        if self.padding_mode is PaddingMode.EXPLICIT_ROUND_UP and not self.rounds_up:
            raise NetworkError(
                f"layer {self.layer!r}: ONNX has no convolution that rounds its size up; give the "
                "padding that it needs with post_padding"
            )
        attributes: Attributes = {
            "kernel_shape": list(self.sizes),
            **PADDING_MODES[self.padding_mode],
        }
        before = [0] * dimensions if self.padding_nd is None else list(self.padding_nd)
        after = before if self.post_padding is None else list(self.post_padding)
        if "auto_pad" not in attributes:
            attributes["pads"] = before + after
        if self.stride_nd is not None:
            attributes["strides"] = list(self.stride_nd)
        if self.dilation_nd is not None:
            attributes["dilations"] = list(self.dilation_nd)
        return attributes


class WindowLayer(Layer):
    """A convolution or a pooling. As in TensorRT its window can be set once it is added: it is
    checked, and the shape of its output inferred again, at once.

    Setting raises NetworkError: it does not fit, or a layer takes the output already.
    """

    __slots__ = ("_change", "_window")
    _window: Window
    _change: Callable[[Window], None]

    def __init__(self, layer: Layer, window: Window, change: Callable[[Window], None]) -> None:
        super().__init__(layer.name, layer.outputs)
        object.__setattr__(self, "_window", window)
        object.__setattr__(self, "_change", change)

    def _set(self, window: Window) -> None:
        self._change(window)
        object.__setattr__(self, "_window", window)

    @property
    def stride_nd(self) -> Sequence[int] | None:
        """The steps of the window; None: 1."""
        return self._window.stride_nd

    @stride_nd.setter
    def stride_nd(self, values: Sequence[int]) -> None:
        self._set(replace(self._window, stride_nd=values))

    @property
    def padding_nd(self) -> Sequence[int] | None:
        """The padding before each dimension, and after it unless post_padding is set."""
        return self._window.padding_nd

    @padding_nd.setter
    def padding_nd(self, values: Sequence[int]) -> None:
        self._set(replace(self._window, padding_nd=values))

    @property
    def post_padding(self) -> Sequence[int] | None:
        """The padding after each dimension; None: padding_nd."""
        return self._window.post_padding

    @post_padding.setter
    def post_padding(self, values: Sequence[int]) -> None:
        self._set(replace(self._window, post_padding=values))

    @property
    def padding_mode(self) -> PaddingMode:
        """How padding is found."""
        return self._window.padding_mode

    @padding_mode.setter
    def padding_mode(self, mode: PaddingMode) -> None:
        self._set(replace(self._window, padding_mode=mode))


class DilatedLayer(WindowLayer):
    """A convolution, whose window can be spread."""

    __slots__ = ()

    @property
    def dilation_nd(self) -> Sequence[int] | None:
        """The distance between the values of the window; None: 1."""
        return self._window.dilation_nd

    @dilation_nd.setter
    def dilation_nd(self, values: Sequence[int]) -> None:
        self._set(replace(self._window, dilation_nd=values))


def weights_as(
    layer: str, what: str, values: npt.ArrayLike, shape: Sequence[int], dtype: str
) -> npt.NDArray[Any]:
    """Return weights as an array of `shape`; they may come flat, as TensorRT's samples give them.

    Raises NetworkError: their number or their shape is another.
    """
    array = np.asarray(values)
    needed = "x".join(map(str, shape))
    if array.size != int(np.prod(shape)) or (array.ndim > 1 and array.shape != tuple(shape)):
        raise NetworkError(
            f"layer {layer!r}: its {what} has the shape {'x'.join(map(str, array.shape))} "
            f"({array.size} values), but must have {needed} ({int(np.prod(shape))} values)"
        )
    return np.ascontiguousarray(array.reshape(shape), dtype)
