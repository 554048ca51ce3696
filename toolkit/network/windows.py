"""Strides, padding and weights of convolutions and poolings, as ONNX writes them."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.errors import NetworkError

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


def window(
    layer: str,
    sizes: Sequence[int],
    *,
    stride: Sequence[int] | None,
    padding: Sequence[int] | None,
    post_padding: Sequence[int] | None,
    dilation: Sequence[int] | None,
    mode: PaddingMode,
) -> Attributes:
    """Return the attributes of a window of `sizes`; `post_padding` None: the same as `padding`."""
    before = list(padding) if padding is not None else [0] * len(sizes)
    after = list(post_padding) if post_padding is not None else before
    per_dimension = {"stride_nd": stride, "padding_nd": padding, "post_padding": post_padding}
    for name, values in {**per_dimension, "dilation_nd": dilation}.items():
        if values is not None and len(values) != len(sizes):
            raise NetworkError(
                f"layer {layer!r}: {name} has {len(values)} values, but the window has "
                f"{len(sizes)} dimensions ({'x'.join(map(str, sizes))}); give one for each"
            )
    attributes: Attributes = {"kernel_shape": list(sizes), **PADDING_MODES[mode]}
    if "auto_pad" not in attributes:
        attributes["pads"] = before + after
    if stride is not None:
        attributes["strides"] = list(stride)
    if dilation is not None:
        attributes["dilations"] = list(dilation)
    return attributes


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


def no_ceiling(layer: str, mode: PaddingMode) -> PaddingMode:
    """Return a padding mode of convolutions; raises NetworkError for one of poolings alone."""
    if mode is PaddingMode.EXPLICIT_ROUND_UP:
        raise NetworkError(
            f"layer {layer!r}: ONNX has no convolution that rounds its size up; give the padding "
            "that it needs with post_padding"
        )
    return mode
