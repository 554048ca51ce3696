"""Lower Gemm and MatMul to matrix products."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.gpu.emit.context import LoweringContext, Numbers
from toolkit.gpu.emit.elementwise import broadcast
from toolkit.gpu.emit.epilogue import read_epilogue, weight_matrix
from toolkit.gpu.emit.float8_gemm import float8_weights
from toolkit.gpu.emit.int4_gemm import Int4Weights, add_int4_gemm, int4_weights
from toolkit.gpu.emit.int8_gemm import Int8Epilogue, int8_factors, int8_weights
from toolkit.gpu.emit.tiled_gemm import add_gemm
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.gemm import DenseLoader, Epilogue, GemmProblem, GemmShape, MatrixStrides
from toolkit.gpu.ir.network import Array
from toolkit.gpu.ir.view import Shape, View, like, row_major
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.schedule.loop_order import join_contiguous
from toolkit.graph.dtypes import FLOAT8


@dataclass(frozen=True, slots=True)
class _Operands:
    """Operands of rank 3 or 4: (products, rows, columns) or (groups, products, rows, columns).

    `residual` is repeated to the shape of `y`.
    """

    left: View
    right: View
    y: View
    residual: View | None

    @property
    def views(self) -> tuple[View, ...]:
        views = (self.left, self.right, self.y, self.residual)
        return tuple(view for view in views if view is not None)


def emit_gemm(ctx: LoweringContext, group: Group) -> None:
    """Add a Gemm: alpha and beta are in the weights already, B and C are constant."""
    op = group.root_operation
    weights, transposed = ctx.network.constants[op.inputs[1]], bool(op.integer("transB", 0))
    depth, columns = reversed(weights.shape) if transposed else weights.shape
    if _add_float8(ctx, group, columns, transposed=transposed):
        return
    int4 = int4_weights(ctx, op, transposed=transposed)
    if int4 is not None:
        left = ctx.read(op.inputs[0], "float")
        left = left.permuted((1, 0)) if op.integer("transA", 0) else left
        _add(ctx, group, left, _matrix(int4, depth, columns), int4=int4)
        return
    int8 = int8_weights(ctx, op, 0 if transposed else 1, columns, depth)
    numbers: Numbers = "int8 or float" if int8 else "float"
    left = ctx.read(op.inputs[0], numbers, floats=ctx.float_type(*op.inputs[:2]))
    values = weights if int8 is None else int8.values
    right = weight_matrix(ctx, values.T if transposed else values, left.dtype)
    left = left.permuted((1, 0)) if op.integer("transA", 0) else left
    _add(ctx, group, left, right, int8)


def emit_matmul(ctx: LoweringContext, group: Group) -> None:
    """Add a MatMul of tensors or constants of any rank; a third input is a bias of the columns."""
    op = group.root_operation
    shape = _shape(ctx, op.inputs[1])
    if _add_float8(ctx, group, shape[-1], transposed=False):
        return
    if len(shape) > 1:
        weights = int8_weights(ctx, op, -1, shape[-1], shape[-2])
        if weights is not None:
            left = ctx.read(op.inputs[0], "int8 or float")
            right = weight_matrix(ctx, weights.values, left.dtype)
            _add(ctx, group, left, right, weights)
            return
    depth, columns = (*shape, 1) if len(shape) == 1 else shape[-2:]
    int8 = int8_factors(ctx, op, depth, columns)
    numbers: Numbers = "float" if int8 is None else "int8 or float"
    floats = ctx.float_type(*op.inputs[:2])
    left = ctx.read(op.inputs[0], numbers, floats=floats)
    constant = ctx.network.constants.get(op.inputs[1])
    int4 = int4_weights(ctx, op, transposed=False)
    if int4 is not None:
        right = _matrix(int4, depth, columns)
    elif constant is not None and constant.ndim == 2:
        right = weight_matrix(ctx, constant, left.dtype)
    else:
        right = ctx.read(op.inputs[1], numbers, floats=floats)
    _add(ctx, group, left, right, int8, int4=int4)


def _add_float8(ctx: LoweringContext, group: Group, columns: int, *, transposed: bool) -> bool:
    """Add a product of FP8; False: it is none."""
    weights = float8_weights(ctx, group.root_operation, columns)
    if weights is None:
        return False
    values = weights.values.T if transposed else weights.values
    left = ctx.read(group.root_operation.inputs[0])
    _add(ctx, group, left, weight_matrix(ctx, values, left.dtype), factors=weights.factors)
    return True


def _matrix(int4: Int4Weights, depth: int, columns: int) -> View:
    """Return the weights as a matrix, whose strides no kernel reads."""
    return replace(int4.words, shape=(depth, columns), strides=(1, depth))


def _add(
    ctx: LoweringContext,
    group: Group,
    left: View,
    right: View,
    int8: Int8Epilogue | None = None,
    *,
    int4: Int4Weights | None = None,
    factors: Array | None = None,
) -> None:
    """Add the product of two views of any rank, as numpy.matmul; `factors` of its columns."""
    op = group.root_operation
    columns = (ctx.network.shapes[op.outputs[0]] or (1,))[-1]
    factors = factors if int4 is None else int4.factors
    epilogue, residual_name = read_epilogue(ctx, group, op.input(2), columns, int8, factors=factors)
    y = ctx.output_view(group.result, _order(ctx, group.result, left, right))
    if y.strides and y.strides[-1] != 1:
        raise NotCoveredError(f"node {group.nodes[0]!r} writes columns apart from each other")
    residual = None if residual_name is None else _read_residual(ctx, residual_name, y.shape)
    if len(right.shape) == 2 and len(left.shape) > 2:  # rows are rows in any order
        order = sorted(range(len(left.shape) - 1), key=lambda at: -left.strides[at])
        left, y = (view.permuted((*order, len(order))) for view in (left, y))
        residual = residual and residual.permuted((*order, len(order)))
    batched = _with_batches(ctx, _as_matrices(left, right, y, residual))
    problem = _problem(batched, epilogue)
    if int4 is None:
        add_gemm(ctx, group.nodes, problem)
    else:
        add_int4_gemm(ctx, group.nodes, problem, int4)


def _problem(operands: _Operands, epilogue: Epilogue) -> GemmProblem:
    left, right, y, residual = operands.left, operands.right, operands.y, operands.residual
    (rows, depth), columns = left.shape[-2:], right.shape[-1]
    groups, inner = (1, *left.shape[:-2])[-2:]
    shape = GemmShape(
        rows=rows,
        columns=columns,
        depth=depth,
        unshared_depth=depth,
        item_bytes=left.item_bytes,
        stored_bytes=sum(view.item_bytes for view in (y, residual) if view is not None),
        batch=groups * inner,
        float8=left.dtype == FLOAT8,
        holds_registers=residual is not None and residual.item_bytes > left.item_bytes,
    )
    return GemmProblem(
        shape=shape,
        left=DenseLoader(left, _strides(left)),
        right=right,
        right_strides=_strides(right),
        y=y,
        y_strides=_strides(y),
        epilogue=epilogue,
        residual=residual,
        residual_strides=_strides(residual or y),
        inner=inner,
    )


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
    view = broadcast(ctx.read(name, "int8 or float"), shape)
    if shape[-1:] != (1,) and view.strides[-1:] != (1,):
        view = ctx.copy_view(view, row_major(shape), view.dtype)
    return view


def _as_matrices(left: View, right: View, y: View, residual: View | None) -> _Operands:
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
    return _Operands(left, broadcast(right, (*batch, *right.shape[-2:])), y, residual)


def _with_batches(ctx: LoweringContext, operands: _Operands) -> _Operands:
    """Join the dimensions before the last two to one or two; copies operands if needed.

    Where all products share the right operand, the last of them joins the rows.
    """
    joined = _joined(operands)
    if len(joined.left.shape) > 4:
        left, right = (_dense(ctx, view) for view in (operands.left, operands.right))
        residual = operands.residual and _dense(ctx, operands.residual)
        joined = _joined(replace(operands, left=left, right=right, residual=residual))
    return joined


def _joined(operands: _Operands) -> _Operands:
    y = operands.y
    outer = range(len(y.shape) - 2)
    batches = join_contiguous(
        (y.shape[at], tuple(view.strides[at] for view in operands.views)) for at in outer
    )
    tails = [(view.shape[-2:], view.strides[-2:]) for view in operands.views]
    if batches and batches[-1][1][1] == 0 and _rows_join(operands, batches[-1][1]):
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
        for at, (view, (shape, strides)) in enumerate(zip(operands.views, tails, strict=True))
    ]
    return _Operands(views[0], views[1], views[2], views[3] if len(views) == 4 else None)


def _rows_join(operands: _Operands, steps: Sequence[int]) -> bool:
    """Whether the rows of one product and those of the next lie like rows of one."""
    rows = operands.y.shape[-2]
    views = [(at, view) for at, view in enumerate(operands.views) if at != 1]
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


def _strides(view: View) -> MatrixStrides:
    """Return the strides of (matrices, rows, columns) or (groups, matrices, rows, columns)."""
    outer, batch, row, column = (0, *view.strides)[-4:]
    return MatrixStrides(row, column, batch, outer)
