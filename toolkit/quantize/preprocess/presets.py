"""Preprocessings by name, as `--preprocess NAME` takes them.

Rows give the values that belong to a training recipe. Layout and dtype belong to the model's input.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]
"""Fields of `device.engine.preprocessing.Preprocessing` by name."""

_UNIT: Values = {"color": "rgb", "scale": 1.0 / 255.0}
_PLAIN: Values = {"mean": (0.0,), "std": (1.0,)}
_HALF: Values = {"mean": (0.5,), "std": (0.5,)}
_IMAGENET: Values = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_CLIP: Values = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
_LETTERBOX: Values = {"resize": "letterbox", "pad_value": 114, "interpolation": "linear"}
_STRETCH: Values = {"resize": "stretch", "interpolation": "linear"}


def _crop(fraction: float, interpolation: str = "pillow-bicubic") -> Values:
    """Return a crop as timm makes it, or with another of Pillow's filters."""
    return {
        "resize": "centre-crop",
        "crop_fraction": fraction,
        "interpolation": interpolation,
    }


@dataclass(frozen=True, slots=True)
class Preset:
    """A preprocessing with a name; `source`: who trains like this."""

    name: str
    source: str
    values: Values


_ROWS = (
    Preset("yolo", "Ultralytics LetterBox, YOLOv5 to YOLO11; assumed where nothing is known",
           {**_LETTERBOX, **_UNIT, **_PLAIN}),
    Preset("yolo-classify", "Ultralytics classify_transforms",
           {**_crop(1.0, "pillow-bilinear"), **_UNIT, **_PLAIN}),
    Preset("rtdetr", "Ultralytics RTDETRPredictor: LetterBox(scale_fill=True)",
           {**_STRETCH, **_UNIT, **_PLAIN}),
    Preset("imagenet", "torchvision ImageClassification preset, 224 of 256 pixels",
           {**_crop(0.875, "pillow-bilinear"), **_UNIT, **_IMAGENET}),
    Preset("timm", "timm _cfg: crop_pct 0.875, bicubic, IMAGENET_DEFAULT_MEAN and STD",
           {**_crop(0.875), **_UNIT, **_IMAGENET}),
    Preset("timm-half", "timm IMAGENET_INCEPTION_MEAN and STD, crop_pct 0.9, bicubic: -1 to 1",
           {**_crop(0.9), **_UNIT, **_HALF}),
    Preset("clip", "timm OPENAI_CLIP_MEAN and STD, crop_pct 1.0, bicubic",
           {**_crop(1.0), **_UNIT, **_CLIP}),
    Preset("segmentation", "torchvision SemanticSegmentation preset",
           {**_STRETCH, **_UNIT, **_IMAGENET}),
    Preset("unit", "torchvision ObjectDetection preset: the model normalises itself",
           {**_STRETCH, **_UNIT, **_PLAIN}),
    Preset("raw", "pixels from 0 to 255 as they are",
           {**_STRETCH, **_UNIT, **_PLAIN, "scale": 1.0}),
)  # fmt: skip

PRESETS: Mapping[str, Preset] = {row.name: row for row in _ROWS}
