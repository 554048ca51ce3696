"""`tandem build`: model -> engine for a device profile."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from device.engine.manifest import DimRange, Precision
from toolkit.cli.command import PATH, argument, command, json_option, option, part
from toolkit.cli.options.calibration import CalibrationOptions
from toolkit.cli.options.model import (
    ModelOptions,
    html_option,
    jetpack_option,
    parse_named,
    profile_option,
)
from toolkit.cli.options.plan import KernelOptions, PlanningOptions
from toolkit.partition.planning.objectives import BUILD_GOALS, DEFAULT


def _parse_dims(values: tuple[str, ...]) -> tuple[DimRange, ...]:
    """Read NAME=MIN:OPT:MAX, any number of times, into ranges of dynamic dimensions."""

    def read(text: str) -> tuple[int, int, int]:
        low, opt, high = (int(size) for size in text.split(":"))
        return low, opt, high

    ranges = []
    for value in values:
        example = "NAME=MIN:OPT:MAX, such as batch=1:4:8"
        name, (low, opt, high) = parse_named(value, "=", read, example)
        if not (name and 1 <= low <= opt <= high):
            raise click.BadParameter(f"{value!r} does not keep 1 <= MIN <= OPT <= MAX")
        ranges.append(DimRange(name=name, min=low, opt=opt, max=high))
    return tuple(ranges)


def _parse_block(value: str | None) -> int | None:
    return None if value is None else int(value)


@dataclass(frozen=True, slots=True)
class TableOptions:
    """INT8 ranges that are there already, or kept for another build."""

    table: Path | None = option(
        "Read INT8 ranges from a calibration table, a TensorRT cache or a Q/DQ model."
    )
    save_table: Path | None = option("Write the calibration table that the build measures.")
    dummy_ranges: bool = option("INT8 without calibration: for timing only, the results are wrong.")


@dataclass(frozen=True, slots=True)
class Build:
    """Build an engine from a MODEL for a device profile.

    MODEL: .onnx, .pt2 (PyTorch), .keras, .h5, .tflite or the folder of a SavedModel.

    The report says which node runs on which processor and why, in segments.

    Example: tandem build model.onnx --profile agx-orin-64gb --data images/ -o m.engine
    """

    model: Path = argument()
    profile: str = profile_option("laptop", "Model")
    jetpack: str | None = jetpack_option("Model")
    source: ModelOptions = part("Model")
    dims: tuple[DimRange, ...] = option(
        "Keep a dimension dynamic within a range.",
        "--dim", group="Model", multiple=True, parse=_parse_dims, metavar="NAME=MIN:OPT:MAX",
    )  # fmt: skip
    precision: Precision | Literal["best", "bf16", "fp8"] | None = option(
        "int8: also where it saves no time; best: INT8, except nodes faster or more accurate in "
        "FP16; bf16: kernels store BF16; fp8: products in FP8, but for those. [default: INT8 with "
        "--data or --table and of a Q/DQ model, except nodes faster in FP16, else fp16; fp32 "
        "without a GPU]",
        group="Precision", type=click.Choice(["fp32", "fp16", "int8", "best", "bf16", "fp8"]),
    )  # fmt: skip
    int4_weights: Literal[32, 128] | None = option(
        "FP16, but weights of products of at least 1024 x 1024 have 4 bits, one scale for 32 or "
        "128 along the depth, chosen by --data.",
        group="Precision", type=click.Choice(["32", "128"]), parse=_parse_block,
    )  # fmt: skip
    data: Path | None = option("Images, a video, .npy or .npz samples.", group="Calibration")
    calibration: CalibrationOptions = part("Calibration")
    ranges: TableOptions = part("Calibration")
    objective: str = option(
        "Objective of the split between GPU and DLA.",
        group="Plan", type=click.Choice(BUILD_GOALS), default=DEFAULT,
    )  # fmt: skip
    plan: PlanningOptions = part("Plan")
    measured: tuple[Path, ...] = option(
        "Node times measured on a board, a file for each precision; they replace predicted ones.",
        group="Plan", type=PATH, multiple=True,
    )  # fmt: skip
    kernels: KernelOptions = part("Kernels")
    measure_on: str | None = option(
        "First time tactics and nodes on farm boards of the fleet that TANDEM_FLEET names.",
        group="Kernels", metavar="fleet:REQUIREMENTS",
    )  # fmt: skip
    no_fallback: bool = option(
        "Leave out the GPU kernels of DLA segments, for boards whose TensorRT refuses one.",
        group="Kernels",
    )
    gpu_backend: Literal["cuda", "tensorrt", "auto"] = option(
        "What runs GPU segments: kernels of the engine, the board's TensorRT in their place, or "
        "auto: both, and `tandem-agent prepare` keeps the faster.",
        group="Kernels", default="cuda",
    )  # fmt: skip
    preprocess_on: Literal["cpu", "gpu"] = option(
        "gpu: add a kernel that preprocesses camera frames, NV12 or BGR, on the GPU.",
        group="Kernels", default="cpu",
    )  # fmt: skip
    out: Path | None = option("[default: MODEL.engine]", "-o", "--out", group="Output")
    html: Path | None = html_option(
        "the engine's graph, layers, memory, roofline and kernels", "Output"
    )
    as_json: bool = json_option(group="Output")

    @property
    def engine(self) -> Path:
        """The engine's file."""
        named = self.model.name not in ("", "..")  # "." is a SavedModel, too
        return self.out or (self.model if named else self.model.resolve()).with_suffix(".engine")


build = command(Build, "cached_build:build")  # fmt: skip
