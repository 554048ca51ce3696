"""Concatenation in place."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from toolkit.gpu.draft import Draft
from toolkit.gpu.emit.moves import part_of, slice_of
from toolkit.gpu.graph.fusion import Group
from toolkit.gpu.graph.network import Network, Operation
from toolkit.gpu.view import View, channels_last

# Roots that write a (N, C, H, W) tensor channels-last wherever they are told to.
_WRITE_PIXELS = frozenset({"Conv", "ConvMaxPool", "MaxPool", "AveragePool", "Resize"})


def emit_concat(draft: Draft, group: Group) -> None:
    """Concat: a view of parts that lie in a row, else copies of what was not written in place."""
    op = group.root_operation
    name = op.outputs[0]
    axis = op.integer("axis", 0) % len(draft.network.shapes[name])
    sources = [draft.read(part) for part in op.inputs]
    joined = _in_a_row(sources, axis)
    if joined is not None:
        draft.views[name] = joined
        return
    whole = draft.views.get(name) or draft.make(name, _concat_strides(draft, op))
    start = 0
    for source in sources:
        target = part_of(whole, axis, start, source.shape[axis])
        if source != target:
            draft.elementwise(target, [source], (), group.nodes)
        start += source.shape[axis]


def plan_homes(draft: Draft, groups: Sequence[Group]) -> None:
    """Give tensors that a concatenation joins a home inside its result.

    Takes those that one kernel writes for this concatenation first. The later concatenation is
    planned first: one inside another, or of its first parts only, lands in the outer one.
    """
    makers = {group.result: group for group in groups}
    for group in reversed(groups):
        op = group.root
        if op is None or op.kind != "Concat" or op.outputs[0] in draft.views:
            continue
        axis = op.integer("axis", 0) % len(draft.network.shapes[op.outputs[0]])
        homes = [draft.homes[part] for part in op.inputs if part in draft.homes]
        if len(homes) < len(op.inputs) or _in_a_row(homes, axis) is None:
            parts = _without_slices(draft.network, op.inputs, axis, makers)
            _plan(draft, op.outputs[0], axis, [(part, makers.get(part)) for part in parts])


def _plan(draft: Draft, name: str, axis: int, parts: Sequence[tuple[str, Group | None]]) -> None:
    """Plan the homes of the parts of one concatenation, given with their makers."""
    shape = draft.network.shapes[name]
    leaves = name in draft.network.outputs
    pixels = len(shape) == 4 and axis == 1 and not leaves
    if len(shape) == 4 and not pixels and not leaves:
        return  # its layout is that of its parts, which is not known yet
    if not any(maker and _may_write(maker, pixels) for _, maker in parts):
        return
    whole = draft.homes.get(name) or draft.fresh(name, channels_last(shape) if pixels else None)
    draft.views[name] = whole
    start = 0
    for part, maker in parts:
        known = draft.network.shapes.get(part)
        size = draft.network.constants[part].shape[axis] if known is None else known[axis]
        home = part_of(whole, axis, start, size)
        free = part not in draft.homes and part not in draft.network.outputs
        same = draft.network.scales.get(part) == whole.scale
        if maker and free and same and _may_write(maker, home.pixel_pitch() is not None):
            draft.homes[part] = home
        start += size


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


def _may_write(maker: Group, pixels: bool) -> bool:
    """Whether a group writes into a home; some write pixels, with channels last, and no other."""
    # A concatenation inside a concatenation is planned after its outer one, and moves into it.
    if maker.root is None or maker.root.kind == "Concat":
        return True
    return pixels and maker.root.kind in _WRITE_PIXELS


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


def _concat_strides(draft: Draft, op: Operation) -> tuple[int, ...] | None:
    """Channels-last where every part is, else None."""
    views = [draft.read(part) for part in op.inputs]
    name = op.outputs[0]
    if name in draft.network.outputs or any(view.pixel_pitch() is None for view in views):
        return None
    return channels_last(draft.network.shapes[name])
