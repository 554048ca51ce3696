"""Fixes the shapes of a model's inputs: given shapes apply, other dynamic dimensions freeze."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from toolkit.errors import ImportModelError


def fix_shapes(
    model: ir.Model,
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    dynamic: set[str],
    batch: int = 1,
) -> list[str]:
    """Give every input a shape of numbers and the names in `dynamic`.

    `shapes`: by input; a named dimension gets the same size in every input. Any other dynamic
    first dimension becomes `batch`. Returns notes on these defaults. Raises
    ImportModelError: any other dynamic dimension, no shape, or one that does not fit; it names the
    input in the model at `path`.
    """
    notes: list[str] = []
    inputs = _inputs(model, shapes, path)
    frozen: dict[str, int] = {}
    image_size = _image_size(model.metadata_props)
    # Inputs with requested shapes come first: they freeze dimensions of the others.
    for name, value in sorted(inputs.items(), key=lambda item: item[0] not in shapes):
        notes += _fix_input(
            path, value, shapes.get(name), dynamic, frozen, batch=batch, image_size=image_size
        )
    if frozen or shapes:
        _rebind(model, frozen)
    return notes


def set_shapes(model: ir.Model, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Give the inputs named in `shapes` a fixed shape; other dynamic dimensions stay.

    Raises ImportModelError: the model at `path` has no such input, or the shape does not fit it.
    """
    inputs = _inputs(model, shapes, path)
    fixed: dict[str, int] = {}
    for name, shape in shapes.items():
        value = inputs[name]
        old: list[int | ir.SymbolicDim] = list(value.shape or [ir.SymbolicDim(None)] * len(shape))
        new = _new_dims(path, value, old, shape)
        fixed |= {
            str(before.value): after
            for before, after in zip(old, new, strict=True)
            if not isinstance(before, int) and before.value is not None and isinstance(after, int)
        }
        value.shape = ir.Shape(new)
    if shapes:
        _rebind(model, fixed)


def _inputs(model: ir.Model, shapes: Iterable[str], path: Path) -> dict[str, ir.Value]:
    """Return the inputs by name; `shapes` names some of them."""
    inputs = {str(value.name): value for value in model.graph.inputs}
    for name in shapes:
        if name not in inputs:
            raise ImportModelError(
                f"{path.name} has no input {name!r} (it has: {', '.join(inputs)}); "
                "correct the name given with --shape."
            )
    return inputs


def _fix_input(
    path: Path,
    value: ir.Value,
    requested: tuple[int, ...] | None,
    dynamic: set[str],
    frozen: dict[str, int],
    *,
    batch: int,
    image_size: tuple[int, ...],
) -> list[str]:
    """Give one input a shape whose every dimension is a number or a name in `dynamic`."""
    if value.shape is None:
        if requested is None:
            raise ImportModelError(
                f"{path.name}: input {value.name!r} has no shape; "
                f"give one, such as --shape {value.name}=1x3x224x224."
            )
        value.shape = ir.Shape(requested)
        return []
    old = list(value.shape)
    new = _new_dims(path, value, old, requested)
    notes = []
    for axis, dim in enumerate(new):
        if isinstance(dim, int) or str(dim.value) in dynamic:
            continue
        if dim.value is not None and str(dim.value) in frozen:
            new[axis] = frozen[str(dim.value)]
            continue
        if axis > 0:
            raise ImportModelError(
                f"{path.name}: input {value.name!r} has shape {_text(old)}, and dimension {axis} "
                f"is dynamic; fix it, such as --shape {value.name}={_example(old, image_size)}"
                f"{f', or give its range with {_option(dim)}' if dim.value else ''}."
            )
        new[axis] = batch
        notes.append(
            f"input {value.name!r}: dynamic first dimension {dim.value or '?'} frozen to {batch}"
            f"{f'; {_option(dim)} keeps it dynamic' if dim.value else ''}"
        )
    for before, after in zip(old, new, strict=True):
        if isinstance(before, int) or not isinstance(after, int) or before.value is None:
            continue
        if (frozen_size := frozen.setdefault(str(before.value), after)) != after:
            raise ImportModelError(
                f"{path.name}: dimension {before.value!r} is {after} in the shape given for "
                f"input {value.name!r} and {frozen_size} elsewhere; give it one size with --shape."
            )
    value.shape = ir.Shape(new)
    return notes


def _option(dim: ir.SymbolicDim) -> str:
    return f"`tandem build --dim {dim.value}=MIN:OPT:MAX`"


def _new_dims(
    path: Path,
    value: ir.Value,
    old: list[int | ir.SymbolicDim],
    requested: tuple[int, ...] | None,
) -> list[int | ir.SymbolicDim]:
    if requested is None:
        return list(old)
    fits = len(requested) == len(old) and all(
        not isinstance(before, int) or before == after
        for before, after in zip(old, requested, strict=False)
    )
    if not fits or min(requested, default=1) < 1:
        raise ImportModelError(
            f"{path.name}: input {value.name!r} has shape {_text(old)}, "
            f"which {'x'.join(map(str, requested))} does not fit."
        )
    return list(requested)


def _rebind(model: ir.Model, frozen: Mapping[str, int]) -> None:
    """Carry frozen dimensions to the outputs and drop stale shapes in between."""
    outputs = set(model.graph.outputs)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value not in outputs:
                value.shape = None
    for value in model.graph.outputs:
        if value.shape is not None:
            value.shape = ir.Shape(
                [
                    dim if isinstance(dim, int) else frozen.get(str(dim.value), dim)
                    for dim in value.shape
                ]
            )


def dims_in_use(model: ir.Model) -> set[str]:
    """The names of the dynamic dimensions of the inputs."""
    return {
        str(dim.value)
        for value in model.graph.inputs
        for dim in value.shape or ()
        if not isinstance(dim, int) and dim.value is not None
    }


def _text(dims: Iterable[int | ir.SymbolicDim]) -> str:
    return (
        "[" + ", ".join(str(d) if isinstance(d, int) else str(d.value or "?") for d in dims) + "]"
    )


def _image_size(metadata: Mapping[str, str]) -> tuple[int, ...]:
    """Height and width that Ultralytics exports state as `imgsz`, () without them."""
    match = re.fullmatch(r"\[(\d+), (\d+)\]", metadata.get("imgsz", ""))
    return tuple(map(int, match.groups())) if match else ()


def _example(dims: Sequence[int | ir.SymbolicDim], image_size: tuple[int, ...]) -> str:
    sizes = ["1", *["224"] * (len(dims) - 1)]
    if len(dims) == 4 and image_size:
        sizes[2:] = map(str, image_size)
    return "x".join(
        str(dim) if isinstance(dim, int) else size for dim, size in zip(dims, sizes, strict=True)
    )
