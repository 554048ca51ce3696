"""The one place that imports OpenCV, so that its absence is one clear sentence."""

import os

from device.errors import PipelineError
from device.install_advice import pip_install

# 64 megapixels (9152 x 6944) is the largest camera that is sold for Jetson boards; 192 MiB as BGR.
MAX_PIXELS = 64 << 20
# OpenCV, which reads this as it is loaded, counts with its own reading of a picture's header.
os.environ["OPENCV_IO_MAX_IMAGE_PIXELS"] = str(MAX_PIXELS)

try:
    import cv2
except ImportError as error:
    raise PipelineError(
        f"OpenCV (cv2) cannot be imported ({error}): {pip_install('camera')}, or use"
        " JetPack's own cv2 (a venv made with --system-site-packages)."
    ) from error

__all__ = ["MAX_PIXELS", "cv2"]
