"""What an object of each class is made of, and the poses in which it stands.

An object is a list of flat facets (or an analytic sphere) with colours, all picked at random.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

from toolkit.demo.scenes.geometry import (
    FACES,
    FRONT,
    TOP,
    Area,
    Floats,
    Pose,
    Rng,
    Vector,
    cuboid,
    panel,
    revolve,
)

CLASSES: tuple[str, ...] = ("cone", "ball", "box", "wheel", "marker")


@dataclass(frozen=True, slots=True)
class Solid:
    """Facets float32 [n, 4, 3] in painting order, with one BGR colour (0..255) each."""

    facets: Floats
    colours: Floats


@dataclass(frozen=True, slots=True)
class Ball:
    """A sphere; `paint` maps object-space normals [n, 3] and the colours [k, 3] to BGR [n, 3]."""

    paint: Callable[[Floats, Floats], Floats]
    colours: Floats


@dataclass(frozen=True, slots=True)
class Figure:
    """One object's looks: everything about it that does not change while it moves."""

    class_id: int
    look: Solid | Ball
    grime: Floats
    distance: float  # of the camera, in object radii: small is strong perspective
    shine: float


def pick_hue(rng: Rng, hues: tuple[int, int], saturation: tuple[int, int] = (120, 255)) -> Floats:
    """Pick a BGR colour float32 [3]; hues in OpenCV's 0..179."""
    value = rng.integers(110, 256)
    hsv = np.array([[[rng.integers(*hues) % 180, rng.integers(*saturation), value]]], np.uint8)
    return np.asarray(cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)[0, 0], np.float32)


def pick_grey(rng: Rng, low: int, high: int) -> Floats:
    """Pick a nearly grey BGR colour float32 [3], with a mean from `low` to `high`, about."""
    return np.asarray(rng.uniform(low, high) + rng.uniform(-8, 8, 3), np.float32)


_CONE_HUES = ((0, 14), (0, 14), (0, 14), (20, 32), (100, 125))  # mostly orange


def _cone(rng: Rng) -> Solid:
    body, stripe = pick_hue(rng, _CONE_HUES[rng.integers(5)], (190, 255)), pick_grey(rng, 200, 250)
    bands, around, foot, tip = 10, 28, rng.uniform(0.38, 0.62), rng.uniform(0.04, 0.12)
    t = np.linspace(0, 1, bands + 1)
    rings = [(tip + (foot - tip) * float(u), -1.0 + 1.9 * float(u)) for u in t]
    striped = np.zeros(bands, np.bool_)
    for first in ((), (4,), (3, 6))[rng.integers(3)]:
        striped[first : first + 2] = True
    side = revolve(rings, around)
    plate = foot * rng.uniform(1.1, 1.45)
    base = np.stack(cuboid((plate, 0.06, plate))) + np.array([0, 0.94, 0], np.float32)
    lid = revolve([(0.0, -1.0), (tip, -1.0)], around)
    cap = body if rng.random() < 0.6 else pick_grey(rng, 20, 60)
    colours = [cap] * len(base) + [stripe if s else body for s in striped for _ in range(around)]
    facets = np.concatenate([base, side.reshape(-1, 4, 3), lid.reshape(-1, 4, 3)])
    return Solid(facets, np.stack(colours + [body * 0.5] * around))


_CARD_HUES = ((8, 20), (8, 20), (0, 180))  # cardboard, cardboard, plastic crate


def _box(rng: Rng) -> Solid:
    half: Vector = (rng.uniform(0.5, 1.0), rng.uniform(0.4, 0.9), rng.uniform(0.5, 1.0))
    kind = int(rng.integers(3))
    body = pick_hue(rng, _CARD_HUES[kind], (70, 150) if kind < 2 else (100, 230))
    facets, colours = cuboid(half), [body] * len(FACES)
    tape, ink, w = pick_grey(rng, 120, 230), body * 0.35, rng.uniform(0.06, 0.16)
    decals: list[tuple[int, Area, Floats]]
    decals = [(TOP, (-w, -1, w, 1), tape), (FRONT, (-w, -1, w, -0.55), tape)]
    for face in (0, 2, 3, FRONT):
        u, v = rng.uniform(-0.8, 0.0, 2)
        label = (u, v, u + rng.uniform(0.3, 0.8), v + rng.uniform(0.3, 0.7))
        decals.append((face, label, pick_grey(rng, 190, 250) if rng.random() < 0.5 else ink))
        decals.append((face, (-0.92, 0.72, 0.92, 0.80), body * 0.75))
    if rng.random() < 0.15:
        decals = []
    facets += [panel(face, half, area) for face, area, _ in decals]
    return Solid(np.stack(facets), np.stack(colours + [colour for _, _, colour in decals]))


def _wheel(rng: Rng) -> Solid:
    n, half = 24, rng.uniform(0.12, 0.32)
    hub, rim = rng.uniform(0.12, 0.25), rng.uniform(0.55, 0.72)
    lip = rim + rng.uniform(0.04, 0.1)
    profile = [(0.0, -half), (hub, -half * 0.8), (rim, -half * 0.7), (lip, -half)]
    profile += [(0.94, -half), (1.0, -half * 0.75), (1.0, half)]
    metal = pick_grey(rng, 130, 235) if rng.random() < 0.6 else pick_hue(rng, (0, 180))
    tyre, gap = pick_grey(rng, 18, 60), pick_grey(rng, 15, 80)
    bands = np.stack([metal * 0.8, gap, metal, tyre * 1.25, tyre, tyre])
    colours = np.repeat(bands, n, axis=0)
    colours[-n::2] *= 0.6  # lugs of the tread
    turned = revolve(profile, n).reshape(-1, 4, 3)
    spokes = _spokes(int(rng.integers(3, 9)), hub * 0.9, rim, rng.uniform(0.06, 0.16), -half * 0.8)
    facets = np.concatenate([turned, spokes])
    # The axle turns from y to z, so that the wheel's outside faces the viewer.
    facets = np.stack([facets[..., 0], -facets[..., 2], facets[..., 1]], axis=-1)
    return Solid(facets, np.concatenate([colours, np.tile(metal, (len(spokes), 1))]))


def _spokes(count: int, start: float, end: float, width: float, y: float) -> Floats:
    """Lay `count` tapering bars around the y axis: float32 [count, 4, 3]."""
    along = np.array([start, end, end, start])
    across = np.array([width, width * 0.7, -width * 0.7, -width])
    angle = np.arange(count)[:, None] * (2 * np.pi / count)
    x = along * np.cos(angle) - across * np.sin(angle)
    z = along * np.sin(angle) + across * np.cos(angle)
    return np.stack([x, np.full_like(x, y), z], axis=-1).astype(np.float32)


def _marker(rng: Rng) -> Solid:
    cells, quiet = int(rng.integers(4, 7)), rng.uniform(0.06, 0.2)
    dark, light = pick_grey(rng, 5, 45), pick_grey(rng, 205, 252)
    half: Vector = (0.9, 0.9, rng.uniform(0.02, 0.08))
    edge = 1 - quiet
    facets = [*cuboid(half), panel(FRONT, half, (-edge, -edge, edge, edge))]
    colours = [light * 0.8] * (len(FACES) - 1) + [light, dark]
    step = 2 * edge / (cells + 2)  # one dark cell all around the code
    for i, j in np.argwhere(rng.random((cells, cells)) < 0.5):
        u, v = -edge + (1 + int(j)) * step, -edge + (1 + int(i)) * step
        facets.append(panel(FRONT, half, (u, v, u + step, v + step)))
        colours.append(light)
    return Solid(np.stack(facets), np.stack(colours))


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


def _ball(rng: Rng) -> Ball:
    kind = int(rng.integers(len(_BALLS)))
    palettes: tuple[tuple[Floats, ...], ...] = (
        (pick_grey(rng, 10, 50), pick_grey(rng, 200, 250), pick_grey(rng, 60, 130)),
        (pick_hue(rng, (0, 60)), pick_grey(rng, 210, 250), pick_hue(rng, (60, 180))),
        (pick_grey(rng, 15, 50), pick_hue(rng, (5, 16)), pick_grey(rng, 15, 50)),
        (pick_grey(rng, 0, 0), pick_grey(rng, 200, 250), pick_hue(rng, (0, 180))),
    )
    return Ball(_BALLS[kind], np.stack(palettes[kind]))


_LOOKS: tuple[Callable[[Rng], Solid | Ball], ...] = (_cone, _ball, _box, _wheel, _marker)

# Degrees: yaw, pitch, roll, spin; one row per class of CLASSES. Positive pitch looks down on it.
POSES: tuple[tuple[tuple[float, float], ...], ...] = (
    ((-45, 45), (4, 45), (-12, 12), (0, 0)),
    ((-180, 180), (-180, 180), (-180, 180), (0, 0)),
    ((-180, 180), (8, 50), (-12, 12), (0, 0)),
    ((-62, 62), (-15, 30), (-12, 12), (-180, 180)),
    ((-55, 55), (-45, 45), (-15, 15), (-180, 180)),
)
_TIPPED = (0.15, 0.0, 0.1, 0.0, 0.0)  # share of objects that lie on their side


def pick_figure(rng: Rng, class_id: int) -> Figure:
    """Pick the look of an object of a class, an index into CLASSES."""
    grime = (1 + rng.normal(0, 0.09, (5, 5))).astype(np.float32)
    shine = rng.uniform(0, 0.5) * float(CLASSES[class_id] != "marker")
    return Figure(class_id, _LOOKS[class_id](rng), grime, rng.uniform(2.8, 7.0), shine)


def pick_pose(rng: Rng, class_id: int) -> Pose:
    """Pick a pose within the class's row of POSES; some objects lie on their side."""
    yaw, pitch, roll, spin = (rng.uniform(low, high) for low, high in POSES[class_id])
    tipped = rng.random() < _TIPPED[class_id]
    return Pose(yaw, pitch, roll + (90.0 * rng.choice((-1, 1)) if tipped else 0.0), spin)
