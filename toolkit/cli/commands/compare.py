"""`tandem compare`: FP32, GPU INT8 and DLA INT8 side by side, without a board."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from toolkit.cli.options.calibration import progress_bar
from toolkit.cli.options.model import layout_option
from toolkit.cli.options.plugin import plugin_option

if TYPE_CHECKING:
    from device.runtime.session import Scales
    from toolkit.plugins import Plugin

SAMPLES = 8


@click.command(
    epilog="Example: tandem compare m.engine model.onnx --data images/ "
    "--preprocess configs/models/robot-objects.toml"
)
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path),
    help="Images, a video, .npy or .npz samples.")  # fmt: skip
@click.option("--samples", type=click.IntRange(min=1), default=SAMPLES, show_default=True,
    help="Number of samples.")  # fmt: skip
@click.option("--preprocess", type=click.Path(path_type=Path),
    help="Model file (configs/models/*.toml): how an image becomes the input; for a detector also "
    "mAP50 on the held-out scenes.")  # fmt: skip
@click.option("--recorded", type=click.Path(path_type=Path), metavar="OUT.npz",
    help="Tensors of a run on a board, by name; of inputs in it or the first sample.")  # fmt: skip
@click.option("--dla", type=click.Choice(["exact", "fast"]), default="fast", show_default=True,
    help="Every stage in integers, or a shorter way proven to give the same bits.")  # fmt: skip
@click.option("--scales", type=click.Choice(["hardware", "ideal"]), default="hardware",
    show_default=True, help="Scales of the DLA: 16 bits and a shift, or exact.")  # fmt: skip
@click.option("--nodes", "every", is_flag=True, help="List every node, not only those with a loss.")
@layout_option
@plugin_option
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(
    engine: Path,
    model: Path,
    data: Path | None,
    samples: int,
    preprocess: Path | None,
    recorded: Path | None,
    dla: Literal["exact", "fast"],
    scales: "Scales",
    every: bool,
    inputs_as_nchw: bool,
    plugins: "tuple[Plugin, ...]",
    as_json: bool,
) -> None:
    """Compare an ENGINE with its MODEL: FP32, GPU INT8, and the DLA's INT8 in software.

    Names the nodes where the DLA's arithmetic loses accuracy, and why. Silicon may differ.
    """
    from device.runtime.emulation.options import Emulation
    from toolkit.cli.actions.compare import CompareRequest, compare_engine
    from toolkit.evaluate.compare.report import comparison_builtins, comparison_text

    request = CompareRequest(
        engine=engine,
        model=model,
        data=data,
        samples=samples,
        preprocess=preprocess,
        recorded=recorded,
        emulation=Emulation(dla, scales),
        plugins=plugins,
        inputs_as_nchw=inputs_as_nchw,
    )
    with progress_bar(engine.name) as report:
        comparison, tensors = compare_engine(request, report)
    if as_json:
        click.echo(json.dumps(comparison_builtins(comparison, tensors)))
    else:
        click.echo(comparison_text(comparison, tensors, every=every))
