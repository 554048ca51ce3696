"""Moves between space and channels, written as convolutions with weights of 0 and 1.

space to depth: y[(i, j, c), h, w] = x[c, b h + i, b w + j], a convolution of window and stride b;
depth to space is the transposed one. Chains of views (Reshape, Transpose, ..) are followed by
numbering the elements: where the numbers come out is what the chain does.
"""

from collections.abc import Iterator
from math import prod

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from toolkit.dla.legalize.graph_rewriter import GraphRewriter
from toolkit.dla.legalize.rewrite import Outcome, Site, image, sizes
from toolkit.dla.legalize.selection import choose_channels, slice_ranges

VIEWS = frozenset({"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze"})
# Of these, those that leave every element at its place in memory.
PLAIN_VIEWS = VIEWS - {"Transpose"}
MAX_NUMBERED = 1 << 22  # elements: what following a chain may number
MAX_CHAIN = 16
MAX_BLOCK = 32  # longest window of a transposed convolution, rule deconv.kernel


def space_to_depth(site: Site) -> Outcome:
    """Write SpaceToDepth as a strided convolution."""
    shape, block = image(site.data), site.view.integer("blocksize", 1)
    if shape is None:
        return "it needs a 4-D map of known size"
    order = space_to_depth_order(shape[1], block)
    return site.replaced_by(gather_blocks(site.rewriter, site.data, order))


def depth_to_space(site: Site) -> Outcome:
    """Write DepthToSpace as a transposed convolution."""
    shape, block = image(site.data), site.view.integer("blocksize", 1)
    if shape is None:
        return "it needs a 4-D map of known size"
    columns_first = site.view.attribute("mode") == "CRD"
    order = _depth_to_space_order(shape[1] // block**2, block, columns_first=columns_first)
    return site.replaced_by(_scatter_blocks(site.rewriter, site.data, order))


def space_to_depth_order(channels: int, block: int) -> NDArray[np.int64]:
    """Where each output channel comes from: its channel, row and column in a block, [C b b, 3]."""
    rows, columns, maps = np.meshgrid(
        np.arange(block), np.arange(block), np.arange(channels), indexing="ij"
    )
    return np.stack([maps.ravel(), rows.ravel(), columns.ravel()], axis=1)


def _depth_to_space_order(channels: int, block: int, *, columns_first: bool) -> NDArray[np.int64]:
    """Where each input channel goes to: its channel, row and column in a block, [C b b, 3]."""
    if not columns_first:
        return space_to_depth_order(channels, block)
    maps, rows, columns = np.meshgrid(
        np.arange(channels), np.arange(block), np.arange(block), indexing="ij"
    )
    return np.stack([maps.ravel(), rows.ravel(), columns.ravel()], axis=1)


def gather_blocks(rewriter: GraphRewriter, data: ir.Value, order: NDArray[np.int64]) -> ir.Value:
    """Add the convolution that makes each output channel of one place in each block."""
    shape = image(data)
    assert shape is not None
    block = int(order[:, 1:].max()) + 1
    weights = np.zeros((len(order), shape[1], block, block))
    weights[np.arange(len(order)), order[:, 0], order[:, 1], order[:, 2]] = 1.0
    attributes = {"kernel_shape": (block, block), "strides": (block, block)}
    return rewriter.add("Conv", [data, rewriter.constant(weights, data)], attributes)


def _scatter_blocks(rewriter: GraphRewriter, data: ir.Value, order: NDArray[np.int64]) -> ir.Value:
    channels, block = int(order[:, 0].max()) + 1, int(order[:, 1:].max()) + 1
    weights = np.zeros((len(order), channels, block, block))
    weights[np.arange(len(order)), order[:, 0], order[:, 1], order[:, 2]] = 1.0
    attributes = {"kernel_shape": (block, block), "strides": (block, block)}
    return rewriter.add("ConvTranspose", [data, rewriter.constant(weights, data)], attributes)


def focus(site: Site) -> Outcome:
    """Write a Concat of all the strided slices of one map as a strided convolution."""
    if site.view.integer("axis", 0) % 4 != 1:
        return "it does not concatenate channels"
    slices = [_strided(value) for value in site.node.inputs]
    first = slices[0]
    if first is None or len(slices) < 2:
        return "its inputs are not strided slices"
    source, block = first[0], first[1]
    shape = image(source)
    order: list[NDArray[np.int64]] = []
    for piece in slices:
        if piece is None or piece[0] is not source or piece[1] != block or shape is None:
            return "its inputs are not strided slices of one map"
        rows, columns = piece[2]
        maps = np.arange(shape[1])
        corner = [np.full(shape[1], index) for index in (rows, columns)]
        order.append(np.stack([maps, *corner], axis=1))
    positions = np.concatenate(order)
    if int(positions[:, 1:].max()) + 1 != block:
        return "the slices leave the end of each block out"
    return site.replaced_by(gather_blocks(site.rewriter, source, positions))


def _strided(value: ir.Value | None) -> tuple[ir.Value, int, tuple[int, int]] | None:
    """The map, the step and the first row and column, of Slices that follow each other."""
    from_row = from_column = 0
    by_row = by_column = 1
    while value is not None:
        node = value.producer()
        if node is None or node.op_type != "Slice":
            break
        shape, ranges = image(node.inputs[0]), slice_ranges(node)
        if (
            shape is None
            or isinstance(ranges, str)
            or ranges[:2] != [range(shape[0]), range(shape[1])]
        ):
            return None
        for axis, size in ((2, shape[2]), (3, shape[3])):
            whole = len(ranges[axis]) * ranges[axis].step == size
            if not whole or ranges[axis].start >= ranges[axis].step:
                return None
        # x[a::s][b::t] = x[a + s b :: s t]; the slice further up comes later.
        from_row, by_row = ranges[2].start + ranges[2].step * from_row, by_row * ranges[2].step
        from_column, by_column = (
            ranges[3].start + ranges[3].step * from_column,
            by_column * ranges[3].step,
        )
        value = node.inputs[0]
    if value is None or by_row != by_column or by_row == 1:
        return None
    return value, by_row, (from_row, from_column)


def view_identity(site: Site) -> Outcome:
    """Drop views that give back the tensor that they began with."""
    for source in _sources(site.output):
        if sizes(source) == sizes(site.output) and _unmoved(site.output, source):
            return site.replaced_by(source)
    return "no tensor above has the same elements in the same shape"


def view_moves(site: Site) -> Outcome:
    """Write views that move channels, or channels and space, as one convolution."""
    for source in _sources(site.output):
        moved = _moved(site.rewriter, source, site.output)
        if moved is not None:
            return site.replaced_by(moved)
    return "the views move neither channels nor blocks of a 4-D map"


def view_unary(site: Site) -> Outcome:
    """f(view(x)) = view(f(x)) for an f of one element."""
    view = site.data.producer()
    if view is None or view.op_type not in VIEWS or site.data.is_graph_output():
        return "its input is no view, or is an output"
    source, chain = site.data, []
    while (node := source.producer()) is not None and node.op_type in VIEWS:
        chain.append(node)
        above = node.inputs[0]
        if above is None or len(chain) > MAX_CHAIN:
            break
        source = above
        if image(source) is not None:
            break
    if image(source) is None or not all(_single(node) for node in chain):
        return "the views above it have other readers, or no 4-D map above them"
    rewriter = site.rewriter
    data = rewriter.add(site.node.op_type, [source, *site.node.inputs[1:]], _plain(site.node))
    for node in reversed(chain):
        data = rewriter.add_border(node.op_type, [data, *node.inputs[1:]], _plain(node))
    return site.replaced_by(data)


def _single(node: ir.Node) -> bool:
    return len(list(node.outputs[0].uses())) == 1 and not node.outputs[0].is_graph_output()


def _plain(node: ir.Node) -> dict[str, int | float | str | tuple[int, ...]]:
    kinds = (int, float, str, tuple)
    return {name: a.value for name, a in node.attributes.items() if isinstance(a.value, kinds)}


def _sources(value: ir.Value) -> Iterator[ir.Value]:
    """The 4-D maps above a view, through other views."""
    for _ in range(MAX_CHAIN):
        node = value.producer()
        above = node.inputs[0] if node is not None and node.op_type in VIEWS else None
        if above is None or above.is_initializer():
            return
        value = above
        if image(value) is not None:
            yield value


def _numbered(result: ir.Value, source: ir.Value) -> NDArray[np.int64] | None:
    """The place in `source` of every element of `result`; None: too many, or a size unknown."""
    shape = sizes(source)
    if shape is None or int(np.prod(shape)) > MAX_NUMBERED:
        return None
    chain: list[ir.Node] = []
    value = result
    while value is not source:
        node = value.producer()
        assert node is not None
        chain.append(node)
        above = node.inputs[0]
        assert above is not None
        value = above
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    for node in reversed(chain):
        if node.op_type == "Transpose":
            order = node.attributes.get_ints("perm", tuple(range(numbers.ndim))[::-1])
            numbers = numbers.transpose(order)
        else:
            size = sizes(node.outputs[0])
            if size is None:
                return None
            numbers = numbers.reshape(size)
    return numbers


def _unmoved(result: ir.Value, source: ir.Value) -> bool:
    numbers = _numbered(result, source)
    return numbers is not None and bool(np.all(np.diff(numbers.reshape(-1)) == 1))


def _moved(rewriter: GraphRewriter, source: ir.Value, result: ir.Value) -> ir.Value | None:
    """Return `result` computed from `source` by a convolution, None where it is no such move."""
    source_shape, result_shape = image(source), image(result)
    if source_shape is None or result_shape is None or source_shape[0] != result_shape[0]:
        return None
    if 0 in (*source_shape, *result_shape):
        return None
    numbers = _numbered(result, source)
    starts = prod(source_shape[1:]) * np.arange(source_shape[0])[:, None, None, None]
    if numbers is None or not np.array_equal(numbers, numbers[:1] + starts):
        return None  # the batch is moved
    origins = np.stack(np.unravel_index(numbers[0], source_shape[1:]), axis=-1)
    if source_shape[1:] == result_shape[1:]:
        return _shuffled(rewriter, source, origins)
    down, across = source_shape[2] / result_shape[2], source_shape[3] / result_shape[3]
    if down == across > 1 and down == int(down):
        order = origins[:, 0, 0]
        same = np.array_equal(origins, _gathered_at(order, result_shape, int(down)))
        return gather_blocks(rewriter, source, order) if same else None
    up = result_shape[2] // source_shape[2]
    is_up = result_shape[2:] == (up * source_shape[2], up * source_shape[3])
    return _scattered(rewriter, source, origins, up) if is_up else None


def _shuffled(
    rewriter: GraphRewriter, source: ir.Value, origins: NDArray[np.int64]
) -> ir.Value | None:
    indices = origins[:, 0, 0, 0]
    if np.all(np.diff(indices) == 1):
        return None  # nothing moves
    same = np.array_equal(origins, _channels_at(indices, origins.shape))
    return choose_channels(rewriter, source, indices) if same else None


def _channels_at(indices: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int64]:
    rows, columns = np.arange(shape[1])[:, None], np.arange(shape[2])[None, :]
    parts = np.broadcast_arrays(indices[:, None, None], rows, columns)
    return np.stack(parts, axis=-1)


def _gathered_at(order: NDArray[np.int64], goes: tuple[int, ...], block: int) -> NDArray[np.int64]:
    """The origins from which `gather_blocks` takes each element."""
    rows, columns = np.arange(goes[2])[:, None] * block, np.arange(goes[3])[None, :] * block
    parts = np.broadcast_arrays(
        order[:, 0, None, None], order[:, 1, None, None] + rows, order[:, 2, None, None] + columns
    )
    return np.stack(parts, axis=-1)


def _scattered(
    rewriter: GraphRewriter, source: ir.Value, origins: NDArray[np.int64], block: int
) -> ir.Value | None:
    source_shape = image(source)
    if source_shape is None or block > MAX_BLOCK:
        return None
    # Output (c, b h + i, b w + j) takes input channel k at (h, w): read k off the first block.
    corner = origins[:, :block, :block, 0]
    if len(np.unique(corner)) != source_shape[1] or corner.size != source_shape[1]:
        return None
    order = np.empty((source_shape[1], 3), np.int64)
    for maps, row, column in np.ndindex(*corner.shape):
        order[corner[maps, row, column]] = maps, row, column
    rows, columns = (np.arange(size * block) for size in source_shape[2:])
    expected = np.stack(
        np.broadcast_arrays(
            corner[:, rows[:, None] % block, columns[None, :] % block],
            rows[:, None] // block,
            columns[None, :] // block,
        ),
        axis=-1,
    )
    return _scatter_blocks(rewriter, source, order) if np.array_equal(origins, expected) else None
