"""Objects that move smoothly before a panning photograph: the demo's video."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import cv2
import numpy as np
import numpy.typing as npt

from toolkit.demo.scenes.canvas import Box, Canvas
from toolkit.demo.scenes.drawing import Light, Sprite, draw, pick_lamp
from toolkit.demo.scenes.geometry import Image, Pose, Rng
from toolkit.demo.scenes.objects import CLASSES, POSES, Figure, pick_figure, pick_pose

# 256 equally likely values of a standard normal: noise is one table look-up per sample.
_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)])


@dataclass(frozen=True, slots=True)
class Scene:
    """An image (uint8 [height, width, 3], BGR) and the objects in it."""

    image: Image
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class _Actor:
    """An object of a moving scene: it swings about `home` and turns while it does.

    Rows of `sway` are x, y, size (all in pixels), yaw and spin (degrees): amplitude, turns per
    100 frames, phase in turns.
    """

    figure: Figure
    pose: Pose
    home: tuple[float, float, float]
    sway: npt.NDArray[np.float64]

    def sprite(self, frame: int, light: Light) -> Sprite:
        """Draw the object as it stands in a frame."""
        phase = self.sway[:, 2] + self.sway[:, 1] * frame / 100
        dx, dy, ds, yaw, spin = (self.sway[:, 0] * np.sin(2 * np.pi * phase)).tolist()
        pose = Pose(self.pose.yaw + yaw, self.pose.pitch, self.pose.roll, self.pose.spin + spin)
        x, y, size = self.home
        return draw(self.figure, pose, light, (x + dx, y + dy, size + ds))


def _cast(rng: Rng, width: int, height: int) -> list[_Actor]:
    """Give each class one actor, and two more, spread over a 4 by 2 grid; small ones first."""
    classes = [*range(len(CLASSES)), *rng.integers(0, len(CLASSES), 2).tolist()]
    actors = []
    for class_id, cell in zip(classes, rng.permutation(8).tolist(), strict=False):
        size = height * rng.uniform(0.13, 0.36)
        x = width * (cell % 4 + rng.uniform(0.35, 0.65)) / 4
        y = height * (cell // 4 + rng.uniform(0.4, 0.7)) / 2
        (_, yaw), _, _, (_, spin) = POSES[class_id]
        reach = np.array([width * 0.12, height * 0.08, size * 0.2, yaw * 0.2, spin * 0.5])
        sway = np.stack([reach, rng.uniform(0.2, 0.6, 5), rng.uniform(0, 1, 5)], axis=1)
        home = (x, y, size)
        pose = pick_pose(rng, class_id)
        pose = Pose(pose.yaw * 0.75, pose.pitch, pose.roll, pose.spin)  # leaves room to turn
        actors.append(_Actor(pick_figure(rng, class_id), pose, home, sway))
    return sorted(actors, key=lambda actor: actor.home[2])


def moving_scene(
    seed: int, frames: int, backgrounds: Sequence[Image], width: int = 640, height: int = 480
) -> Iterator[Scene]:
    """Film objects that move smoothly over a slowly panning photograph.

    Yields `frames` scenes with images uint8 [height, width, 3], BGR. An object that is hidden
    by more than 1 - MIN_VISIBLE has no box in that frame.
    """
    rng = np.random.default_rng([seed])
    light, photo = pick_lamp(rng), backgrounds[int(rng.integers(len(backgrounds)))]
    zoom = 1.3 * max(width / photo.shape[1], height / photo.shape[0])
    stage = np.asarray(cv2.resize(photo, None, fx=zoom, fy=zoom), np.uint8)
    actors, slack = _cast(rng, width, height), np.array(stage.shape[1::-1]) - (width, height)
    for frame in range(frames):
        swing = np.array([np.sin(frame / 90), np.cos(frame / 120)])
        centre = slack / 2 * (1 + 0.9 * swing) + np.array([width - 1, height - 1]) / 2
        window = cv2.getRectSubPix(stage, (width, height), centre.tolist())
        canvas = Canvas(np.asarray(window, np.uint8))
        for actor in actors:
            sprite = actor.sprite(frame, light)
            canvas.darken(sprite, (0, int(actor.home[2] * 0.06)), 0.4)
            canvas.paint(sprite, actor.figure.class_id)
        yield Scene(sense(rng, canvas.image, 3.0), canvas.boxes())


def sense(rng: Rng, image: Image, sigma: float) -> Image:
    """Add Gaussian sensor noise of `sigma` grey levels."""
    table = np.rint(_NORMAL * sigma).astype(np.int16)
    noise = cv2.LUT(rng.integers(0, 256, image.shape, np.uint8), table)
    return np.asarray(cv2.add(image, noise, dtype=cv2.CV_8U), np.uint8)
