"""Camera effects on an image: exposure, blur, sensor noise and JPEG artefacts."""

from statistics import NormalDist

import cv2
import numpy as np

from toolkit.demo.scenes.geometry import Image, Rng

REFERENCE_WIDTH = 320.0


# 256 equally likely values of a standard normal: noise is one table look-up per sample.
_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)])


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


def sense(rng: Rng, image: Image, sigma: float) -> Image:
    """Add Gaussian sensor noise of `sigma` grey levels."""
    table = np.rint(_NORMAL * sigma).astype(np.int16)
    noise = cv2.LUT(rng.integers(0, 256, image.shape, np.uint8), table)
    return np.asarray(cv2.add(image, noise, dtype=cv2.CV_8U), np.uint8)


def compress(image: Image, quality: int) -> Image:
    """Return uint8 [H, W, 3] as JPEG of a quality (0 to 100) gives it back."""
    coded = cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, quality))[1]
    return np.asarray(cv2.imdecode(coded, cv2.IMREAD_COLOR), np.uint8)
