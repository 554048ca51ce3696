"""Concatenation in place."""

from collections.abc import Sequence

from toolkit.gpu.draft import Draft
from toolkit.gpu.fusion import Group
from toolkit.gpu.moves import part_of
from toolkit.gpu.network import Operation
from toolkit.gpu.view import channels_last

# Roots that write a (N, C, H, W) tensor channels-last wherever they are told to.
_WRITE_ANYWHERE = frozenset({"Conv", "MaxPool", "AveragePool", "Resize"})


def emit_concat(draft: Draft, group: Group) -> None:
    """Concat: copies what was not written in place."""
    op = group.root_operation
    name = op.outputs[0]
    shape = draft.network.shapes[name]
    axis = op.integer("axis", 0) % len(shape)
    whole = draft.views.get(name) or draft.make(name, _concat_strides(draft, op))
    start = 0
    for part in op.inputs:
        source = draft.read(part)
        target = part_of(whole, axis, start, source.shape[axis])
        if source != target:
            draft.elementwise(target, [source], (), group.nodes)
        start += source.shape[axis]


def plan_homes(draft: Draft, groups: Sequence[Group]) -> None:
    """Give tensors that a concatenation of channels joins a home inside its result.

    Takes those that one kernel writes, channels-last, for this concatenation first. The later
    concatenation is planned first, so one inside another lands in the outer one.
    """
    makers = {group.result: group for group in groups}
    for group in reversed(groups):
        op = group.root
        if op is None or op.kind != "Concat" or op.outputs[0] in draft.network.outputs:
            continue
        name = op.outputs[0]
        shape = draft.network.shapes[name]
        if len(shape) != 4 or op.integer("axis", 0) % 4 != 1:
            continue
        parts = [(part, makers.get(part)) for part in op.inputs]
        if not any(maker and _writes_anywhere(maker) for _, maker in parts):
            continue
        whole = draft.homes.get(name) or draft.fresh(name, channels_last(shape))
        draft.views[name] = whole
        start = 0
        for part, maker in parts:
            size = draft.network.shapes[part][1] if part in draft.network.shapes else 0
            free = part not in draft.homes and part not in draft.network.outputs
            same = draft.network.scales.get(part) == whole.scale
            if maker and free and same and _writes_anywhere(maker):
                draft.homes[part] = part_of(whole, 1, start, size)
            start += size or draft.network.constants[part].shape[1]


def _writes_anywhere(group: Group) -> bool:
    # A concatenation inside a concatenation is planned after its outer one, and moves into it.
    return group.root is None or group.root.kind in (*_WRITE_ANYWHERE, "Concat")


def _concat_strides(draft: Draft, op: Operation) -> tuple[int, ...] | None:
    """Channels-last where every part is, else None."""
    views = [draft.read(part) for part in op.inputs]
    name = op.outputs[0]
    if name in draft.network.outputs or any(view.pixel_pitch() is None for view in views):
        return None
    return channels_last(draft.network.shapes[name])
