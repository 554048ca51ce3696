"""`tandem explore`: what each precision of a model takes, and what it loses, on one board."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import argument, command, json_option, option, part
from toolkit.cli.options.calibration import PreprocessOptions
from toolkit.cli.options.model import (
    ModelOptions,
    html_option,
    jetpack_option,
    profile_option,
)


@dataclass(frozen=True, slots=True)
class Explore:
    """Compare FP32, FP16, BF16, FP8, INT4 weights and forms of INT8 of a MODEL on one board.

    A row for each: predicted time and energy of a frame, bytes of the weights, what the outputs
    lose, and the command that makes it. No engine is written. INT8 is calibrated five times.
    MXFP8 and NVFP4 are simulated: they have no times here, and a model for TensorRT.

    Example: tandem explore model.onnx --data images/ --profile orin-nx-16gb --html points.html
    """

    model: Path = argument()
    profile: str = profile_option(group="Model")
    jetpack: str | None = jetpack_option("Model")
    source: ModelOptions = part("Model")
    data: Path = option(
        "Images, a video, .npy or .npz samples.", required=True, group="Calibration"
    )
    samples: int | None = option("Number of samples. [default: all]", min=1, group="Calibration")
    preprocess: PreprocessOptions = part("Calibration")
    html: Path | None = html_option("the points, loss over time", "Output")
    as_json: bool = json_option(group="Output")


explore = command(Explore, "explore:explore")  # fmt: skip
