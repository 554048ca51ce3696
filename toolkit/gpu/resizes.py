"""Resizing of pictures -> calls."""

from dataclasses import replace

from toolkit.gpu.draft import Draft
from toolkit.gpu.errors import NotCoveredError
from toolkit.gpu.fusion import Group
from toolkit.gpu.view import View, channels_last

# Coordinates and rounding with which pixel i of the result comes from floor(i / factor).
_WHOLE_PIXELS = {("asymmetric", "floor"), ("half_pixel", "round")}


def emit_resize(draft: Draft, group: Group) -> None:
    """Add a nearest-neighbour upscaling by whole factors: a copy that repeats pixels."""
    op = group.root_operation
    shape, result = draft.network.shapes[op.inputs[0]], draft.network.shapes[group.result]
    factors = [(r // s) for r, s in zip(result[2:], shape[2:], strict=True)]
    how = op.text("coordinate_transformation_mode", "half_pixel")
    rounding = op.text("nearest_mode", "round_prefer_floor")
    fits = op.text("mode", "nearest") == "nearest" and len(shape) == 4 and result[:2] == shape[:2]
    fits = fits and all(f * s == r for f, s, r in zip(factors, shape[2:], result[2:], strict=True))
    if not (fits and (how, rounding.split("_")[0]) in _WHOLE_PIXELS):
        raise NotCoveredError(
            f"node {op.name!r} (Resize) is not an upscaling by whole factors to the nearest pixel"
        )
    x, _ = draft.pixels(op.inputs[0])
    y = draft.make(group.result, channels_last(result))
    draft.elementwise(_split(y, factors, False), [_split(x, factors, True)], (), group.nodes)


def _split(view: View, factors: list[int], repeat: bool) -> View:
    """Return (N, C, H, f, W, g): with `repeat` each pixel f x g times, else their own places."""
    (f, g), (sn, sc, sh, sw) = factors, view.strides
    n, c, h, w = view.shape
    if repeat:
        return replace(view, shape=(n, c, h, f, w, g), strides=(sn, sc, sh, 0, sw, 0))
    return replace(
        view, shape=(n, c, h // f, f, w // g, g), strides=(sn, sc, sh * f, sh, sw * g, sw)
    )
