"""Concatenation in place."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.gpu.emit.context import LoweringContext
from toolkit.gpu.emit.conv1x1_nchw import supports_conv1x1_nchw
from toolkit.gpu.emit.layout import part_of
from toolkit.gpu.ir.network import Network, Operation
from toolkit.gpu.ir.parameters import slice_of
from toolkit.gpu.ir.view import View, channels_last, row_major
from toolkit.gpu.passes.concat_split import RESHAPES
from toolkit.gpu.passes.fusion import Group

# Roots that write a (N, C, H, W) tensor channels-last wherever they are told to.
_WRITE_PIXELS = frozenset(
    {"Conv", "ConvMaxPool", "DirectConv", "ConvUpsampleConcat", "MaxPool", "AveragePool", "Resize"}
)


def emit_concat(ctx: LoweringContext, group: Group) -> None:
    """Concat: a view of parts that lie in a row, else copies of what was not written in place."""
    op = group.root_operation
    name = op.outputs[0]
    axis = op.integer("axis", 0) % len(ctx.network.shapes[name])
    sources = [ctx.read(part) for part in op.inputs]
    joined = _in_a_row(sources, axis)
    if joined is not None:
        ctx.views[name] = joined
        return
    whole = ctx.views.get(name) or ctx.make(name, _concat_strides(ctx, op))
    start = 0
    for source in sources:
        target = part_of(whole, axis, start, source.shape[axis])
        if not source.lies_as(target):
            ctx.elementwise(target, [source], (), group.nodes)
        start += source.shape[axis]


def plan_concat_slices(ctx: LoweringContext, groups: Sequence[Group]) -> None:
    """Give tensors that a concatenation joins a home inside its result.

    Takes those that one kernel writes for this concatenation first. The later concatenation is
    planned first: one inside another, or of its first parts only, lands in the outer one. Outputs
    that a kernel can write as they leave get a home, too.
    """
    makers = {group.result: group for group in groups}
    readers = Counter(name for op in ctx.network.operations for name in op.inputs)
    readers.update(ctx.network.outputs)
    for group in reversed(groups):
        op = group.root
        if op is not None and readers[group.result] == 1 and _leaves_in_planes(ctx, group):
            ctx.concat_slices[group.result] = ctx.fresh(group.result)
        if op is None or op.kind != "Concat" or op.outputs[0] in ctx.views:
            continue
        axis = op.integer("axis", 0) % len(ctx.network.shapes[op.outputs[0]])
        concat_slices = [ctx.concat_slices[part] for part in op.inputs if part in ctx.concat_slices]
        if len(concat_slices) < len(op.inputs) or _in_a_row(concat_slices, axis) is None:
            parts = _without_slices(ctx.network, op.inputs, axis, makers)
            _plan(ctx, op.outputs[0], axis, [_Part(part, makers, readers) for part in parts])


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a concatenation, of a network with these makers and counts of readers."""

    name: str
    makers: Mapping[str, Group]
    readers: Mapping[str, int]

    @property
    def maker(self) -> Group | None:
        return self.makers.get(self.name)

    def source(self) -> "_Part":
        """Return what is only reshaped to this part, by operations that nothing else reads."""
        root = self.maker.root if self.maker else None
        if root is None or root.kind not in RESHAPES:
            return self
        private = all(self.readers[name] == 1 for name in (self.name, root.inputs[0]))
        return replace(self, name=root.inputs[0]).source() if private else self


def _leaves_in_planes(ctx: LoweringContext, group: Group) -> bool:
    """Whether a group makes an output that its kernel can write in the order of its indices."""
    name, network = group.result, ctx.network
    if name not in network.outputs or name in ctx.concat_slices or len(network.shapes[name]) != 4:
        return False
    shape = network.shapes[name]
    return supports_conv1x1_nchw(ctx, group, View("", ctx.dtype, shape, row_major(shape)))


def _plan(ctx: LoweringContext, name: str, axis: int, parts: Sequence[_Part]) -> None:
    """Plan the homes of the parts of one concatenation."""
    shape = ctx.network.shapes[name]
    leaves = name in ctx.network.outputs
    pixels = len(shape) == 4 and axis == 1 and not leaves
    if len(shape) == 4 and not pixels and not leaves:
        return  # its layout is that of its parts, which is not known yet
    strides = channels_last(shape) if pixels else row_major(shape)
    scale = ctx.network.scales.get(name)
    trial = ctx.concat_slices.get(name) or View("", ctx.dtype, shape, strides, scale=scale)
    if not any(home for _, home in _concat_slices(ctx, trial, axis, parts)):
        return
    whole = ctx.concat_slices.get(name) or ctx.fresh(name, strides)
    ctx.views[name] = whole
    ctx.concat_slices |= {
        part: home for part, home in _concat_slices(ctx, whole, axis, parts) if home
    }


def _concat_slices(
    ctx: LoweringContext, whole: View, axis: int, parts: Sequence[_Part]
) -> list[tuple[str, View | None]]:
    """Return what is written into `whole`, and where; None: not by the kernel that makes it."""
    network = ctx.network
    found: list[tuple[str, View | None]] = []
    start = 0
    for part in parts:
        known = network.shapes.get(part.name)
        size = network.constants[part.name].shape[axis] if known is None else known[axis]
        home, source = part_of(whole, axis, start, size), part.source()
        start += size
        own = source.name not in ctx.concat_slices and source.name not in network.outputs
        if own and source.maker and network.scales.get(source.name) == whole.scale:
            found.append((source.name, _written(ctx, source, home)))
    return found


def _written(ctx: LoweringContext, part: _Part, home: View) -> View | None:
    """Return the home as the kernel that makes a part writes it; None where it does not."""
    group = part.maker
    assert group is not None
    shape = ctx.network.shapes[part.name]
    at = home if shape == home.shape else home.reshaped(shape)
    if at is None:
        return None
    # A concatenation inside a concatenation is planned after its outer one, and moves into it.
    if group.root is None or group.root.kind == "Concat":
        return at
    if at.pixel_pitch() is not None and group.root.kind in _WRITE_PIXELS:
        return at
    private = part.readers[part.name] == 1  # others would read pixels
    return at if private and supports_conv1x1_nchw(ctx, group, at) else None


def _without_slices(
    network: Network, parts: Sequence[str], axis: int, makers: Mapping[str, Group]
) -> tuple[str, ...]:
    """Name a tensor itself where all its slices follow one another: then it can be a part."""
    found: list[str] = []
    rest = list(parts)
    while rest:
        count, source = _slices_of_a_whole(network, rest, axis, makers)
        found.append(source if count else rest[0])
        del rest[: count or 1]
    return tuple(found)


def _slices_of_a_whole(
    network: Network, parts: Sequence[str], axis: int, makers: Mapping[str, Group]
) -> tuple[int, str]:
    """Return how many of the first parts are slices that make up a tensor, and its name."""
    source, end = "", 0
    for count, part in enumerate(parts, 1):
        one = slice_of(network, makers[part].root) if part in makers else None
        if one is None or (one.axis, one.start) != (axis, end) or source not in ("", one.source):
            break
        source, end = one.source, end + one.size
        if end == network.shapes[source][axis]:
            return count, source
    return 0, ""


def _in_a_row(parts: Sequence[View], axis: int) -> View | None:
    """Return the view that parts form which lie one after the other; None where they do not."""
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
    """Channels-last where every part is, else None."""
    views = [ctx.read(part) for part in op.inputs]
    name = op.outputs[0]
    if name in ctx.network.outputs or any(view.pixel_pitch() is None for view in views):
        return None
    return channels_last(ctx.network.shapes[name])
