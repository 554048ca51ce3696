"""Generated pictures for detectors: coloured shapes on textures, with their boxes and classes.

A detector learns them from random weights in minutes, so that its scores and boxes mean something
without a data set. Everything is computed by torch, on the GPU if it is given one.
"""

from dataclasses import dataclass
from typing import Any

CLASSES = ("disc", "square", "triangle", "ring", "cross")
MOST_SHAPES = 6
_SMALLEST, _LARGEST = 0.05, 0.2  # half the size of a shape, in sides of the picture
_GRIDS = (3, 11, 47)  # cells of the texture, per side
_THICKNESS = 0.45  # of a ring and of the bars of a cross, in halves of the shape
_MIN_VISIBLE = 0.6  # of a shape's pixels: else a later shape covers it, and it has no box


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture, float32 (3, side, side) in 0 to 1, with boxes (n, 4) in pixels and labels (n).

    Labels are 1 + the number in CLASSES, as torchvision's detectors want them.
    """

    picture: Any
    boxes: Any
    labels: Any


def scene(side: int, generator: Any) -> Scene:  # noqa: ANN401  (torch has no types here)
    """Draw one picture with 1 to MOST_SHAPES shapes, on the device of the generator."""
    import torch

    device = generator.device

    def uniform(*shape: int) -> Any:  # noqa: ANN401
        return torch.rand(*shape, generator=generator, device=device)

    picture = _texture(side, uniform)
    at = (torch.arange(side, device=device) + 0.5) / side
    y, x = torch.meshgrid(at, at, indexing="ij")
    count = 1 + int(uniform(1) * MOST_SHAPES)
    labels = (uniform(count) * len(CLASSES)).long()
    masks = []
    for label in labels.tolist():
        half = _SMALLEST + (_LARGEST - _SMALLEST) * uniform(1) ** 2
        centre = half + (1 - 2 * half) * uniform(2)
        angle = uniform(1) * 2 * torch.pi
        u, v = (x - centre[0]) / half, (y - centre[1]) / half
        turned = (u * angle.cos() + v * angle.sin(), v * angle.cos() - u * angle.sin())
        mask = _inside(CLASSES[label], *turned)
        colour = uniform(3, 1, 1) * (0.75 + 0.25 * uniform(1, side, side))
        picture = torch.where(mask, colour, picture)
        masks = [(earlier & ~mask, area) for earlier, area in masks]
        masks.append((mask, mask.sum()))
    shown = torch.stack([visible.sum() >= _MIN_VISIBLE * area for visible, area in masks])
    boxes = torch.stack([_box(visible) for visible, _ in masks])
    return Scene(picture, boxes[shown], (labels + 1)[shown])


def _texture(side: int, uniform: Any) -> Any:  # noqa: ANN401
    """Return noise at three scales around one brightness."""
    from torch.nn.functional import interpolate

    layers = [
        interpolate(uniform(1, 3, cells, cells) - 0.5, size=(side, side), mode="bilinear")[0]
        for cells in _GRIDS
    ]
    contrast = 0.2 + 0.6 * uniform(1)
    return (0.2 + 0.6 * uniform(3, 1, 1) + contrast * sum(layers) / 2).clamp(0, 1)


def _inside(name: str, u: Any, v: Any) -> Any:  # noqa: ANN401
    """Return where a shape of radius 1 around 0 is, bool, in its own turned coordinates."""
    radius = u.hypot(v)
    if name == "disc":
        return radius <= 1
    if name == "ring":
        return (radius <= 1) & (radius >= 1 - _THICKNESS)
    if name == "square":
        return (u.abs() <= 0.7) & (v.abs() <= 0.7)
    if name == "triangle":
        # The three sides are at distance 1/2 from the centre.
        return (v <= 0.5) & (0.866 * u - 0.5 * v <= 0.5) & (-0.866 * u - 0.5 * v <= 0.5)
    bar = _THICKNESS / 2
    return (radius <= 1) & ((u.abs() <= bar) | (v.abs() <= bar))


def _box(mask: Any) -> Any:  # noqa: ANN401
    """Return the corners (x0, y0, x1, y1) of what a mask holds, in pixels, as float32."""
    import torch

    corners = []
    for axis in (0, 1):
        line = mask.any(axis).to(torch.uint8)
        corners.append((line.argmax(), len(line) - line.flip(0).argmax()))
    (x0, x1), (y0, y1) = corners
    return torch.stack([x0, y0, x1, y1]).float()
