"""The options that say how images become network inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from device.engine.preprocessing import Interpolation
from toolkit.cli.options.choices import PREPROCESSINGS
from toolkit.cli.options.finite import FiniteRange

if TYPE_CHECKING:
    from pipelines.config import ModelConfig
    from toolkit.quantize.preprocess.decide import Stated

F = TypeVar("F", bound=Callable[..., Any])

_RESIZES = ("letterbox", "letterbox-corner", "stretch", "centre-crop")


@dataclass(frozen=True, slots=True)
class PreprocessOptions:
    """What the command line says of the preprocessing. `file`: a model file, if one is named."""

    stated: "Stated"
    file: Path | None = None
    model: "ModelConfig | None" = None


def parse_numbers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    """Parse one number, or three with commas."""
    if value is None:
        return None
    try:
        numbers = tuple(float(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(
            f"{value!r} is not a number for each channel, such as 0.485,0.456,0.406"
        ) from error
    if len(numbers) not in (1, 3):
        raise click.BadParameter(f"{value!r} has {len(numbers)} numbers; give 1 or 3")
    return numbers


def parse_resize(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> dict[str, Any] | None:
    """Parse the name of a resize; the crop may have a fraction of the shorter side."""
    if value is None:
        return None
    name, colon, share = value.partition(":")
    try:
        fraction = float(share) if colon else 1.0
    except ValueError:
        fraction = 0.0
    if name not in _RESIZES or not 0.0 < fraction <= 1.0 or (colon and name != "centre-crop"):
        raise click.BadParameter(
            f"{value!r} is not one of {', '.join(_RESIZES)}; centre-crop takes the share of the "
            "shorter side, such as centre-crop:0.875"
        )
    return {"resize": name, "crop_fraction": fraction}


def preprocess_options(command: F) -> F:
    """Add --preprocess, --mean, --std, --scale, --colour, --layout, --resize and two more.

    The command takes all of them as one `preprocess`, a PreprocessOptions.
    """
    names = ", ".join(PREPROCESSINGS)
    options = (
        click.option(
            "--preprocess",
            metavar="NAME|FILE",
            help=f"How an image becomes the input: {names}, or a model file "
            "(configs/models/*.toml). [default: as the model's metadata or name say, else yolo]",
        ),
        click.option(
            "--mean", callback=parse_numbers, metavar="R,G,B",
            help="Subtracted from scaled pixels, in the input's colour order.",
        ),
        click.option(
            "--std", callback=parse_numbers, metavar="R,G,B", help="Divides after the mean."
        ),
        click.option(
            "--scale", type=FiniteRange(min=0, min_open=True),
            help="Multiplies pixels from 0 to 255, such as 1 or 0.00392157.",
        ),
        click.option("--colour", "--color", "color", type=click.Choice(["rgb", "bgr", "grey"])),
        click.option("--layout", type=click.Choice(["nchw", "nhwc"])),
        click.option(
            "--resize", callback=parse_resize, metavar="MODE",
            help=f"{', '.join(_RESIZES)}, or centre-crop:0.875 (share of the shorter side).",
        ),
        click.option(
            "--interpolation", type=click.Choice(get_args(Interpolation)),
            help="Of the resize: Pillow's antialias, as classifiers are trained.",
        ),
        click.option(
            "--strict", is_flag=True, help="Refuse images whose preprocessing nothing says."
        ),
    )  # fmt: skip

    @wraps(command)
    def with_preprocessing(
        *args: object,
        preprocess: str | None,
        mean: tuple[float, ...] | None,
        std: tuple[float, ...] | None,
        scale: float | None,
        color: str | None,
        layout: str | None,
        resize: dict[str, Any] | None,
        interpolation: str | None,
        strict: bool,
        **others: object,
    ) -> object:
        values = {
            "mean": mean,
            "std": std,
            "scale": scale,
            "color": color,
            "layout": layout,
            "interpolation": interpolation,
        }
        stated = {name: value for name, value in values.items() if value is not None}
        options = _options(preprocess, stated | (resize or {}), strict=strict)
        return command(*args, preprocess=options, **others)

    decorated: Any = with_preprocessing
    for option in reversed(options):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def _options(preprocess: str | None, values: dict[str, Any], *, strict: bool) -> PreprocessOptions:
    from toolkit.quantize.preprocess.decide import Stated, as_stated
    from toolkit.quantize.preprocess.presets import PRESETS

    if preprocess is None:
        return PreprocessOptions(Stated(values=values, strict=strict))
    origin = f"--preprocess {preprocess}"
    if preprocess in PRESETS:
        return PreprocessOptions(Stated(PRESETS[preprocess].values, origin, values, strict))
    path = Path(preprocess)
    if not path.suffix and not path.exists():
        raise click.BadParameter(
            f"{preprocess!r} is no file and none of {', '.join(PRESETS)}",
            param_hint="--preprocess",
        )
    from pipelines.config import load_model

    model = load_model(path)
    base = as_stated(model.preprocess).base
    return PreprocessOptions(Stated(base, origin, values, strict), path, model)
