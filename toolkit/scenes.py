"""Synthetic scenes for the demo detector: five kinds of objects drawn over real photographs.

An object is a list of flat facets in 3-D (or an analytic sphere), turned, projected with
perspective, shaded and pasted over a crop of a photograph; light, blur, sensor noise and JPEG
artefacts come last, as in a camera. Every scene is a function of (seed, index) alone, so a
training set, a calibration set and a held-out set are three numbers and not three archives.

Object coordinates: x right, y down, z away from the viewer; an object is about 1 in radius.
The corners of a facet run clockwise when it is seen from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import cv2
import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Rng = np.random.Generator
Vector = tuple[float, float, float]
Area = tuple[float, float, float, float]

CLASSES: tuple[str, ...] = ("cone", "ball", "box", "wheel", "marker")

# Photographs that no training or calibration scene ever shows; file stems.
HELD_OUT_PHOTOGRAPHS: tuple[str, ...] = ("camera", "china", "coffee")

TRAIN_SEED, CALIBRATION_SEED, HELD_OUT_SEED = 1, 2, 3

MIN_VISIBLE = 0.35  # of an object's pixels; below it a person would not name the object either
OBJECT_SIZE = (20.0, 160.0)  # longer side in pixels, for a scene 320 pixels wide
REFERENCE_WIDTH = 320.0


@dataclass(frozen=True, slots=True)
class Box:
    """A labelled object: `class_id` indexes CLASSES, corners are in pixels, x2 and y2 exclusive."""

    class_id: int
    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture (uint8 [height, width, 3], BGR) and the objects in it."""

    image: Image
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class _Solid:
    """Facets float32 [n, 4, 3] in painting order, with one BGR colour (0..255) each."""

    facets: Floats
    colours: Floats


@dataclass(frozen=True, slots=True)
class _Ball:
    """A sphere; `paint` maps object-space normals [n, 3] and the colours [k, 3] to BGR [n, 3]."""

    paint: Callable[[Floats, Floats], Floats]
    colours: Floats


@dataclass(frozen=True, slots=True)
class _Figure:
    """One object's looks: everything about it that does not change while it moves."""

    class_id: int
    look: _Solid | _Ball
    grime: Floats
    distance: float  # of the camera, in object radii: small is strong perspective
    shine: float


@dataclass(frozen=True, slots=True)
class _Pose:
    """Angles in degrees: spin about the object's own z, then yaw (y), pitch (x), roll (z)."""

    yaw: float
    pitch: float
    roll: float
    spin: float


@dataclass(frozen=True, slots=True)
class _Light:
    """A distant lamp; `towards` is the unit vector from the object to it."""

    towards: Floats
    ambient: float


@dataclass(frozen=True, slots=True)
class _Sprite:
    """A drawn object: colour uint8 [h, w, 3], coverage uint8 [h, w], corner in the picture."""

    colour: Image
    mask: Image
    x: int
    y: int


# --- geometry -------------------------------------------------------------------------------

# The faces of a cuboid: outward normal, the viewer's right, the viewer's down.
_FACES: tuple[tuple[Vector, Vector, Vector], ...] = (
    ((0, 0, 1), (-1, 0, 0), (0, 1, 0)),
    ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    ((1, 0, 0), (0, 0, 1), (0, 1, 0)),
    ((-1, 0, 0), (0, 0, -1), (0, 1, 0)),
    ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
    ((0, 0, -1), (1, 0, 0), (0, 1, 0)),
)
_TOP, _FRONT = 4, 5


_AXES = np.array(_FACES, np.float32)


def _panel(face: int, half: Vector, area: Area) -> Floats:
    """Cut the rectangle `area` (u1, v1, u2, v2 in -1..1) out of one face: float32 [4, 3]."""
    u1, v1, u2, v2 = area
    corners = np.array([[1, u1, v1], [1, u2, v1], [1, u2, v2], [1, u1, v2]], np.float32)
    return np.asarray(corners @ _AXES[face] * np.array(half, np.float32), np.float32)


def _cuboid(half: Vector) -> list[Floats]:
    return [_panel(face, half, (-1, -1, 1, 1)) for face in range(len(_FACES))]


def _revolve(profile: Sequence[tuple[float, float]], segments: int) -> Floats:
    """Turn (radius, y) points about the y axis: float32 [bands, segments, 4, 3]."""
    angle = np.linspace(0, 2 * np.pi, segments + 1, dtype=np.float32)
    circle = np.stack([np.cos(angle), np.zeros_like(angle), np.sin(angle)], axis=1)
    rings = np.stack([circle * r + np.array([0, y, 0], np.float32) for r, y in profile])
    near, far = rings[:-1], rings[1:]
    quads = (near[:, :-1], near[:, 1:], far[:, 1:], far[:, :-1])
    return np.asarray(np.stack(quads, axis=2), np.float32)


def _rotation(pose: _Pose) -> Floats:
    """Build the matrix float32 [3, 3] that takes object to camera axes."""
    (cy, cp, cr, cs), (sy, sp, sr, ss) = (
        f(np.radians([pose.yaw, pose.pitch, pose.roll, pose.spin])) for f in (np.cos, np.sin)
    )
    yaw = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    pitch = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    roll = np.array([[cr, -sr, 0], [sr, cr, 0], [0, 0, 1]])
    spin = np.array([[cs, -ss, 0], [ss, cs, 0], [0, 0, 1]])
    return np.asarray(roll @ pitch @ yaw @ spin, np.float32)


# --- looks: what one object of a class is made of ---------------------------------------------


def _hue(rng: Rng, hues: tuple[int, int], saturation: tuple[int, int] = (120, 255)) -> Floats:
    """Pick a BGR colour float32 [3]; hues in OpenCV's 0..179."""
    value = rng.integers(110, 256)
    hsv = np.array([[[rng.integers(*hues) % 180, rng.integers(*saturation), value]]], np.uint8)
    return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[0, 0], np.float32)


def _grey(rng: Rng, low: int, high: int) -> Floats:
    return np.asarray(rng.uniform(low, high) + rng.uniform(-8, 8, 3), np.float32)


_CONE_HUES = ((0, 14), (0, 14), (0, 14), (20, 32), (100, 125))  # mostly orange


def _cone(rng: Rng) -> _Solid:
    body, stripe = _hue(rng, _CONE_HUES[rng.integers(5)], (190, 255)), _grey(rng, 200, 250)
    bands, around, foot, tip = 10, 28, rng.uniform(0.38, 0.62), rng.uniform(0.04, 0.12)
    t = np.linspace(0, 1, bands + 1)
    rings = [(tip + (foot - tip) * float(u), -1.0 + 1.9 * float(u)) for u in t]
    striped = np.zeros(bands, np.bool_)
    for first in ((), (4,), (3, 6))[rng.integers(3)]:
        striped[first : first + 2] = True
    side = _revolve(rings, around)
    plate = foot * rng.uniform(1.1, 1.45)
    base = np.stack(_cuboid((plate, 0.06, plate))) + np.array([0, 0.94, 0], np.float32)
    lid = _revolve([(0.0, -1.0), (tip, -1.0)], around)
    cap = body if rng.random() < 0.6 else _grey(rng, 20, 60)
    colours = [cap] * len(base) + [stripe if s else body for s in striped for _ in range(around)]
    facets = np.concatenate([base, side.reshape(-1, 4, 3), lid.reshape(-1, 4, 3)])
    return _Solid(facets, np.stack(colours + [body * 0.5] * around))


_CARD_HUES = ((8, 20), (8, 20), (0, 180))  # cardboard, cardboard, plastic crate


def _box(rng: Rng) -> _Solid:
    half: Vector = (rng.uniform(0.5, 1.0), rng.uniform(0.4, 0.9), rng.uniform(0.5, 1.0))
    kind = int(rng.integers(3))
    body = _hue(rng, _CARD_HUES[kind], (70, 150) if kind < 2 else (100, 230))
    facets, colours = _cuboid(half), [body] * len(_FACES)
    tape, ink, w = _grey(rng, 120, 230), body * 0.35, rng.uniform(0.06, 0.16)
    decals: list[tuple[int, Area, Floats]]
    decals = [(_TOP, (-w, -1, w, 1), tape), (_FRONT, (-w, -1, w, -0.55), tape)]
    for face in (0, 2, 3, _FRONT):
        u, v = rng.uniform(-0.8, 0.0, 2)
        label = (u, v, u + rng.uniform(0.3, 0.8), v + rng.uniform(0.3, 0.7))
        decals.append((face, label, _grey(rng, 190, 250) if rng.random() < 0.5 else ink))
        decals.append((face, (-0.92, 0.72, 0.92, 0.80), body * 0.75))
    if rng.random() < 0.15:
        decals = []
    facets += [_panel(face, half, area) for face, area, _ in decals]
    return _Solid(np.stack(facets), np.stack(colours + [colour for _, _, colour in decals]))


def _wheel(rng: Rng) -> _Solid:
    n, half = 24, rng.uniform(0.12, 0.32)
    hub, rim = rng.uniform(0.12, 0.25), rng.uniform(0.55, 0.72)
    lip = rim + rng.uniform(0.04, 0.1)
    profile = [(0.0, -half), (hub, -half * 0.8), (rim, -half * 0.7), (lip, -half)]
    profile += [(0.94, -half), (1.0, -half * 0.75), (1.0, half)]
    metal = _grey(rng, 130, 235) if rng.random() < 0.6 else _hue(rng, (0, 180))
    tyre, gap = _grey(rng, 18, 60), _grey(rng, 15, 80)
    bands = np.stack([metal * 0.8, gap, metal, tyre * 1.25, tyre, tyre])
    colours = np.repeat(bands, n, axis=0)
    colours[-n::2] *= 0.6  # lugs of the tread
    turned = _revolve(profile, n).reshape(-1, 4, 3)
    spokes = _spokes(int(rng.integers(3, 9)), hub * 0.9, rim, rng.uniform(0.06, 0.16), -half * 0.8)
    facets = np.concatenate([turned, spokes])
    # The axle turns from y to z, so that the wheel's outside faces the viewer.
    facets = np.stack([facets[..., 0], -facets[..., 2], facets[..., 1]], axis=-1)
    return _Solid(facets, np.concatenate([colours, np.tile(metal, (len(spokes), 1))]))


def _spokes(count: int, start: float, end: float, width: float, y: float) -> Floats:
    """Lay `count` tapering bars around the y axis: float32 [count, 4, 3]."""
    along = np.array([start, end, end, start])
    across = np.array([width, width * 0.7, -width * 0.7, -width])
    angle = np.arange(count)[:, None] * (2 * np.pi / count)
    x = along * np.cos(angle) - across * np.sin(angle)
    z = along * np.sin(angle) + across * np.cos(angle)
    return np.stack([x, np.full_like(x, y), z], axis=-1).astype(np.float32)


def _marker(rng: Rng) -> _Solid:
    cells, quiet = int(rng.integers(4, 7)), rng.uniform(0.06, 0.2)
    dark, light = _grey(rng, 5, 45), _grey(rng, 205, 252)
    half: Vector = (0.9, 0.9, rng.uniform(0.02, 0.08))
    edge = 1 - quiet
    facets = [*_cuboid(half), _panel(_FRONT, half, (-edge, -edge, edge, edge))]
    colours = [light * 0.8] * (len(_FACES) - 1) + [light, dark]
    step = 2 * edge / (cells + 2)  # one dark cell all around the code
    for i, j in np.argwhere(rng.random((cells, cells)) < 0.5):
        u, v = -edge + (1 + int(j)) * step, -edge + (1 + int(i)) * step
        facets.append(_panel(_FRONT, half, (u, v, u + step, v + step)))
        colours.append(light)
    return _Solid(np.stack(facets), np.stack(colours))


_GOLD = (1 + 5**0.5) / 2
# Axes through the 12 pentagons (6 pairs) and the 20 hexagons (10 pairs) of a football.
_PENTAGONS: list[Vector] = [(0, 1, _GOLD), (0, 1, -_GOLD), (1, _GOLD, 0), (1, -_GOLD, 0)]
_PENTAGONS += [(_GOLD, 0, 1), (-_GOLD, 0, 1)]
_HEXAGONS: list[Vector] = [(1, 1, 1), (1, 1, -1), (1, -1, 1), (-1, 1, 1), (0, _GOLD, 1 / _GOLD)]
_HEXAGONS += [(0, _GOLD, -1 / _GOLD), (_GOLD, 1 / _GOLD, 0), (_GOLD, -1 / _GOLD, 0)]
_HEXAGONS += [(1 / _GOLD, 0, _GOLD), (-1 / _GOLD, 0, _GOLD)]
_PANELS = np.array(_PENTAGONS + _HEXAGONS, np.float32)
_PANELS /= np.linalg.norm(_PANELS, axis=1, keepdims=True)
_PANELS[:6] *= 0.985  # the pentagons of a football are smaller than its hexagons


def _football(normal: Floats, colours: Floats) -> Floats:
    near = np.abs(normal @ _PANELS.T)
    best = near.argmax(axis=1)
    top = np.partition(near, -2, axis=1)[:, -2:]
    paint = np.where(best[:, None] < 6, colours[0], colours[1])
    return np.asarray(np.where(top[:, 1:] - top[:, :1] < 0.012, colours[2], paint), np.float32)


def _beach_ball(normal: Floats, colours: Floats) -> Floats:
    sector = np.floor((np.arctan2(normal[:, 0], normal[:, 2]) / np.pi + 1) * 2.9999).astype(int)
    paint = colours[sector % len(colours)]
    return np.asarray(np.where(np.abs(normal[:, 1:2]) > 0.96, 240, paint), np.float32)


def _basketball(normal: Floats, colours: Floats) -> Floats:
    x, y, z = np.abs(normal).T
    seam = (np.minimum(x, y) < 0.035) | (np.abs(x - 0.45 - 0.3 * z * z) < 0.035)
    return np.asarray(np.where(seam[:, None], colours[0], colours[1]), np.float32)


def _plain_ball(normal: Floats, colours: Floats) -> Floats:
    x, y, z = normal.T
    seam = np.abs(y - 0.55 * (x * x - z * z)) < 0.05
    return np.asarray(np.where(seam[:, None], colours[1], colours[2]), np.float32)


_BALLS = (_football, _beach_ball, _basketball, _plain_ball)


def _ball(rng: Rng) -> _Ball:
    kind = int(rng.integers(len(_BALLS)))
    palettes: tuple[tuple[Floats, ...], ...] = (
        (_grey(rng, 10, 50), _grey(rng, 200, 250), _grey(rng, 60, 130)),
        (_hue(rng, (0, 60)), _grey(rng, 210, 250), _hue(rng, (60, 180))),
        (_grey(rng, 15, 50), _hue(rng, (5, 16)), _grey(rng, 15, 50)),
        (_grey(rng, 0, 0), _grey(rng, 200, 250), _hue(rng, (0, 180))),
    )
    return _Ball(_BALLS[kind], np.stack(palettes[kind]))


_LOOKS: tuple[Callable[[Rng], _Solid | _Ball], ...] = (_cone, _ball, _box, _wheel, _marker)

# Degrees: yaw, pitch, roll, spin; one row per class of CLASSES. Positive pitch looks down on it.
_POSES: tuple[tuple[tuple[float, float], ...], ...] = (
    ((-45, 45), (4, 45), (-12, 12), (0, 0)),
    ((-180, 180), (-180, 180), (-180, 180), (0, 0)),
    ((-180, 180), (8, 50), (-12, 12), (0, 0)),
    ((-62, 62), (-15, 30), (-12, 12), (-180, 180)),
    ((-55, 55), (-45, 45), (-15, 15), (-180, 180)),
)
_TIPPED = (0.15, 0.0, 0.1, 0.0, 0.0)  # share of objects that lie on their side


def _figure(rng: Rng, class_id: int) -> _Figure:
    grime = (1 + rng.normal(0, 0.09, (5, 5))).astype(np.float32)
    shine = rng.uniform(0, 0.5) * float(CLASSES[class_id] != "marker")
    return _Figure(class_id, _LOOKS[class_id](rng), grime, rng.uniform(2.8, 7.0), shine)


def _pose(rng: Rng, class_id: int) -> _Pose:
    yaw, pitch, roll, spin = (rng.uniform(low, high) for low, high in _POSES[class_id])
    tipped = rng.random() < _TIPPED[class_id]
    return _Pose(yaw, pitch, roll + (90.0 * rng.choice((-1, 1)) if tipped else 0.0), spin)


def _lamp(rng: Rng) -> _Light:
    towards = np.array([rng.uniform(-1, 1), rng.uniform(-1.2, -0.2), rng.uniform(-1.2, -0.3)])
    return _Light(
        (towards / np.linalg.norm(towards)).astype(np.float32), float(rng.uniform(0.35, 0.65))
    )


# --- drawing ----------------------------------------------------------------------------------


def _shade(colours: Floats, normal: Floats, light: _Light, shine: float) -> Floats:
    """Light surfaces with unit normals [n, 3]: Lambert plus a highlight towards the viewer."""
    half = light.towards + np.array([0, 0, -1], np.float32)
    half /= np.linalg.norm(half)
    lit = light.ambient + (1.15 - light.ambient) * np.maximum(normal @ light.towards, 0)
    gloss = 255 * shine * np.maximum(normal @ half, 0) ** 24
    return np.asarray(np.clip(colours * lit[:, None] + gloss[:, None], 0, 255), np.float32)


def _draw(
    figure: _Figure, pose: _Pose, light: _Light, place: tuple[float, float, float]
) -> _Sprite:
    """Draw an object with its outline centred on place[:2] and place[2] pixels long or high."""
    look = figure.look
    if isinstance(look, _Ball):
        sprite = _draw_ball(look, figure, _rotation(pose), light, place)
    else:
        sprite = _draw_solid(look, figure, _rotation(pose), light, place)
    height, width = sprite.mask.shape
    grime = cv2.resize(figure.grime, (width, height), interpolation=cv2.INTER_LINEAR)
    colour = np.clip(sprite.colour * grime[..., None], 0, 255).astype(np.uint8)
    return _Sprite(colour, sprite.mask, sprite.x, sprite.y)


def _draw_solid(
    look: _Solid, figure: _Figure, turn: Floats, light: _Light, place: tuple[float, float, float]
) -> _Sprite:
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


def _halve(colour: Image, mask: Image, x: int, y: int) -> _Sprite:
    """Average 2x2 blocks; colour stays that of the covered part, so no dark rim appears."""
    size = (mask.shape[1] // 2, mask.shape[0] // 2)
    small = cv2.resize(mask, size, interpolation=cv2.INTER_AREA)
    mixed = cv2.resize(colour, size, interpolation=cv2.INTER_AREA)
    whole = np.minimum(mixed * (255.0 / np.maximum(small, 1))[..., None], 255)
    return _Sprite(whole.astype(np.uint8), np.asarray(small, np.uint8), x, y)


def _draw_ball(
    look: _Ball, figure: _Figure, turn: Floats, light: _Light, place: tuple[float, float, float]
) -> _Sprite:
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
    return _Sprite(colour, mask.astype(np.uint8), x, y)


class _Canvas:
    """A picture being painted, and which object owns each pixel (0: none, k: the k-th)."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.owner = np.zeros(image.shape[:2], np.int16)
        # Entry k describes object k: its class, its pixels, those still visible. 0 is the rest.
        self.classes = [-1]
        self.areas = np.zeros(1, np.int64)
        self.visible = np.zeros(1, np.int64)

    def window(self, sprite: _Sprite) -> tuple[slice, slice, slice, slice]:
        """Slices of the picture (rows, columns) and of the sprite where the two overlap."""
        height, width, h, w = *self.image.shape[:2], *sprite.mask.shape[:2]
        top, left = max(sprite.y, 0), max(sprite.x, 0)
        bottom, right = max(min(sprite.y + h, height), top), max(min(sprite.x + w, width), left)
        rows, columns = slice(top, bottom), slice(left, right)
        inner = slice(top - sprite.y, bottom - sprite.y), slice(left - sprite.x, right - sprite.x)
        return rows, columns, *inner

    def fits(self, sprite: _Sprite) -> bool:
        """Say whether the sprite and all under it would stay visible enough to be named."""
        rows, columns, inner_rows, inner_columns = self.window(sprite)
        solid = sprite.mask[inner_rows, inner_columns] > 127
        if np.count_nonzero(solid) < MIN_VISIBLE * np.count_nonzero(sprite.mask > 127):
            return False
        left = self.visible - self._count(rows, columns, solid)
        return bool(np.all(left[1:] >= MIN_VISIBLE * self.areas[1:]))

    def paint(self, sprite: _Sprite, class_id: int | None) -> None:
        """Paste a sprite; with `class_id` None it is clutter that hides objects."""
        rows, columns, inner_rows, inner_columns = self.window(sprite)
        mask = sprite.mask[inner_rows, inner_columns]
        under = self.image[rows, columns].astype(np.float32)
        over = sprite.colour[inner_rows, inner_columns] - under
        mixed = under + over * (mask.astype(np.float32) / 255)[..., None]
        self.image[rows, columns] = np.rint(mixed)
        solid = mask > 127
        self.visible -= self._count(rows, columns, solid)
        if class_id is not None:
            self.classes.append(class_id)
            self.areas = np.append(self.areas, np.count_nonzero(sprite.mask > 127))
            self.visible = np.append(self.visible, np.count_nonzero(solid))
        self.owner[rows, columns][solid] = 0 if class_id is None else len(self.areas) - 1

    def _count(self, rows: slice, columns: slice, solid: Mask) -> npt.NDArray[np.int64]:
        """Count each object's pixels under a sprite."""
        return np.bincount(self.owner[rows, columns][solid], minlength=len(self.areas))

    def darken(self, sprite: _Sprite, offset: tuple[int, int], strength: float) -> None:
        """Lay the sprite's soft shadow on what is painted so far."""
        pad = max(sprite.mask.shape) // 6 + 2
        soft = np.asarray(cv2.blur(np.pad(sprite.mask, pad), (pad, pad)), np.uint8)
        moved = _Sprite(sprite.colour, soft, sprite.x - pad + offset[0], sprite.y - pad + offset[1])
        rows, columns, inner_rows, inner_columns = self.window(moved)
        fade = 1 - soft[inner_rows, inner_columns].astype(np.float32) * (strength / 255)
        self.image[rows, columns] = self.image[rows, columns] * fade[..., None]

    def boxes(self) -> tuple[Box, ...]:
        """Boxes tight around the visible pixels of every object that is visible enough."""
        found = []
        for number in range(1, len(self.areas)):
            if self.visible[number] < max(MIN_VISIBLE * self.areas[number], 1):
                continue
            mine = self.owner == number
            rows, columns = np.flatnonzero(mine.any(axis=1)), np.flatnonzero(mine.any(axis=0))
            corners = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
            found.append(Box(self.classes[number], *(float(v) for v in corners)))
        return tuple(found)


# --- backgrounds and clutter ------------------------------------------------------------------


def load_backgrounds(folder: Path, held_out: bool | None = None) -> list[Image]:
    """Read the photographs of a folder in the order of their names, BGR uint8.

    `held_out` True keeps only HELD_OUT_PHOTOGRAPHS, False all the others, None everything.

    Raises:
        FileNotFoundError: no such photograph is in the folder.
    """
    files = sorted(Path(folder).glob("*.jpg"))
    if held_out is not None:
        files = [f for f in files if (f.stem in HELD_OUT_PHOTOGRAPHS) == held_out]
    if not files:
        raise FileNotFoundError(f"{folder}: no photograph (*.jpg) to draw scenes over")
    return [np.asarray(cv2.imread(str(f), cv2.IMREAD_COLOR), np.uint8) for f in files]


def _crop(rng: Rng, photo: Image, width: int, height: int) -> Image:
    """Cut a random window of any size out of a photograph: turned, stretched, mirrored."""
    rows, columns = photo.shape[:2]
    zoom = min(columns / width, rows / height) * float(np.exp(rng.uniform(np.log(0.3), 0)))
    angle = rng.uniform(-np.pi, np.pi) if rng.random() < 0.25 else rng.normal(0, 0.12)
    stretch = np.diag(zoom * rng.uniform((0.7, 0.7), (1.0, 1.0)) * (rng.choice((-1, 1)), 1))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) @ stretch
    half = np.abs(turn) @ (width / 2, height / 2)  # what the window needs around its centre
    room = np.maximum(np.array([columns, rows]) / 2 - half, 0)
    centre = np.array([columns, rows]) / 2 + rng.uniform(-1, 1, 2) * room
    offset = centre - turn @ (width / 2, height / 2)
    matrix = np.column_stack([turn, offset]).astype(np.float32)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    size = (width, height)
    turned = cv2.warpAffine(photo, matrix, size, flags=flags, borderMode=cv2.BORDER_REFLECT_101)
    return np.asarray(turned, np.uint8)


def _any_crop(rng: Rng, photos: Sequence[Image], width: int, height: int) -> Image:
    """Crop any of the photographs, at times in other tones than the few there are have."""
    image = _crop(rng, photos[int(rng.integers(len(photos)))], width, height)
    if rng.random() < 0.5:
        image = image[..., rng.permutation(3)]
    if rng.random() < 0.5:
        ramp = np.linspace(0, 1, 256)[:, None] ** np.exp(rng.normal(0, 0.3, 3))
        ramp = 255 * ramp * rng.uniform(0.4, 1.1)
        curve = np.clip(ramp[::-1] if rng.random() < 0.15 else ramp, 0, 255).astype(np.uint8)
        image = np.asarray(cv2.LUT(image, curve[:, None]), np.uint8)
    return np.ascontiguousarray(image)


def _background(rng: Rng, photos: Sequence[Image], width: int, height: int) -> Image:
    """Show one photograph, one above another as wall and floor, or one melting into another."""
    image, kind = _any_crop(rng, photos, width, height), rng.random()
    if kind < 0.25:
        floor = int(height * rng.uniform(0.4, 0.8))
        image[floor:] = _any_crop(rng, photos, width, height - floor)
    elif kind < 0.4:
        share = float(rng.uniform(0.2, 0.8))
        other = _any_crop(rng, photos, width, height)
        image = np.asarray(cv2.addWeighted(image, share, other, 1 - share, 0), np.uint8)
    return image


def _outline(rng: Rng) -> Floats:
    """Choose a shape within the unit circle: bar, triangle, ellipse or blob, float32 [n, 2]."""
    kind = rng.random()
    if kind < 0.4:
        return np.array([[-0.7, -0.7], [0.7, -0.7], [0.7, 0.7], [-0.7, 0.7]], np.float32)
    if kind < 0.5:
        return np.asarray(rng.uniform(-1, 1, (3, 2)), np.float32)
    angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    reach = np.ones(40)
    if kind > 0.65:
        for wave in range(1, 6):
            reach += rng.normal(0, 0.22 / wave) * np.sin(wave * angle + rng.uniform(0, 7))
        reach = np.clip(reach / reach.max(), 0.2, 1)
    return np.asarray(reach[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1), np.float32)


def _material(rng: Rng, photos: Sequence[Image], side: int) -> Image:
    """Fill a square with one colour, stripes or a piece of a photograph, and shade it."""
    kind = rng.random()
    if kind < 0.45:
        colour = _any_crop(rng, photos, side, side)
    else:
        main = _grey(rng, 5, 240) if kind < 0.65 else _hue(rng, (0, 180), (0, 220))
        colour = np.full((side, side, 3), np.clip(main, 0, 255), np.uint8)
    if 0.6 < kind < 0.8:
        colour[:, np.arange(side) % int(rng.integers(8, 32)) < 5] = _hue(rng, (0, 180), (0, 200))
    shade = rng.uniform(0.35, 1.1, (2, 2)).astype(np.float32)
    field = cv2.resize(shade, (side, side))
    return np.asarray(cv2.multiply(colour, cv2.merge([field] * 3), dtype=cv2.CV_8U), np.uint8)


def _clutter(rng: Rng, photos: Sequence[Image], width: int, height: int, longest: float) -> _Sprite:
    """Draw a thing of no class up to `longest` pixels, to hide objects and to mislead."""
    length = longest * float(np.exp(rng.uniform(np.log(0.15), 0)))
    thick = length * float(np.exp(rng.uniform(np.log(0.1), 0)))
    angle, side = rng.uniform(0, np.pi), int(length) + 4
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    shape = (_outline(rng) * (length / 2, thick / 2)) @ turn
    mask = np.zeros((side, side), np.uint8)
    scales = (1.0, rng.uniform(0.7, 0.95)) if rng.random() < 0.2 else (1.0,)  # at times a frame
    for scale, value in zip(scales, (255, 0), strict=False):
        polygon = np.rint((shape * scale + side / 2) * 16).astype(np.int32)
        cv2.fillPoly(mask, [polygon], value, cv2.LINE_AA, 4)
    x, y = rng.uniform(0, width) - side / 2, rng.uniform(0, height) - side / 2
    return _Sprite(_material(rng, photos, side), mask, int(x), int(y))


# --- the camera -------------------------------------------------------------------------------

# 256 equally likely values of a standard normal: noise is one table look-up per sample.
_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)])


def _expose(rng: Rng, image: Image) -> Image:
    """Change gain and colour cast, lay a gradient and at times a soft shadow edge over all."""
    field = np.ones((24, 24), np.float32)
    slope = np.linspace(-1, 1, 24, dtype=np.float32) * rng.uniform(0, 0.3)
    field += slope[:, None] if rng.random() < 0.5 else slope[None, :]
    if rng.random() < 0.35:
        patch = np.rint(rng.uniform(-8, 32, (4, 2))).astype(np.int32)
        cv2.fillConvexPoly(field, cv2.convexHull(patch), float(rng.uniform(0.45, 0.8)))
    gain = np.exp(rng.normal(0, 0.25)) * np.clip(rng.normal(1, 0.07, 3), 0.8, 1.2)
    light = cv2.resize(field[..., None] * gain.astype(np.float32), image.shape[1::-1])
    return np.asarray(cv2.multiply(image, light, dtype=cv2.CV_8U), np.uint8)


def _blur(rng: Rng, image: Image) -> Image:
    scale = image.shape[1] / REFERENCE_WIDTH
    kind = rng.random()
    if kind < 0.3:
        return np.asarray(cv2.GaussianBlur(image, (0, 0), rng.uniform(0.4, 1.4) * scale), np.uint8)
    if kind < 0.45:
        length = int(rng.integers(3, 8) * scale) | 1
        kernel = np.zeros((length, length), np.float32)
        angle, middle = rng.uniform(0, np.pi), length // 2
        step = np.rint(middle * np.array([np.cos(angle), np.sin(angle)])).astype(int)
        start, end = (middle - step).tolist(), (middle + step).tolist()
        cv2.line(kernel, start, end, 1.0)
        return np.asarray(cv2.filter2D(image, -1, kernel / kernel.sum()), np.uint8)
    return image


def _sense(rng: Rng, image: Image, sigma: float) -> Image:
    """Add Gaussian sensor noise of `sigma` grey levels."""
    table = np.rint(_NORMAL * sigma).astype(np.int16)
    noise = cv2.LUT(rng.integers(0, 256, image.shape, np.uint8), table)
    return np.asarray(cv2.add(image, noise, dtype=cv2.CV_8U), np.uint8)


def _compress(image: Image, quality: int) -> Image:
    coded = cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, quality))[1]
    return np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR), np.uint8)


# --- scenes -----------------------------------------------------------------------------------


def _populate(rng: Rng, canvas: _Canvas, photos: Sequence[Image]) -> None:
    """Place objects and clutter; what would hide another too much is left out."""
    height, width = canvas.image.shape[:2]
    light, scale = _lamp(rng), min(width, height) / REFERENCE_WIDTH
    for _ in range(int(rng.integers(0, 6))):
        canvas.paint(_clutter(rng, photos, width, height, width * 0.8), None)
    smallest, largest = np.log(np.array(OBJECT_SIZE) * scale)
    shadow, strength = rng.uniform((-0.12, -0.06), (0.12, 0.18)), rng.uniform(0.0, 0.6)
    for _ in range(int(rng.integers(0, 8))):
        class_id = int(rng.integers(len(CLASSES)))
        size = float(np.exp(rng.uniform(smallest, largest)))
        margin = size * 0.35
        x, y = rng.uniform(margin, width - margin), rng.uniform(margin, height - margin)
        sprite = _draw(_figure(rng, class_id), _pose(rng, class_id), light, (x, y, size))
        if canvas.fits(sprite):
            canvas.darken(sprite, (int(shadow[0] * size), int(shadow[1] * size)), strength)
            canvas.paint(sprite, class_id)
        if rng.random() < 0.3:
            clutter = _clutter(rng, photos, width, height, width * 0.5)
            if canvas.fits(clutter):
                canvas.paint(clutter, None)


def draw_scene(seed: int, index: int, backgrounds: Sequence[Image], size: int = 320) -> Scene:
    """Draw scene `index` of the set `seed`: BGR uint8 [size, size, 3] and its boxes.

    The same arguments give the same scene, whatever was drawn before.
    """
    rng = np.random.default_rng([seed, index])
    canvas = _Canvas(_background(rng, backgrounds, size, size))
    _populate(rng, canvas, backgrounds)
    image = _blur(rng, _expose(rng, canvas.image))
    image = _sense(rng, image, rng.uniform(0.0, 9.0))
    if rng.random() < 0.7:
        image = _compress(image, int(rng.integers(35, 96)))
    return Scene(image, canvas.boxes())


@dataclass(frozen=True, slots=True)
class _Actor:
    """An object of a moving scene: it swings about `home` and turns while it does.

    Rows of `sway` are x, y, size (all in pixels), yaw and spin (degrees): amplitude, turns per
    100 frames, phase in turns.
    """

    figure: _Figure
    pose: _Pose
    home: tuple[float, float, float]
    sway: npt.NDArray[np.float64]

    def sprite(self, frame: int, light: _Light) -> _Sprite:
        """Draw the object as it stands in a frame."""
        phase = self.sway[:, 2] + self.sway[:, 1] * frame / 100
        dx, dy, ds, yaw, spin = (self.sway[:, 0] * np.sin(2 * np.pi * phase)).tolist()
        pose = _Pose(self.pose.yaw + yaw, self.pose.pitch, self.pose.roll, self.pose.spin + spin)
        x, y, size = self.home
        return _draw(self.figure, pose, light, (x + dx, y + dy, size + ds))


def _cast(rng: Rng, width: int, height: int) -> list[_Actor]:
    """Give each class one actor, and two more, spread over a 4 by 2 grid; small ones first."""
    classes = [*range(len(CLASSES)), *rng.integers(0, len(CLASSES), 2).tolist()]
    actors = []
    for class_id, cell in zip(classes, rng.permutation(8).tolist(), strict=False):
        size = height * rng.uniform(0.13, 0.36)
        x = width * (cell % 4 + rng.uniform(0.35, 0.65)) / 4
        y = height * (cell // 4 + rng.uniform(0.4, 0.7)) / 2
        (_, yaw), _, _, (_, spin) = _POSES[class_id]
        reach = np.array([width * 0.12, height * 0.08, size * 0.2, yaw * 0.2, spin * 0.5])
        sway = np.stack([reach, rng.uniform(0.2, 0.6, 5), rng.uniform(0, 1, 5)], axis=1)
        home = (x, y, size)
        pose = _pose(rng, class_id)
        pose = _Pose(pose.yaw * 0.75, pose.pitch, pose.roll, pose.spin)  # leaves room to turn
        actors.append(_Actor(_figure(rng, class_id), pose, home, sway))
    return sorted(actors, key=lambda actor: actor.home[2])


def moving_scene(
    seed: int, frames: int, backgrounds: Sequence[Image], width: int = 640, height: int = 480
) -> Iterator[Scene]:
    """Film objects that move smoothly over a slowly panning photograph.

    Yields `frames` scenes with images uint8 [height, width, 3], BGR. An object that is hidden
    by more than 1 - MIN_VISIBLE has no box in that frame.
    """
    rng = np.random.default_rng([seed])
    light, photo = _lamp(rng), backgrounds[int(rng.integers(len(backgrounds)))]
    zoom = 1.3 * max(width / photo.shape[1], height / photo.shape[0])
    stage = np.asarray(cv2.resize(photo, None, fx=zoom, fy=zoom), np.uint8)
    actors, slack = _cast(rng, width, height), np.array(stage.shape[1::-1]) - (width, height)
    for frame in range(frames):
        swing = np.array([np.sin(frame / 90), np.cos(frame / 120)])
        centre = slack / 2 * (1 + 0.9 * swing) + np.array([width - 1, height - 1]) / 2
        window = cv2.getRectSubPix(stage, (width, height), centre.tolist())
        canvas = _Canvas(np.asarray(window, np.uint8))
        for actor in actors:
            sprite = actor.sprite(frame, light)
            canvas.darken(sprite, (0, int(actor.home[2] * 0.06)), 0.4)
            canvas.paint(sprite, actor.figure.class_id)
        yield Scene(_sense(rng, canvas.image, 3.0), canvas.boxes())
