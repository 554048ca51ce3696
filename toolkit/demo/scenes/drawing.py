"""One object becomes a sprite: projected with perspective, shaded, with soft edges."""

from dataclasses import dataclass

import cv2
import numpy as np

from toolkit.demo.scenes.geometry import Floats, Image, Pose, Rng, rotation
from toolkit.demo.scenes.objects import Ball, Figure, Solid


@dataclass(frozen=True, slots=True)
class Light:
    """A distant lamp; `towards` is the unit vector from the object to it."""

    towards: Floats
    ambient: float


@dataclass(frozen=True, slots=True)
class Sprite:
    """A drawn object: colour uint8 [h, w, 3], coverage uint8 [h, w], corner in the picture."""

    colour: Image
    mask: Image
    x: int
    y: int


def pick_lamp(rng: Rng) -> Light:
    """Pick a light from above and in front of the scene."""
    towards = np.array([rng.uniform(-1, 1), rng.uniform(-1.2, -0.2), rng.uniform(-1.2, -0.3)])
    return Light(
        (towards / np.linalg.norm(towards)).astype(np.float32), float(rng.uniform(0.35, 0.65))
    )


def _shade(colours: Floats, normal: Floats, light: Light, shine: float) -> Floats:
    """Light surfaces with unit normals [n, 3]: Lambert plus a highlight towards the viewer."""
    half = light.towards + np.array([0, 0, -1], np.float32)
    half /= np.linalg.norm(half)
    lit = light.ambient + (1.15 - light.ambient) * np.maximum(normal @ light.towards, 0)
    gloss = 255 * shine * np.maximum(normal @ half, 0) ** 24
    return np.asarray(np.clip(colours * lit[:, None] + gloss[:, None], 0, 255), np.float32)


def draw(figure: Figure, pose: Pose, light: Light, place: tuple[float, float, float]) -> Sprite:
    """Draw an object with its outline centred on place[:2] and place[2] pixels long or high."""
    look = figure.look
    if isinstance(look, Ball):
        sprite = _draw_ball(look, figure, rotation(pose), light, place)
    else:
        sprite = _draw_solid(look, figure, rotation(pose), light, place)
    height, width = sprite.mask.shape
    grime = cv2.resize(figure.grime, (width, height), interpolation=cv2.INTER_LINEAR)
    colour = np.clip(sprite.colour * grime[..., None], 0, 255).astype(np.uint8)
    return Sprite(colour, sprite.mask, sprite.x, sprite.y)


def _draw_solid(
    look: Solid, figure: Figure, turn: Floats, light: Light, place: tuple[float, float, float]
) -> Sprite:
    facets = look.facets @ turn.T
    normal = np.cross(facets[:, 3] - facets[:, 1], facets[:, 2] - facets[:, 0])
    normal /= np.linalg.norm(normal, axis=1, keepdims=True) + 1e-9
    eye = np.array([0, 0, -figure.distance], np.float32)
    seen = np.einsum("ij,ij->i", normal, facets.mean(axis=1) - eye) < 0
    facets, normal = facets[seen], normal[seen]
    flat = facets[..., :2] / (facets[..., 2:] + figure.distance)
    low, high = flat.min(axis=(0, 1)), flat.max(axis=(0, 1))
    scale = place[2] / float((high - low).max())
    flat = (flat - (low + high) / 2) * scale + np.array(place[:2])
    x, y = (int(np.floor(v)) - 1 for v in flat.min(axis=(0, 1)))
    width, height = (int(np.ceil(v)) + 1 for v in flat.max(axis=(0, 1)) - (x, y))
    # Twice the size without anti-aliasing, then halved: smooth outside, no seams between facets.
    colour, mask = (
        np.zeros((2 * height, 2 * width, 3), np.uint8),
        np.zeros((2 * height, 2 * width), np.uint8),
    )
    corners = np.rint(((flat - (x, y)) * 2 - 0.5) * 16).astype(np.int32)
    paints = _shade(look.colours[seen], normal, light, figure.shine).tolist()
    for polygon, paint in zip(corners, paints, strict=True):
        cv2.fillConvexPoly(colour, polygon, paint, cv2.LINE_8, 4)
        cv2.fillConvexPoly(mask, polygon, 255, cv2.LINE_8, 4)
    return _halve(colour, mask, x, y)


def _halve(colour: Image, mask: Image, x: int, y: int) -> Sprite:
    """Average 2x2 blocks; colour stays that of the covered part, so no dark rim appears."""
    size = (mask.shape[1] // 2, mask.shape[0] // 2)
    small = cv2.resize(mask, size, interpolation=cv2.INTER_AREA)
    mixed = cv2.resize(colour, size, interpolation=cv2.INTER_AREA)
    whole = np.minimum(mixed * (255.0 / np.maximum(small, 1))[..., None], 255)
    return Sprite(whole.astype(np.uint8), np.asarray(small, np.uint8), x, y)


def _draw_ball(
    look: Ball, figure: Figure, turn: Floats, light: Light, place: tuple[float, float, float]
) -> Sprite:
    radius = place[2] / 2
    x, y = int(np.floor(place[0] - radius)) - 1, int(np.floor(place[1] - radius)) - 1
    side = int(np.ceil(place[2])) + 3
    u = (np.arange(x, x + side, dtype=np.float32) + 0.5 - np.float32(place[0])) / radius
    v = (np.arange(y, y + side, dtype=np.float32) + 0.5 - np.float32(place[1])) / radius
    square = u[None, :] ** 2 + v[:, None] ** 2
    mask = np.clip((1 - np.sqrt(square)) * radius + 0.5, 0, 1) * 255
    inside = mask > 0
    v_grid, u_grid = np.nonzero(inside)
    depth = -np.sqrt(np.maximum(1 - square[inside], 0))
    normal = np.stack([u[u_grid], v[v_grid], depth], axis=1).astype(np.float32)
    colour = np.zeros((side, side, 3), np.uint8)
    colour[inside] = _shade(look.paint(normal @ turn, look.colours), normal, light, figure.shine)
    return Sprite(colour, mask.astype(np.uint8), x, y)
