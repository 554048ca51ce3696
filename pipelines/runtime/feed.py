"""Pictures -> the engine's inputs: numbers made on the CPU, or bytes for a kernel of the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from device.runtime.frames import FrameInput, FramePixels, FramePlace
from pipelines.config import PreprocessConfig
from pipelines.frame import Frame, Image
from pipelines.stages.antialias import resize_part
from pipelines.stages.decoders.candidates import Outputs
from pipelines.stages.preprocess import Preprocessor, fit, inner_size
from pipelines.stages.view import Geometry
from pipelines.vision import cv2

Arrays = Mapping[str, NDArray[Any]]


Picture = Image | Frame
"""What a network looks at: a part of a frame, uint8 [H, W, 3] BGR, or a whole frame."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a picture lies in the input, and its shape [H, W, 3]."""

    geometry: Geometry
    shape: tuple[int, ...]


class Infer(Protocol):
    """Runs an engine on all of its inputs."""

    def __call__(self, feeds: Arrays) -> Mapping[str, NDArray[Any]]:
        """Return the outputs by name; SessionError if an input does not fit."""


class Feed(Protocol):
    """The inputs of one engine for batches of pictures."""

    def put(self, row: int, picture: Picture) -> Placed:
        """Make image number `row` of the next batch."""

    def infer(self, count: int) -> Outputs:
        """Run the engine on a batch of `count` images."""

    def close(self) -> None:
        """Free what it took."""


class HostFeed:
    """Inputs that are made on the CPU."""

    def __init__(
        self, config: PreprocessConfig, infer: Infer, name: str, count: int, others: Arrays
    ) -> None:
        """`name`: the input of images, up to `count` of them; `others`: all other inputs."""
        self._infer = infer
        self._name = name
        self._others = others
        self._blob = np.zeros((count, *config.input_shape[1:]), config.dtype)
        self._preprocessors = [
            Preprocessor(config, self._blob[row : row + 1]) for row in range(count)
        ]

    def put(self, row: int, picture: Picture) -> Placed:
        """See `Feed.put`."""
        preprocessor = self._preprocessors[row]
        if not isinstance(picture, Frame):
            return Placed(preprocessor.run(picture)[1], picture.shape)
        geometry = None if picture.nv12 is None else preprocessor.run_nv12(picture.nv12)
        if geometry is None:
            geometry = preprocessor.run(picture.image)[1]
        return Placed(geometry, (*picture.size, 3))

    def infer(self, count: int) -> Outputs:
        """See `Feed.infer`."""
        feeds = {name: array[:count] for name, array in self._others.items()}
        return dict(self._infer({self._name: self._blob[:count], **feeds}))

    def close(self) -> None:
        """There is nothing to free."""


class DeviceFeed:
    """Inputs that a kernel of the engine makes on the GPU, of the bytes of frames."""

    def __init__(self, config: PreprocessConfig, target: FrameInput) -> None:
        self._config = config
        self._target = target
        self._smaller: NDArray[np.uint8] | None = None

    def put(self, row: int, picture: Picture) -> Placed:
        """See `Feed.put`.

        A camera's NV12 goes as it is. BGR, which has twice the bytes, is first resized here where
        that makes it smaller: copying it takes longer. The kernel does not antialias.
        """
        by_kernel = not self._config.interpolation
        if by_kernel and isinstance(picture, Frame) and picture.nv12 is not None:
            height, width = picture.size
            pixels = FramePixels(picture.nv12.rows, "nv12", width, height)
        else:
            image = picture.image if isinstance(picture, Frame) else picture
            height, width = image.shape[:2]
            pixels = self._as_small_as_needed(image)
        geometry = fit(height, width, self._config)
        inner_width, inner_height = inner_size(height, width, self._config)
        place = FramePlace(inner_width, inner_height, x=geometry.pad_x, y=geometry.pad_y)
        self._target.put(row, pixels, place)
        return Placed(geometry, (height, width, 3))

    def infer(self, count: int) -> Outputs:
        """See `Feed.infer`."""
        return self._target.infer(count)

    def _as_small_as_needed(self, image: Image) -> FramePixels:
        """Return an image of which no byte is more than the input shows; the same result."""
        height, width = image.shape[:2]
        inner_width, inner_height = inner = inner_size(height, width, self._config)
        if self._config.interpolation:
            part = (0, 0, inner_width, inner_height)
            resized = resize_part(image, inner, part, self._config.interpolation)
            return FramePixels(resized, "bgr", inner_width, inner_height)
        if inner_width * inner_height >= height * width:
            return FramePixels(image, "bgr", width, height)
        self._smaller = np.asarray(
            cv2.resize(image, inner, dst=self._smaller, interpolation=cv2.INTER_LINEAR), np.uint8
        )
        return FramePixels(self._smaller, "bgr", inner_width, inner_height)

    def close(self) -> None:
        """Free memory and kernels."""
        self._target.close()
