"""`tandem plan`: what runs where, why, what it takes, and what to change; no board needed."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from device.engine.manifest import Precision
from toolkit.cli.options.calibration import parse_shapes
from toolkit.cli.options.choices import PLAN_SECONDS
from toolkit.cli.options.finite import FiniteRange
from toolkit.cli.options.memory import memory_option
from toolkit.cli.options.model import layout_option
from toolkit.cli.options.names import complete_profile
from toolkit.cli.options.page import html_option, say_written
from toolkit.cli.options.plan import plan_options
from toolkit.cli.options.plugin import plugin_option
from toolkit.cli.options.progress import progress_bar
from toolkit.html.page import write_page
from toolkit.partition.planning.objectives import GOALS, MAKESPAN
from toolkit.partition.planning.workload import WorkloadModel, load_workload

if TYPE_CHECKING:
    from toolkit.plugins import Plugin


@click.command(
    epilog="Example: tandem plan model.onnx --profile agx-orin-64gb --power-mode 30W "
    "--html plan.html"
)
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option(
    "--profile", required=True, shell_complete=complete_profile, help="See `tandem profiles`."
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "int8"]),
    default="int8",
    show_default=True,
)
@plan_options(tuple(GOALS))
@click.option("--rate", "rate_hz", type=FiniteRange(min=0, min_open=True),
    help="Frame rate that the board must sustain, in Hz.")  # fmt: skip
@click.option("--workload", type=click.Path(path_type=Path),
    help="File with several models that share one board, in place of MODEL.")  # fmt: skip
@click.option("--pipeline", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT.toml",
    help="Write a pipeline.toml that runs the models of --workload where the plan has them, and "
    "print the commands that build their engines.")  # fmt: skip
@click.option("--table", type=click.Path(path_type=Path),
    help="INT8 ranges; tensors without one stay off the DLA. [default: all have one]")  # fmt: skip
@click.option("--data", type=click.Path(path_type=Path),
    help="Images, a video, .npy or .npz samples: calibrate as a build does, and plan with the "
    "nodes that it keeps in floating point.")  # fmt: skip
@click.option("--measured", type=click.Path(path_type=Path),
    help="Node times measured on a board, or the report of its selftest; they replace predicted "
    "ones.")  # fmt: skip
@click.option("--no-rewrites", is_flag=True, help="Plan the graph without rewriting it.")
@click.option("--seconds", type=FiniteRange(min=0.1), default=PLAN_SECONDS, show_default=True,
    help="Time limit of the search for a proven plan.")  # fmt: skip
@click.option("--explain", "explained", metavar="NODE",
    help="Show every rule for a node, with its value and its limit.")  # fmt: skip
@click.option("--nodes", "with_nodes", is_flag=True, help="List every node with its reason.")
@click.option("--cycles", "with_cycles", is_flag=True,
    help="List the clock cycles of every DLA layer and what limits it.")  # fmt: skip
@click.option("--trtexec", "with_trtexec", is_flag=True,
    help="Print the options with which trtexec places the nodes so.")  # fmt: skip
@html_option("the graph, frames in flight and how plans compare")
@click.option("--shape", "shapes", multiple=True, callback=parse_shapes, metavar="NAME=DIMS",
    help="Fix an input's shape.")  # fmt: skip
@layout_option
@memory_option
@plugin_option
@click.option("--jetpack", help="JetPack version on the board. [default: newest with its DLA]")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    model: Path | None,
    profile: str,
    precision: Precision,
    objective: str,
    power_mode: str | None,
    max_crossings: int | None,
    force_dla: tuple[str, ...],
    force_gpu: tuple[str, ...],
    min_gain: float | None,
    max_latency_ms: float | None,
    rate_hz: float | None,
    workload: Path | None,
    pipeline: Path | None,
    table: Path | None,
    data: Path | None,
    measured: Path | None,
    no_rewrites: bool,
    seconds: float,
    explained: str | None,
    with_nodes: bool,
    with_cycles: bool,
    with_trtexec: bool,
    html: Path | None,
    shapes: dict[str, tuple[int, ...]],
    inputs_as_nchw: bool,
    plugins: "tuple[Plugin, ...]",
    jetpack: str | None,
    as_json: bool,
) -> None:
    """Say which nodes of a MODEL run on the DLA, why the others do not, and what it takes.

    All times and energies are predicted; docs/COSTS.md says how well.
    """
    of_one = rate_hz or table or data or shapes or inputs_as_nchw or measured or explained
    if workload is not None and (of_one or force_dla or force_gpu):
        raise click.UsageError(
            "--rate, --table, --data, --shape, --inputs-as-nchw, --measured, --explain, "
            "--force-dla and --force-gpu belong to one MODEL; a workload file holds rate, table, "
            "shapes and layout of each."
        )
    if data is not None and (table or precision != "int8" or no_rewrites or max_latency_ms):
        raise click.UsageError(
            "--data calibrates INT8 as a build does; leave out --table, --precision, "
            "--no-rewrites and --max-latency-ms."
        )
    if workload is None and objective == MAKESPAN:
        raise click.UsageError(
            f"--objective {MAKESPAN} is the time of a frame of several models: give --workload; "
            "for one MODEL take --objective latency."
        )
    if pipeline is not None and workload is None:
        raise click.UsageError("--pipeline is for the models of a --workload.")
    members = _members(model, workload, rate_hz, table, shapes, inputs_as_nchw)

    with _no_collection():
        from toolkit.cli.actions import plan as action

    request = action.PlanRequest(
        members=tuple(replace(action.member_of(row), data=data) for row in members),
        profile=profile,
        jetpack=jetpack,
        options=action.PlanOptions(
            precision=precision,
            objective=objective,
            power_mode=power_mode,
            max_crossings=max_crossings,
            min_gain=min_gain,
            max_latency_ms=max_latency_ms,
            seconds=seconds,
            forced=action.Forced(force_dla, force_gpu),
            rewrites=not no_rewrites,
        ),
        measured=action.measured_times(measured, model, precision) if measured and model else None,
        plugins=plugins,
    )
    if explained is not None:
        explanation = action.explain(request, explained)
        click.echo(json.dumps(explanation.as_builtins()) if as_json else explanation.as_text())
        return
    with progress_bar("plan") as report, _no_collection():
        result = action.make_plan(request, report)
    if html:
        write_page(html, action.plan_html(result.shared, result.advice, result.notes))
    planned = action.write_pipeline(pipeline, members, request, result) if pipeline else None
    if as_json:
        commands = {"build": planned.commands} if planned else {}
        click.echo(json.dumps({**action.as_builtins(result), **commands}))
        say_written(html, as_json=True)
        return
    click.echo(
        action.as_text(
            result, with_nodes=with_nodes, with_cycles=with_cycles, with_trtexec=with_trtexec
        )
    )
    if pipeline is not None and planned is not None:
        click.echo("\n" + action.pipeline_report(pipeline, planned))
    say_written(html, as_json=False)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave cyclic garbage for a while: looking for it takes 8 % of a plan, and finds little."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()
            gc.unfreeze()  # what is there counts as old now: enabling looks through none of it
            gc.enable()


def _members(
    model: Path | None,
    workload: Path | None,
    rate_hz: float | None,
    table: Path | None,
    shapes: dict[str, tuple[int, ...]],
    inputs_as_nchw: bool,
) -> tuple[WorkloadModel, ...]:
    """Return the models to plan: those of the workload file, or the one MODEL."""
    if workload is not None and model is None:
        return load_workload(workload).model
    if model is not None and workload is None:
        one = WorkloadModel(
            path=model,
            rate_hz=rate_hz,
            table=table,
            shapes=shapes,
            inputs_as_nchw=inputs_as_nchw,
        )
        return (one,)
    raise click.UsageError("Give a MODEL or a --workload.")
