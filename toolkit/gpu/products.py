"""Products of matrices -> calls."""

from math import prod

from toolkit.gpu.draft import Draft
from toolkit.gpu.endings import (
    Ending,
    constant_weights,
    ending_of,
    operand_strides,
    product_constants,
)
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.fusion import Group
from toolkit.gpu.sizes import ceil_div
from toolkit.gpu.tiles import product_tile
from toolkit.gpu.view import View, row_major


def emit_gemm(draft: Draft, group: Group) -> None:
    """Add a Gemm: alpha and beta are in the weights already, B and C are constant."""
    op = group.root_operation
    if op.number("alpha", 1.0) != 1.0 or (op.input(2) and op.number("beta", 1.0) != 1.0):
        raise NotCoveredError(f"node {op.name!r} (Gemm) has factors; kernels take 1.0")
    weights = constant_weights(draft, op, 1)
    right = draft.constant(weights.T if op.integer("transB", 0) else weights, draft.dtype)
    left = draft.read(op.inputs[0])
    if left.dtype != draft.dtype:
        left = draft.rows(op.inputs[0])
    left = left.permuted((1, 0)) if op.integer("transA", 0) else left
    _matmul(draft, group, left, right, ending_of(draft, group, op.input(2)))


def emit_matmul(draft: Draft, group: Group) -> None:
    """Add a MatMul, of two tensors or of a tensor and a constant."""
    op = group.root_operation
    left, right = (_stored(draft, name) for name in op.inputs)
    if len(left.shape) < 2 or len(right.shape) < 2:
        raise NotCoveredError(f"node {op.name!r} (MatMul) has a vector; kernels take matrices")
    if len(right.shape) == 2 and len(left.shape) > 2:
        left = _as_matrix(draft, left)
    elif len(left.shape) > 2:
        if left.shape[:-2] != right.shape[:-2]:
            raise NotCoveredError(
                f"node {op.name!r} (MatMul) repeats {list(right.shape)} along {list(left.shape)}; "
                "kernels take equal batches"
            )
        left, right = _as_batch(draft, left), _as_batch(draft, right)
    _matmul(draft, group, left, right, ending_of(draft, group, ""))


def _matmul(draft: Draft, group: Group, left: View, right: View, ending: Ending) -> None:
    """Add the product of two views of rank 2, or of two of rank 3."""
    products = left.shape[0] if len(left.shape) == 3 else 1
    if products > 1 and ending.residual is not None:
        raise NotCoveredError(
            f"node {group.nodes[0]!r} ends {products} products in a residual; kernels take 1"
        )
    (rows, depth), columns = left.shape[-2:], right.shape[-1]
    residual = None if ending.residual is None else draft.rows(ending.residual)
    y = draft.make(group.result)
    tile = product_tile(rows, columns, depth, draft.item_bytes, draft.gpu)
    call = draft.make_call(
        "matmul",
        (ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns), products, 1),
        {
            "a": left,
            "b": right,
            "bias": ending.bias,
            "residual": residual,
            "y": y,
            "rows": rows,
        },
        {
            "DEPTH": depth,
            "COLUMNS": columns,
            **operand_strides("A", *_three(left)),
            **operand_strides("B", *_three(right)),
            "Y_BATCH": rows * columns,
            "Y_PITCH": columns,
            "R_PITCH": columns,
            "STEPS": ending.steps,
            **product_constants(draft, tile),
        },
        writes=(y,),
        warps=tile.warps,
        stages=tile.stages,
    )
    draft.add(group.nodes, (call,))


def _stored(draft: Draft, name: str) -> View:
    """Return a view in the type that products are made in."""
    view = draft.read(name)
    return view if view.dtype == draft.dtype else draft.rows(name)


def _as_matrix(draft: Draft, view: View) -> View:
    """Join all dimensions but the last; copies if they do not lie in a row."""
    shape = (prod(view.shape[:-1]), view.shape[-1])
    return _dense(draft, view).reshaped(shape) or view


def _as_batch(draft: Draft, view: View) -> View:
    """Join all dimensions but the last two; a single batch dimension keeps its strides."""
    if len(view.shape) == 3:
        return view
    shape = (prod(view.shape[:-2]), *view.shape[-2:])
    return _dense(draft, view).reshaped(shape) or view


def _dense(draft: Draft, view: View) -> View:
    if view.is_row_major():
        return view
    return draft.copy(view, row_major(view.shape), view.dtype)


def _three(view: View) -> tuple[int, int, int]:
    """Return the strides of products, rows and columns."""
    batch = view.strides[0] if len(view.shape) == 3 else 0
    return batch, view.strides[-2], view.strides[-1]
