"""`tandem ranges`: convert INT8 ranges between formats, and compare them."""

import json
from pathlib import Path

import click

from toolkit.cli.options.calibration import parse_shapes
from toolkit.cli.options.memory import memory_option
from toolkit.cli.options.range_outputs import output_options


@click.command(
    epilog="Example: tandem ranges qat.onnx --cache qat.cache --plain plain.onnx --layers fp16.txt"
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Plain ONNX model of the ranges. [default: that of a Q/DQ model]",
)
@click.option("--against", type=click.Path(path_type=Path), help="Compare with these ranges.")
@click.option("--table", type=click.Path(path_type=Path), help="Write a calibration table.")
@output_options
@click.option("--plain", type=click.Path(path_type=Path), help="Write a Q/DQ model without Q/DQ.")
@click.option(
    "--layers",
    type=click.Path(path_type=Path),
    help="Write the nodes in floating point as trtexec's --layerPrecisions takes them.",
)
@click.option(
    "--any-weight-scale",
    is_flag=True,
    help="Accept weights of a Q/DQ model whose scale is not max|w| / 127.",
)
@click.option(
    "--shape", "shapes", multiple=True, callback=parse_shapes, metavar="NAME=DIMS",
    help="Fix an input's shape.",
)  # fmt: skip
@memory_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def ranges(
    source: Path,
    model: Path | None,
    against: Path | None,
    table: Path | None,
    cache: Path | None,
    tensorrt: str | None,
    qdq: Path | None,
    qdq_for: str,
    adjusted_model: Path | None,
    plain: Path | None,
    layers: Path | None,
    any_weight_scale: bool,
    shapes: dict[str, tuple[int, ...]],
    as_json: bool,
) -> None:
    """Show, compare and convert the INT8 ranges in SOURCE.

    SOURCE is a calibration table, a TensorRT cache or a Q/DQ model, recognized by its content.
    Every conversion keeps the scales bit for bit.
    """
    from toolkit.cli.actions.ranges import (
        Outputs,
        RangesRequest,
        as_builtins,
        as_text,
        convert_ranges,
    )

    request = RangesRequest(source, model, against, any_weight_scale, shapes)
    outputs = Outputs(table, cache, tensorrt, qdq, qdq_for, adjusted_model, plain, layers)
    result = convert_ranges(request, outputs)
    click.echo(json.dumps(as_builtins(result)) if as_json else as_text(result))
