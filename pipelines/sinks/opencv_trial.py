"""Tries OpenCV's encoder in a process of its own: FFmpeg inside OpenCV writes on standard error.

python -I .../device/start pipelines.sinks.opencv_trial PATH FOURCC FPS WIDTH HEIGHT
"""

import sys

import numpy as np

from pipelines.vision import cv2

FRAMES = 2


def main(argv: list[str]) -> None:
    """Write a few black frames, if OpenCV can."""
    path, code, fps, width, height = argv[1:]
    size = int(width), int(height)
    writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*code), float(fps), size)
    for _ in range(FRAMES if writer.isOpened() else 0):
        writer.write(np.zeros((*size[::-1], 3), np.uint8))
    writer.release()


if __name__ == "__main__":
    main(sys.argv)
