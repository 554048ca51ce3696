"""Rewrite rules for what stands around products with constant weights.

Such a product takes rows of any number of dimensions, in any order in memory. Exporters join them
before it, split and transpose them after it; what is added to the result then would be a kernel of
its own. Written around the operand, all of that is a view.
"""

from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph

_SQRT_HALF = 0.7071067811865476
_CONSTANT_TOLERANCE = 1e-6  # relative: constants that an exporter rounded to float32


def rows_split(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """Gemm of reshaped rows, with its rows split again -> Gemm of the split rows."""
    gemm = graph.sole_producer(op.inputs[0], "Gemm")
    first = gemm and graph.sole_producer(gemm.inputs[0], "Reshape", "Flatten")
    shape = rewriter.shapes[op.outputs[0]]
    if gemm is None or first is None or gemm.integer("transA", 0) or len(shape) < 2:
        return None
    if (
        gemm.inputs[1] not in rewriter.constants
        or rewriter.shapes[gemm.outputs[0]][-1] != shape[-1]
    ):
        return None
    depth, source = rewriter.shapes[first.outputs[0]][-1], first.inputs[0]
    if source not in rewriter.shapes:
        return None
    dtype, scale = rewriter.dtypes[source], rewriter.scales.get(first.outputs[0])
    split = (*shape[:-1], depth)
    rows = rewriter.add_new(op, "Reshape", (source,), split, dtype, scale=scale)
    return rewriter.replaced_by(
        op, "Gemm", (rows, *gemm.inputs[1:]), gemm.attributes, also=(first, gemm)
    )


def rows_transposed(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """A product whose rows are transposed -> the product of the transposed rows."""
    product = graph.sole_producer(op.inputs[0], "Gemm", "MatMul")
    shape = rewriter.shapes[op.outputs[0]]
    order = op.integers("perm", tuple(reversed(range(len(shape)))))
    if product is None or order[-1] != len(shape) - 1 or op.outputs[0] in rewriter.scales:
        return None
    left, right = product.inputs[:2]
    weights = rewriter.constants.get(right)
    alike = left in rewriter.shapes and len(rewriter.shapes[left]) == len(shape)
    if weights is None or weights.ndim != 2 or not alike or product.integer("transA", 0):
        return None
    turned = rewriter.add_new(
        op,
        "Transpose",
        (left,),
        tuple(rewriter.shapes[left][at] for at in order),
        rewriter.dtypes[left],
        attributes={"perm": order},
        scale=rewriter.scales.get(left),
    )
    return rewriter.replaced_by(
        op, product.kind, (turned, *product.inputs[1:]), product.attributes, also=(product,)
    )


def gelu(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """0.5 x (1 + erf(x / sqrt(2))), its factors in any order -> Gelu."""
    inner: list[Operation] = []
    factors: list[str] = []
    for name in op.inputs:
        product = graph.sole_producer(name, "Mul")
        inner += [product] if product else []
        factors += product.inputs if product else (name,)
    halves = [name for name in factors if _near(graph, name, 0.5)]
    sums = [name for name in factors if graph.sole_producer(name, "Add") is not None]
    if len(factors) != 3 or len(halves) != 1 or len(sums) != 1:
        return None
    add = graph.sole_producer(sums[0], "Add")
    x = next(name for name in factors if name not in (halves[0], sums[0]))
    erf = None if add is None else _erf_of(graph, add, x)
    if add is None or erf is None or rewriter.shapes.get(x) != rewriter.shapes[op.outputs[0]]:
        return None
    return rewriter.replaced_by(op, "Gelu", (x,), also=(*inner, add, *erf))


def _erf_of(graph: UseDefGraph, add: Operation, x: str) -> tuple[Operation, ...] | None:
    """Return the Erf and the scaling of x in 1 + erf(x / sqrt(2))."""
    for summand, constant in (add.inputs, add.inputs[::-1]):
        erf = graph.sole_producer(summand, "Erf")
        scaled = erf and graph.sole_producer(erf.inputs[0], "Div", "Mul")
        if erf is None or scaled is None or not _near(graph, constant, 1.0):
            continue
        if scaled.kind == "Div" and scaled.inputs[0] == x:
            fits = _near(graph, scaled.inputs[1], 1 / _SQRT_HALF)
        else:
            others = [name for name in scaled.inputs if name != x]
            fits = scaled.kind == "Mul" and len(others) == 1
            fits = fits and _near(graph, others[0], _SQRT_HALF)
        if fits:
            return erf, scaled
    return None


def _near(graph: UseDefGraph, name: str, expected: float) -> bool:
    number = graph.scalar(name)
    return number is not None and abs(number - expected) <= _CONSTANT_TOLERANCE * expected


GEMM_RULES: tuple[Rule, ...] = (
    Rule("Mul", gelu),
    Rule("Reshape", rows_split),
    Rule("Transpose", rows_transposed),
)
