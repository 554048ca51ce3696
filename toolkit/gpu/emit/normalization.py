"""Softmax and normalizations: what runs along rows and keeps them -> calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.gpu.emit.context import Draft
from toolkit.gpu.emit.elementwise import broadcast, steps_after
from toolkit.gpu.emit.strided_rows import in_thirds, plan_walk, tile_rows
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.ir.view import Shape, View, like
from toolkit.gpu.passes.fusion import Group
from toolkit.gpu.shapes.sizes import ceil_div

_SOFTMAX = {"Softmax": "softmax", "LogSoftmax": "log", "Hardmax": "first"}
# ONNX, MeanVarianceNormalization: added to the deviation; here, squared, to the variance.
_DEVIATION_EPSILON = 1e-9


def emit_softmax(draft: Draft, group: Group) -> None:
    """Add a Softmax, LogSoftmax or Hardmax along any dimension."""
    op = group.root_operation
    x = draft.read_float(op.inputs[0])
    axis = op.integer("axis", -1) % len(x.shape)
    y = draft.make(group.result, _strides_like(draft, group, x))
    steps, numbers = steps_after(draft, group)
    walk = plan_walk([x, y], [axis])
    tile = tile_rows(walk)
    call = draft.make_call(
        "softmax",
        tile.grid(walk),
        {"x": x, "y": y, "rows": walk.rows, "numbers": numbers},
        {
            **walk.constants("X", "Y"),
            "MODE": _SOFTMAX[op.kind],
            "STEPS": steps,
            **tile.constants(),
        },
        writes=(y,),
        warps=tile.warps,
    )
    draft.add(group.nodes, (call,))


@dataclass(frozen=True, slots=True)
class _Normalization:
    """What the kernel is told: dimensions of a row, the mode, and factors of the input's shape."""

    x: View
    y: View
    along: Sequence[int]
    mode: str
    epsilon: float = 0.0
    gain: View | None = None
    bias: View | None = None


def emit_layer_normalization(draft: Draft, group: Group) -> None:
    """Add a LayerNormalization or RMSNormalization."""
    op = group.root_operation
    if len(op.outputs) > 1:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) returns what it normalized by; kernels return 1 tensor"
        )
    x = draft.read_float(op.inputs[0])
    first = op.integer("axis", -1) % len(x.shape)
    along = op.integers("axes", tuple(range(first, len(x.shape))))  # "axes": of a pattern
    gain, bias = (
        broadcast(draft.read_float(name), x.shape) if name else None
        for name in (op.input(1), op.input(2))
    )
    _normalize(
        draft,
        group,
        _Normalization(
            x=x,
            y=draft.make(group.result),
            along=along,
            mode="square" if op.kind == "RMSNormalization" else "variance",
            epsilon=op.number("epsilon", 1e-5),
            gain=gain,
            bias=bias,
        ),
    )


def emit_group_normalization(draft: Draft, group: Group) -> None:
    """Add an InstanceNormalization or GroupNormalization, with factors for each channel.

    Up to opset 20 a GroupNormalization may have factors for each group instead.
    """
    op = group.root_operation
    x = draft.read_float(op.inputs[0])
    y = draft.make(group.result, _strides_like(draft, group, x))
    channels = x.shape[1]
    groups = op.integer("num_groups", 1) if op.kind == "GroupNormalization" else channels
    split = _channels_split(x, groups)
    gain, bias = (_factor(draft.read_float(name), split) for name in op.inputs[1:3])
    _normalize(
        draft,
        group,
        _Normalization(
            x=split,
            y=_channels_split(y, groups),
            along=range(2, len(split.shape)),
            mode="variance",
            epsilon=op.number("epsilon", 1e-5),
            gain=gain,
            bias=bias,
        ),
    )


def emit_mean_variance(draft: Draft, group: Group) -> None:
    """Add a MeanVarianceNormalization."""
    op = group.root_operation
    x = draft.read_float(op.inputs[0])
    y = draft.make(group.result, _strides_like(draft, group, x))
    along = [axis % len(x.shape) for axis in op.integers("axes", (0, 2, 3))]
    _normalize(draft, group, _Normalization(x, y, along, "variance", _DEVIATION_EPSILON**2))


def emit_lp_normalization(draft: Draft, group: Group) -> None:
    """Add an LpNormalization."""
    op = group.root_operation
    x = draft.read_float(op.inputs[0])
    y = draft.make(group.result, _strides_like(draft, group, x))
    along = [op.integer("axis", -1) % len(x.shape)]
    _normalize(draft, group, _Normalization(x, y, along, f"l{op.integer('p', 2)}"))


def emit_local_normalization(draft: Draft, group: Group) -> None:
    """Add an LRN: normalization by the channels around each."""
    op = group.root_operation
    x = draft.read_float(op.inputs[0])
    y = draft.make(group.result, _strides_like(draft, group, x))
    walk = plan_walk([x, y], [1])
    tile = tile_rows(walk)
    call = draft.make_call(
        "normalize_locally",
        (tile.grid(walk)[0], ceil_div(walk.columns, tile.columns), 1),
        {"x": x, "y": y, "rows": walk.rows},
        {
            **walk.constants("X", "Y"),
            "SIZE": op.integer("size", 1),
            "ALPHA": op.number("alpha", 1e-4),
            "BETA": op.number("beta", 0.75),
            "BIAS": op.number("bias", 1.0),
            "STEPS": draft.expression(op.outputs[0], group.after).steps,
            **tile.constants(),
        },
        writes=(y,),
        warps=tile.warps,
    )
    draft.add(group.nodes, (call,))


def _normalize(draft: Draft, group: Group, what: _Normalization) -> None:
    factors = [what.gain or what.x, what.bias or what.x]  # absent ones are not looked at
    walk = plan_walk([what.x, *factors, what.y], what.along)
    tile = in_thirds(tile_rows(walk), walk)
    steps, numbers = steps_after(draft, group)
    operands = {"x": what.x, "gain": what.gain, "bias": what.bias, "y": what.y}
    call = draft.make_call(
        "normalize",
        tile.grid(walk),
        {**operands, "rows": walk.rows, "numbers": numbers},
        {
            **walk.constants("X", "GAIN", "BIAS", "Y"),
            "MODE": what.mode,
            "EPSILON": what.epsilon,
            "STEPS": steps,
            **tile.constants(),
        },
        writes=(what.y,),
        warps=tile.warps,
    )
    draft.add(group.nodes, (call,))


def _strides_like(draft: Draft, group: Group, x: View) -> Shape | None:
    """Strides with which the result lies as `x`; as ONNX has it where it leaves the segment."""
    return None if group.result in draft.network.outputs else like(x.strides, x.shape)


def _factor(view: View, split: View) -> View:
    """Return one number a channel, or a group, as (N, groups, channels of one, ...)."""
    groups, each = split.shape[1:3]
    step, rest = view.strides[0], (0,) * (len(split.shape) - 3)
    own = (step, 0) if view.shape == (groups,) else (step * each, step)
    return replace(view, shape=split.shape, strides=(0, *own, *rest))


def _channels_split(view: View, groups: int) -> View:
    """Return (N, C, ...) as (N, groups, C / groups, ...)."""
    channels, step = view.shape[1], view.strides[1]
    each = channels // groups
    return replace(
        view,
        shape=(view.shape[0], groups, each, *view.shape[2:]),
        strides=(view.strides[0], step * each, step, *view.strides[2:]),
    )
