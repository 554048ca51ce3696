"""A rendered moving scene as video, for machines without a camera."""

from pathlib import Path

from device.errors import SourceError
from pipelines.vision import cv2
from toolkit.demo.scenes import load_backgrounds, moving_scene
from toolkit.shipped import demo_file

FPS = 30.0
FRAMES = 300
SEED = 11  # not a seed that training saw


def write_scene_video(path: Path) -> Path:
    """Render a scene of 640x480 pixels to a video file; return its path."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), FPS, (640, 480))
    if not writer.isOpened():
        raise SourceError(
            f"OpenCV cannot encode {path}: it has no MPEG-4 encoder; give `tandem demo --source`, "
            "or install opencv-python-headless."
        )
    backgrounds = load_backgrounds(demo_file("scenes/backgrounds"), held_out=True)
    try:
        for scene in moving_scene(SEED, FRAMES, backgrounds):
            writer.write(scene.image)
    finally:
        writer.release()
    return path
