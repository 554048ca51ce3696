"""`tandem plan`: what runs where, why, what it takes, and what to change; no board needed."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import click

from toolkit.cli.command import NEW_FILE, argument, command, json_option, option, part
from toolkit.cli.options.choices import PLAN_SECONDS, PlanPrecision
from toolkit.cli.options.model import (
    ModelOptions,
    html_option,
    jetpack_option,
    profile_option,
)
from toolkit.cli.options.plan import PlanningOptions
from toolkit.partition.planning.objectives import DEFAULT, GOALS


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is shown beside the plan."""

    explain: str | None = option(
        "Show every rule for a node, with its value and its limit.", metavar="NODE"
    )
    nodes: bool = option("List every node with its reason.")
    cycles: bool = option("List the clock cycles of every DLA layer and what limits it.")
    trtexec: bool = option("Print the options with which trtexec places the nodes so.")
    pipeline: Path | None = option(
        "Write a pipeline.toml that runs the models of --workload where the plan has them, and "
        "print the commands that build their engines.", type=NEW_FILE, metavar="OUT.toml",
    )  # fmt: skip
    html: Path | None = html_option("the graph, frames in flight and how plans compare")
    as_json: bool = json_option("Print the plan as JSON.")


@dataclass(frozen=True, slots=True)
class Plan:
    """Say which nodes of a MODEL run on the DLA, why the others do not, and what it takes.

    All times and energies are predicted; docs/costs.md says how well.

    Example: tandem plan model.onnx --profile agx-orin-64gb --power-mode 30W --html plan.html
    """

    model: Path | None = argument(required=False)
    profile: str = profile_option(group="Model")
    jetpack: str | None = jetpack_option("Model")
    rate_hz: float | None = option(
        "Frame rate that the board must sustain, in Hz.",
        "--rate", group="Model", min=0, min_open=True,
    )  # fmt: skip
    workload: Path | None = option(
        "File with several models that share one board, in place of MODEL.", group="Model"
    )
    source: ModelOptions = part("Model")
    table: Path | None = option(
        "INT8 ranges; tensors without one stay off the DLA. [default: all have one]",
        group="Calibration",
    )
    data: Path | None = option(
        "Images, a video, .npy or .npz samples: calibrate as a build does, and plan with the "
        "nodes that it keeps in floating point.",
        group="Calibration",
    )
    precision: PlanPrecision = option(
        "bf16: kernels store BF16; nothing runs on the DLA.",
        group="Precision", type=click.Choice(get_args(PlanPrecision)), default="int8",
    )  # fmt: skip
    objective: str = option(
        "What the split between GPU and DLA optimizes.",
        group="Plan", type=click.Choice(list(GOALS)), default=DEFAULT,
    )  # fmt: skip
    limits: PlanningOptions = part("Plan")
    measured: Path | None = option(
        "Node times measured on a board, or the report of its selftest; they replace predicted "
        "ones.", group="Plan",
    )  # fmt: skip
    no_rewrites: bool = option("Plan the graph without rewriting it.", group="Plan")
    seconds: float = option(
        "Time limit of the search for a proven plan.", group="Plan", min=0.1, default=PLAN_SECONDS
    )
    shown: ReportOptions = part("Output")


plan = command(Plan, "plan:plan")  # fmt: skip
