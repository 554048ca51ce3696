"""Convolutions over one or three dimensions, and transposed ones over one to three -> calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from toolkit.gpu.call import Call
from toolkit.gpu.draft import Draft
from toolkit.gpu.endings import (
    Ending,
    constant_weights,
    ending_of,
    product_constants,
    weight_matrix,
)
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.fusion import Group
from toolkit.gpu.network import Array, Operation
from toolkit.gpu.sizes import ceil_div
from toolkit.gpu.tiles import Product, Tile, product_tiles
from toolkit.gpu.view import Shape, View, like

_Three = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Window:
    """What ONNX says of the window; `pads` are those before the first input, None: worked out."""

    taps: Shape
    strides: Shape
    dilations: Shape
    pads: Shape | None
    added: Shape
    auto: str

    @classmethod
    def read(cls, op: Operation, taps: Shape) -> "_Window":
        rank = len(taps)
        auto = op.text("auto_pad", "NOTSET")
        pads: Shape | None = op.integers("pads", (0,) * 2 * rank)[:rank]
        if auto.startswith("SAME") or "output_shape" in op.attributes:
            pads = None
        return cls(
            taps=taps,
            strides=op.integers("strides", (1,) * rank),
            dilations=op.integers("dilations", (1,) * rank),
            pads=(0,) * rank if auto == "VALID" else pads,
            added=op.integers("output_padding", (0,) * rank),
            auto=auto,
        )

    @property
    def spans(self) -> Shape:
        """Inputs from the first tap to the last."""
        return tuple((t - 1) * d + 1 for t, d in zip(self.taps, self.dilations, strict=True))

    def pads_of_convolution(self, size: Shape, result: Shape) -> Shape:
        if self.pads is not None:
            return self.pads
        totals = [
            max(0, (r - 1) * step + span - n)
            for n, r, step, span in zip(size, result, self.strides, self.spans, strict=True)
        ]
        return tuple(n - n // 2 if self.auto == "SAME_LOWER" else n // 2 for n in totals)

    def pads_of_transposed(self, size: Shape, result: Shape) -> Shape:
        if self.pads is not None:
            return self.pads
        whole = zip(size, self.strides, self.spans, self.added, strict=True)
        totals = [
            (n - 1) * step + span + added - r
            for (n, step, span, added), r in zip(whole, result, strict=True)
        ]
        return tuple(n // 2 if self.auto == "SAME_UPPER" else n - n // 2 for n in totals)


@dataclass(frozen=True, slots=True)
class _Volume:
    """A convolution along three dimensions; missing ones are single, before the others.

    `weights`: (phases, groups, taps x channels, filters).
    """

    x: View
    y: View
    residual: View | None
    weights: Array
    taps: _Three
    strides: _Three
    dilations: _Three
    pads: _Three
    transposed: bool
    ending: Ending


def emit_volume_convolution(draft: Draft, group: Group) -> None:
    """Add a Conv over one or three dimensions."""
    op = group.root_operation
    weights = constant_weights(draft, op, 1)
    taps = _three(weights.shape[2:], 1)
    groups = op.integer("group", 1)
    shape, result = draft.network.shapes[op.inputs[0]], draft.network.shapes[group.result]
    _check_rank(op, shape)
    window = _Window.read(op, weights.shape[2:])
    # (group, filter, channel, taps) -> (group, taps, channel, filter)
    each = weights.reshape(groups, weights.shape[0] // groups, weights.shape[1], -1)
    packed = each.transpose(0, 3, 2, 1).reshape(1, groups, -1, each.shape[1])
    _emit(
        draft,
        group,
        _Volume(
            *_operands(draft, group),
            weights=packed,
            taps=taps,
            strides=_three(window.strides, 1),
            dilations=_three(window.dilations, 1),
            pads=_three(window.pads_of_convolution(shape[2:], result[2:]), 0),
            transposed=False,
            ending=ending_of(draft, group, op.input(2)),
        ),
    )


def emit_transposed_convolution(draft: Draft, group: Group) -> None:
    """Add a ConvTranspose: a convolution for each phase of its strides."""
    op = group.root_operation
    weights = constant_weights(draft, op, 1)
    shape, result = draft.network.shapes[op.inputs[0]], draft.network.shapes[group.result]
    _check_rank(op, shape)
    window = _Window.read(op, weights.shape[2:])
    pads = _three(window.pads_of_transposed(shape[2:], result[2:]), 0)
    strides = _three(window.strides, 1)
    dilated = _dilated(weights, _three(window.dilations, 1))
    packed = _phases(dilated, op.integer("group", 1), strides, pads)
    _emit(
        draft,
        group,
        _Volume(
            *_operands(draft, group),
            weights=packed.reshape(*packed.shape[:2], -1, packed.shape[-1]),
            taps=_three(packed.shape[2:5], 1),
            strides=strides,
            dilations=(-1, -1, -1),
            pads=pads,
            transposed=True,
            ending=ending_of(draft, group, op.input(2)),
        ),
    )


def _check_rank(op: Operation, shape: Shape) -> None:
    if not 3 <= len(shape) <= 5:
        raise NotCoveredError(
            f"node {op.name!r} ({op.kind}) has {len(shape) - 2} spatial dimensions; kernels take "
            "1 to 3"
        )


def _operands(draft: Draft, group: Group) -> tuple[View, View, View | None]:
    """Return the input, the result and the residual, channels-last."""
    op = group.root_operation
    x = _channels_last(draft, op.inputs[0])
    shape = draft.network.shapes[group.result]
    y = draft.make(group.result, _strides(shape))
    name = draft.expression(op.outputs[0], group.after).operands[1:]
    return x, y, _channels_last(draft, name[0]) if name else None


def _channels_last(draft: Draft, name: str) -> View:
    """Return a tensor stored channels-last; copies if needed."""
    view = draft.read_float(name)
    if _is_channels_last(view):
        return view
    return draft.copy(view, _strides(view.shape), view.dtype)


def _is_channels_last(view: View) -> bool:
    """Whether channels lie side by side, and places one after the other."""
    sizes, steps = (view.shape[0], *view.shape[2:]), (view.strides[0], *view.strides[2:])
    wanted = [_pitch(view) * prod(sizes[at + 1 :]) for at in range(len(sizes))]
    dense = all(n == 1 or s == w for n, s, w in zip(sizes, steps, wanted, strict=True))
    return dense and (view.shape[1] == 1 or view.strides[1] == 1)


def _pitch(view: View) -> int:
    """Return the elements from one place to the next."""
    for at in (*reversed(range(2, len(view.shape))), 0):
        if view.shape[at] != 1:
            return view.strides[at]
    return view.shape[1]


def _strides(shape: Shape) -> Shape:
    """Return the strides of (N, C, ...) with channels fastest."""
    rest = range(2, len(shape))
    return like((len(shape) + 1, 0, *(len(shape) - at for at in rest)), shape)


def _emit(draft: Draft, group: Group, p: _Volume) -> None:
    phases, groups, depth, filters = p.weights.shape
    out = _three(p.y.shape[2:], 1)
    steps = p.strides if p.transposed else (1, 1, 1)
    places = p.y.shape[0] * prod(ceil_div(n, step) for n, step in zip(out, steps, strict=True))
    weights = weight_matrix(draft, p.weights, p.x.dtype)
    read = 0 if p.residual is None else p.residual.item_bytes
    product = Product(
        rows=places,
        columns=filters,
        depth=depth,
        run=depth // prod(p.taps),
        item_bytes=p.x.item_bytes,
        stored_bytes=p.y.item_bytes + read,
        products=phases * groups,
    )

    def call(tile: Tile) -> Call:
        blocks = ceil_div(places, tile.rows) * ceil_div(filters, tile.columns)
        return draft.make_call(
            "volume",
            (blocks, groups, phases),
            {
                "x": p.x,
                "weights": weights,
                "bias": p.ending.bias,
                "residual": p.residual,
                "y": p.y,
                "batch": p.x.shape[0],
            },
            {
                "SIZE": _three(p.x.shape[2:], 1),
                "OUT": out,
                "CHANNELS": product.run,
                "FILTERS": filters,
                "X_STRIDES": (p.x.strides[0], *_three(p.x.strides[2:], 0)),
                "W_PHASE": weights.strides[0],
                "W_GROUP": weights.strides[1],
                "W_PITCH": weights.strides[3],
                "Y_PITCH": _pitch(p.y),
                "R_PITCH": 0 if p.residual is None else _pitch(p.residual),
                "TAPS": p.taps,
                "STRIDE": p.strides,
                "DILATION": p.dilations,
                "PAD": p.pads,
                "TRANSPOSED": p.transposed,
                "STEPS": p.ending.steps,
                **product_constants(draft, tile, p.x.dtype),
            },
            writes=(p.y,),
            warps=tile.warps,
            stages=tile.stages,
        )

    draft.add(group.nodes, *((call(tile),) for tile in product_tiles(product, draft.gpu)))


def _dilated(weights: Array, dilations: _Three) -> Array:
    """Return (C, F, taps...) as (C, F, depth, rows, columns) with zeros between the taps."""
    taps = weights.reshape(*weights.shape[:2], *_three(weights.shape[2:], 1))
    sizes = [(n - 1) * d + 1 for n, d in zip(taps.shape[2:], dilations, strict=True)]
    wide = np.zeros((*taps.shape[:2], *sizes), weights.dtype)
    wide[:, :, :: dilations[0], :: dilations[1], :: dilations[2]] = taps
    return wide


def _phases(weights: Array, groups: int, strides: _Three, pads: _Three) -> Array:
    """Return (C, F / groups, taps...) as (phase, group, taps of a phase..., channel, filter).

    The taps of a phase are those of its remainder, (phase + pad) % stride; missing ones are 0.
    """
    channels, filters, *taps = weights.shape
    counts = [ceil_div(n, step) for n, step in zip(taps, strides, strict=True)]
    lacking = [c * s - n for c, s, n in zip(counts, strides, taps, strict=True)]
    padded = np.pad(weights, [(0, 0), (0, 0), *((0, n) for n in lacking)])
    grouped = padded.reshape(groups, channels // groups, filters, *padded.shape[2:])
    parts = []
    for phase in np.ndindex(*strides):
        first = [(own + pad) % step for own, pad, step in zip(phase, pads, strides, strict=True)]
        d, h, w = (slice(at, None, step) for at, step in zip(first, strides, strict=True))
        parts.append(grouped[:, :, :, d, h, w].transpose(0, 3, 4, 5, 1, 2))
    return np.stack(parts)


def _three(values: Sequence[int], missing: int) -> _Three:
    """Return one to three numbers as three, `missing` ones first."""
    depth, row, column = (*(missing,) * (3 - len(values)), *values)
    return depth, row, column
