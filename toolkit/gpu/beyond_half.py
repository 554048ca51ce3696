"""Tensors whose values FP16 does not hold: kernels store and multiply them in FP32.

Kernels add up in FP32 and keep what they fuse in registers, so only what is written to memory, or
given to a matrix product, is FP16. Beyond 65504 that is infinite, and 0 times it, or the difference
of two, is NaN.

Observed ranges decide where there are any. Without them the graph does: operators whose results
grow with the square, the exponential or the number of what they read. Its constants decide always:
those beyond 65504, and those that FP16 rounds to 0 and that keep a divisor from it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.gpu.ir.elementwise_ops import ARRANGED, OPERATORS
from toolkit.graph.dtypes import LARGEST_BFLOAT16

LARGEST_HALF = float(np.finfo(np.float16).max)
MARGIN = 4.0
"""Another input may be twice as large as all samples, and then its square four times."""

_ROUNDED_TO_ZERO = 2.0**-25
_COUNTS = frozenset({"CumSum", "Range"})
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})  # FP32 would slow them
_NO_ODD = "BF16 has no odd numbers above 256"
_SUMS = frozenset({"ReduceMean", "ReduceSum"})
_OFFSETS = frozenset({"Add", "Clip", "Max"})
_OF_ZERO = frozenset({"Div", "Log", "Reciprocal"})  # infinite or NaN


@dataclass(frozen=True, slots=True)
class BeyondHalf:
    """A tensor of which FP16 may lose the values: the node that makes it, its operator, and why.

    `node`, `op`: "" for inputs and constants. `amax`: the largest magnitude, None if not known.
    """

    node: str
    op: str
    reason: str
    amax: float | None = None


def beyond_bfloat16(model: ir.Model, *, from_bfloat16: bool = False) -> dict[str, BeyondHalf]:
    """Return those constants, and what is computed with them, that BF16 rounds to infinity.

    Masks of attention have the largest number of FP32. Counts are beside them, also folded ones:
    BF16 has no odd numbers above 256. `from_bfloat16`: the model was in BF16, so that constants
    which it rounds were folded; those that only element-wise operators read stay as they are.
    """
    wide = _constants(model.graph, LARGEST_BFLOAT16)
    for node in model.graph:
        wide |= _computed(node, wide, "BF16")
    for node in model.graph:
        if node.domain == "" and node.op_type in _COUNTS:
            wide |= _made(node, _NO_ODD)
    for name, value in model.graph.initializers.items():
        if name not in wide and (numbers := _rounded_numbers(value)) is not None:
            is_weight = any(node.op_type in _PRODUCTS for node in value.consumers())
            if not is_weight and bool((numbers == np.rint(numbers)).all()):
                wide[name] = BeyondHalf("", "", _NO_ODD)
            elif from_bfloat16 and all(map(_is_element_wise, value.consumers())):
                wide[name] = BeyondHalf("", "", "folded in FP32")
    return _arranged(model.graph, wide)


def _rounded_numbers(value: ir.Value) -> NDArray[np.float32] | None:
    """Return a constant of several numbers if BF16 rounds any of them."""
    if value.dtype != ir.DataType.FLOAT or value.const_value is None or value.const_value.size < 2:
        return None
    numbers: NDArray[np.float32] = value.const_value.numpy()
    # BF16 is the upper half of FP32.
    is_rounded = np.ascontiguousarray(numbers).view(np.uint32) & np.uint32(0xFFFF)
    return numbers if is_rounded.any() else None


def _is_element_wise(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in OPERATORS


def beyond_half(model: ir.Model, amax: Mapping[str, float] | None) -> dict[str, BeyondHalf]:
    """Return the float32 tensors that kernels keep in FP32, by name, in the graph's order.

    `amax`: observed magnitudes, None without samples. An infinite constant is one in FP16, too.
    """
    graph = model.graph
    wide = _constants(graph, LARGEST_HALF)
    for node in graph:
        wide |= _computed(node, wide, "FP16")
        if _keeps_from_zero(node):
            wide |= _made(node, "a divisor that a constant below FP16 keeps from 0")
    if amax is None:
        for node in graph:
            for reason, rule in UNBOUNDED.items():
                for unbounded in rule(node):
                    wide |= _made(unbounded, reason)
        return _arranged(graph, wide)
    values = [*graph.inputs, *(out for node in graph for out in node.outputs)]
    for value in values:
        largest = amax.get(str(value.name), 0.0)
        if value.dtype == ir.DataType.FLOAT and largest * MARGIN > LARGEST_HALF:
            producer = value.producer()
            where = ("", "") if producer is None else (str(producer.name), producer.op_type)
            wide[str(value.name)] = BeyondHalf(*where, "samples", largest)
    return wide


def _constants(graph: ir.Graph, limit: float) -> dict[str, BeyondHalf]:
    wide: dict[str, BeyondHalf] = {}
    for name, value in graph.initializers.items():
        if value.dtype != ir.DataType.FLOAT or value.const_value is None:
            continue
        numbers = np.abs(value.const_value.numpy())
        largest = float(numbers.max(initial=0.0, where=np.isfinite(numbers)))
        if largest > limit:
            wide[name] = BeyondHalf("", "", "constant", largest)
    return wide


def _computed(node: ir.Node, wide: Mapping[str, BeyondHalf], narrow: str) -> dict[str, BeyondHalf]:
    reads = any(value is not None and str(value.name) in wide for value in node.inputs)
    if node.domain != "" or node.op_type not in OPERATORS or not reads:
        return {}
    return _made(node, f"computed with a constant beyond {narrow}")


def _made(node: ir.Node, reason: str) -> dict[str, BeyondHalf]:
    row = BeyondHalf(str(node.name), node.op_type, reason)
    return {str(out.name): row for out in node.outputs if out.dtype == ir.DataType.FLOAT}


def _arranged(graph: ir.Graph, wide: dict[str, BeyondHalf]) -> dict[str, BeyondHalf]:
    """Add what only rearranges the numbers of such tensors."""
    for node in graph:
        count = ARRANGED.get(node.op_type, 0) if node.domain == "" else 0
        sources = [str(value.name) for value in node.inputs[:count] if value is not None]
        reason = next((wide[name].reason for name in sources if name in wide), None)
        if reason is not None:
            wide |= _made(node, reason)
    return wide


def _keeps_from_zero(node: ir.Node) -> bool:
    """Whether a node adds, or takes as the least, a number that is 0 in FP16, for a divisor."""
    if node.op_type not in _OFFSETS:
        return False
    small = any(0.0 < abs(_scalar(value) or 0.0) <= _ROUNDED_TO_ZERO for value in node.inputs)
    return small and any(
        reader.op_type in _OF_ZERO and (reader.op_type != "Div" or index == 1)
        for out in node.outputs
        for reader, index in out.uses()
    )


def _squares(node: ir.Node) -> Iterator[ir.Node]:
    """Squares that are added up, as in the variance of a normalization, and their sum."""
    if node.op_type == "Mul":
        squares = node.inputs[0] is node.inputs[1]
    else:
        squares = node.op_type == "Pow" and (_scalar(node.inputs[1]) or 0.0) >= 2.0
    sums = [reader for reader in _readers(node) if reader.op_type in _SUMS] if squares else []
    yield from (node, *sums) if sums else ()
    if node.op_type == "ReduceSumSquare":
        yield node


def _exponentials(node: ir.Node) -> Iterator[ir.Node]:
    """A softmax by hand that does not subtract the largest: the powers and their sum."""
    if node.op_type != "Exp":
        return
    operand = node.inputs[0]
    before = None if operand is None else operand.producer()
    shifted = before is not None and before.op_type == "Sub" and _is_largest(before.inputs[1])
    sums = [reader for reader in _readers(node) if reader.op_type == "ReduceSum"]
    if sums and not shifted:
        yield from (node, *sums)


def _linear_attention(node: ir.Node) -> Iterator[ir.Node]:
    """Sums over all keys that a part of themselves divides: both products and the divisor."""
    if node.op_type != "Div":
        return
    left, right = (_to_product(value) for value in node.inputs[:2])
    if left and right and left[-1] is right[-1]:
        operands = (_to_product(value) for value in left[-1].inputs)
        yield from (*left, *right, *(path[-1] for path in operands if path))


UNBOUNDED: Mapping[str, Callable[[ir.Node], Iterator[ir.Node]]] = {
    "squares that are added up": _squares,
    "exponentials without the largest subtracted": _exponentials,
    "sums of linear attention, not divided yet": _linear_attention,
}
"""Why results may be beyond FP16, and the nodes that make them, for a node that shows it."""


def _readers(node: ir.Node) -> list[ir.Node]:
    return [reader for out in node.outputs for reader, _ in out.uses()]


def _is_largest(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return node is not None and node.op_type == "ReduceMax"


def _to_product(value: ir.Value | None) -> list[ir.Node]:
    """Return the nodes from a part of a product of two computed matrices to that; [] of others.

    A constant may be added to it.
    """
    path: list[ir.Node] = []
    while value is not None and (node := value.producer()) is not None:
        path.append(node)
        if node.op_type == "MatMul":
            return path if not any(_is_constant(operand) for operand in node.inputs) else []
        if node.op_type == "Add":
            value = next((v for v in node.inputs if not _is_constant(v)), None)
        elif node.op_type in ARRANGED and node.op_type != "Concat":
            value = node.inputs[0]
        else:
            return []
    return []


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def _scalar(value: ir.Value | None) -> float | None:
    constant = None if value is None else value.const_value
    return None if constant is None or constant.size != 1 else float(constant.numpy().reshape(()))
