"""Calibration data of any kind -> samples for the inputs of a model.

A folder or file of images, .npy or .npz, a video, or a Python iterable. Images and frames go
through the preprocessing of the pipeline, so that the ranges are those on the board.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx_ir as ir

from calibration.arrays import cut_array
from calibration.dataset import (
    Dataset,
    InputSpec,
    Sample,
    Skipped,
    holds_pictures,
    iterable_dataset,
    open_dataset,
)
from calibration.errors import CalibrationError
from calibration.iterable import Item
from calibration.samples import Stamp, batched, stamp_of
from device.engine.preprocessing import Preprocessing
from device.errors import SourceError
from pipelines.config import PreprocessConfig, SourceConfig
from toolkit.graph.dtypes import IO_DTYPES
from toolkit.quantize.preprocess.decide import Decision, StatedPreprocessing, as_stated, decide
from toolkit.quantize.preprocess.known import Hint

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
    preprocess: Preprocessing | None = None,
    limit: int | None = None,
) -> Dataset:
    """The samples of `source`, at most `limit`, spread evenly over it where its length is known.

    `preprocess` of images and frames; None: as `toolkit.quantize.preprocess.decide` assumes.

    Raises TandemError: there is no such data, or they do not fit the inputs.
    """
    if not isinstance(source, str | Path):
        return iterable_dataset(source, inputs, limit)
    path = Path(source)
    if not prepares(source):
        return open_dataset(path, None, inputs, limit)
    decision = decide(preprocess, None, inputs)
    if decision is None:
        raise CalibrationError(
            f"{path} holds images, but the model has no single image input of known size, only "
            f"{[list(spec.shape) for spec in inputs]}: set its size with --shape, or give .npz "
            "files instead"
        )
    prepare, settings = _preparation(decision.config), msgspec.json.encode(decision.config)
    if path.suffix.lower() not in VIDEOS:
        return open_dataset(path, lambda image: prepare(_read(image)), inputs, limit, settings)
    if limit is not None and limit < 1:
        raise CalibrationError(f"limit is {limit} samples, but must be at least 1: raise it")
    batch = inputs[0].shape[0] or 1
    frame_spec = replace(inputs[0], shape=(1, *inputs[0].shape[1:]))
    frames = _Video(path, frame_spec, prepare, limit and limit * batch, settings)
    return batched(frames, batch)


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


def prepares(source: Source) -> bool:
    """True if `open_data` preprocesses what is there: images or a video, not arrays."""
    if not isinstance(source, str | Path):
        return False
    path = Path(source)
    return path.suffix.lower() in VIDEOS or holds_pictures(path)


def preprocessing_of(
    source: Source,
    inputs: Sequence[InputSpec],
    preprocess: StatedPreprocessing | Preprocessing | None,
    suggested: Hint | None,
) -> Decision | None:
    """Return how images become inputs; of arrays only what the user says is known."""
    if prepares(source):
        return decide(preprocess, suggested, inputs)
    if not as_stated(preprocess).says_anything:
        return None
    decision = decide(preprocess, suggested, inputs)
    return None if decision is None else replace(decision, applied=False)


def _preparation(config: PreprocessConfig) -> Callable[[_Image], _Image]:
    """Return image uint8 [H,W,3] BGR -> input."""

    def prepare(picture: _Image) -> _Image:
        from pipelines.stages.preprocess import preprocess

        return preprocess(picture, config)[0]

    return prepare


def _read(path: Path) -> _Image:
    from pipelines.pictures import PictureError, read_picture

    try:
        return read_picture(path)
    except PictureError as error:
        raise SourceError(f"{path} is not a picture that can be read: {error}") from error


class _Video:
    """Frames of a video, `limit` of them or all, spread evenly over its length."""

    shifts = False

    def __init__(
        self,
        path: Path,
        spec: InputSpec,
        prepare: Callable[[_Image], _Image],
        limit: int | None,
        prepared_by: bytes,
    ) -> None:
        self._path = path
        self._hashes: dict[Stamp, str] = {}  # of the whole, for all parts
        self._prepared_by = prepared_by
        self._spec = spec
        self._prepare = prepare
        total = _count_frames(path)
        count = min(total, limit or total)
        self._frames: Sequence[int] = [number * total // count for number in range(count)]
        self.requested = limit or total
        self.skipped: tuple[Skipped, ...] = ()
        self.names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._frames)

    def part(self, start: int, stop: int) -> "_Video":
        stamp = stamp_of(self._path)
        if stamp not in self._hashes:  # the file is read once, not for each part
            self._hashes[stamp] = self._hash()
        part = copy(self)
        part._frames, part.requested = self._frames[start:stop], stop - start
        whole = f"{self._hashes[stamp]} {start} {stop}"
        part.__dict__["_sha256"] = hashlib.sha256(whole.encode()).hexdigest()
        return part

    def __iter__(self) -> Iterator[Sample]:
        from pipelines.sources.batching import read_frames

        self.skipped = self.names = ()
        # All frames up to the last selected one are decoded: seeking is inexact in most codecs.
        remaining = iter(self._frames)
        next_number = next(remaining, None)
        with read_frames(_config(self._path)) as frames:
            for frame in frames:
                while next_number is not None and next_number < frame.seq:
                    self._skip(next_number)
                    next_number = next(remaining, None)
                if next_number is None:
                    return
                if frame.seq == next_number:
                    self.names += (f"{self._path.name}, frame {next_number}",)
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

    def stamps(self) -> Mapping[str, Stamp]:
        return {self._path.name: stamp_of(self._path)}

    def sha256(self) -> str:
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        return self._hash()

    def _hash(self) -> str:
        digest = hashlib.sha256(self._prepared_by)
        digest.update(repr((self._path.name, self._frames)).encode())
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
    from pipelines.sources.batching import read_frames
    from pipelines.vision import cv2

    with read_frames(_config(path)) as frames:  # SourceError: there is no such video
        capture = cv2.VideoCapture(str(path), cv2.CAP_FFMPEG)
        declared = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        capture.release()
        count = declared if declared > 0 else sum(1 for _ in frames)
    if count == 0:
        raise CalibrationError(
            f"{path} holds no frame that can be decoded: convert it to H.264 in MP4"
        )
    return count
