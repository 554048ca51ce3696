"""Which Resize and Upsample operations are nearest-neighbor upsampling by whole factors."""

from toolkit.gpu.ir.network import Network, Operation, Shape
from toolkit.gpu.ir.parameters import floats_of, scales_input

# Coordinates and rounding with which pixel i of the result comes from floor(i / factor).
_WHOLE_PIXELS = {("asymmetric", "floor"), ("half_pixel", "round")}


def repeats_pixels(network: Network, op: Operation, shape: Shape, result: Shape) -> bool:
    """Whether a Resize or Upsample repeats each pixel of (N, C, H, W) whole times."""
    return has_whole_factors(op, shape, result) and _has_whole_scales(network, op)


def has_whole_factors(op: Operation, shape: Shape, result: Shape) -> bool:
    """Whether its shapes and attributes allow that; scales may say otherwise."""
    old = op.kind == "Upsample"
    if op.text("mode", "nearest") != "nearest" or len(shape) != 4 or result[:2] != shape[:2]:
        return False
    coordinates = op.text("coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    nearest = op.text("nearest_mode", "floor" if old else "round_prefer_floor")
    if (coordinates, nearest.split("_")[0]) not in _WHOLE_PIXELS:
        return False
    return all(r // s * s == r and r >= s for r, s in zip(result[2:], shape[2:], strict=True))


def _has_whole_scales(network: Network, op: Operation) -> bool:
    """Whether scales, where an operation is given them and no sizes, are whole numbers.

    One of 2.4 makes 4 rows of 2, too, but three of the first and one of the second.
    """
    at = scales_input(op)
    if op.input(at) and op.input(at) not in network.constants:
        return False
    return all(scale == int(scale) for scale in floats_of(network, op, at, "scales") or ())
