"""The demo of a kit: the shipped detector with its pipeline, over pictures that are drawn here."""

import re
from collections.abc import Iterator
from pathlib import Path

import configs
from device.selftest.demo import BUNDLE, EVENTS, FOLDER
from device.update.bundle import ENGINE, LABELS, PIPELINE
from pipelines.vision import cv2
from toolkit.demo.scene_video import SEED
from toolkit.demo.scenes import load_backgrounds, moving_scene
from toolkit.shipped import demo_file

NAME = "robot-objects"
MODEL = f"models/{NAME}.onnx"
_PICTURES = "pictures"
_COUNT = 30


def demo_files(engine: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the entries of the kit: the bundle's files, and pictures."""
    yield f"{BUNDLE}/{ENGINE}", engine.read_bytes()
    yield f"{BUNDLE}/{LABELS}", (configs.ROOT / f"models/{NAME}.labels.txt").read_bytes()
    pipeline = (configs.ROOT / f"pipelines/{NAME}.toml").read_text()
    yield f"{BUNDLE}/{PIPELINE}", pipeline_text(pipeline).encode()
    backgrounds = load_backgrounds(demo_file("scenes/backgrounds"), held_out=True)
    for number, scene in enumerate(moving_scene(SEED, _COUNT, backgrounds)):
        _, encoded = cv2.imencode(".jpg", scene.image)
        yield f"{FOLDER}/{_PICTURES}/{number:03}.jpg", encoded.tobytes()


def pipeline_text(shipped: str) -> str:
    """Return the shipped pipeline, from the pictures to a file."""
    sections = re.split(r"(?m)^(?=\[)", shipped)
    shared = [s for s in sections if not s.startswith(("[source]", "[[sinks]]"))]
    return (
        "".join(shared) + f'\n[source]\nuri = "{_PICTURES}"\nframes = "every"\nrealtime = false\n'
        f'\n[[sinks]]\nkind = "jsonl"\npath = "{EVENTS}"\n'
    )
