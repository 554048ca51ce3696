"""Rewrite rules for what stands around products with constant weights.

Such a product takes rows of any number of dimensions, in any order in memory. Exporters join them
before it, split and transpose them after it; what is added to the result then would be a kernel of
its own. Written around the operand, all of that is a view.
"""

from collections.abc import Sequence
from dataclasses import replace

from toolkit.gpu.ir.expressions import is_elementwise
from toolkit.gpu.ir.network import Operation
from toolkit.gpu.ir.patterns import Match, NetworkRewriter, Rule, UseDefGraph

_SQRT_HALF = 0.7071067811865476
_PRODUCTS = ("Conv", "Gemm", "MatMul")
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


def column_factors(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """A product, transposed or not, times a factor for each column -> a product with factors."""
    for source, constant in (op.inputs, op.inputs[::-1]):
        product, move, order = _product_of(graph, rewriter, source, op) or (None, None, ())
        k = graph.network.constants.get(constant)
        if product is None or k is None or product.input(3):
            continue
        column = order.index(len(order) - 1)
        sizes = (1,) * (len(order) - k.ndim) + k.shape
        if not k.size == sizes[column] == rewriter.shapes[op.outputs[0]][column]:
            continue
        factors = rewriter.constant(f"{op.outputs[0]} (factors)", k.reshape(-1))
        operands = (*product.inputs[:2], product.input(2), factors)
        if move is None:
            return rewriter.replaced_by(
                op, product.kind, operands, product.attributes, also=(product,)
            )
        scaled = _add_product(rewriter, product, operands, *op.nodes)
        return rewriter.replaced_by(
            op, "Transpose", (scaled,), move.attributes, also=(move, product)
        )
    return None


def residual_of_transposed(graph: UseDefGraph, op: Operation, rewriter: NetworkRewriter) -> Match:
    """A transposed product + x -> transposed: the product + x transposed back.

    Not where another product makes x, whose epilogue takes the sum, nor where all that reads the
    sum could join its kernel.
    """
    output = op.outputs[0]
    readers = [reader for reader in graph.network.operations if output in reader.inputs]
    if output in graph.network.outputs or all(map(is_elementwise, readers)):
        return None
    for source, other in (op.inputs, op.inputs[::-1]):
        product, move, order = _product_of(graph, rewriter, source, op) or (None, None, ())
        same = rewriter.shapes.get(other) == rewriter.shapes[output] and other != source
        if product is None or move is None or not same or graph.sole_producer(other, *_PRODUCTS):
            continue
        shape, scale = rewriter.shapes[product.outputs[0]], rewriter.scales.get(other)
        back = {"perm": tuple(order.index(at) for at in range(len(order)))}
        turned = rewriter.add_new(
            op, "Transpose", (other,), shape, rewriter.dtypes[other], attributes=back, scale=scale
        )
        result = _add_product(rewriter, product, product.inputs)
        total = rewriter.add_new(op, op.kind, (result, turned), shape, rewriter.dtypes[output])
        return rewriter.replaced_by(
            op, "Transpose", (total,), move.attributes, also=(move, product)
        )
    return None


def _product_of(
    graph: UseDefGraph, rewriter: NetworkRewriter, source: str, op: Operation
) -> tuple[Operation, Operation | None, tuple[int, ...]] | None:
    """Return the product with a constant matrix that makes floats of op's shape, a Transpose behind
    it, and the order of dimensions; None: another tensor.
    """
    move = graph.sole_producer(source, "Transpose")
    product = graph.sole_producer(move.inputs[0] if move else source, "Gemm", "MatMul")
    shape = rewriter.shapes[op.outputs[0]]
    if product is None or rewriter.shapes[source] != shape:
        return None
    weights = rewriter.constants.get(product.inputs[1])
    rounded = {op.outputs[0], source, product.outputs[0]} & set(rewriter.scales)
    if weights is None or weights.ndim != 2 or rounded:
        return None
    order = tuple(range(len(shape)))
    return product, move, move.integers("perm", order[::-1]) if move else order


def _add_product(
    rewriter: NetworkRewriter, product: Operation, operands: Sequence[str], *nodes: str
) -> str:
    """Add a product with these operands, which stands for `nodes`, too; return its result."""
    old = product.outputs[0]
    shape, dtype = rewriter.shapes[old], rewriter.dtypes[old]
    result = rewriter.add_new(
        product, product.kind, operands, shape, dtype, attributes=product.attributes
    )
    rewriter.operations[-1] = replace(rewriter.operations[-1], others=(*product.others, *nodes))
    return result


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
    Rule("Mul", column_factors),
)
RESIDUAL_RULES: tuple[Rule, ...] = (Rule("Add", residual_of_transposed),)
