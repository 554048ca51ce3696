"""Sizes of a model's tensors in which each number of rows that data decide is a dimension."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from device.engine.manifest import DimRange
from toolkit.gpu.shapes.formulas import Formula
from toolkit.gpu.shapes.inference import Known, Trace, infer_sizes
from toolkit.gpu.shapes.sizes import Size, Space

_UNBOUNDED = 1 << 20  # where no bound is known
PAST_ALL = 2**31 - 1  # ends of slices that take all there is
PADDED = "PaddedNonMaxSuppression"  # its results are rows, and how many there are
_MAX_BOUND = 1 << 16  # rows; padding to more would take longer than it saves


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor whose number of rows the data decide: size `dim` of `axis`, at most `bound`.

    `bound` None: none is known. `is_padded`: it is the first rows of a tensor of `bound` rows.
    """

    value: ir.Value
    axis: int
    dim: int
    bound: int | None
    is_padded: bool = False


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The sizes of all tensors, over the numbers of rows of the sources."""

    sources: tuple[Source, ...]
    known: Known

    def shape(self, value: ir.Value) -> tuple[int, ...] | None:
        """Return the shape of a tensor, None where it is not known."""
        if value.const_value is not None:
            return tuple(value.const_value.shape.numpy())
        return self.known.shapes.get(str(value.name))

    def rows(self, value: ir.Value, dim: int) -> "Rows | None":
        """Return where a tensor has its rows; None unless exactly one size depends on `dim`."""
        shape = self.shape(value)
        if shape is None:
            return None
        factors = [_factor(size, dim) for size in shape]
        axes = [axis for axis, factor in enumerate(factors) if factor != 0]
        factor = factors[axes[0]] if len(axes) == 1 else None
        return None if factor is None else Rows(axes[0], factor)

    def is_static(self, value: ir.Value) -> bool:
        """Whether no size of a tensor, nor a size that it holds, depends on data."""
        shape = self.shape(value)
        values = self.known.values.get(str(value.name))
        sizes = [] if values is None or values.dtype != object else values.reshape(-1).tolist()
        return shape is not None and not any(isinstance(size, Size) for size in (*shape, *sizes))

    def holds(self, value: ir.Value, dim: int) -> bool:
        """Whether a tensor holds a size that depends on the number of rows `dim`."""
        values = self.known.values.get(str(value.name))
        sizes = [] if values is None or values.dtype != object else values.reshape(-1).tolist()
        return any(isinstance(size, Size) and _mentions(size.formula, dim) for size in sizes)

    def values(self, value: ir.Value | None) -> npt.NDArray[Any] | None:
        """Return the numbers of a constant or of a tensor of sizes, None where they are unknown."""
        if value is None:
            return None
        if value.const_value is not None:
            return np.asarray(value.const_value.numpy())
        return self.known.values.get(str(value.name))


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor's rows: `factor` slices along `axis` for each."""

    axis: int
    factor: int


def infer_rows(model: ir.Model) -> RowSizes:
    """Infer sizes with a dimension for each result of NonZero and each Slice of unknown size."""
    sources = tuple(_sources(model.graph))
    bounds = [_UNBOUNDED if s.bound is None else s.bound for s in sources]
    dims = tuple(DimRange(name=f"rows {at}", min=1, opt=b, max=b) for at, b in enumerate(bounds))
    space = Space(dims, tuple(max(b - 1 - at, 1) for at, b in enumerate(bounds)))
    shapes = {str(source.value.name): _shape(source, space) for source in sources}
    values = (value for node in model.graph for value in node.outputs)
    types = {str(v.name): v.dtype.value for v in values if v.dtype is not None}
    return RowSizes(sources, infer_sizes(model, Trace(space, Known(shapes, types))))


def _shape(source: Source, space: Space) -> tuple[int, ...]:
    rows = space.dim(source.dim)
    return tuple(size if isinstance(size, int) else rows for size in source.value.shape or ())


def _sources(graph: ir.Graph) -> Iterator[Source]:
    """Find the tensors with one size that data decide, which their node makes."""
    dim = 0
    for node in graph:
        axis_and_bound = _SOURCES[node.op_type](node) if node.op_type in _SOURCES else None
        if axis_and_bound is None:
            continue
        value, (axis, bound) = node.outputs[0], axis_and_bound
        sizes = value.shape or ()
        if value.dtype is None or any(
            at != axis and not isinstance(size, int) for at, size in enumerate(sizes)
        ):
            continue
        if axis < len(sizes) and not isinstance(sizes[axis], int):
            bounded = bound if bound and bound <= _MAX_BOUND else None
            yield Source(value, axis, dim, bounded, _padded_rows(node) is not None)
            dim += 1


def _indices_of_true(node: ir.Node) -> tuple[int, int | None] | None:
    """NonZero: a column for each element that is not 0."""
    mask = node.inputs[0]
    shape = () if mask is None or mask.shape is None else mask.shape
    sizes = [size for size in shape if isinstance(size, int)]
    return 1, prod(sizes) if shape and len(sizes) == len(shape) else None


def _sliced(node: ir.Node) -> tuple[int, int | None] | None:
    """Slice of a size that is not known by constants: bounded where it takes the first so many."""
    bound = _padded_rows(node)
    if bound is not None:
        return 0, bound
    sizes = node.outputs[0].shape or ()
    parameters = [_integers(value) for value in node.inputs[1:5]]
    if len(parameters) < 3 or any(numbers is None for numbers in parameters):
        return None
    starts, ends, axes, *steps = (numbers for numbers in parameters if numbers is not None)
    steps = steps or [[1] * len(axes)]
    for start, end, axis, step in zip(starts, ends, axes, steps[0], strict=True):
        if not isinstance(sizes[axis], int) and (start, step) != (0, 1):
            return axis % len(sizes), None
        if not isinstance(sizes[axis], int) and end < PAST_ALL:
            return axis % len(sizes), end if end > 0 else None
    return None


def _padded_rows(node: ir.Node) -> int | None:
    """Return how many rows a Slice takes the first of, which a suppression padded."""
    rows = node.inputs[0]
    producer = None if rows is None else rows.producer()
    if node.op_type != "Slice" or producer is None or producer.op_type != PADDED:
        return None
    assert rows is not None
    assert rows.shape is not None
    return int(rows.shape[0])  # type: ignore[arg-type]


def _integers(value: ir.Value | None) -> Sequence[int] | None:
    if value is None or value.const_value is None:
        return None
    return [int(number) for number in value.const_value.numpy().reshape(-1)]


_SOURCES = {"NonZero": _indices_of_true, "Slice": _sliced}


def _mentions(formula: Formula, dim: int) -> bool:
    atoms = (atom for monomial, _ in formula.terms for atom in monomial)
    return any(
        atom == dim
        if isinstance(atom, int)
        else _mentions(atom.dividend, dim) or _mentions(atom.divisor, dim)
        for atom in atoms
    )


def _factor(size: int, dim: int) -> int | None:
    """Return how many slices a size has for each row: 0 for none, None where it is otherwise."""
    if not isinstance(size, Size):
        return 0
    terms = size.formula.terms
    if len(terms) == 1 and terms[0][0] == (dim,) and terms[0][1] > 0:
        return terms[0][1]
    return None
