"""Explore the precisions of a model for `tandem explore`."""

import shlex
from typing import Any

from toolkit.cli.actions.calibration import stated_preprocessing
from toolkit.cli.actions.outputs import need_folders, print_page_path, print_result
from toolkit.cli.commands.explore import Explore
from toolkit.cli.options.calibration import PreprocessOptions
from toolkit.cli.pages.explore_page import explore_page
from toolkit.cli.progress import progress_bar
from toolkit.engine.explore import Explored, ExploreRequest, Point
from toolkit.engine.explore import explore as measure
from toolkit.html.page import write_page
from toolkit.importers.source import ModelPath
from toolkit.quantize.loss.judge import loss_text
from toolkit.quantize.ranges.measure import RangeOptions
from toolkit.quantize.ranges.report_text import judgement_builtins


def explore(options: Explore) -> None:
    """Measure all points, write the page and print the table. Raises TandemError."""
    need_folders(options.html, model=options.model)
    stated, _ = stated_preprocessing(options.preprocess)
    request = ExploreRequest(
        ModelPath(options.model, options.source.inputs_as_nchw),
        options.data,
        options.profile,
        options.jetpack,
        options.source.shapes,
        options.source.plugins,
        RangeOptions(samples=options.samples, preprocess=stated),
    )
    with progress_bar(options.model.name) as report:
        explored = measure(request, report)
    commands = {row.form.name: _command(row, options) for row in explored.points}
    if options.html is not None:
        write_page(options.html, explore_page(explored, commands))
    print_result(_builtins(explored, commands), _text(explored, commands), as_json=options.as_json)
    print_page_path(options.html, as_json=options.as_json)


def _command(row: Point, options: Explore) -> str:
    """The command that makes a point."""
    if row.form.simulated is None:
        words = ["tandem", "build", str(options.model), "--profile", options.profile]
        words += ("--jetpack", options.jetpack) if options.jetpack else ()
    else:  # the ranges are written, too, and what INT8 would lose by them does not matter
        file = options.model.with_suffix(f".{row.form.simulated.name.lower()}.onnx")
        words = ["tandem", "calibrate", str(options.model), "--qdq", str(file), "--accept-loss"]
    words += _source_words(options)
    if row.form.reads_data:
        words += ("--data", str(options.data))
        words += ("--samples", str(options.samples)) if options.samples else ()
        words += _preprocess_words(options.preprocess)
        words += ("--accept-loss",) if row.spent > 1.0 and row.form.precision == "int8" else ()
    return shlex.join([*words, *row.form.flags])


def _source_words(options: Explore) -> list[str]:
    source, words = options.source, list[str]()
    for name, sizes in source.shapes.items():
        words += ("--shape", f"{name}={'x'.join(map(str, sizes))}")
    words += ["--inputs-as-nchw"] * source.inputs_as_nchw
    return words + ["--plugin", "FILE.py"] * bool(source.plugins)


def _preprocess_words(options: PreprocessOptions) -> list[str]:
    """The options of a build that say the same."""
    words = []
    for flag, numbers in (("--mean", options.mean), ("--std", options.std)):
        words += [flag, ",".join(map(repr, numbers))] if numbers is not None else []
    for name in ("preprocess", "scale", "color", "layout", "interpolation"):
        value = getattr(options, name)
        words += [f"--{name}", str(value)] if value is not None else []
    if options.resize is not None:
        mode, share = options.resize["resize"], options.resize["crop_fraction"]
        words += ["--resize", f"{mode}:{share:g}" if share != 1.0 else mode]
    return words + ["--strict"] * options.strict


def _text(explored: Explored, commands: dict[str, str]) -> str:
    """Return the table for people; a star marks what no other point beats."""
    heads = ("", "us a frame", "mJ", "weights", "on DLA", "float", "SQNR dB", "of limit")
    rows = [heads, *(_cells(row) for row in explored.points)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(heads))]
    lines = [f"{explored.model} on {explored.profile}, predicted; * no other is as good in all:"]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join((first.ljust(widths[0]), *cells)).rstrip())
    missing = explored.not_built.items()
    lines += [f"{name.ljust(widths[0])}  not built here: {why}" for name, why in missing]
    lines.append("")
    for row in explored.points:
        lines += [f"{row.form.name}: {commands[row.form.name]}", *_losses(row)]
    return "\n".join([*lines, *(f"note: {note}" for note in explored.notes)])


def _cells(row: Point) -> tuple[str, ...]:
    return (
        f"{'*' if row.best else ' '} {row.form.name}",
        "-" if row.frame_us is None else f"{row.frame_us:.0f}",
        "-" if row.energy_mj is None else f"{row.energy_mj:.2f}",
        f"{row.weight_bytes / 2**20:.2f} MiB",
        f"{100 * row.on_dla:.0f} %",
        f"{100 * row.float_share:.1f} %",
        f"{row.sqnr_db:.1f}",
        f"{row.spent:.3f}",
    )


def _losses(row: Point) -> list[str]:
    losses = () if row.loss is None else row.loss.losses
    return [f"  {loss_text(loss)}{': BEYOND THE LIMIT' * loss.broken}" for loss in losses]


def _builtins(explored: Explored, commands: dict[str, str]) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "model": explored.model,
        "profile": explored.profile,
        "points": [
            {
                "name": row.form.name,
                "precision": row.form.precision,
                "frame_us": row.frame_us,
                "energy_mj": row.energy_mj,
                "weight_bytes": row.weight_bytes,
                "on_dla": row.on_dla,
                "float_share": row.float_share,
                "spent": row.spent,
                "sqnr_db": row.sqnr_db,
                "loss": None if row.loss is None else judgement_builtins(row.loss),
                "best": row.best,
                "command": commands[row.form.name],
            }
            for row in explored.points
        ],
        "not_built": dict(explored.not_built),
        "notes": list(explored.notes),
    }
