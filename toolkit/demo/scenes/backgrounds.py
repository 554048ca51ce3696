"""The photographs behind the objects, cropped, turned and recoloured."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from toolkit.demo.scenes.geometry import Image, Rng

# Photographs that no training or calibration scene ever shows; file stems.
HELD_OUT_PHOTOGRAPHS: tuple[str, ...] = ("camera", "china", "coffee")


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
