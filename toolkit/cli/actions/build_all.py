"""Build the engines of a matrix, each model in each precision as one task of a worker."""

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import msgspec
from msgspec import Meta

from device.errors import TandemError
from device.toml_file import decode_toml
from toolkit.cache import cache_folder
from toolkit.cli.actions.cached_build import build_cached, from_cache, names_file, refuse
from toolkit.cli.command import parsed
from toolkit.cli.commands.build import Build
from toolkit.cli.commands.build_all import BuildAll
from toolkit.cli.progress import cpu_seconds, progress_bar
from toolkit.errors import BuildError, WorkersError
from toolkit.html.markup import table
from toolkit.html.page import page, write_page
from toolkit.workers import open_workers

if TYPE_CHECKING:
    from toolkit.quantize.ranges.measure import Ranges

LOG = logging.getLogger(__name__)
_WITH_DATA = frozenset({"int8", "best", "bf16", "fp8"})
Words = tuple[str, ...]


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model; `data` calibrates INT8. Options as `tandem build` has them."""

    path: str
    data: str | None = None
    options: Words = ()
    calibration: Words = ()


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is built; paths are relative to the file, but in options to the working directory.

    `calibration`: options of INT8 alone.
    """

    models: Annotated[tuple[_Model, ...], Meta(min_length=1)]
    profiles: Annotated[Words, Meta(min_length=1)]
    precisions: Annotated[Words, Meta(min_length=1)]
    out: str = "engines"
    options: Words = ()
    calibration: Words = ()


class Row(msgspec.Struct, frozen=True):
    """An engine of the report. `how`: built, cached or failed."""

    model: str
    profile: str
    precision: str
    engine: str
    how: str
    bytes: int = 0
    cpu_s: float = 0.0
    problem: str = ""


class _Cell(msgspec.Struct, frozen=True):
    row: Row
    words: Words


def build_all(options: BuildAll) -> None:
    """Build what is missing and print the report. Raises TandemError: an engine was not built."""
    groups = _groups(options.matrix)
    cells = [cell for group in groups.values() for cell in group]
    rows = {cell.row.engine: row for cell in cells if (row := _cached(cell)) is not None}
    tasks = {}
    for key, group in groups.items():
        missing = [cell for cell in group if cell.row.engine not in rows]
        if missing:
            tasks[key] = (msgspec.json.encode(missing).decode(), str(cache_folder()))
    models = {Path(cell.words[0]) for key in tasks for cell in groups[key]}
    largest = max((model.stat().st_size for model in models if model.is_file()), default=0)
    with progress_bar(options.matrix.name) as report, open_workers(options.workers) as workers:
        report("build", len(rows) / len(cells))
        problem = ""
        try:
            for _, content in workers.run(build_group, tasks, model_bytes=largest):
                rows |= {row.engine: row for row in msgspec.json.decode(content, type=list[Row])}
                report("build", len(rows) / len(cells))
        except WorkersError as error:  # what was built is reported
            problem = str(error)
    replace = msgspec.structs.replace
    ordered = [rows.get(cell.row.engine, replace(cell.row, problem=problem)) for cell in cells]
    _report(ordered, options)
    failed = [row for row in ordered if row.problem]
    if failed:
        raise BuildError(f"{len(failed)} of {len(cells)} engines failed: {failed[0].problem}")


def build_group(text: str, cache: str) -> bytes:
    """The task of a worker: build the engines of one model in one precision."""
    os.environ["TANDEM_CACHE"] = cache
    cells = msgspec.json.decode(text, type=list[_Cell])
    measured: dict[str, Ranges] = {}
    return msgspec.json.encode([_built(cell, measured) for cell in cells])


def _cached(cell: _Cell) -> Row | None:
    """Return the row of an engine that was built before, which is written; else None."""
    began = cpu_seconds()
    with suppress(Exception), parsed(Build, cell.words) as options:
        refuse(options)
        Path(cell.row.engine).parent.mkdir(parents=True, exist_ok=True)
        if from_cache(options) is not None:
            return _done(cell.row, "cached", began)
    return None  # what is wrong is said by the build


def _built(cell: _Cell, measured: "dict[str, Ranges]") -> Row:
    began = cpu_seconds()
    try:
        with parsed(Build, cell.words) as options:
            refuse(options)
            Path(cell.row.engine).parent.mkdir(parents=True, exist_ok=True)
            _, cached = build_cached(options, measured)
    except (TandemError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        return msgspec.structs.replace(cell.row, problem=text)
    except MemoryError:  # another worker may have more
        raise
    except Exception as error:  # the other models are built all the same
        LOG.exception("%s was not built", cell.row.engine)
        return msgspec.structs.replace(cell.row, problem=f"{type(error).__name__}: {error}")
    return _done(cell.row, "cached" if cached else "built", began)


def _done(row: Row, how: str, began: float) -> Row:
    size = Path(row.engine).stat().st_size
    return msgspec.structs.replace(row, how=how, bytes=size, cpu_s=round(cpu_seconds() - began, 3))


def _groups(path: Path) -> dict[tuple[str, str], list[_Cell]]:
    """Return the cells of a matrix by model and precision. Raises TandemError: it is no matrix."""
    try:
        matrix = decode_toml(path.read_bytes(), Matrix)
    except (OSError, ValueError) as error:
        raise BuildError(f"{path} is no matrix of builds: {error}") from error
    root = path.parent.absolute()  # workers may have another working directory
    names = [Path(model.path).stem for model in matrix.models]
    profiles = [Path(profile).stem for profile in matrix.profiles]
    for kind, stems in (("models", names), ("profiles", profiles)):
        twice = next((name for name in stems if stems.count(name) > 1), None)
        if twice is not None:
            raise BuildError(f"{path} has two {kind} called {twice!r}: give one another file name")
    groups: dict[tuple[str, str], list[_Cell]] = {}
    for name, model in zip(names, matrix.models, strict=True):
        for precision in matrix.precisions:
            groups[name, precision] = [
                _cell(matrix, model, root, profile, precision) for profile in matrix.profiles
            ]
    return groups


def _cell(matrix: Matrix, model: _Model, root: Path, profile: str, precision: str) -> _Cell:
    source = root / model.path
    engine = root / matrix.out / f"{source.stem}.{Path(profile).stem}.{precision}.engine"
    target = str(root / profile) if names_file(profile) else profile
    words = [str(source), "--profile", target, "--precision", precision, "-o", str(engine)]
    words += [*matrix.options, *model.options]
    if precision in _WITH_DATA:
        words += [] if model.data is None else ["--data", str(root / model.data)]
        words += [*matrix.calibration, *model.calibration]
    return _Cell(Row(source.name, profile, precision, str(engine), "failed"), tuple(words))


def _report(rows: list[Row], options: BuildAll) -> None:
    counts = {how: sum(row.how == how for row in rows) for how in ("built", "cached", "failed")}
    lead = ", ".join(f"{count} {how}" for how, count in counts.items())
    cells = [
        (row.model, row.profile, row.precision, row.how, f"{row.bytes / 1e6:.2f} MB",
         f"{row.cpu_s:.1f} s", row.problem or row.engine)
        for row in rows
    ]  # fmt: skip
    head = ("model", "profile", "precision", "", "size", "CPU", "engine")
    if options.html is not None:
        write_page(options.html, page(options.matrix.name, lead, [table("engines", head, cells)]))
    if options.as_json:
        click.echo(json.dumps({**counts, "engines": msgspec.to_builtins(rows)}))
        return
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    for line in (head, *cells):
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())
    click.echo(lead)
