"""Einsum -> transpositions, sums and one product of matrices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from toolkit.gpu.ir.network import Attribute, Operation, Shape
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, UseDefGraph
from toolkit.gpu.reasons import Reason, reason


def einsum_as_matmul(_: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Write an Einsum of one or two tensors, without diagonals and "...", as other operators."""
    equation = _read_equation(op)
    if equation is None:
        return None
    written, result = equation
    shapes = [rewriter.shape_of(name) for name in op.inputs]
    sizes = _sizes(written, shapes)
    steps = _Steps(op, rewriter, sizes)
    spread = [
        steps.squeezed(name, axes, shape)
        for name, axes, shape in zip(op.inputs, written, shapes, strict=True)
    ]
    labels = [axes for _, axes in spread]
    tensors = [
        steps.summed(
            name, axes, "".join(c for c in axes if c in result or c in _others(labels, at))
        )
        for at, (name, axes) in enumerate(spread)
    ]
    if len(tensors) == 1:
        (name, axes) = tensors[0]
        steps.moved(name, axes, result, op.outputs[0])
        return rewriter.replacement()
    (left, a), (right, b) = tensors
    batch = [c for c in result if c in a and c in b]
    rows = [c for c in result if c in a and c not in b]
    columns = [c for c in result if c in b and c not in a]
    depth = [c for c in a if c in b and c not in result]
    left = steps.folded(left, a, batch, rows, depth)
    right = steps.folded(right, b, batch, depth, columns)
    shape = (*(sizes[c] for c in batch), steps.size(rows), steps.size(columns))
    product = rewriter.add_new(op, "MatMul", (left, right), shape, rewriter.dtypes[op.outputs[0]])
    order = "".join((*batch, *rows, *columns))
    whole = steps.reshaped(product, tuple(sizes[c] for c in order))
    steps.moved(whole, order, result, op.outputs[0])
    return rewriter.replacement()


def einsum_refusal(
    op: Operation, shapes: Sequence[Shape | None], inferred: Shape | None
) -> Reason | None:
    """Return why no kernels compute an Einsum; `shapes` of its operands, `inferred` of its result.

    Of the sizes 1 and n of a label, shape inference takes the one that comes first: what follows
    the result takes it for smaller, too.
    """
    equation = _read_equation(op)
    if equation is None:
        return reason("gpu.einsum:equation", op.text("equation", ""), len(op.inputs))
    labels, result = equation
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or inferred is None:
        return None
    sizes = _sizes(labels, known)
    for axes, shape in zip(labels, known, strict=True):
        for label, size in zip(axes, shape, strict=True):
            if size not in (1, sizes[label]):
                return reason("gpu.einsum:sizes", sizes[label], size, label)
    whole = tuple(sizes[label] for label in result)
    return None if inferred == whole else reason("gpu.einsum:ones", list(whole), list(inferred))


def _read_equation(op: Operation) -> tuple[list[str], str] | None:
    """Return the labels of each operand and of the result; None where no kernels compute it."""
    if len(op.inputs) > 2:
        return None
    equation = op.text("equation", "").replace(" ", "")
    if "." in equation:
        return None
    operands, arrow, result = equation.partition("->")
    labels = operands.split(",")
    if not arrow:  # labels that come once, in alphabetic order
        result = "".join(sorted(c for c in set(operands) - {","} if operands.count(c) == 1))
    if len(labels) != len(op.inputs) or any(len(set(axes)) != len(axes) for axes in labels):
        return None
    return labels, result


def _sizes(labels: Sequence[str], shapes: Sequence[Shape]) -> dict[str, int]:
    """Return the size of each label: of 1 and another size the other one."""
    sizes: dict[str, int] = {}
    for axes, shape in zip(labels, shapes, strict=True):
        for label, size in zip(axes, shape, strict=True):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
    return sizes


def _others(labels: list[str], at: int) -> str:
    return "".join(label for index, label in enumerate(labels) if index != at)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Adds operations on tensors whose dimensions have labels; `sizes` of the labels."""

    op: Operation
    rewriter: NetworkRewriter
    sizes: Mapping[str, int]

    def size(self, labels: Sequence[str]) -> int:
        return prod(self.sizes[label] for label in labels)

    def squeezed(self, name: str, current: str, shape: Sequence[int]) -> tuple[str, str]:
        """Return a tensor without the dimensions of 1 that spread over another's, and its labels.

        The product then repeats it along them, or sums the other alone.
        """
        labels = "".join(c for c, size in zip(current, shape, strict=True) if size == self.sizes[c])
        if labels == current:
            return name, current
        return self.reshaped(name, tuple(self.sizes[label] for label in labels)), labels

    def summed(self, name: str, current: str, labels: str) -> tuple[str, str]:
        """Sum a tensor over what only it has; return it with the labels that are left."""
        axes = tuple(at for at, label in enumerate(current) if label not in labels)
        if not axes:
            return name, current
        sizes = tuple(self.sizes[label] for label in labels)
        return self._add("ReduceSum", name, sizes, {"axes": axes, "keepdims": 0}), labels

    def folded(
        self, name: str, current: str, batch: list[str], first: list[str], second: list[str]
    ) -> str:
        """Return a tensor as (batch..., rows, columns)."""
        moved = self.moved(name, current, "".join((*batch, *first, *second)))
        shape = (*(self.sizes[c] for c in batch), self.size(first), self.size(second))
        return self.reshaped(moved, shape)

    def moved(self, name: str, current: str, target_labels: str, output: str = "") -> str:
        """Order the dimensions of a tensor; `output` names the result where it must be one."""
        perm = {"perm": tuple(current.index(label) for label in target_labels)}
        if output:
            return self.rewriter.add(self.op, "Transpose", (name,), output, perm)
        return self._add("Transpose", name, tuple(self.sizes[c] for c in target_labels), perm)

    def reshaped(self, name: str, shape: Shape) -> str:
        return self._add("Reshape", name, shape)

    def _add(
        self,
        kind: str,
        name: str,
        shape: Shape,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> str:
        dtype = self.rewriter.dtypes[self.op.outputs[0]]
        return self.rewriter.add_new(self.op, kind, (name,), shape, dtype, attributes=attributes)
