"""Products of matrices -> calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.elementwise import broadcast
from toolkit.gpu.emit.epilogue import (
    Epilogue,
    constant_weights,
    epilogue_of,
    operand_strides,
    result_strides,
    weight_matrix,
)
from toolkit.gpu.emit.int8_gemm import int8_factors, int8_weights
from toolkit.gpu.emit.row_panel import gemm_tactics
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.view import Shape, View, like, row_major
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.tiles import GemmShape
from toolkit.plugins import Constant


@dataclass(frozen=True, slots=True)
class _Products:
    """Operands of rank 3 or 4: (products, rows, columns) or (groups, products, rows, columns).

    `residual` is repeated to the shape of `y`.
    """

    left: View
    right: View
    y: View
    residual: View | None

    @property
    def given(self) -> tuple[View, ...]:
        views = (self.left, self.right, self.y, self.residual)
        return tuple(view for view in views if view is not None)


def emit_gemm(ctx: LoweringContext, group: Group) -> None:
    """Add a Gemm: alpha and beta are in the weights already, B and C are constant."""
    op = group.root_operation
    if op.number("alpha", 1.0) != 1.0 or (op.input(2) and op.number("beta", 1.0) != 1.0):
        raise NotCoveredError(f"node {op.name!r} (Gemm) has factors; kernels take 1.0")
    weights, turned = constant_weights(ctx, op, 1), bool(op.integer("transB", 0))
    depth, columns = reversed(weights.shape) if turned else weights.shape
    integer = int8_weights(ctx, op, 0 if turned else 1, columns, depth)
    left = ctx.read_int8_or_float(op.inputs[0]) if integer else ctx.read_float(op.inputs[0])
    values = weights if integer is None else integer.values
    right = weight_matrix(ctx, values.T if turned else values, left.dtype)
    left = left.permuted((1, 0)) if op.integer("transA", 0) else left
    _matmul(ctx, group, left, right, epilogue_of(ctx, group, op.input(2), integer))


def emit_matmul(ctx: LoweringContext, group: Group) -> None:
    """Add a MatMul of tensors or constants of any rank; a third input is a bias of the columns."""
    op = group.root_operation
    shape = _shape(ctx, op.inputs[1])
    if len(shape) > 1:
        weights = int8_weights(ctx, op, -1, shape[-1], shape[-2])
        if weights is not None:
            left = ctx.read_int8_or_float(op.inputs[0])
            right = weight_matrix(ctx, weights.values, left.dtype)
            _matmul(ctx, group, left, right, epilogue_of(ctx, group, op.input(2), weights))
            return
    depth, columns = (*shape, 1) if len(shape) == 1 else shape[-2:]
    integer = int8_factors(ctx, op, depth, columns)
    read = ctx.read_float if integer is None else ctx.read_int8_or_float
    left = read(op.inputs[0])
    constant = ctx.network.constants.get(op.inputs[1])
    if constant is not None and constant.ndim == 2:
        right = weight_matrix(ctx, constant, left.dtype)
    else:
        right = read(op.inputs[1])
    _matmul(ctx, group, left, right, epilogue_of(ctx, group, op.input(2), integer))


def _matmul(
    ctx: LoweringContext, group: Group, left: View, right: View, epilogue: Epilogue
) -> None:
    """Add the product of two views of any rank, as numpy.matmul."""
    y = ctx.output_view(group.result, _order(ctx, group.result, left, right))
    if y.strides and y.strides[-1] != 1:
        raise NotCoveredError(f"node {group.nodes[0]!r} writes columns apart from each other")
    residual = (
        None if epilogue.residual is None else _read_residual(ctx, epilogue.residual, y.shape)
    )
    if len(right.shape) == 2 and len(left.shape) > 2:  # rows are rows in any order
        order = sorted(range(len(left.shape) - 1), key=lambda at: -left.strides[at])
        left, y = (view.permuted((*order, len(order))) for view in (left, y))
        residual = residual and residual.permuted((*order, len(order)))
    products = _with_batches(ctx, _as_matrices(left, right, y, residual))
    left, right, y = products.left, products.right, products.y
    (rows, depth), columns = left.shape[-2:], right.shape[-1]
    groups, inner = (1, *left.shape[:-2])[-2:]
    product = GemmShape(
        rows=rows,
        columns=columns,
        depth=depth,
        run=depth,
        item_bytes=left.item_bytes,
        stored_bytes=sum(view.item_bytes for view in (y, residual) if view is not None),
        products=groups * inner,
    )
    constants: dict[str, Constant] = {
        "DEPTH": depth,
        "COLUMNS": columns,
        "INNER": inner,
        **operand_strides("A", *_inside_out(left)),
        **operand_strides("B", *_inside_out(right)),
        **result_strides("Y", *_rows_out(y)),
        **result_strides("R", *_rows_out(products.residual or y)),
        "EPILOGUE": epilogue.steps,
    }
    operands = {
        "a": left,
        "b": right,
        "bias": epilogue.bias,
        "scale": epilogue.scale,
        "scalars": epilogue.scalars,
        "residual": products.residual,
        "y": y,
        "rows": rows,
    }
    ctx.add_op(group.nodes, *gemm_tactics(ctx, product, operands, constants))


def _order(ctx: LoweringContext, result: str, left: View, right: View) -> Shape | None:
    """Return strides for the result in the order in which the rows of `left` lie; None: as usual.

    All rows of a transposed tensor are then rows of one product.
    """
    transposed = len(left.shape) > 2 and not left.is_row_major() and left.strides[-1] == 1
    if not transposed or len(right.shape) != 2 or result in ctx.network.outputs:
        return None
    return like(left.strides, ctx.network.shapes[result])


def _shape(ctx: LoweringContext, name: str) -> Shape:
    constant = ctx.network.constants.get(name)
    return ctx.network.shapes[name] if constant is None else constant.shape


def _read_residual(ctx: LoweringContext, name: str, shape: Shape) -> View:
    """Return a tensor repeated to `shape`, with columns side by side; copies if needed."""
    view = broadcast(ctx.read_int8_or_float(name), shape)
    if shape[-1:] != (1,) and view.strides[-1:] != (1,):
        view = ctx.copy_view(view, row_major(shape), view.dtype)
    return view


def _as_matrices(left: View, right: View, y: View, residual: View | None) -> _Products:
    """Give vectors their second dimension, and all the same dimensions before the last two."""
    if len(right.shape) == 1:
        right = _unsqueezed(right, 1)
        y = _unsqueezed(y, len(y.shape))
        residual = residual and _unsqueezed(residual, len(residual.shape))
    if len(left.shape) == 1:
        left = _unsqueezed(left, 0)
        y = _unsqueezed(y, len(y.shape) - 1)
        residual = residual and _unsqueezed(residual, len(residual.shape) - 1)
    batch = y.shape[:-2]
    left = broadcast(left, (*batch, *left.shape[-2:]))
    return _Products(left, broadcast(right, (*batch, *right.shape[-2:])), y, residual)


def _with_batches(ctx: LoweringContext, products: _Products) -> _Products:
    """Join the dimensions before the last two to one or two; copies operands if needed.

    Where all products share the right operand, the last of them joins the rows.
    """
    found = _joined(products)
    if len(found.left.shape) > 4:
        left, right = (_dense(ctx, view) for view in (products.left, products.right))
        residual = products.residual and _dense(ctx, products.residual)
        found = _joined(replace(products, left=left, right=right, residual=residual))
    return found


def _joined(products: _Products) -> _Products:
    y = products.y
    batches: list[tuple[int, tuple[int, ...]]] = []  # sizes, and the strides of all views
    for at in range(len(y.shape) - 2):
        size, steps = y.shape[at], tuple(view.strides[at] for view in products.given)
        if size == 1:
            continue
        if batches and all(o == s * size for o, s in zip(batches[-1][1], steps, strict=True)):
            batches[-1] = (batches[-1][0] * size, steps)
        else:
            batches.append((size, steps))
    tails = [(view.shape[-2:], view.strides[-2:]) for view in products.given]
    if batches and batches[-1][1][1] == 0 and _rows_join(products, batches[-1][1]):
        size, steps = batches.pop()
        rows = y.shape[-2] * size
        inner = [s if y.shape[-2] == 1 else t[1][0] for s, t in zip(steps, tails, strict=True)]
        tails = [
            (t[0], t[1]) if at == 1 else ((rows, t[0][1]), (inner[at], t[1][1]))
            for at, t in enumerate(tails)
        ]
    batches = batches or [(1, (0,) * len(tails))]
    views = [
        replace(
            view,
            shape=(*(size for size, _ in batches), *shape),
            strides=(*(steps[at] for _, steps in batches), *strides),
        )
        for at, (view, (shape, strides)) in enumerate(zip(products.given, tails, strict=True))
    ]
    return _Products(views[0], views[1], views[2], views[3] if len(views) == 4 else None)


def _rows_join(products: _Products, steps: Sequence[int]) -> bool:
    """Whether the rows of one product and those of the next lie like rows of one."""
    rows = products.y.shape[-2]
    views = [(at, view) for at, view in enumerate(products.given) if at != 1]
    return rows == 1 or all(steps[at] == rows * view.strides[-2] for at, view in views)


def _unsqueezed(view: View, at: int) -> View:
    shape, strides = view.shape, view.strides
    return replace(
        view, shape=(*shape[:at], 1, *shape[at:]), strides=(*strides[:at], 1, *strides[at:])
    )


def _dense(ctx: LoweringContext, view: View) -> View:
    if view.is_row_major():
        return view
    return ctx.copy_view(view, row_major(view.shape), view.dtype)


def _inside_out(view: View) -> tuple[int, int, int, int]:
    """Return the strides of rows, columns, products and groups of them."""
    outer, batch, row, column = (0, *view.strides)[-4:]
    return row, column, batch, outer


def _rows_out(view: View) -> tuple[int, int, int]:
    """Return the strides of rows, products and groups of them."""
    row, _, batch, outer = _inside_out(view)
    return row, batch, outer
