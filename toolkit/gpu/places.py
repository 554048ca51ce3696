"""Operations that move no arithmetic: new views, slices, and concatenation in place."""

from collections.abc import Sequence
from dataclasses import replace

from toolkit.gpu.draft import Draft
from toolkit.gpu.fusion import Group
from toolkit.gpu.network import Operation
from toolkit.gpu.view import View, channels_last, row_major

# Roots that write a (N, C, H, W) tensor channels-last wherever they are told to.
_WRITE_ANYWHERE = frozenset({"Conv", "MaxPool", "AveragePool", "Resize"})


def emit_same(draft: Draft, group: Group) -> None:
    """Identity: the same elements under another name."""
    op = group.root_operation
    draft.views[op.outputs[0]] = draft.read(op.inputs[0])


def emit_reshape(draft: Draft, group: Group) -> None:
    """Reshape, Flatten, Squeeze, Unsqueeze: a view, after a copy where pixels lie otherwise."""
    op = group.root_operation
    shape = draft.network.shapes[op.outputs[0]]
    view = draft.read(op.inputs[0])
    made = view.reshaped(shape)
    if made is None:
        made = draft.copy(view, row_major(view.shape), draft.dtype).reshaped(shape)
    assert made is not None  # a dense tensor takes every shape
    draft.views[op.outputs[0]] = made


def emit_transpose(draft: Draft, group: Group) -> None:
    """Transpose: the same elements with other strides."""
    op = group.root_operation
    view = draft.read(op.inputs[0])
    order = op.integers("perm", tuple(reversed(range(len(view.shape)))))
    draft.views[op.outputs[0]] = view.permuted(order)


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
        target = _part(whole, axis, start, source.shape[axis])
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
        whole = draft.homes.get(name) or draft.allocate(
            name, draft.dtype, shape, channels_last(shape)
        )
        draft.views[name] = whole
        start = 0
        for part, maker in parts:
            size = draft.network.shapes[part][1] if part in draft.network.shapes else 0
            free = part not in draft.homes and part not in draft.network.outputs
            if maker and free and _writes_anywhere(maker):
                draft.homes[part] = _part(whole, 1, start, size)
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


def _part(view: View, axis: int, start: int, size: int) -> View:
    shape = (*view.shape[:axis], size, *view.shape[axis + 1 :])
    return replace(view, shape=shape, offset=view.offset + start * view.strides[axis])
