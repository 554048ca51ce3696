"""`tandem inspect`: what is inside an engine file or an ONNX model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click

from toolkit.cli.command import argument, command, json_option, option
from toolkit.cli.options.choices import PlanPrecision
from toolkit.cli.options.model import html_option, plugins_option, shapes_option


@dataclass(frozen=True, slots=True)
class Inspect:
    """Show what is inside an ENGINE, an ONNX MODEL, or a file of arrays (.npz).

    Engine: profile, inputs, outputs, segments, crossings and memory; all but the bytes of weights
    and kernels is checked first, with --verify these, too. Model: inputs, outputs, weights, and
    operators with their multiply-accumulates.

    Examples: tandem inspect model.engine --nodes; tandem inspect model.onnx --profile
    agx-orin-64gb
    """

    file: Path = argument("MODEL_OR_ENGINE")
    nodes: bool = option("List every node, with its processor and reason.")
    kernels: bool = option(
        "Engine: each operation's kernel, its registers, shared memory and occupancy, and its "
        "least time by the profile's roofline."
    )
    times: Path | None = option(
        "Engine: what a board measured, shown beside --kernels: the output of `tandem bench "
        "--profile --json` there."
    )
    profile: str | None = option("Model: also what runs where on this profile, and why.")
    precision: PlanPrecision = option(
        "Model: the precision of that plan.",
        type=click.Choice(get_args(PlanPrecision)), default="int8",
    )  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = shapes_option("Model: fix an input's shape.")
    plugins: tuple[Any, ...] = plugins_option()
    html: Path | None = html_option(
        "graph, layers, memory and roofline of an engine, or graph and operators of a model"
    )
    verify: bool = option("Engine: check every byte by its checksums.")
    as_json: bool = json_option("Print all of it as JSON.")


inspect = command(Inspect, "inspect:inspect")  # fmt: skip
