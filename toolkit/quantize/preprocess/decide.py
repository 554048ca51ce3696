"""Decide the preprocessing of images: stated values over known ones over assumed ones.

Nothing is taken in silence: every value carries its origin, and the reports show both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calibration.arrays import InputSpec
from calibration.errors import CalibrationError
from device.engine.preprocessing import LETTERBOXES, Preprocessing, describe, plain
from device.errors import PreprocessingError
from pipelines.config import PreprocessConfig
from toolkit.quantize.preprocess.known import Hint
from toolkit.quantize.preprocess.presets import PRESETS, Values

ASSUMED = "assumed, as nothing says it"
FROM_INPUT = "the model's input"
_DEFAULT = PRESETS["yolo"].values
_COLORS = {1: "grey", 3: "rgb"}
_DTYPES = frozenset({"float32", "float16", "uint8"})
_TITLES = {"color": "colour", "crop_fraction": "crop fraction", "pad_value": "padding"}
_OF_COLORS = ("color", "mean", "std")
_OF_NUMBERS = ("scale", "mean", "std")


@dataclass(frozen=True, slots=True)
class StatedPreprocessing:
    """What the user says of the preprocessing.

    `base`: values that belong together, of a preset or a model file, with their `origin`.
    `values`: single ones, which go before them. `strict`: nothing may be assumed.
    """

    base: Values = field(default_factory=dict)
    origin: str = ""
    values: Values = field(default_factory=dict)
    strict: bool = False

    @property
    def says_anything(self) -> bool:
        """True if there is any value."""
        return bool(self.base or self.values)


@dataclass(frozen=True, slots=True)
class Decision:
    """The preprocessing of a model's images; `origins`: field -> where its value comes from.

    `applied`: images went through it. False: the samples are arrays, which are said to be its
    results.
    """

    config: PreprocessConfig
    origins: Mapping[str, str]
    applied: bool = True

    @property
    def assumed(self) -> tuple[str, ...]:
        """What is assumed of images, in words."""
        names = [name for name, origin in self.origins.items() if origin == ASSUMED]
        return tuple(_TITLES.get(name, name) for name in names) if self.applied else ()

    @property
    def value(self) -> Preprocessing:
        """The preprocessing without the size."""
        return plain(self.config)

    @property
    def in_words(self) -> str:
        """The preprocessing in words."""
        return describe(self.config)

    def lines(self) -> list[str]:
        """Return the preprocessing and its origins as text."""
        size = f"{self.config.width}x{self.config.height}"
        applied = "" if self.applied else " (as stated: the samples are arrays, taken as they are)"
        lines = [f"preprocessing to {size}: {describe(self.config)}{applied}"]
        for origin in dict.fromkeys(self.origins.values()):
            names = [_TITLES.get(n, n) for n, source in self.origins.items() if source == origin]
            if origin == ASSUMED:
                lines.append(
                    f"  ASSUMED, as nothing says it: {', '.join(names)}; "
                    "`tandem build --preprocess` states it"
                )
            else:
                lines.append(f"  from {origin}: {', '.join(names)}")
        return lines


def as_stated(preprocess: StatedPreprocessing | Preprocessing | None) -> StatedPreprocessing:
    """Return what a library's caller states, as the command line would."""
    if preprocess is None:
        return StatedPreprocessing()
    if isinstance(preprocess, StatedPreprocessing):
        return preprocess
    return StatedPreprocessing(_fields(preprocess), "the caller")


def decide(
    preprocess: StatedPreprocessing | Preprocessing | None,
    hint: Hint | None,
    inputs: Sequence[InputSpec],
) -> Decision | None:
    """Return the preprocessing of a model's only input, None if that is no image.

    Raises CalibrationError: stated values contradict each other, or the input.
    """
    stated = as_stated(preprocess)
    image = _image_input(inputs)
    if image is None:
        if stated.values:
            raise CalibrationError(
                f"the preprocessing says {', '.join(stated.values)}, but the model has no single "
                f"image input, only {[list(spec.shape) for spec in inputs]}: leave it out"
            )
        return None
    values, origins = dict(_DEFAULT), dict.fromkeys(_DEFAULT, ASSUMED)
    for layer, origin in _layers(stated, hint, image):
        values |= layer
        origins |= dict.fromkeys(layer, origin)
    size = {"width": image.width, "height": image.height} | {
        name: values.pop(name) for name in ("width", "height") if name in values
    }
    if values["resize"] != "centre-crop":
        values["crop_fraction"] = 1.0
    hidden = {"width", "height", "crop_fraction", *_unused(values)}
    _check_units(stated, values)
    try:
        config = PreprocessConfig(**values, **size)
    except PreprocessingError as error:
        raise CalibrationError(f"the preprocessing is wrong: {error}") from error
    _check_size(config, image)
    decision = Decision(config, {name: o for name, o in origins.items() if name not in hidden})
    if stated.strict and decision.assumed:
        raise CalibrationError(
            f"nothing says {_listed(decision.assumed)} of the images, and `tandem build --strict` "
            "assumes nothing: state them with `tandem build --preprocess`, or one by one"
        )
    return decision


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def stated_over(recorded: Preprocessing, stated: StatedPreprocessing) -> Preprocessing:
    """Return a recorded preprocessing with the values that the user states in their place.

    Raises CalibrationError: the values contradict each other.
    """
    values = {**_fields(recorded), **_without(stated.base, ("width", "height")), **stated.values}
    if values["resize"] != "centre-crop":
        values["crop_fraction"] = 1.0
    try:
        return Preprocessing(**values)
    except PreprocessingError as error:
        raise CalibrationError(f"the preprocessing is wrong: {error}") from error


@dataclass(frozen=True, slots=True)
class _Image:
    """An image input."""

    spec: InputSpec
    layout: str
    channels: int
    height: int
    width: int


def _image_input(inputs: Sequence[InputSpec]) -> _Image | None:
    """Return the only input if it is a batch of images of a known size."""
    if len(inputs) != 1:
        return None
    spec = inputs[0]
    shape = spec.shape
    if len(shape) != 4 or spec.dtype not in _DTYPES:
        return None
    last = shape[3] in _COLORS and shape[1] not in _COLORS
    channels, height, width = (shape[3], *shape[1:3]) if last else shape[1:]
    if channels not in _COLORS or height is None or width is None:
        return None
    return _Image(spec, "nhwc" if last else "nchw", channels, height, width)


def _layers(
    stated: StatedPreprocessing, hint: Hint | None, image: _Image
) -> list[tuple[Values, str]]:
    """Return values with their origin; later ones go before earlier ones."""
    layers: list[tuple[Values, str]] = []
    if hint is not None and not stated.base:
        layers.append((hint.preset.values, hint.origin))
    of_input: dict[str, Any] = {"layout": image.layout, "dtype": image.spec.dtype}
    if image.channels == 1:  # recipes are those of three colours
        of_input |= {"color": "grey"}
        layers = [(_without(values, _OF_COLORS), origin) for values, origin in layers]
    if image.spec.dtype == "uint8":
        of_input |= {"scale": 1.0, "mean": (0.0,), "std": (1.0,)}
        layers = [(_without(values, _OF_NUMBERS), origin) for values, origin in layers]
    layers.append((of_input, FROM_INPUT))
    if stated.base:
        layers.append((stated.base, stated.origin))
    layers += [({name: value}, f"--{_option(name)}") for name, value in stated.values.items()]
    return layers


def _without(values: Values, names: Sequence[str]) -> Values:
    return {name: value for name, value in values.items() if name not in names}


def _option(name: str) -> str:
    return {"color": "colour", "crop_fraction": "resize"}.get(name, name)


def _unused(values: Values) -> tuple[str, ...]:
    return () if values["resize"] in LETTERBOXES else ("pad_value",)


def _fields(preprocessing: Preprocessing) -> Values:
    return {name: getattr(preprocessing, name) for name in preprocessing.__struct_fields__}


def _check_units(stated: StatedPreprocessing, values: Values) -> None:
    """Refuse a mean in pixels beside a scale that makes pixels 0 to 1."""
    top = 255.0 * values["scale"]
    if "mean" in stated.values and max(values["mean"]) > 1.001 * top:
        raise CalibrationError(
            f"the mean is {max(values['mean']):g}, but scaled pixels end at {top:g} (scale "
            f"{values['scale']:.6g}): `tandem build --scale 1` is for a mean in pixels, or divide "
            "mean and std by 255"
        )


def _check_size(config: PreprocessConfig, image: _Image) -> None:
    expected = (None, *config.input_shape[1:])
    actual = (None, *image.spec.shape[1:])
    if actual != expected or config.dtype != image.spec.dtype:
        raise CalibrationError(
            f"the preprocessing makes {config.dtype} inputs of shape {list(config.input_shape)}, "
            f"but the model's input '{image.spec.name}' takes {image.spec.dtype} of shape "
            f"{list(image.spec.shape)}: correct layout, colour, dtype or size"
        )
