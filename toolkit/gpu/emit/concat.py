"""Lower Concat without copies where its inputs can be written directly into the output."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv1x1_nchw import supports_conv1x1_nchw
from toolkit.gpu.emit.layout import slice_view
from toolkit.gpu.ir.network import RESHAPES, Network, Operation
from toolkit.gpu.ir.parameters import slice_of
from toolkit.gpu.ir.view import View, channels_last, row_major
from toolkit.gpu.passes.fusion import Group

# Roots whose kernels write NHWC to any view.
_WRITE_NHWC = frozenset({"Conv", "MaxPool", "AveragePool", "Resize"})


def emit_concat(ctx: LoweringContext, group: Group) -> None:
    """Lower Concat: a view of adjacent inputs, else copies of those that are not in place."""
    op = group.root_operation
    name = op.outputs[0]
    axis = op.integer("axis", 0) % len(ctx.network.shapes[name])
    sources = [ctx.read(part) for part in op.inputs]
    adjacent = _join_adjacent(sources, axis)
    if adjacent is not None:
        ctx.views[name] = adjacent
        return
    whole = ctx.views.get(name) or ctx.output_view(name, _concat_strides(ctx, op))
    start = 0
    for source in sources:
        target = slice_view(whole, axis, start, source.shape[axis])
        if not source.is_same_as(target):
            ctx.add_elementwise(target, [source], (), group.nodes)
        start += source.shape[axis]


def plan_concat_slices(ctx: LoweringContext, groups: Sequence[Group]) -> None:
    """Assign slices of Concat outputs to the tensors that are to be written there.

    Later concatenations are planned first, so that one nested in another, or of its first inputs
    only, is written into the outer one. Segment outputs that a kernel can write row-major get their
    buffer here, too.
    """
    producers = {group.result: group for group in groups}
    readers = Counter(name for op in ctx.network.operations for name in op.inputs)
    readers.update(ctx.network.outputs)
    for group in reversed(groups):
        op = group.root
        if op is not None and readers[group.result] == 1 and _is_nchw_output(ctx, group):
            ctx.concat_slices[group.result] = ctx.allocate_tensor(group.result)
        if op is None or op.kind != "Concat" or op.outputs[0] in ctx.views:
            continue
        axis = op.integer("axis", 0) % len(ctx.network.shapes[op.outputs[0]])
        concat_slices = [ctx.concat_slices[part] for part in op.inputs if part in ctx.concat_slices]
        if len(concat_slices) < len(op.inputs) or _join_adjacent(concat_slices, axis) is None:
            inputs = _merge_slices(ctx.network, op.inputs, axis, producers)
            parts = [_ConcatInput(name, producers, readers) for name in inputs]
            _plan(ctx, op.outputs[0], axis, parts)


@dataclass(frozen=True, slots=True)
class _ConcatInput:
    """An input of a Concat, in a network with these producers and reader counts."""

    name: str
    producers: Mapping[str, Group]
    readers: Mapping[str, int]

    @property
    def producer(self) -> Group | None:
        return self.producers.get(self.name)

    def source(self) -> "_ConcatInput":
        """Return the tensor of which this input is a reshape with no other readers, or itself."""
        root = self.producer.root if self.producer else None
        if root is None or root.kind not in RESHAPES:
            return self
        private = all(self.readers[name] == 1 for name in (self.name, root.inputs[0]))
        return replace(self, name=root.inputs[0]).source() if private else self


def _is_nchw_output(ctx: LoweringContext, group: Group) -> bool:
    """Whether a group computes an output of the segment that its kernel can write as NCHW."""
    name, network = group.result, ctx.network
    if name not in network.outputs or name in ctx.concat_slices or len(network.shapes[name]) != 4:
        return False
    shape = network.shapes[name]
    return supports_conv1x1_nchw(ctx, group, View("", ctx.dtype, shape, row_major(shape)))


def _plan(ctx: LoweringContext, name: str, axis: int, parts: Sequence[_ConcatInput]) -> None:
    """Plan the slices of one concatenation."""
    shape = ctx.network.shapes[name]
    is_output = name in ctx.network.outputs
    nhwc = len(shape) == 4 and axis == 1 and not is_output
    if len(shape) == 4 and not nhwc and not is_output:
        return  # its layout is that of its inputs, which is not known yet
    strides = channels_last(shape) if nhwc else row_major(shape)
    scale = ctx.network.scales.get(name)
    trial = ctx.concat_slices.get(name) or View("", ctx.dtype, shape, strides, scale=scale)
    if not _writable_slices(ctx, trial, axis, parts):
        return
    whole = ctx.concat_slices.get(name) or ctx.allocate_tensor(name, strides)
    ctx.views[name] = whole
    ctx.concat_slices |= _writable_slices(ctx, whole, axis, parts)


def _writable_slices(
    ctx: LoweringContext, whole: View, axis: int, parts: Sequence[_ConcatInput]
) -> dict[str, View]:
    """Return the slices of `whole` that producers of inputs can write, by tensor."""
    network = ctx.network
    slices: dict[str, View] = {}
    start = 0
    for part in parts:
        shape = network.shapes.get(part.name)
        size = network.constants[part.name].shape[axis] if shape is None else shape[axis]
        target, source = slice_view(whole, axis, start, size), part.source()
        start += size
        free = source.name not in ctx.concat_slices and source.name not in network.outputs
        if free and source.producer and network.scales.get(source.name) == whole.scale:
            written = _written_view(ctx, source, source.producer, target)
            if written is not None:
                slices[source.name] = written
    return slices


def _written_view(
    ctx: LoweringContext, source: _ConcatInput, group: Group, target: View
) -> View | None:
    """Return `target` as the group's kernel writes it; None where it cannot."""
    shape = ctx.network.shapes[source.name]
    view = target if shape == target.shape else target.reshaped(shape)
    if view is None:
        return None
    # A nested concatenation is planned after its outer one, and moves into it.
    if group.root is None or group.root.kind == "Concat":
        return view
    if view.pixel_pitch() is not None and group.root.kind in _WRITE_NHWC:
        return view
    private = source.readers[source.name] == 1  # others would read NHWC
    return view if private and supports_conv1x1_nchw(ctx, group, view) else None


def _merge_slices(
    network: Network, inputs: Sequence[str], axis: int, producers: Mapping[str, Group]
) -> tuple[str, ...]:
    """Replace consecutive slices that make up a whole tensor by that tensor."""
    merged: list[str] = []
    remaining = list(inputs)
    while remaining:
        count, source = _leading_slices(network, remaining, axis, producers)
        merged.append(source if count else remaining[0])
        del remaining[: count or 1]
    return tuple(merged)


def _leading_slices(
    network: Network, inputs: Sequence[str], axis: int, producers: Mapping[str, Group]
) -> tuple[int, str]:
    """Return how many of the first inputs are slices that make up a tensor, and its name."""
    source, end = "", 0
    for count, name in enumerate(inputs, 1):
        part = slice_of(network, producers[name].root) if name in producers else None
        if part is None or (part.axis, part.start) != (axis, end):
            break
        if source not in ("", part.source):
            break
        source, end = part.source, end + part.size
        if end == network.shapes[source][axis]:
            return count, source
    return 0, ""


def _join_adjacent(parts: Sequence[View], axis: int) -> View | None:
    """Return the view that adjacent views form; None where they are not adjacent."""
    first, end = parts[0], parts[0].offset
    for part in parts:
        same = (part.base, part.dtype, part.scale) == (first.base, first.dtype, first.scale)
        if not same or part.strides != first.strides or part.offset != end:
            return None
        end += part.shape[axis] * part.strides[axis]
    size = sum(part.shape[axis] for part in parts)
    shape = (*first.shape[:axis], size, *first.shape[axis + 1 :])
    return replace(first, shape=shape)


def _concat_strides(ctx: LoweringContext, op: Operation) -> tuple[int, ...] | None:
    """Return NHWC strides where every input is NHWC, else None."""
    views = [ctx.read(part) for part in op.inputs]
    name = op.outputs[0]
    shape = ctx.network.shapes[name]
    if name in ctx.network.outputs or len(shape) != 4:
        return None
    return channels_last(shape) if all(view.pixel_pitch() for view in views) else None
