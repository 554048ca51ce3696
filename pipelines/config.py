"""pipeline.toml and the model files of `configs/models`, decoded once into frozen values."""

from typing import Annotated, Literal, Union

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Triple = tuple[float, float, float]


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table: frozen, and unknown keys are refused."""


class SourceConfig(_Value, frozen=True, kw_only=True):
    """Where frames come from.

    `uri`: a file, a folder of pictures, `v4l2:///dev/video0`, `rtsp://...`. `frames`: "latest"
    drops what the engine cannot keep up with (live sources), "every" runs each frame (files).
    `loop` starts a file or folder again at its end. `stall_s`: a live source that gives no frame
    for so long is opened again.
    """

    uri: str
    frames: Literal["latest", "every"] = "latest"
    loop: bool = False
    realtime: bool = True  # files: keep the pace of their frame rate
    stall_s: Annotated[float, Meta(gt=0.0)] = 2.0


class PreprocessConfig(_Value, frozen=True, kw_only=True):
    """Frame -> network input: resize, colour order, value = (pixel * scale - mean) / std."""

    width: Positive
    height: Positive
    resize: Literal["letterbox", "stretch"] = "letterbox"
    color: Literal["rgb", "bgr"] = "rgb"
    scale: float = 1.0 / 255.0
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)
    pad_value: Annotated[int, Meta(ge=0, le=255)] = 114


class LtrbGrid(_Value, frozen=True, kw_only=True, tag="ltrb_grid", tag_field="kind"):
    """Anchor-free head: `boxes` [1,4,A] = left, top, right, bottom distances from the centre of
    each cell in units of its stride; `scores` [1,C,A] = probabilities. Cells go level by level,
    row by row."""

    boxes: str
    scores: str
    strides: tuple[Positive, ...]
    score_threshold: Fraction = 0.35
    iou_threshold: Fraction = 0.5
    max_detections: Positive = 100


class Classification(_Value, frozen=True, kw_only=True, tag="classification", tag_field="kind"):
    """`scores` [1,C]: the `top` best classes; softmax is applied unless the model did."""

    scores: str
    softmax: bool = True
    top: Positive = 5


DecodeConfig = Union[LtrbGrid, Classification]  # noqa: UP007  (read by msgspec on 3.10)


class MqttSink(_Value, frozen=True, kw_only=True, tag="mqtt", tag_field="kind"):
    """Publish each frame's detections on the device's detections topic, at most `max_hz`."""

    max_hz: Annotated[float, Meta(gt=0.0)] = 30.0
    qos: Literal[0, 1] = 0


class JsonlSink(_Value, frozen=True, kw_only=True, tag="jsonl", tag_field="kind"):
    """Append each frame's detections to a file, one JSON object a line."""

    path: str


class VideoSink(_Value, frozen=True, kw_only=True, tag="video", tag_field="kind"):
    """Write an annotated video."""

    path: str
    fps: Annotated[float, Meta(gt=0.0)] = 15.0


SinkConfig = Union[MqttSink, JsonlSink, VideoSink]  # noqa: UP007  (read by msgspec on 3.10)


class PipelineConfig(_Value, frozen=True, kw_only=True):
    """pipeline.toml: one source, one model, any sinks."""

    name: str
    source: SourceConfig
    preprocess: PreprocessConfig
    decode: DecodeConfig
    sinks: tuple[SinkConfig, ...] = ()


class ModelConfig(_Value, frozen=True, kw_only=True):
    """A file of `configs/models`: a model with its labels and how to feed and read it.

    Paths are relative to the file's own folder.
    """

    name: str
    file: str
    labels: str
    calibration: str = ""
    preprocess: PreprocessConfig
    decode: DecodeConfig
