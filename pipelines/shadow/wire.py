"""How a frame and what the running release saw in it go over a socket: a line of JSON, then arrays.

The shadow sends one byte for each sample that it wants; the tap answers with a `Head` as one line
and the bytes of its arrays in order. The first line of a connection is a `Hello`, unasked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from pipelines.frame import Frame, Nv12, Stamp
from pipelines.results import (
    ClassScores,
    Decoded,
    DepthMap,
    Detections,
    SegmentationMap,
    Texts,
)
from pipelines.vision import cv2

ASK = b"n"
MAX_HEAD_BYTES = 4 * 1024**2  # texts are in it
MAX_ARRAY_BYTES = 256 * 1024**2  # a frame of 8K has 100 MB
MAX_ARRAYS = 8
_KINDS = "biuf"  # of NumPy's types: nothing that is an object

Array = NDArray[Any]


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What runs: the name of its pipeline, its classes and its cameras."""

    pipeline: str
    labels: tuple[str, ...]
    cameras: tuple[str, ...]


class ArraySpec(msgspec.Struct, frozen=True):
    """Type and shape of an array, whose bytes follow."""

    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], Meta(max_length=4)]


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A sample without its arrays, of which the first are the pixels.

    `nv12`: height and width of a picture in NV12, none for BGR. `task`: what was decoded. `region`,
    `metric` and `lines` are those of maps and texts.
    """

    camera: str
    seq: int
    mono_ns: int
    wall_ns: int
    nv12: tuple[int, int] | None
    task: str
    arrays: Annotated[tuple[ArraySpec, ...], Meta(max_length=MAX_ARRAYS)]
    region: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    metric: bool = False
    lines: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A frame and what the running release decoded of it, in pixels of the frame."""

    frame: Frame
    decoded: Decoded


@dataclass(frozen=True, slots=True)
class _Task:
    """How the results of one task become arrays, and are made of them."""

    name: str
    kind: type[Decoded]
    arrays: Callable[[Any], tuple[Array, ...]]
    make: Callable[[Head, Sequence[Array]], Decoded]


TASKS: tuple[_Task, ...] = (
    _Task(
        "detections",
        Detections,
        lambda decoded: (decoded.boxes, decoded.scores, decoded.class_ids),
        lambda _head, arrays: _detections(arrays),
    ),
    _Task(
        "classes",
        ClassScores,
        lambda decoded: (decoded.scores, decoded.class_ids),
        lambda _head, arrays: ClassScores(*_rows(arrays, 2)),
    ),
    _Task(
        "segmentation",
        SegmentationMap,
        lambda decoded: (decoded.class_ids,),
        lambda head, arrays: SegmentationMap(_map(arrays), head.region),
    ),
    _Task(
        "depth",
        DepthMap,
        lambda decoded: (decoded.depth,),
        lambda head, arrays: DepthMap(_map(arrays), head.region, head.metric),
    ),
    _Task(
        "texts",
        Texts,
        lambda decoded: (decoded.scores,),
        lambda head, arrays: Texts(head.lines, *_rows(arrays, 1)),
    ),
)


def task_of(decoded: Decoded) -> str:
    """Return the name of the task that gives such results."""
    return _task(decoded).name


def encode(sample: Sample) -> list[bytes | memoryview]:
    """Return the line of a sample and the bytes of its arrays, which are copies: the memory of
    frames and of an engine's outputs is used again."""
    frame, decoded = sample.frame, sample.decoded
    task = _task(decoded)
    nv12 = frame.nv12
    pixels = frame.image if nv12 is None else nv12.rows
    arrays = [np.array(array, order="C") for array in (pixels, *task.arrays(decoded))]
    head = Head(
        camera=frame.camera,
        seq=frame.seq,
        mono_ns=frame.t_capture.mono_ns,
        wall_ns=frame.t_capture.wall_ns,
        nv12=None if nv12 is None else (nv12.height, nv12.width),
        task=task.name,
        arrays=tuple(ArraySpec(array.dtype.str, array.shape) for array in arrays),
        region=getattr(decoded, "region", (0.0, 0.0, 0.0, 0.0)),
        metric=getattr(decoded, "metric", False),
        lines=getattr(decoded, "lines", ()),
    )
    bodies = [array.reshape(-1).view(np.uint8).data for array in arrays]
    return [msgspec.json.encode(head) + b"\n", *bodies]


def read_hello(stream: BinaryIO) -> Hello:
    """Return the first line of a connection. Raises ValueError, EOFError or OSError."""
    return msgspec.json.decode(_line(stream), type=Hello)


def read_sample(stream: BinaryIO) -> Sample:
    """Return the next sample. Raises ValueError: it is damaged; EOFError or OSError."""
    try:
        head = msgspec.json.decode(_line(stream), type=Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"a sample of the running pipeline is not understood: {error}") from error
    if not head.arrays:
        raise ValueError("a sample of the running pipeline has no pixels")
    pixels, *results = [_read_array(stream, spec) for spec in head.arrays]
    task = next((task for task in TASKS if task.name == head.task), None)
    if task is None:
        raise ValueError(f"a sample of the running pipeline has the unknown task {head.task!r}")
    return Sample(_frame(head, pixels), task.make(head, results))


def _task(decoded: Decoded) -> _Task:
    return next(task for task in TASKS if isinstance(decoded, task.kind))


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline(MAX_HEAD_BYTES + 1)
    if len(line) > MAX_HEAD_BYTES:
        raise ValueError(f"a line of the running pipeline has more than {MAX_HEAD_BYTES} bytes")
    if not line.endswith(b"\n"):
        raise EOFError("the running pipeline ended")
    return line


def _read_array(stream: BinaryIO, spec: ArraySpec) -> Array:
    try:
        dtype = np.dtype(spec.dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"{spec.dtype!r} is no type of an array") from error
    size = dtype.itemsize
    for side in spec.shape:
        size *= side
    if dtype.kind not in _KINDS or size > MAX_ARRAY_BYTES:
        raise ValueError(f"an array of type {dtype} and {size} bytes is not taken")
    array = np.empty(spec.shape, dtype)
    view = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < size:
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]  # BinaryIO lacks it
        if not count:
            raise EOFError("the running pipeline ended")
        done += count
    return array


def _frame(head: Head, pixels: Array) -> Frame:
    stamp = Stamp(head.mono_ns, head.wall_ns)
    if pixels.dtype != np.uint8 or pixels.size == 0:
        raise ValueError(f"pixels of type {pixels.dtype} and shape {pixels.shape} are not taken")
    if head.nv12 is None:
        if pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(f"a picture of the shape {pixels.shape} is not BGR")
        return Frame(pixels, head.seq, stamp, stamp, "", head.camera)
    height, width = head.nv12
    fits = pixels.ndim == 2 and pixels.shape[0] % 3 == 0 and pixels.shape[1] % 2 == 0
    if not fits or not (0 < 3 * height <= 2 * pixels.shape[0] and 0 < width <= pixels.shape[1]):
        raise ValueError(f"rows of the shape {pixels.shape} are not NV12 of {width} x {height}")

    def picture() -> NDArray[np.uint8]:
        image = np.asarray(cv2.cvtColor(pixels, cv2.COLOR_YUV2BGR_NV12), np.uint8)
        return image[:height, :width]

    nv12 = Nv12(pixels, width, height)
    return Frame(picture, head.seq, stamp, stamp, "", head.camera, nv12=nv12)


def _rows(arrays: Sequence[Array], count: int) -> Sequence[Array]:
    """Return `count` arrays that have as many rows each; boxes have four columns."""
    if len(arrays) != count or len({array.shape[:1] for array in arrays}) != 1:
        raise ValueError(f"results of the shapes {[a.shape for a in arrays]} do not fit together")
    if count == 3 and arrays[0].shape[1:] != (4,):
        raise ValueError(f"boxes of the shape {arrays[0].shape} have no four sides")
    if any(array.ndim != 1 for array in arrays[1 if count == 3 else 0 :]):
        raise ValueError(f"results of the shapes {[a.shape for a in arrays]} are not lists")
    return arrays


def _detections(arrays: Sequence[Array]) -> Detections:
    boxes, scores, class_ids = _rows(arrays, 3)
    return Detections(boxes, scores, class_ids)


def _map(arrays: Sequence[Array]) -> Array:
    if len(arrays) != 1 or arrays[0].ndim != 2:
        raise ValueError(f"a map of the shapes {[a.shape for a in arrays]} has no rows and columns")
    return arrays[0]
