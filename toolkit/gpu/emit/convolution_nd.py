"""Lower convolutions and transposed ones over one to three dimensions to one matrix product.

`convolution.py` has more kernels for those over two whose weights are constants."""

from dataclasses import replace
from math import prod

import numpy as np

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.epilogue import pixel_pitch, read_epilogue, weight_matrix
from toolkit.gpu.emit.tiled_gemm import add_gemm
from toolkit.gpu.ir.gemm import GemmProblem, GemmShape, Im2col3dLoader, MatrixStrides, Three
from toolkit.gpu.ir.network import Array, Operation
from toolkit.gpu.ir.view import Shape, View, channels_last, row_major
from toolkit.gpu.ir.windows import read_transposed_window, read_window, three
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div
from toolkit.graph.window import Window


def emit_convolution_nd(ctx: LoweringContext, group: Group) -> None:
    """Add a Conv over one or three dimensions, or with weights that are computed."""
    op = group.root_operation
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[group.result]
    weights, taps = _filters(ctx, op)
    window = read_window(op, op.integers("kernel_shape", taps), shape, result)
    _add(ctx, group, weights, window, taps=three(taps, 1), dilations=three(window.dilations, 1))


def emit_transposed_convolution(ctx: LoweringContext, group: Group) -> None:
    """Add a ConvTranspose: a convolution for each phase of its strides."""
    op = group.root_operation
    weights = ctx.network.constants[op.inputs[1]]
    shape, result = ctx.network.shapes[op.inputs[0]], ctx.network.shapes[group.result]
    window = read_transposed_window(op, weights.shape[2:], shape, result)
    dilated = _dilated(weights, three(window.dilations, 1))
    strides, pads = three(window.strides, 1), three(window.before, 0)
    phases = _phases(dilated, op.integer("group", 1), strides, pads)
    matrices = phases.reshape(*phases.shape[:2], -1, phases.shape[-1])
    packed = weight_matrix(ctx, matrices, ctx.float_type(*op.inputs[:2]))
    taps = three(phases.shape[2:5], 1)
    _add(ctx, group, packed, window, taps=taps, dilations=(-1, -1, -1), transposed=True)


def _filters(ctx: LoweringContext, op: Operation) -> tuple[View, Shape]:
    """Return the weights of a Conv, (1, groups, taps x channels, filters of a group), and the taps.

    They are packed now, or while running if they are computed then.
    """
    groups, name = op.integer("group", 1), op.inputs[1]
    if name in ctx.network.constants:
        weights = ctx.network.constants[name]
        # (group, filter, channel, taps) -> (group, taps, channel, filter)
        each = weights.reshape(groups, weights.shape[0] // groups, weights.shape[1], -1)
        packed = each.transpose(0, 3, 2, 1).reshape(1, groups, -1, each.shape[1])
        return weight_matrix(ctx, packed, ctx.float_type(*op.inputs[:2])), weights.shape[2:]
    view = ctx.read(name, "float", floats=ctx.float_type(*op.inputs[:2]))
    moved = view.permuted((0, *range(2, len(view.shape)), 1))
    if not moved.is_row_major():
        moved = ctx.copy_view(moved, row_major(moved.shape), moved.dtype)
    filters, depth = view.shape[0] // groups, prod(view.shape[1:])
    strides = (0, filters * depth, 1, depth)
    return replace(moved, shape=(1, groups, depth, filters), strides=strides), view.shape[2:]


def _add(
    ctx: LoweringContext,
    group: Group,
    weights: View,
    window: Window,
    *,
    taps: Three,
    dilations: Three,
    transposed: bool = False,
) -> None:
    """Add the product with `weights`, (phases, groups, taps x channels, filters)."""
    op = group.root_operation
    phases, groups, depth, filters = weights.shape
    x = ctx.read(op.inputs[0], "float", "channels last", ctx.float_type(*op.inputs[:2]))
    y = ctx.output_view(group.result, channels_last(ctx.network.shapes[group.result]))
    epilogue, residual_name = read_epilogue(ctx, group, op.input(2), filters * groups)
    residual = None
    if residual_name is not None:
        residual = ctx.read(residual_name, "float", "channels last")
    output_size, strides = three(y.shape[2:], 1), three(window.strides, 1)
    step = strides if transposed else (1, 1, 1)
    pixels = (ceil_div(n, each) for n, each in zip(output_size, step, strict=True))
    channels = depth // prod(taps)
    shape = GemmShape(
        rows=y.shape[0] * prod(pixels),
        columns=filters,
        depth=depth,
        unshared_depth=channels,
        item_bytes=x.item_bytes,
        stored_bytes=y.item_bytes + (0 if residual is None else residual.item_bytes),
        batch=phases * groups,
        holds_registers=True,
    )
    left = Im2col3dLoader(
        view=x,
        strides=(x.strides[0], *three(x.strides[2:], 0)),
        size=three(x.shape[2:], 1),
        output_size=output_size,
        taps=taps,
        step=strides,
        dilations=dilations,
        pads=three(window.before, 0),
        channels=channels,
        groups=groups,
        phases=phases,
        transposed=transposed,
    )
    phase, group_stride, row, column = weights.strides
    problem = GemmProblem(
        shape=shape,
        left=left,
        right=weights,
        right_strides=MatrixStrides(row, column, batch=group_stride, outer=phase),
        y=y,
        y_strides=MatrixStrides(pixel_pitch(y)),
        epilogue=epilogue,
        residual=residual,
        residual_strides=MatrixStrides(pixel_pitch(residual) if residual is not None else 0),
    )
    add_gemm(ctx, group.nodes, problem)


def _dilated(weights: Array, dilations: Three) -> Array:
    """Return (C, F, taps...) as (C, F, depth, rows, columns) with zeros between the taps."""
    taps = weights.reshape(*weights.shape[:2], *three(weights.shape[2:], 1))
    sizes = [(n - 1) * d + 1 for n, d in zip(taps.shape[2:], dilations, strict=True)]
    wide = np.zeros((*taps.shape[:2], *sizes), weights.dtype)
    wide[:, :, :: dilations[0], :: dilations[1], :: dilations[2]] = taps
    return wide


def _phases(weights: Array, groups: int, strides: Three, pads: Three) -> Array:
    """Return (C, F / groups, taps...) as (phase, group, taps of a phase..., channel, filter).

    The taps of a phase are those of its remainder, (phase + pad) % stride; missing ones are 0.
    """
    channels, filters, *taps = weights.shape
    counts = [ceil_div(n, step) for n, step in zip(taps, strides, strict=True)]
    missing = [c * s - n for c, s, n in zip(counts, strides, taps, strict=True)]
    padded = np.pad(weights, [(0, 0), (0, 0), *((0, n) for n in missing)])
    grouped = padded.reshape(groups, channels // groups, filters, *padded.shape[2:])
    parts = []
    for phase in np.ndindex(*strides):
        first = [
            (offset + pad) % step for offset, pad, step in zip(phase, pads, strides, strict=True)
        ]
        d, h, w = (slice(at, None, step) for at, step in zip(first, strides, strict=True))
        parts.append(grouped[:, :, :, d, h, w].transpose(0, 3, 4, 5, 1, 2))
    return np.stack(parts)
