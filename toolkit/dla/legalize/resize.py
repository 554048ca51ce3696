"""Resize by integer scales, in one of the coordinate modes that the DLA has.

A nearest Resize is the list of rows and columns that it copies; two modes with the same list are
the same Resize. The coordinates are those of the ONNX operator, in exact fractions.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from toolkit.dla.legalize.rewrite import Outcome, Site, image

_Sizes = tuple[tuple[int, int], tuple[int, int]]
"""Height and width, each before and after."""
HALF = Fraction(1, 2)

# The place in the input of output i, of `n` elements made of `m`.
_COORDINATES: dict[str, Callable[[int, int, int], Fraction]] = {
    "half_pixel": lambda i, n, m: (i + HALF) * Fraction(m, n) - HALF,
    "half_pixel_symmetric": lambda i, n, m: (i + HALF) * Fraction(m, n) - HALF,
    "pytorch_half_pixel": lambda i, n, m: (
        (i + HALF) * Fraction(m, n) - HALF if n > 1 else Fraction(0)
    ),
    "asymmetric": lambda i, n, m: Fraction(i * m, n),
    "align_corners": lambda i, n, m: Fraction(i * (m - 1), n - 1) if n > 1 else Fraction(0),
    "tf_half_pixel_for_nn": lambda i, n, m: (i + HALF) * Fraction(m, n),
}
_ROUNDINGS: dict[str, Callable[[Fraction], int]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "round_prefer_floor": lambda x: math.ceil(x - HALF),
    "round_prefer_ceil": lambda x: math.floor(x + HALF),
}
# The modes of the DLA, rule resize.mode; the plainest first.
NEAREST_MODES = (
    ("asymmetric", "floor"),
    ("half_pixel", "round_prefer_floor"),
    ("half_pixel", "round_prefer_ceil"),
)
POOL_STRIDES = {1, 2, 4, 8, 16}  # up to the longest pooling stride, rule pool.stride


def nearest(site: Site) -> Outcome:
    """Write a nearest Resize with integer scales in a mode of the DLA."""
    enlarged = _enlarged(site, "nearest")
    if isinstance(enlarged, str):
        return enlarged
    sizes, scales = enlarged
    copied = [_copied(site, *pair) for pair in sizes]
    for coordinates, rounding in NEAREST_MODES:
        if [_list(coordinates, rounding, *pair) for pair in sizes] == copied:
            return _resize(site, scales, coordinates, rounding)
    return "the DLA has no mode that copies the same rows and columns"


def linear(site: Site) -> Outcome:
    """Write a linear Resize with integer scales in the half_pixel mode."""
    enlarged = _enlarged(site, "linear")
    if isinstance(enlarged, str):
        return enlarged
    sizes, scales = enlarged
    coordinate_of = _COORDINATES.get(str(site.view.attribute("coordinate_transformation_mode")))
    if coordinate_of is None or any(
        coordinate_of(i, n, m) != _COORDINATES["half_pixel"](i, n, m)
        for m, n in sizes
        for i in range(n)
    ):
        return "its coordinates are not those of half_pixel"
    return _resize(site, scales, "half_pixel", None)


def nearest_pool(site: Site) -> Outcome:
    """Keep every k-th row and column by a MaxPool of window 1 and stride k."""
    sizes = _sizes(site, "nearest")
    if isinstance(sizes, str):
        return sizes
    steps = _steps(sizes)
    # Other scales are no exact binary fractions: then runtimes differ in the rows that they keep.
    if steps is None or not set(steps) <= POOL_STRIDES:
        return "it does not shrink by powers of two that a pooling has as its stride"
    copied = [_copied(site, *pair) for pair in sizes]
    if any(
        rows != [i * k for i in range(size)]
        for rows, k, (_, size) in zip(copied, steps, sizes, strict=True)
    ):
        return "it does not keep the first of each block"
    attributes = {"kernel_shape": (1, 1), "strides": steps}
    return site.replaced_by(site.rewriter.add("MaxPool", [site.data], attributes))


def linear_pool(site: Site) -> Outcome:
    """Halve a map by averages of two."""
    sizes = _sizes(site, "linear")
    if isinstance(sizes, str):
        return sizes
    steps, mode = _steps(sizes), str(site.view.attribute("coordinate_transformation_mode"))
    coordinate_of = _COORDINATES.get(mode)
    if steps is None or coordinate_of is None or not set(steps) <= {1, 2}:
        return "it does not halve height or width"
    if any(
        coordinate_of(i, n, m) != i * k + Fraction(k - 1, 2)
        for (m, n), k in zip(sizes, steps, strict=True)
        for i in range(n)
    ):
        return "its coordinates are not in the middle of two"
    attributes = {"kernel_shape": steps, "strides": steps}
    return site.replaced_by(site.rewriter.add("AveragePool", [site.data], attributes))


def _sizes(site: Site, mode: str) -> _Sizes | str:
    """Height and width before and after, of a Resize of a 4-D map in one mode."""
    input_shape, output_shape = image(site.data), image(site.output)
    if input_shape is None or output_shape is None or input_shape[:2] != output_shape[:2]:
        return "it needs a 4-D map of known size and resizes height and width alone"
    given_mode = site.view.attribute("mode")
    if given_mode != mode:
        return f"mode {given_mode}"
    if site.view.integer("antialias", 0) or site.view.integer("exclude_outside", 0):
        return "it is antialiased or leaves the outside out"
    if site.view.attribute("keep_aspect_ratio_policy") not in (None, "stretch"):
        return "it keeps the aspect ratio"
    scales = site.array(2 if site.node.op_type == "Resize" else 1)
    if scales is not None and scales.size:
        # Coordinates follow the scales, which need not be the quotients of the sizes.
        exact = [float(n) / m for m, n in zip(input_shape, output_shape, strict=True)]
        count = min(2, scales.size)
        if not np.allclose(scales[-count:], exact[-count:], rtol=1e-6):
            return "its scales are not those of its sizes"
    return (input_shape[2], output_shape[2]), (input_shape[3], output_shape[3])


def _enlarged(site: Site, mode: str) -> tuple[_Sizes, tuple[int, int]] | str:
    """Return `_sizes` and the integer scales of height and width, or why there are none."""
    sizes = _sizes(site, mode)
    if isinstance(sizes, str):
        return sizes
    if any(after % before for before, after in sizes):
        return f"scales {sizes[0][1] / sizes[0][0]:g} and {sizes[1][1] / sizes[1][0]:g}"
    return sizes, (sizes[0][1] // sizes[0][0], sizes[1][1] // sizes[1][0])


def _steps(sizes: _Sizes) -> tuple[int, int] | None:
    if any(before % after for before, after in sizes):
        return None
    return sizes[0][0] // sizes[0][1], sizes[1][0] // sizes[1][1]


def _copied(site: Site, before: int, after: int) -> list[int] | None:
    """The rows (or columns) that the site copies, None where its mode is unknown."""
    coordinates = str(site.view.attribute("coordinate_transformation_mode") or "asymmetric")
    rounding = str(site.view.attribute("nearest_mode") or "floor")
    return _list(coordinates, rounding, before, after)


def _list(coordinates: str, rounding: str, before: int, after: int) -> list[int] | None:
    coordinate_of, round_index = _COORDINATES.get(coordinates), _ROUNDINGS.get(rounding)
    if coordinate_of is None or round_index is None:
        return None
    return [
        min(before - 1, max(0, round_index(coordinate_of(i, after, before)))) for i in range(after)
    ]


def _resize(site: Site, scales: tuple[int, int], coordinates: str, rounding: str | None) -> Outcome:
    attributes = {
        "mode": str(site.view.attribute("mode")),
        "coordinate_transformation_mode": coordinates,
    }
    if rounding is not None:
        attributes["nearest_mode"] = rounding
    factors = site.rewriter.constant(np.array([1, 1, *scales], np.float32))
    return site.replaced_by(site.rewriter.add("Resize", [site.data, None, factors], attributes))
