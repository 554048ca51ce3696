"""`tandem compare`: whether two files agree; or what the INT8 of one engine loses, and why."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.cli.command import argument, command, json_option, option, part
from toolkit.cli.options.choices import Dla, Scales
from toolkit.cli.options.inputs import InputOptions, ToleranceOptions
from toolkit.cli.options.model import html_option, layout_option, memory_option, plugins_option

BISECT_FOLDER = "bisect"


@dataclass(frozen=True, slots=True)
class Compare:
    """Say whether A and B agree: ONNX models, engines or saved outputs (.npz), in any pairing.

    Exit status: 0, or 1 if an output is beyond its tolerance or one side lacks it, or 2 if the
    comparison could not run. B is the reference.

    With one file: what INT8 loses, node by node, and why. Give an engine with its --model, or a
    model with a --profile. FP32, INT8 as on a GPU and the DLA's arithmetic side by side, and
    what the DLA loses against a GPU with the same ranges.

    Examples: tandem compare model.onnx model.engine --input x.npz --layers; tandem compare
    a.onnx b.onnx --bisect; tandem compare model.engine --model model.onnx --data images/
    """

    a: Path = argument()
    b: Path | None = argument(required=False)
    inputs: InputOptions = part()
    tolerances: ToleranceOptions = part()
    layers: bool = option("Also compare every tensor that both show, in running order.")
    bisect: bool = option(
        "Where they differ, find the first node that differs and write it as a model."
    )
    out: Path | None = option(f"Where --bisect writes. [default: {BISECT_FOLDER}]", metavar="DIR")
    model: Path | None = option("One engine: the model that it was built from.", metavar="M.onnx")
    profile: str | None = option("One model: build an INT8 engine of it for this profile.")
    table: Path | None = option(
        "One model: INT8 ranges. [default: measured on --data] One engine: the ranges that it was "
        "built with, for the GPU beside it. [default: as the DLA's rules changed them]"
    )
    recorded: Path | None = option(
        "One engine: tensors of a run on a board, by name, of inputs in it or the first sample; or "
        "the report of its selftest.", metavar="OUT.npz",
    )  # fmt: skip
    dla: Dla | None = option(
        "DLA segments: in onnxruntime, or in the DLA's INT8 arithmetic, in integers or a shorter "
        "way proven to give the same bits. [default: of two files portable, of one fast]"
    )
    scales: Scales | None = option(
        "One file: scales of the DLA, 16 bits and a shift or exact. [default: hardware]"
    )
    nodes: bool = option("List every tensor.")
    inputs_as_nchw: bool = layout_option()
    max_memory: int | None = memory_option()
    plugins: tuple[Any, ...] = plugins_option()
    html: Path | None = html_option(
        "outputs and, of two engines, segments, placements, kernels and graphs side by side"
    )
    as_json: bool = json_option("Print the comparison as JSON.")


compare = command(Compare, "compare:compare")  # fmt: skip
