"""Models whose preprocessing is known by what their file says, or guessed from its name."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from toolkit.importers.origin import ModelOrigin
from toolkit.quantize.preprocess.presets import PRESETS, Preset

_KERAS = re.compile(r"keras|tf2onnx", re.IGNORECASE)  # same names as torchvision, other recipes


@dataclass(frozen=True, slots=True)
class Hint:
    """The preprocessing that a model suggests; `origin`: from what, in words."""

    preset: Preset
    origin: str


@dataclass(frozen=True, slots=True)
class Known:
    """A row: a model of which `evidence` returns words, and whose name matches, has `preset`.

    `evidence` takes what the file says about itself and its name, and returns "" for no.
    """

    preset: str
    evidence: Callable[[ModelOrigin, str], str]
    name: str = ""


def known_preprocessing(name: str, origin: ModelOrigin) -> Hint | None:
    """Return the preprocessing of the first row that fits, None where the model is not known.

    `name`: of the model's file.
    """
    stem = Path(name).stem.lower()
    for row in KNOWN:
        if re.search(row.name, stem) and (words := row.evidence(origin, stem)):
            return Hint(PRESETS[row.preset], words)
    return None


def _ultralytics(task: str, description: str = "") -> Callable[[ModelOrigin, str], str]:
    def evidence(origin: ModelOrigin, name: str) -> str:
        metadata = origin.metadata
        text = metadata.get("description", "")
        is_theirs = metadata.get("author") == "Ultralytics" or text.startswith("Ultralytics")
        fits = re.fullmatch(task, metadata.get("task", "")) and re.search(description, text.lower())
        return (
            f"the model's Ultralytics metadata, task {metadata['task']}"
            if (is_theirs and fits)
            else ""
        )

    return evidence


def _yolov5(origin: ModelOrigin, name: str) -> str:
    """YOLOv5 writes `stride` and `names` alone."""
    fits = {"stride", "names"} == origin.metadata.keys()
    return "the model's metadata, stride and names as YOLOv5 writes them" if fits else ""


def _classes(module: str) -> Callable[[ModelOrigin, str], str]:
    def evidence(origin: ModelOrigin, name: str) -> str:
        theirs = sorted(one for one in origin.classes if one.startswith(module))
        return f"the class {theirs[0]} in the model's metadata" if theirs else ""

    return evidence


def _file_name(family: str) -> Callable[[ModelOrigin, str], str]:
    def evidence(origin: ModelOrigin, name: str) -> str:
        if _KERAS.search(origin.producer):
            return ""
        return f"a guess from the file name {name!r} ({family})"

    return evidence


_TIMM_HALF = (
    r"^(vit_|mixer_|beit_|resnetv2_|tnt_|inception_v4|inception_resnet|xception(41|65|71)|"
    r"tf_efficientnetv2_(s|m|l|xl)\b|.*[._](ap_in1k|ra4_))"
)
_TIMM_SELF_SUPERVISED = r"[._](dino|mae)"  # with ImageNet's statistics, unlike other vit_
_TIMM_NAME = r"[._](in1k|in21k|in22k|in12k|augreg\d*|tv_in1k|ra\d?_in1k|laion\w*|openai)(?![a-z])"
_TORCHVISION_NAME = (
    r"^(wide_)?(resnet|resnext)[-_]?\d+|^densenet[-_]?\d+|^vgg[-_]?\d+|^alexnet|^squeezenet|"
    r"^mobilenet[-_]?v[23]|^mnasnet|^shufflenet[-_]?v2|^regnet_[xy]|^convnext_(tiny|small|base)|"
    r"^efficientnet_(b\d|v2_[sml])|^swin_(v2_)?[tsb]\b|^vit_[blh]_\d+"
)

KNOWN: tuple[Known, ...] = (
    Known("rtdetr", _ultralytics("detect", r"rt-?detr")),
    Known("yolo", _ultralytics("detect|segment|pose|obb")),
    Known("yolo-classify", _ultralytics("classify")),
    Known("yolo", _classes("ultralytics.")),
    Known("yolo", _yolov5),
    Known("clip", _classes("timm.models."), r"_clip_|clip"),
    Known("timm", _classes("timm.models."), _TIMM_SELF_SUPERVISED),
    Known("timm-half", _classes("timm.models."), _TIMM_HALF),
    Known("timm", _classes("timm.models.")),
    Known("unit", _classes("torchvision.models.detection.")),
    Known("segmentation", _classes("torchvision.models.segmentation.")),
    Known("imagenet", _classes("torchvision.models.")),
    Known("yolo", _file_name("YOLO of Ultralytics"), r"^yolo(v5|v8|v9|v10|11|12|26)[nsmblxtec]"),
    Known("clip", _file_name("timm"), r"_clip_.*" + _TIMM_NAME),
    Known("timm-half", _file_name("timm"), rf"^(?=.*{_TIMM_NAME})" + _TIMM_HALF),
    Known("timm", _file_name("timm"), _TIMM_NAME),
    Known("imagenet", _file_name("torchvision"), _TORCHVISION_NAME),
)
