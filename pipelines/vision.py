"""The one place that imports OpenCV, so that its absence is one clear sentence."""

from device.errors import PipelineError

try:
    import cv2
except ImportError as error:
    raise PipelineError(
        f"OpenCV (cv2) cannot be imported ({error}): install tandem-edge[camera], or use JetPack's"
        " own cv2 (a venv made with --system-site-packages)."
    ) from error

__all__ = ["cv2"]
