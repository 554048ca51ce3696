"""`tandem calibrate`: data -> INT8 ranges as table, TensorRT cache, Q/DQ model and report."""

from dataclasses import dataclass
from pathlib import Path

import click

from toolkit.cli.command import argument, command, json_option, option, part
from toolkit.cli.options.calibration import CalibrationOptions
from toolkit.cli.options.choices import complete_profile
from toolkit.cli.options.model import ModelOptions
from toolkit.cli.options.ranges import RangeOutputs


def _parse_shard(value: str | None) -> tuple[int, int] | None:
    """Read I/N, such as 2/8."""
    if value is None:
        return None
    index, slash, count = value.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise click.BadParameter(f"{value!r} is not I/N with 1 <= I <= N, such as 2/8")
    return int(index), int(count)


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Find the INT8 ranges of a MODEL on real data.

    `--method auto` evaluates every calibration method for each tensor, and takes the range with the
    least error at the outputs. INT8 is judged on samples held out from the ranges. If an output
    has scores or misses its target, the nodes whose INT8 costs most stay in floating point. If it
    loses too much, the command ends with an error; the table is written, but a build refuses it.

    In place of `--workers`, run one shard on each machine, `--shard 2/8 -o 2.state`, then merge
    them: `tandem calibrate MODEL *.state --data DATA`.

    Example: tandem calibrate model.onnx --data images/ --method auto --html report.html -o
    model.calib.json
    """

    model: Path = argument()
    states: tuple[Path, ...] = argument("[STATE]...", required=False, nargs=-1)
    profile: str | None = option(
        "Calibrate the graph that a build for this profile makes, rewrites for its DLA included.",
        group="Model", complete=complete_profile,
    )  # fmt: skip
    source: ModelOptions = part("Model")
    data: Path = option(
        "Images, a video, .npy or .npz samples.", group="Calibration", required=True
    )
    calibration: CalibrationOptions = part("Calibration")
    shard: tuple[int, int] | None = option(
        "Process only shard I of N (from 1), and write its state.",
        group="Calibration", parse=_parse_shard, metavar="I/N",
    )  # fmt: skip
    out: Path | None = option(
        "[default: MODEL.calib.json; of a shard MODEL.I-N.state]", "-o", "--out", group="Output"
    )
    outputs: RangeOutputs = part("Output")
    html: Path | None = option("Write a page with histograms.", group="Output")
    as_json: bool = json_option(group="Output")


calibrate = command(Calibrate, "calibrate:calibrate", first="toolkit.graph.native:start")
