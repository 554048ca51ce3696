"""Measure INT8 ranges with the options of `tandem calibrate`, and write them in every form."""

from dataclasses import dataclass, replace
from pathlib import Path

import click

from calibration.table import write_table
from calibration.trt_cache import DEFAULT_TENSORRT, cache_of, cache_version, write_cache
from toolkit.cli.options.range_outputs import write_bytes, write_model
from toolkit.engine.measure import CalibrateRequest, measure_model
from toolkit.importers.onnx import source_path
from toolkit.quantize.loss.judge import check
from toolkit.quantize.qdq.export import export_form
from toolkit.quantize.ranges.measure import RangeOptions, Ranges, Report
from toolkit.quantize.ranges.report_html import ranges_html

__all__ = ["CalibrateRequest", "Outputs", "calibrate_model", "keep_weights", "refuse_loss"]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files to write. `tensorrt` reads the cache, `qdq_for` the Q/DQ model."""

    table: Path
    cache: Path | None
    tensorrt: str | None
    qdq: Path | None
    qdq_for: str
    adjusted_model: Path | None
    html: Path | None

    def paths(self, *, refused: bool) -> tuple[Path, ...]:
        """Return the files in the order in which they are written.

        Of `refused` ranges those alone that say so.
        """
        of_accepted = (self.cache, self.qdq, self.adjusted_model)
        files = (self.table, *(() if refused else of_accepted), self.html)
        return tuple(path for path in files if path is not None)


def calibrate_model(
    request: CalibrateRequest, outputs: Outputs, report: Report
) -> tuple[Ranges, tuple[Path, ...]]:
    """Measure the ranges and write the files; second, their paths.

    Ranges that lose too much are written as a table that builds refuse, with the page.

    Raises BuildError: the model is quantized already, or a file cannot be written.
    """
    ranges, name = measure_model(replace(request, accept_loss=True), report)
    refused = bool(ranges.judgement.broken) and not request.accept_loss
    write_table(outputs.table, ranges.table)
    if not refused:
        _write_forms(ranges, outputs)
    if outputs.html:
        write_bytes(outputs.html, ranges_html(ranges, name).encode())
    return ranges, outputs.paths(refused=refused)


def refuse_loss(ranges: Ranges, request: CalibrateRequest) -> None:
    """Raise BuildError if INT8 loses too much and the loss is not accepted."""
    if not request.accept_loss:
        check(ranges.judgement, source_path(request.model).name)


def _write_forms(ranges: Ranges, outputs: Outputs) -> None:
    """Write the forms that cannot say what they lose."""
    table = ranges.table
    if outputs.cache:
        version = cache_version(outputs.tensorrt or DEFAULT_TENSORRT)
        write_cache(outputs.cache, cache_of(table.tensors, version))
    if outputs.qdq:
        keep = frozenset(table.keep_float)
        model = export_form(ranges.model, table.tensors, outputs.qdq_for, keep_float=keep)
        write_model(outputs.qdq, model)
    if outputs.adjusted_model:
        write_model(outputs.adjusted_model, ranges.model)


def keep_weights(options: RangeOptions) -> tuple[RangeOptions, list[str]]:
    """Switch off the steps that change weights; second, a note about it.

    Raises click.UsageError: the user switched one on.
    """
    switches = {"--equalise": options.equalise, "--bias-correction": options.correct_biases}
    for option, switch in switches.items():
        if switch not in {None, "off"}:
            raise click.UsageError(
                f"{option} {switch} changes weights, but a TensorRT cache holds ranges alone; "
                "write the model that they belong to with --adjusted-model, or leave out --cache."
            )
    if all(options.switch(switch) == "off" for switch in switches.values()):
        return options, []
    note = (
        "equalisation and bias correction were left out: the cache is for the model as it is; "
        "--adjusted-model writes a better one to go with it"
    )
    return replace(options, equalise="off", correct_biases="off"), [note]
