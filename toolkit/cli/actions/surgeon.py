"""Cut a model for `tandem surgeon`."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir

from toolkit.cli.commands.surgeon import Extract, Pixels, Reduce
from toolkit.cli.progress import progress_bar
from toolkit.errors import SurgeonError, about
from toolkit.graph.dtypes import IO_DTYPES
from toolkit.graph.subgraph import cut_model, with_shapes
from toolkit.importers.input_shapes import set_shapes
from toolkit.importers.onnx import ModelFile, read_model_file
from toolkit.plugins import Plugin
from toolkit.surgeon.command import Check
from toolkit.surgeon.pixels import take_pixels
from toolkit.surgeon.reduce import Reduced, reduce_model
from toolkit.surgeon.write import weight_files, write_model


@dataclass(frozen=True, slots=True)
class Part:
    """A part that was written: the files, and what it holds."""

    files: tuple[Path, ...]
    model: ir.Model

    def text(self) -> str:
        """Return inputs, outputs and size."""
        graph = self.model.graph
        lines = [f"{len(graph)} nodes, {len(graph.initializers)} initializers"]
        for title, values in (("input", graph.inputs), ("output", graph.outputs)):
            lines += [f"{title} {_value(value)}" for value in values]
        return "\n".join([*lines, *(f"wrote {path}" for path in self.files)])

    def builtins(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        graph = self.model.graph
        return {
            "files": [str(path) for path in self.files],
            "nodes": [str(node.name) for node in graph],
            "inputs": [str(value.name) for value in graph.inputs],
            "outputs": [str(value.name) for value in graph.outputs],
        }


def extract(options: Extract) -> None:
    """Write the part of a model between tensors. Raises TandemError, click.UsageError."""
    inputs, outputs, source, out = options.inputs, options.outputs, options.model, options.out
    if not inputs and not outputs:
        raise click.UsageError("Give --inputs, --outputs or both: tensors where the part begins "
            "and ends; `tandem inspect MODEL --nodes` lists them.")  # fmt: skip
    file = _read(source, out, ())
    set_shapes(file.model, options.shapes, source)
    with about(source.name):
        model = cut_model(with_shapes(file.model), inputs or None, outputs or None)
        for value in model.graph.inputs:
            if value.dtype is None:
                raise SurgeonError(
                    f"the type of {value.name!r} cannot be inferred, so that it cannot be an "
                    "input; name a tensor before it"
                )
        external = options.external or bool(file.external)
        part = Part(write_model(model, out, external=external), model)
    click.echo(json.dumps(part.builtins()) if options.as_json else part.text())


def reduce(options: Reduce) -> None:
    """Write the smallest part found that fails the check; the file always holds the best so far.

    Raises TandemError, click.BadParameter; exits with 130 when it was interrupted.
    """
    _check_pattern(options.fails_with)
    source = options.model
    check = Check(options.check, options.fails_with, options.timeout)
    written: list[tuple[Path, ...]] = []

    def keep(model: ir.Model) -> None:
        written.append(write_model(model, options.out))

    with progress_bar(source.name) as report:
        file = _read(source, options.out, options.plugins)
        set_shapes(file.model, options.shapes, source)
        with about(source.name):
            reduced = reduce_model(file.model, check, keep, report)
    files = written[-1] if written else ()
    text = _reduced_text(reduced, files)
    click.echo(json.dumps(_reduced_builtins(reduced, files)) if options.as_json else text)
    raise click.exceptions.Exit(130 if reduced.interrupted else 0)


def pixels(options: Pixels) -> None:
    """Write a model that takes pixels. Raises TandemError."""
    file = _read(options.model, options.out, ())
    with about(options.model.name):
        take_pixels(
            file.model,
            options.input,
            options.dtype,
            scale=options.scale,
            mean=options.mean or (0.0,),
            std=options.std or (1.0,),
        )
        written = write_model(file.model, options.out, external=bool(file.external))
    part = Part(written, file.model)
    click.echo(json.dumps(part.builtins()) if options.as_json else part.text())


def _check_pattern(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except re.error as err:
        raise click.BadParameter(
            f"{pattern!r} is no regular expression: {err}", param_hint="--fails-with"
        ) from err


def _reduced_text(reduced: Reduced, files: Sequence[Path]) -> str:
    """Return what is left, and how it fails."""
    stopped = "interrupted: " if reduced.interrupted else ""
    lines = [
        f"{stopped}{len(reduced.nodes)} of {reduced.nodes_before} nodes are left after "
        f"{reduced.runs} runs of the command, which ends with {reduced.failure}"
    ]
    lines += [f"  {n} ({op})" for n, op in zip(reduced.nodes, reduced.ops, strict=True)][:20]
    if len(reduced.nodes) > 20:
        lines.append(f"  and {len(reduced.nodes) - 20} more")
    return "\n".join([*lines, *(f"wrote {path}" for path in files)])


def _reduced_builtins(reduced: Reduced, files: Sequence[Path]) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "files": [str(path) for path in files],
        "nodes": list(reduced.nodes),
        "ops": list(reduced.ops),
        "nodes_before": reduced.nodes_before,
        "runs": reduced.runs,
        "failure": reduced.failure,
        "interrupted": reduced.interrupted,
    }


def _read(source: Path, out: Path, plugins: Sequence[Plugin]) -> ModelFile:
    if out.exists() and source.exists() and out.samefile(source):
        raise SurgeonError(f"{out} is the model itself; write the part to another file with -o")
    file = read_model_file(source, plugins)
    for weights in (source.parent / name for name in file.external):
        for path in (out, *weight_files(out)):
            if path.exists() and weights.exists() and path.samefile(weights):
                raise SurgeonError(
                    f"{path} holds the weights of {source}; write the part to another file with -o"
                )
    return file


def _value(value: ir.Value) -> str:
    dtype = IO_DTYPES.get(value.dtype or ir.DataType.UNDEFINED, str(value.dtype or "unknown type"))
    if value.shape is None:
        return f"{value.name}: {dtype}, unknown shape"
    dims = (str(d) if isinstance(d, int) else str(d.value or "?") for d in value.shape)
    return f"{value.name}: {dtype} {'x'.join(dims)}"
