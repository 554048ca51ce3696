"""Calibration data of any kind -> samples for the inputs of a model.

A folder or file of images, .npy or .npz, a video, or a Python iterable. Images and frames go
through the preprocessing of the pipeline, so that the ranges are those on the board.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from calibration.arrays import cut_array
from calibration.dataset import (
    Dataset,
    InputSpec,
    Sample,
    Skipped,
    iterable_dataset,
    open_dataset,
)
from calibration.errors import CalibrationError
from calibration.iterable import Item
from calibration.samples import batched
from device.errors import SourceError
from pipelines.config import PreprocessConfig, SourceConfig
from toolkit.errors import BuildError
from toolkit.graph.dtypes import IO_DTYPES

Source = str | Path | Iterable[Item]
"""A folder or file, or samples: input name -> array, or arrays for a model's only input."""

VIDEOS = frozenset(
    {".avi", ".h264", ".h265", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm"}
)

_BLOCK = 1 << 20  # bytes

_Image = np.ndarray[Any, Any]


def open_data(
    source: Source,
    inputs: Sequence[InputSpec],
    preprocess: PreprocessConfig | None = None,
    limit: int | None = None,
) -> Dataset:
    """The samples of `source`, at most `limit`, spread evenly over it where its length is known.

    `preprocess` None: letterbox to the input's size, RGB, 0 to 1, if the input is [N,3,H,W].

    Raises TandemError: there is no such data, or they do not fit the inputs.
    """
    if not isinstance(source, str | Path):
        return iterable_dataset(source, inputs, limit)
    path = Path(source)
    prepare = _preparation(inputs, preprocess)
    if path.suffix.lower() not in VIDEOS:
        load = None if prepare is None else lambda picture: prepare(_read(picture))
        return open_dataset(path, load, inputs, limit)
    if limit is not None and limit < 1:
        raise CalibrationError(f"limit is {limit} samples, but must be at least 1: raise it")
    if prepare is None:
        raise CalibrationError(
            f"{path} is a video, but the model has no single input of shape [N,3,H,W] for its "
            f"frames, only {[list(spec.shape) for spec in inputs]}: give .npz files instead"
        )
    batch = inputs[0].shape[0] or 1
    frame_spec = replace(inputs[0], shape=(1, *inputs[0].shape[1:]))
    return batched(_Video(path, frame_spec, prepare, limit and limit * batch), batch)


def input_specs(model: ir.Model) -> list[InputSpec]:
    """The name, shape and dtype of each graph input."""
    return [
        InputSpec(
            name=str(value.name),
            shape=tuple(d if isinstance(d, int) else None for d in value.shape or ()),
            dtype=IO_DTYPES[value.dtype or ir.DataType.UNDEFINED],
        )
        for value in model.graph.inputs
    ]


def _preparation(
    inputs: Sequence[InputSpec], preprocess: PreprocessConfig | None
) -> Callable[[_Image], _Image] | None:
    """Return image uint8 [H,W,3] BGR -> float32 [1,3,H,W] for a model's only input.

    None if the input is no image and no preprocessing is given.
    """
    if len(inputs) != 1:
        return None
    shape = inputs[0].shape
    config = preprocess or _default(shape)
    if config is None:
        return None
    if shape[2:] != (config.height, config.width):
        raise BuildError(
            f"The preprocessing makes pictures of {config.width}x{config.height}, but the model's "
            f"input has shape {list(shape)}; make width and height agree."
        )

    def prepare(picture: _Image) -> _Image:
        from pipelines.stages.preprocess import preprocess as run

        return run(picture, config)[0]

    return prepare


def _default(shape: tuple[int | None, ...]) -> PreprocessConfig | None:
    if len(shape) != 4 or shape[1] != 3 or shape[2] is None or shape[3] is None:
        return None
    return PreprocessConfig(width=shape[3], height=shape[2])


def _read(path: Path) -> _Image:
    from pipelines.sources.files import read_image

    picture = read_image(path)
    if picture is None:
        raise SourceError(f"{path} is not a picture that OpenCV can read.")
    return picture


class _Video:
    """Frames of a video, `limit` of them or all, spread evenly over its length."""

    def __init__(
        self,
        path: Path,
        spec: InputSpec,
        prepare: Callable[[_Image], _Image],
        limit: int | None,
    ) -> None:
        self._path = path
        self._spec = spec
        self._prepare = prepare
        total = _count_frames(path)
        count = min(total, limit or total)
        self._frames = [number * total // count for number in range(count)]
        self.requested = limit or total
        self.skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[Sample]:
        from pipelines.sources.table import open_source

        self.skipped = ()
        # All frames up to the last selected one are decoded: seeking is inexact in most codecs.
        remaining = iter(self._frames)
        next_number = next(remaining, None)
        with open_source(_config(self._path)) as frames:
            for frame in frames:
                while next_number is not None and next_number < frame.seq:
                    self._skip(next_number)
                    next_number = next(remaining, None)
                if next_number is None:
                    return
                if frame.seq == next_number:
                    yield {self._spec.name: self._input(frame.image)}
                    next_number = next(remaining, None)
        for number in () if next_number is None else (next_number, *remaining):
            self._skip(number)

    def _input(self, picture: _Image) -> _Image:
        prepared = self._prepare(picture)
        cut_array(
            prepared.shape, prepared.dtype, self._spec, str(self._path)
        )  # raises if the shape does not fit
        return prepared

    def _skip(self, number: int) -> None:
        self.skipped += (Skipped(f"{self._path.name}, frame {number}", "it cannot be decoded"),)

    def sha256(self) -> str:
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        digest = hashlib.sha256(repr((self._path.name, self._frames)).encode())
        try:
            with self._path.open("rb") as stream:
                while block := stream.read(_BLOCK):
                    digest.update(block)
        except OSError as error:
            raise CalibrationError(
                f"{self._path}: cannot read the calibration data ({error.strerror}): check that "
                "the file is still there"
            ) from error
        return digest.hexdigest()


def _config(path: Path) -> SourceConfig:
    return SourceConfig(uri=str(path), frames="every", realtime=False)


def _count_frames(path: Path) -> int:
    """The frame count that the container declares; if it declares none, decode and count."""
    from pipelines.sources.table import open_source
    from pipelines.vision import cv2

    with open_source(_config(path)) as frames:  # SourceError: there is no such video
        capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
        declared = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        capture.release()
        count = declared if declared > 0 else sum(1 for _ in frames)
    if count == 0:
        raise CalibrationError(
            f"{path} holds no frame that can be decoded: convert it to H.264 in MP4"
        )
    return count
