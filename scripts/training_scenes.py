"""Training scenes of the demo detector: images with ground truth, functions of (seed, index).

Objects (`toolkit.demo.scenes`) are pasted over a crop of a photograph among things of no class;
light, blur, sensor noise and JPEG artefacts come last. A training set, a calibration set and a
held-out set are three numbers and not three archives. The shipped pictures were drawn by this code:
its output must not change by a byte.
"""

from collections.abc import Sequence

import cv2
import numpy as np

from toolkit.demo.scenes.canvas import Canvas
from toolkit.demo.scenes.drawing import Sprite, draw, pick_lamp
from toolkit.demo.scenes.geometry import Floats, Image, Rng
from toolkit.demo.scenes.moving import Scene, sense
from toolkit.demo.scenes.objects import CLASSES, pick_figure, pick_grey, pick_hue, pick_pose

TRAIN_SEED, CALIBRATION_SEED, HELD_OUT_SEED = 1, 2, 3
OBJECT_SIZE = (20.0, 160.0)  # longer side in pixels, for a scene 320 pixels wide
REFERENCE_WIDTH = 320.0


def draw_scene(seed: int, index: int, backgrounds: Sequence[Image], size: int = 320) -> Scene:
    """Draw scene `index` of the set `seed`: BGR uint8 [size, size, 3] and its boxes.

    The same arguments give the same scene, whatever was drawn before.
    """
    rng = np.random.default_rng([seed, index])
    canvas = Canvas(draw_background(rng, backgrounds, size, size))
    _populate(rng, canvas, backgrounds)
    image = blur(rng, expose(rng, canvas.image))
    image = sense(rng, image, rng.uniform(0.0, 9.0))
    if rng.random() < 0.7:
        image = compress(image, int(rng.integers(35, 96)))
    return Scene(image, canvas.boxes())


def _populate(rng: Rng, canvas: Canvas, photos: Sequence[Image]) -> None:
    """Place objects and clutter; skip what would occlude another object too much."""
    height, width = canvas.image.shape[:2]
    light, scale = pick_lamp(rng), min(width, height) / REFERENCE_WIDTH
    for _ in range(int(rng.integers(0, 6))):
        canvas.paint(draw_clutter(rng, photos, width, height, width * 0.8), None)
    smallest, largest = np.log(np.array(OBJECT_SIZE) * scale)
    shadow, strength = rng.uniform((-0.12, -0.06), (0.12, 0.18)), rng.uniform(0.0, 0.6)
    for _ in range(int(rng.integers(0, 8))):
        class_id = int(rng.integers(len(CLASSES)))
        size = float(np.exp(rng.uniform(smallest, largest)))
        margin = size * 0.35
        x, y = rng.uniform(margin, width - margin), rng.uniform(margin, height - margin)
        sprite = draw(pick_figure(rng, class_id), pick_pose(rng, class_id), light, (x, y, size))
        if canvas.fits(sprite):
            canvas.darken(sprite, (int(shadow[0] * size), int(shadow[1] * size)), strength)
            canvas.paint(sprite, class_id)
        if rng.random() < 0.3:
            clutter = draw_clutter(rng, photos, width, height, width * 0.5)
            if canvas.fits(clutter):
                canvas.paint(clutter, None)


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


def crop_any(rng: Rng, photos: Sequence[Image], width: int, height: int) -> Image:
    """Crop a random photograph; sometimes shift its tones for variety."""
    image = _crop(rng, photos[int(rng.integers(len(photos)))], width, height)
    if rng.random() < 0.5:
        image = image[..., rng.permutation(3)]
    if rng.random() < 0.5:
        ramp = np.linspace(0, 1, 256)[:, None] ** np.exp(rng.normal(0, 0.3, 3))
        ramp = 255 * ramp * rng.uniform(0.4, 1.1)
        curve = np.clip(ramp[::-1] if rng.random() < 0.15 else ramp, 0, 255).astype(np.uint8)
        image = np.asarray(cv2.LUT(image, curve[:, None]), np.uint8)
    return np.ascontiguousarray(image)


def draw_background(rng: Rng, photos: Sequence[Image], width: int, height: int) -> Image:
    """Draw one photograph, two stacked as wall and floor, or a blend of two."""
    image, kind = crop_any(rng, photos, width, height), rng.random()
    if kind < 0.25:
        floor = int(height * rng.uniform(0.4, 0.8))
        image[floor:] = crop_any(rng, photos, width, height - floor)
    elif kind < 0.4:
        share = float(rng.uniform(0.2, 0.8))
        overlay = crop_any(rng, photos, width, height)
        image = np.asarray(cv2.addWeighted(image, share, overlay, 1 - share, 0), np.uint8)
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
        colour = crop_any(rng, photos, side, side)
    else:
        main = pick_grey(rng, 5, 240) if kind < 0.65 else pick_hue(rng, (0, 180), (0, 220))
        colour = np.full((side, side, 3), np.clip(main, 0, 255), np.uint8)
    if 0.6 < kind < 0.8:
        colour[:, np.arange(side) % int(rng.integers(8, 32)) < 5] = pick_hue(
            rng, (0, 180), (0, 200)
        )
    shade = rng.uniform(0.35, 1.1, (2, 2)).astype(np.float32)
    field = cv2.resize(shade, (side, side))
    return np.asarray(cv2.multiply(colour, cv2.merge([field] * 3), dtype=cv2.CV_8U), np.uint8)


def draw_clutter(
    rng: Rng, photos: Sequence[Image], width: int, height: int, longest: float
) -> Sprite:
    """Draw a distractor of no class, up to `longest` pixels long."""
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
    return Sprite(_material(rng, photos, side), mask, int(x), int(y))


def expose(rng: Rng, image: Image) -> Image:
    """Change gain and colour cast, add a gradient and sometimes a soft shadow edge."""
    field = np.ones((24, 24), np.float32)
    slope = np.linspace(-1, 1, 24, dtype=np.float32) * rng.uniform(0, 0.3)
    field += slope[:, None] if rng.random() < 0.5 else slope[None, :]
    if rng.random() < 0.35:
        patch = np.rint(rng.uniform(-8, 32, (4, 2))).astype(np.int32)
        cv2.fillConvexPoly(field, cv2.convexHull(patch), float(rng.uniform(0.45, 0.8)))
    gain = np.exp(rng.normal(0, 0.25)) * np.clip(rng.normal(1, 0.07, 3), 0.8, 1.2)
    light = cv2.resize(field[..., None] * gain.astype(np.float32), image.shape[1::-1])
    return np.asarray(cv2.multiply(image, light, dtype=cv2.CV_8U), np.uint8)


def blur(rng: Rng, image: Image) -> Image:
    """Blur uint8 [H, W, 3] by focus or motion, or leave it sharp; drawn by `rng`."""
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


def compress(image: Image, quality: int) -> Image:
    """Return uint8 [H, W, 3] as JPEG of a quality (0 to 100) gives it back."""
    coded = cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, quality))[1]
    return np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR), np.uint8)
