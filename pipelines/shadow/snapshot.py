"""`python -m pipelines.shadow.snapshot`: one frame of the running pipeline as JPEG, in JSON."""

from device.start.isolation import drop_working_directory
from device.start.packages import claim

drop_working_directory()
claim()

# ruff: noqa: E402
import argparse
import base64
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from device.errors import PipelineError, TandemError
from pipelines.frame import Frame, Image
from pipelines.shadow.compare import Connection
from pipelines.shadow.wire import Hello
from pipelines.vision import cv2

MIN_QUALITY = 10


def snapshot(tap: Path, camera: str, timeout_s: float) -> Frame:
    """Return the next frame of a camera; empty: of any. Raises PipelineError: none comes."""
    until_s = time.monotonic() + timeout_s

    def check(hello: Hello) -> None:
        if camera and camera not in hello.cameras:
            names = ", ".join(name for name in hello.cameras if name)
            advice = f"use one of {names}" if names else "its only one has no name, leave it out"
            raise PipelineError(f"the pipeline has no camera {camera!r}: {advice}")

    connection = Connection(tap, check)
    try:
        while (sample := connection.sample(until_s)) is not None:
            if camera in ("", sample.frame.camera):
                return sample.frame
    finally:
        connection.close()
    raise PipelineError(
        f"the running pipeline gave no frame within {timeout_s:g} s: it does not run, its camera "
        "is away, or a release runs in its shadow"
    )


def encode_jpeg(image: Image, width: int, quality: int, max_bytes: int) -> tuple[Image, bytes]:
    """Return a picture of at most this width, and its JPEG of at most so many bytes.

    Raises PipelineError: not even the lowest quality fits.
    """
    height, actual = image.shape[:2]
    if actual > width:
        size = (width, max(1, round(height * width / actual)))
        image = np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)
    while True:
        done, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
        if done and data.nbytes * 4 // 3 <= max_bytes:
            return image, data.tobytes()
        if quality == MIN_QUALITY:
            raise PipelineError(
                f"the picture has {data.nbytes} bytes at the lowest quality, {max_bytes} are the "
                "most: ask for a smaller width"
            )
        quality = max(MIN_QUALITY, quality - 10)


def document_of(frame: Frame, width: int, quality: int, max_bytes: int) -> dict[str, Any]:
    """Return what the operator gets of a frame."""
    image, data = encode_jpeg(frame.image, width, quality, max_bytes)
    taken = datetime.fromtimestamp(frame.t_capture.wall_ns / 1e9, timezone.utc)
    return {
        "camera": frame.camera,
        "seq": frame.seq,
        "at": taken.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "width": image.shape[1],
        "height": image.shape[0],
        "jpeg": base64.b64encode(data).decode(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one frame; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.shadow.snapshot")
    parser.add_argument("--tap", type=Path, required=True)
    parser.add_argument("--camera", default="")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--quality", type=int, default=80)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--max-bytes", type=int, default=500_000)
    options = parser.parse_args(arguments)
    try:
        frame = snapshot(options.tap, options.camera, options.timeout)
        document = document_of(frame, options.width, options.quality, options.max_bytes)
    except (TandemError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
