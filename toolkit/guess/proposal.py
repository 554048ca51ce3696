"""The answer: how to feed a model and how to read it, why, and how sure that is."""

from dataclasses import dataclass
from typing import Any, Literal

from device.engine.preprocessing import Color
from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.decode_config import DecodeConfig
from pipelines.stages.decoder_check import class_count
from toolkit.guess.facts import ModelFacts
from toolkit.guess.names import class_names

Sureness = Literal["certain", "likely", "ask"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Resize, colour and numbers by the name of the recipe. Shapes cannot show them: they are those of
# the family's own preprocessing.
RECIPES: dict[str, dict[str, Any]] = {
    "letterbox": {"resize": "letterbox"},
    "stretch": {"resize": "stretch"},
    "crop": {"resize": "centre-crop", "interpolation": "pillow-bilinear"},
    "imagenet": {"resize": "stretch", "mean": IMAGENET_MEAN, "std": IMAGENET_STD},
    "imagenet-crop": {"resize": "centre-crop", "crop_fraction": 0.875,
                      "interpolation": "pillow-bilinear",
                      "mean": IMAGENET_MEAN, "std": IMAGENET_STD},
    "signed": {"resize": "stretch", "mean": (0.5,), "std": (0.5,)},
    "ultraface": {"resize": "stretch", "scale": 1.0, "mean": (127.0,), "std": (128.0,)},
    "scrfd": {"resize": "letterbox-corner", "scale": 1.0, "mean": (127.5,), "std": (128.0,),
              "pad_value": 0},
    "yolox": {"resize": "letterbox-corner", "color": "bgr", "scale": 1.0},
    "bgr-bytes": {"resize": "letterbox", "color": "bgr", "scale": 1.0},
    "retinaface": {"resize": "letterbox-corner", "color": "bgr", "scale": 1.0,
                   "mean": (104.0, 117.0, 123.0), "pad_value": 0},
    "blazeface": {"resize": "letterbox", "mean": (0.5,), "std": (0.5,), "pad_value": 0},
    "rgb-bytes": {"resize": "stretch", "scale": 1.0},
    "mmdet": {"resize": "letterbox", "color": "bgr", "scale": 1.0,
              "mean": (103.53, 116.28, 123.675), "std": (57.375, 57.12, 58.395)},
    "centernet": {"resize": "letterbox", "color": "bgr", "pad_value": 0,
                  "mean": (0.408, 0.447, 0.47), "std": (0.289, 0.274, 0.278)},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """A reading of a model: the decoder, the recipe of its preprocessing, and why.

    `notes` say what the file cannot show and where this decoder may be wrong. `usual_size`: the
    (height, width) of the family, for an input of dynamic size. `sure` False: nothing but shapes
    that other models have too speaks for it, and the user is asked, be it the only reading.
    """

    decode: DecodeConfig
    recipe: str
    why: str
    notes: tuple[str, ...] = ()
    usual_size: tuple[int, int] | None = None
    sure: bool = True

    @property
    def kind(self) -> str:
        """The decoder's kind."""
        return str(self.decode.__struct_config__.tag)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What `tandem model guess` answers. With several candidates, or one that is not sure, the
    user is asked."""

    rule: str
    sureness: Sureness
    candidates: tuple[Candidate, ...]
    labels: tuple[str, ...]

    @property
    def best(self) -> Candidate:
        """The first candidate."""
        return self.candidates[0]


def preprocess_of(facts: ModelFacts, candidate: Candidate) -> PreprocessConfig:
    """Return the preprocessing of a candidate for the model's input."""
    height, width = facts.size
    recipe = dict(RECIPES[candidate.recipe])
    color: Color = recipe.pop("color", "rgb")
    if facts.channels == 1:
        color = "grey"
        recipe.update({key: recipe[key][:1] for key in ("mean", "std") if key in recipe})
    dtype = facts.image.dtype
    if dtype == "uint8":
        recipe.update({"scale": 1.0, "mean": (0.0,), "std": (1.0,)})
    return PreprocessConfig(
        width=width,
        height=height,
        layout="nhwc" if facts.layout == "nhwc" else "nchw",
        dtype="uint8" if dtype == "uint8" else "float16" if dtype == "float16" else "float32",
        color=color,
        **recipe,
    )


def takes_outputs(facts: ModelFacts, candidate: Candidate) -> bool:
    """True if the decoder can read the model's outputs."""
    try:
        classes_of(facts, candidate)
    except PipelineError:
        return False
    return True


def classes_of(facts: ModelFacts, candidate: Candidate) -> int | None:
    """Return the number of classes that the outputs have, None if they do not show it.

    Raises PipelineError: the decoder cannot read them.
    """
    return class_count(candidate.decode, preprocess_of(facts, candidate), facts.outputs)


def labels_of(facts: ModelFacts) -> tuple[str, ...]:
    """Return the class names of the metadata; empty if it has none."""
    return class_names(facts.metadata)


def names_of_classes(
    facts: ModelFacts, proposal: Proposal, candidate: Candidate
) -> tuple[str, ...]:
    """Return the names of the metadata, or a number for each class of the outputs."""
    if proposal.labels:
        return proposal.labels
    classes = classes_of(facts, candidate)
    return tuple(f"class {number}" for number in range(classes or 1))
