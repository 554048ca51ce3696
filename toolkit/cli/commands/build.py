"""`tandem build`: model -> engine for a device profile."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from device.engine.manifest import DimRange, Precision
from toolkit.cli.options.calibration import (
    KeepOption,
    calibration_options,
    parse_shapes,
    range_options,
)
from toolkit.cli.options.choices import Switch
from toolkit.cli.options.memory import memory_option
from toolkit.cli.options.model import layout_option
from toolkit.cli.options.names import complete_profile
from toolkit.cli.options.page import html_option, say_written
from toolkit.cli.options.plan import plan_options
from toolkit.cli.options.plugin import plugin_option
from toolkit.cli.options.preprocess import PreprocessOptions
from toolkit.cli.options.progress import progress_bar
from toolkit.cli.options.range_outputs import need_folders
from toolkit.cli.options.tactics import tactic_options
from toolkit.partition.planning.objectives import BUILD_GOALS

if TYPE_CHECKING:
    from toolkit.gpu.schedule.tactics import TacticOptions
    from toolkit.plugins import Plugin

# Options that have an effect with --data alone.
OF_CALIBRATION = (
    *("samples", "save_table", "budget", "keep", "resume", "equalise", "bias_correction"),
    "keep_float",
)


def parse_dims(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[DimRange, ...]:
    """Parse NAME=MIN:OPT:MAX, any number of times, into ranges of dynamic dimensions."""
    ranges = []
    for value in values:
        name, _, sizes = value.rpartition("=")
        try:
            low, opt, high = _ints(sizes, ":")
        except ValueError as err:
            raise click.BadParameter(
                f"{value!r} is not NAME=MIN:OPT:MAX, such as batch=1:4:8"
            ) from err
        if not (name and 1 <= low <= opt <= high):
            raise click.BadParameter(f"{value!r} does not keep 1 <= MIN <= OPT <= MAX")
        ranges.append(DimRange(name=name, min=low, opt=opt, max=high))
    return tuple(ranges)


@click.command(
    epilog="Example: tandem build model.onnx --profile agx-orin-64gb --data images/ -o m.engine"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--profile",
    default="laptop",
    show_default=True,
    shell_complete=complete_profile,
    help="See `tandem profiles`.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="[default: MODEL.engine]")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "int8", "best"]),
    help="best: INT8, except for nodes that FP16 serves better. "
    "[default: int8 with --data or --table and of a Q/DQ model, else fp16; fp32 without a GPU]",
)
@calibration_options(required=False)
@click.option(
    "--table",
    type=click.Path(path_type=Path),
    help="Ranges: a calibration table, a TensorRT cache or a Q/DQ model.",
)
@click.option(
    "--save-table",
    type=click.Path(path_type=Path),
    help="Write the calibration table that the build measures.",
)
@click.option(
    "--dummy-ranges",
    is_flag=True,
    help="INT8 without calibration: for timing only, the results are wrong.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    callback=parse_shapes,
    metavar="NAME=DIMS",
    help="Fix an input's shape.",
)
@click.option(
    "--dim",
    "dims",
    multiple=True,
    callback=parse_dims,
    metavar="NAME=MIN:OPT:MAX",
    help="Keep a dimension dynamic within a range.",
)
@layout_option
@memory_option
@plugin_option
@tactic_options
@plan_options(BUILD_GOALS)
@click.option(
    "--no-fallback",
    is_flag=True,
    help="Leave out the GPU kernels of DLA segments, which run where TensorRT refuses one.",
)
@click.option(
    "--gpu-backend",
    type=click.Choice(["cuda", "tensorrt", "auto"]),
    default="cuda",
    show_default=True,
    help="What runs GPU segments: kernels of the engine, the board's TensorRT in their place, or "
    "auto: both, and `tandem-agent prepare` keeps the faster.",
)
@click.option(
    "--preprocess-on",
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="gpu: add a kernel that makes inputs of camera frames, NV12 or BGR, on the GPU.",
)
@click.option("--jetpack", help="JetPack version on the board. [default: newest with its DLA]")
@html_option("the engine's graph, layers, memory, roofline and kernels")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def build(
    ctx: click.Context,
    model: Path,
    profile: str,
    out: Path | None,
    precision: Precision | Literal["best"] | None,
    data: Path | None,
    samples: int | None,
    method: str,
    budget: str | None,
    keep: KeepOption | None,
    resume: Path | None,
    preprocess: PreprocessOptions,
    equalise: Switch | None,
    bias_correction: Switch | None,
    keep_float: tuple[str, ...],
    accept_loss: bool,
    table: Path | None,
    save_table: Path | None,
    dummy_ranges: bool,
    shapes: dict[str, tuple[int, ...]],
    dims: tuple[DimRange, ...],
    inputs_as_nchw: bool,
    plugins: "tuple[Plugin, ...]",
    tactics: "TacticOptions",
    objective: str,
    power_mode: str | None,
    max_crossings: int | None,
    force_dla: tuple[str, ...],
    force_gpu: tuple[str, ...],
    min_gain: float | None,
    max_latency_ms: float | None,
    no_fallback: bool,
    gpu_backend: Literal["cuda", "tensorrt", "auto"],
    preprocess_on: Literal["cpu", "gpu"],
    jetpack: str | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Build an engine from a MODEL for a device profile.

    MODEL: .onnx, .pt2 (PyTorch), .keras, .h5, .tflite or the folder of a SavedModel.

    The report says which node runs on which processor and why, in segments.
    """
    _refuse_two_sources(data, table, save_table, dummy_ranges)
    _refuse_unused(data, precision, ctx.params)
    need_folders(save_table, html)

    from toolkit.cli.actions.build import as_builtins, write_build_page
    from toolkit.engine.build import BuildOptions, build_engine
    from toolkit.engine.report_text import build_text
    from toolkit.importers.onnx import source_path
    from toolkit.importers.source import ModelPath
    from toolkit.partition.planning.forced import Forced
    from toolkit.partition.planning.plan import PlanOptions
    from toolkit.quantize.ranges.table_file import read_ranges

    ranges = range_options(
        method, samples, budget, keep, resume, preprocess, equalise, bias_correction, keep_float
    )
    options = BuildOptions(
        precision=precision,
        jetpack=jetpack,
        data=data,
        ranges=ranges,
        table=read_ranges(table, shapes=shapes, dims=dims, any_weight_scale=True).table
        if table
        else None,
        save_table=save_table,
        dummy_ranges=dummy_ranges,
        accept_loss=accept_loss,
        shapes=shapes,
        dims=dims,
        plan=PlanOptions(
            objective=objective,
            power_mode=power_mode,
            max_crossings=max_crossings,
            forced=Forced(force_dla, force_gpu),
            min_gain=min_gain,
            max_latency_ms=max_latency_ms,
        ),
        plugins=plugins,
        tactics=tactics,
        fallback=not no_fallback,
        gpu_backend=gpu_backend,
        preprocess_on=preprocess_on,
    )
    with progress_bar(model.name) as report:
        source = ModelPath(model, inputs_as_nchw)
        out = out or source_path(source).with_suffix(".engine")
        result = build_engine(source, profile, out, options, report)
    if html is not None:
        write_build_page(result, html)
    click.echo(json.dumps(as_builtins(result)) if as_json else build_text(result))
    say_written(html, as_json=as_json)


def _refuse_two_sources(
    data: Path | None, table: Path | None, save_table: Path | None, dummy_ranges: bool
) -> None:
    """Refuse more than one source of ranges."""
    if table and (data or save_table):
        raise click.UsageError("--table replaces --data and --save-table; give one or the other.")
    if dummy_ranges and (data or table):
        raise click.UsageError("--dummy-ranges replaces --data and --table; give one or the other.")


def _refuse_unused(data: Path | None, precision: str | None, values: Mapping[str, object]) -> None:
    """Refuse calibration options that would have no effect; `values`: those of all options."""
    if not data:
        of_ranges = () if values["table"] else ("accept_loss",)
        for name in (*OF_CALIBRATION, *of_ranges):
            if values[name]:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{option} belongs to calibration; give --data with it.")
    elif precision not in (None, "int8", "best"):
        raise click.UsageError(
            f"--data calibrates INT8; --precision {precision} has no use for it."
        )


def _ints(text: str, separator: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(separator))
