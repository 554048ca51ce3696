"""An image becomes a network input, [1, channels, height, width] or [1, height, width, channels].

Resize, split into planes, then convert each plane straight into its place in the input. Measured
on 1080p -> 640x640: 0.66 ms, against 1.3 to 1.7 ms for the usual chains with a transpose. The
images on the way are kept for the next frame: fresh memory costs OpenCV's split six times its work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.frame import Image, Nv12
from pipelines.stages.antialias import resize_part
from pipelines.stages.native import NativePlanes, native_stages
from pipelines.stages.view import Geometry
from pipelines.vision import cv2

Input = NDArray[Any]  # float32, float16 or uint8, [1, C, H, W] or [1, H, W, C]


def fit(height: int, width: int, config: PreprocessConfig) -> Geometry:
    """Return where an image of that size lands in the network input."""
    inner_w, inner_h = inner_size(height, width, config)
    if config.resize == "centre-crop":  # rounded as torchvision's CenterCrop does
        pad_x = -round((inner_w - config.width) / 2)
        pad_y = -round((inner_h - config.height) / 2)
    elif config.resize == "letterbox-corner":
        pad_x = pad_y = 0
    else:
        pad_x, pad_y = (config.width - inner_w) // 2, (config.height - inner_h) // 2
    return Geometry(inner_w / width, inner_h / height, pad_x, pad_y)


def preprocess(
    image: Image, config: PreprocessConfig, out: Input | None = None
) -> tuple[Input, Geometry]:
    """Return the network input for an image, uint8 [H, W, 3] BGR, and where it lies in it.

    `out`: an array of the input's shape and dtype, written and returned instead of a new one.
    """
    return Preprocessor(config, out).run(image)


def empty_input(config: PreprocessConfig) -> Input:
    """Return an array for one input; its numbers are undefined."""
    return np.empty(config.input_shape, config.dtype)


class Preprocessor:
    """`preprocess` for frames of a stream: one input array, padded again only for a new size.

    The array that `run` returns is overwritten by the next call. `out`: an array to write into,
    one image of a batch for example.
    """

    def __init__(self, config: PreprocessConfig, out: Input | None = None) -> None:
        self._config = config
        self._blob: Input = empty_input(config) if out is None else out
        _check_out(self._blob, config)
        self._place: _Place | None = None
        native_stages()  # loaded now: the first frame is not to wait
        self._scratch = _Scratch()

    def run(self, image: Image) -> tuple[Input, Geometry]:
        """Return the network input for an image, uint8 [H, W, 3] BGR, and where it lies in it."""
        _check_image(image)
        place = self._place_of(*image.shape[:2])
        _paint(image, self._config, place, self._scratch)
        return self._blob, place.geometry

    def run_nv12(self, picture: Nv12) -> Geometry | None:
        """Write the network input for a camera's picture that is not resized, and return where it
        lies in it. None: `run` has to do it, on the picture as an image."""
        place = self._place_of(picture.height, picture.width)
        if place.native is None or place.inner != (picture.width, picture.height):
            return None
        return place.geometry if place.native.write_nv12(picture) else None

    def _place_of(self, height: int, width: int) -> "_Place":
        """Return where images of a size land; pads the input if it is another one than before."""
        if self._place is None or self._place.size != (height, width):
            self._place = _place_of(height, width, self._config, self._blob)
            _pad(self._blob, self._config)
        return self._place


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where images of a size land: `inner`, their width and height once resized; of that, the part
    `left`, `top` and so on as large as `target`, a view [C, H, W] of the input."""

    size: tuple[int, int]
    geometry: Geometry
    inner: tuple[int, int]
    left: int
    top: int
    target: Input
    native: NativePlanes | None  # of `target`, where libtandem fills it


@dataclass(slots=True)
class _Scratch:
    """Images on the way of the last frame, which the next one overwrites."""

    resized: NDArray[Any] | None = None
    planes: list[NDArray[Any]] = field(default_factory=list)


def inner_size(height: int, width: int, config: PreprocessConfig) -> tuple[int, int]:
    """Return (width, height) of the resized image."""
    if config.resize == "stretch":
        return config.width, config.height
    if config.resize == "centre-crop":
        return _cover_size(height, width, config)
    scale = min(config.width / width, config.height / height)
    return (
        min(config.width, max(1, round(width * scale))),
        min(config.height, max(1, round(height * scale))),
    )


def _cover_size(height: int, width: int, config: PreprocessConfig) -> tuple[int, int]:
    """Return (width, height) of which the input is `crop_fraction` along the shorter side.

    Both are rounded down, as torchvision and timm do. A product such as 256.0 may be just below
    the whole number.
    """
    fraction, slack = config.crop_fraction, 1e-6
    if width * config.height <= height * config.width:
        inner_w = int(config.width / fraction + slack)
        return inner_w, max(config.height, int(inner_w * height / width + slack))
    inner_h = int(config.height / fraction + slack)
    return max(config.width, int(inner_h * width / height + slack)), inner_h


def _channels_first(blob: Input, config: PreprocessConfig) -> Input:
    """Return a view [C, H, W] of the input."""
    image: Input = blob[0]
    return image if config.layout == "nchw" else image.transpose(2, 0, 1)


def _planes(
    image: NDArray[Any], config: PreprocessConfig, scratch: _Scratch
) -> Sequence[NDArray[Any]]:
    """Return the planes of a BGR image in the order of the network input's channels."""
    if config.color == "grey":
        return (cv2.cvtColor(image, cv2.COLOR_BGR2GRAY),)
    if [plane.shape for plane in scratch.planes] != [image.shape[:2]] * 3:
        scratch.planes = [np.empty(image.shape[:2], np.uint8) for _ in range(3)]
    cv2.split(image, scratch.planes)
    return scratch.planes[::-1] if config.color == "rgb" else scratch.planes


def _pad(blob: Input, config: PreprocessConfig) -> None:
    for channel, plane in enumerate(_channels_first(blob, config)):
        pixel = config.pad_value * config.scale
        plane[:] = (pixel - config.mean[channel]) / config.std[channel]


def _place_of(height: int, width: int, config: PreprocessConfig, blob: Input) -> _Place:
    """Return where images of that size land in an input."""
    geometry = fit(height, width, config)
    inner = inner_size(height, width, config)
    x, y = geometry.pad_x, geometry.pad_y
    left, top = max(-x, 0), max(-y, 0)
    columns, rows = min(inner[0] - left, config.width), min(inner[1] - top, config.height)
    x, y = max(x, 0), max(y, 0)
    target = _channels_first(blob, config)[:, y : y + rows, x : x + columns]
    native = _native_planes(config, target)
    return _Place((height, width), geometry, inner, left, top, target, native)


def _native_planes(config: PreprocessConfig, target: Input) -> NativePlanes | None:
    """Return what fills all channels at once, with the results of `_normalise`."""
    stages = native_stages()
    if stages is None or config.dtype != "float32" or config.color == "grey":
        return None
    return NativePlanes(
        stages,
        target,
        tuple(config.scale / std for std in config.std),
        tuple(mean / std for mean, std in zip(config.mean, config.std, strict=True)),
        reverse=config.color == "rgb",
    )


def _paint(image: Image, config: PreprocessConfig, place: _Place, scratch: _Scratch) -> None:
    """Write an image to its place."""
    left, top, target = place.left, place.top, place.target
    rows, columns = target.shape[1:]
    resized: NDArray[Any] = image  # a frame that fits is not copied
    if config.interpolation and place.inner != image.shape[1::-1]:
        part = (left, top, columns, rows)
        resized = resize_part(image, place.inner, part, config.interpolation)
    else:
        if place.inner != image.shape[1::-1]:
            resized = scratch.resized = cv2.resize(
                image, place.inner, dst=scratch.resized, interpolation=cv2.INTER_LINEAR
            )
        resized = resized[top : top + rows, left : left + columns]
    if config.dtype == "uint8" and config.layout == "nchw" and config.color != "grey":
        cv2.split(resized, list(target[::-1] if config.color == "rgb" else target))
        return
    if place.native is not None and place.native.write(resized):
        return
    for channel, plane in enumerate(_planes(resized, config, scratch)):
        _normalise(plane, config, channel, target[channel])


def _normalise(plane: NDArray[Any], config: PreprocessConfig, channel: int, out: Input) -> None:
    """Write (plane * scale - mean) / std of one channel to `out`, [H, W] in any layout."""
    if config.dtype == "uint8":
        out[:] = plane
        return
    factor = config.scale / config.std[channel]
    shift = config.mean[channel] / config.std[channel]
    if config.dtype == "float16":  # rounded once, at the end
        out[:] = plane.astype(np.float32) * np.float32(factor) - np.float32(shift)
        return
    out[:] = plane  # then in place: a product that also converts goes through a small buffer
    out *= np.float32(factor)
    if shift:
        out -= np.float32(shift)


def _check_image(image: Image) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise PipelineError(
            f"an image must be uint8 [H, W, 3] in BGR order, not {image.dtype}"
            f" {list(image.shape)}: convert it first."
        )


def _check_out(blob: Input, config: PreprocessConfig) -> None:
    expected, dtype = config.input_shape, config.dtype
    if blob.shape != expected or blob.dtype != dtype:
        raise PipelineError(
            f"the array for the network input must be {dtype} {list(expected)}, not {blob.dtype}"
            f" {list(blob.shape)}: make it with np.empty({expected}, np.{dtype})."
        )
