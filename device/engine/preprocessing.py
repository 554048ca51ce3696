"""How an image becomes a network input: one value for calibration, engine and pipeline.

The calibration prepares its images by it, the calibration table and the engine store it, and the
pipeline compares its own with the engine's. `pipelines.stages.preprocess` carries it out.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from device.errors import PreprocessingError

Resize = Literal["letterbox", "letterbox-corner", "stretch", "centre-crop"]
LETTERBOXES = ("letterbox", "letterbox-corner")  # they keep the shape and fill a border
Interpolation = Literal["linear", "pillow-bilinear", "pillow-bicubic"]
Color = Literal["rgb", "bgr", "grey"]
Layout = Literal["nchw", "nhwc"]
InputType = Literal["float32", "float16", "uint8"]

_ROUNDED = ("scale", "mean", "std", "crop_fraction")
_ROUNDED_REL, _ROUNDED_ABS = 1e-3, 1e-6
_TITLES = {"rgb": "RGB", "bgr": "BGR", "grey": "grey"}
CHANNELS: dict[str, int] = {"rgb": 3, "bgr": 3, "grey": 1}


class Preprocessing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Resize, order the channels, then value = (pixel * scale - mean) / std, pixels 0 to 255.

    `resize`: "letterbox" keeps the aspect ratio and fills the border with `pad_value`;
    "letterbox-corner" has the border at the right and below alone; "stretch" does not keep it;
    "centre-crop" resizes so that the input is `crop_fraction` of the shorter side, and cuts the
    centre out. `interpolation`: "linear", as without it, is OpenCV's bilinear resize;
    "pillow-bilinear" and "pillow-bicubic" are Pillow's, which antialias. `mean`, `std`: one number
    for each channel in the order of `color`, or one for all. "uint8" inputs take pixels as they
    are.

    Raises PreprocessingError: the values contradict each other.
    """

    resize: Resize = "letterbox"
    crop_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    interpolation: Interpolation | UnsetType = UNSET
    color: Color = "rgb"
    layout: Layout = "nchw"
    scale: Annotated[float, Meta(gt=0.0)] = 1.0 / 255.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[Annotated[float, Meta(gt=0.0)], ...] = (1.0,)
    pad_value: Annotated[int, Meta(ge=0, le=255)] = 114
    dtype: InputType = "float32"

    def __post_init__(self) -> None:
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if len(numbers) not in (1, self.channels):
                raise PreprocessingError(
                    f"{name} has {len(numbers)} numbers, but {self.color} has {self.channels} "
                    "channels: give one number for each, or one for all"
                )
            # Equal preprocessings compare equal, however they were written.
            expanded = numbers if len(numbers) == self.channels else numbers * self.channels
            msgspec.structs.force_setattr(self, name, tuple(float(n) for n in expanded))
        if self.interpolation == "linear":
            msgspec.structs.force_setattr(self, "interpolation", UNSET)
        if not all(map(math.isfinite, (self.scale, *self.mean, *self.std))):
            raise PreprocessingError("scale, mean and std must be finite: correct them")
        if min(self.std) <= 0.0 or self.scale <= 0.0:
            raise PreprocessingError(
                f"scale is {self.scale} and std {list(self.std)}, but they must be above 0: "
                "correct them"
            )
        if self.crop_fraction != 1.0 and self.resize != "centre-crop":
            raise PreprocessingError(
                f"crop_fraction is {self.crop_fraction}, but resize is {self.resize!r}: only "
                "'centre-crop' has a crop fraction"
            )
        if self.dtype == "uint8" and (self.scale, set(self.mean), set(self.std)) != (1, {0}, {1}):
            raise PreprocessingError(
                "a uint8 input takes pixels from 0 to 255 as they are: set scale to 1, mean to 0 "
                "and std to 1, or dtype to float32"
            )

    @property
    def channels(self) -> int:
        """Number of channels of the input."""
        return CHANNELS[self.color]

    def shape(self, height: int, width: int) -> tuple[int, int, int, int]:
        """The input's shape for one image."""
        if self.layout == "nhwc":
            return (1, height, width, self.channels)
        return (1, self.channels, height, width)


def plain(preprocessing: Preprocessing) -> Preprocessing:
    """Return the value without the fields of a subclass, such as width and height."""
    names = Preprocessing.__struct_fields__
    return Preprocessing(**{name: getattr(preprocessing, name) for name in names})


def describe(preprocessing: Preprocessing) -> str:
    """Return the preprocessing in words: resize, colour, layout and dtype, and the formula."""
    words = (_resize_text(preprocessing), _TITLES[preprocessing.color])
    kind = f"{preprocessing.layout.upper()} {preprocessing.dtype}"
    return ", ".join((*words, kind, _value_text(preprocessing)))


def preprocessing_line(recorded: Preprocessing | UnsetType) -> str:
    """Return how images become inputs, as far as an engine says."""
    return f"preprocessing: {describe(recorded) if recorded else 'not recorded'}"


def differences(measured: Preprocessing, actual: Preprocessing) -> dict[str, str]:
    """Return the fields in which two preprocessings differ, each with "measured, not actual"."""
    different = {}
    for name, show in _SHOWN.items():
        before, now = getattr(measured, name), getattr(actual, name)
        same = before == now
        if name in _ROUNDED:
            same = _close(before, now)
        resizes = (measured.resize, actual.resize)
        if name == "pad_value" and not set(resizes) & set(LETTERBOXES):
            same = True
        if name == "pad_value" and measured.resize != actual.resize:
            same = True  # said by `resize` already
        if not same:
            different[name] = f"{show(before)}, not {show(now)}"
    return different


def _close(before: object, now: object) -> bool:
    """True for numbers equal to 4 digits: files say 0.0039 or 0.00392157 for 1 / 255."""
    old = before if isinstance(before, tuple) else (before,)
    new = now if isinstance(now, tuple) else (now,)
    return len(old) == len(new) and all(
        math.isclose(a, b, rel_tol=_ROUNDED_REL, abs_tol=_ROUNDED_ABS)
        for a, b in zip(old, new, strict=True)
    )


def _numbers(value: object) -> str:
    numbers: tuple[float, ...] = value if isinstance(value, tuple) else (value,)
    if len(set(numbers)) == 1:
        return f"{numbers[0]:.6g}"
    return f"[{', '.join(f'{number:.6g}' for number in numbers)}]"


_SHOWN: Mapping[str, Callable[[object], str]] = {
    "resize": str,
    "crop_fraction": _numbers,
    "interpolation": lambda value: str(value or "linear"),
    "color": str,
    "layout": str,
    "dtype": str,
    "scale": _numbers,
    "mean": _numbers,
    "std": _numbers,
    "pad_value": _numbers,
}


def _resize_text(preprocessing: Preprocessing) -> str:
    text: str = preprocessing.resize
    if preprocessing.resize in LETTERBOXES:
        text += f" (padding {preprocessing.pad_value})"
    elif preprocessing.crop_fraction != 1.0:
        text += f" ({preprocessing.crop_fraction:.6g} of the shorter side)"
    return f"{text}, {preprocessing.interpolation}" if preprocessing.interpolation else text


def _value_text(preprocessing: Preprocessing) -> str:
    divisor = 1.0 / preprocessing.scale
    text = "pixel"
    if math.isclose(divisor, round(divisor), rel_tol=1e-6):
        text += f" / {round(divisor)}" if round(divisor) != 1 else ""
    else:
        text += f" * {preprocessing.scale:.6g}"
    if any(preprocessing.mean):
        text = f"{text} - {_numbers(preprocessing.mean)}"
    if set(preprocessing.std) != {1.0}:
        text = f"({text}) / {_numbers(preprocessing.std)}"
    return text
