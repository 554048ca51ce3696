"""The choices of options, as literals: the modules that implement them load onnx and numpy.

`tests/repository/test_architecture.py` holds each against its table. Names that a shell completes
are here too.
"""

from typing import Literal

import click

import configs
from device.errors import TandemError

Switch = Literal["auto", "on", "off"]
Dla = Literal["portable", "exact", "fast"]
Scales = Literal["hardware", "ideal"]
Executor = Literal["auto", "openvino"]
PlanPrecision = Literal["fp32", "fp16", "int8", "bf16"]

AUTO = "auto"
CALIBRATION_METHODS = ("minmax", "entropy", "percentile", "mse")
QdqForm = Literal[
    "tensorrt-gpu", "tensorrt-dla", "tensorrt-fp8", "tensorrt-mxfp8", "tensorrt-nvfp4",
    "onnxruntime",
]  # fmt: skip
PREPROCESSINGS = (
    "yolo", "yolo-classify", "rtdetr", "imagenet", "timm", "timm-half", "clip", "segmentation",
    "unit", "raw",
)  # fmt: skip
PLAN_SECONDS = 10.0
USB = "ssh://192.168.55.1"  # a Jetson at a USB port


def complete_profile(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the shipped profiles that begin so."""
    names = sorted(path.stem for path in (configs.ROOT / "profiles").glob("*.toml"))
    return [name for name in names if name.startswith(incomplete)]


def complete_power_mode(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the power modes of the profile on the command line, or of every profile."""
    from device.profile import list_profiles, load_profile

    name = ctx.params.get("profile")
    try:
        profiles = (load_profile(name),) if name else list_profiles()
    except TandemError:
        return []  # the command will say it
    modes = {mode.name for profile in profiles for mode in profile.power_modes}
    return sorted(mode for mode in modes if mode.casefold().startswith(incomplete.casefold()))


def complete_method(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the calibration methods that begin so."""
    return [name for name in (AUTO, *CALIBRATION_METHODS) if name.startswith(incomplete)]
