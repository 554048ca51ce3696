"""Facets of solids in 3-D, and how an object is turned towards the camera.

Object coordinates: x right, y down, z away from the viewer; an object is about 1 in radius.
The corners of a facet run clockwise when it is seen from outside.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Rng = np.random.Generator
Vector = tuple[float, float, float]
Area = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Pose:
    """Angles in degrees: spin about the object's own z, then yaw (y), pitch (x), roll (z)."""

    yaw: float
    pitch: float
    roll: float
    spin: float


# The faces of a cuboid: outward normal, the viewer's right, the viewer's down.
FACES: tuple[tuple[Vector, Vector, Vector], ...] = (
    ((0, 0, 1), (-1, 0, 0), (0, 1, 0)),
    ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    ((1, 0, 0), (0, 0, 1), (0, 1, 0)),
    ((-1, 0, 0), (0, 0, -1), (0, 1, 0)),
    ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
    ((0, 0, -1), (1, 0, 0), (0, 1, 0)),
)
TOP, FRONT = 4, 5

_AXES = np.array(FACES, np.float32)


def panel(face: int, half: Vector, area: Area) -> Floats:
    """Cut the rectangle `area` (u1, v1, u2, v2 in -1..1) out of one face: float32 [4, 3]."""
    u1, v1, u2, v2 = area
    corners = np.array([[1, u1, v1], [1, u2, v1], [1, u2, v2], [1, u1, v2]], np.float32)
    return np.asarray(corners @ _AXES[face] * np.array(half, np.float32), np.float32)


def cuboid(half: Vector) -> list[Floats]:
    """Return the faces of a box of half sizes (x, y, z): six of float32 [4, 3]."""
    return [panel(face, half, (-1, -1, 1, 1)) for face in range(len(FACES))]


def revolve(profile: Sequence[tuple[float, float]], segments: int) -> Floats:
    """Turn (radius, y) points about the y axis: float32 [bands, segments, 4, 3]."""
    angle = np.linspace(0, 2 * np.pi, segments + 1, dtype=np.float32)
    circle = np.stack([np.cos(angle), np.zeros_like(angle), np.sin(angle)], axis=1)
    rings = np.stack([circle * r + np.array([0, y, 0], np.float32) for r, y in profile])
    near, far = rings[:-1], rings[1:]
    quads = (near[:, :-1], near[:, 1:], far[:, 1:], far[:, :-1])
    return np.asarray(np.stack(quads, axis=2), np.float32)


def rotation(pose: Pose) -> Floats:
    """Build the matrix float32 [3, 3] that takes object to camera axes."""
    (cy, cp, cr, cs), (sy, sp, sr, ss) = (
        f(np.radians([pose.yaw, pose.pitch, pose.roll, pose.spin])) for f in (np.cos, np.sin)
    )
    yaw = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    pitch = np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    roll = np.array([[cr, -sr, 0], [sr, cr, 0], [0, 0, 1]])
    spin = np.array([[cs, -ss, 0], [ss, cs, 0], [0, 0, 1]])
    return np.asarray(roll @ pitch @ yaw @ spin, np.float32)
