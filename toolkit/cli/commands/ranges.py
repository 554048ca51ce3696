"""`tandem ranges`: convert INT8 ranges between formats, and compare them."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.cli.command import argument, command, json_option, option, part
from toolkit.cli.options.model import memory_option, shapes_option
from toolkit.cli.options.ranges import RangeOutputs


@dataclass(frozen=True, slots=True)
class Ranges:
    """Show, compare and convert the INT8 ranges in SOURCE.

    SOURCE is a calibration table, a TensorRT cache or a Q/DQ model, recognized by its content.
    Every conversion keeps the scales bit for bit.

    Example: tandem ranges qat.onnx --cache qat.cache --plain plain.onnx --layers fp16.txt
    """

    source: Path = argument()
    model: Path | None = option("Plain ONNX model of the ranges. [default: that of a Q/DQ model]")
    against: Path | None = option("Compare with these ranges.")
    table: Path | None = option("Write a calibration table.")
    outputs: RangeOutputs = part()
    plain: Path | None = option("Write a Q/DQ model without Q/DQ.")
    layers: Path | None = option(
        "Write the nodes in floating point as trtexec's --layerPrecisions takes them."
    )
    any_weight_scale: bool = option(
        "Accept weights of a Q/DQ model whose scale is not max|w| / 127."
    )
    shapes: dict[str, tuple[int, ...]] = shapes_option()
    max_memory: int | None = memory_option()
    as_json: bool = json_option()


ranges = command(Ranges, "ranges:ranges")  # fmt: skip
