"""Runs a pipeline on frames that the element `tandeminfer` puts into shared memory.

    python -I .../device/start pipelines.gstreamer.worker FD PIPELINE ENGINE LABELS DRAW

One line of JSON comes in for each change of caps and each frame, and one goes out for each frame:
its result, nothing where a sink's controls have paused detection, or an error, which is the last
one. It ends with its input, and so with its parent: not
with the parent's thread that started it, which may be a short one.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from device.errors import TandemError
from device.runtime.session import Session
from device.start.stdout import take_stdout
from device.update.bundle import PIPELINE, extract_bundle
from pipelines.config import PipelineConfig, load_pipeline
from pipelines.frame import Frame, Image, Nv12, Stamp
from pipelines.open_models import ModelFiles, bundle_files, files_of, open_models
from pipelines.runtime.batch import BatchRunner
from pipelines.runtime.pipeline import Reporter, discard, sink_context
from pipelines.sink_config import MqttSink
from pipelines.sinks.controls import Controls
from pipelines.sinks.draw_result import draw_result
from pipelines.sinks.opened import OpenSinks
from pipelines.sources.clock import CaptureClock
from pipelines.stages.fit import check_engines
from pipelines.vision import cv2


class Caps(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a frame: `stride` bytes a row. `live`: frames come when they are taken."""

    format: str
    width: int
    height: int
    stride: int
    size: int
    fps: float | None = None
    live: bool = True

    def read(self, memory: NDArray[np.uint8]) -> tuple[Image, Nv12 | None]:
        """Return a copy of a frame as BGR, uint8 [H, W, 3], and as NV12 where it is that."""
        if self.format == "NV12":
            rows = memory[: self.size].reshape(-1, self.stride).copy()
            bgr = np.asarray(cv2.cvtColor(rows, cv2.COLOR_YUV2BGR_NV12), np.uint8)
            return bgr[: self.height, : self.width], Nv12(rows, self.width, self.height)
        pixels = self._pixels(memory)
        copy = pixels.copy() if self.format == "BGR" else pixels[..., ::-1].copy()
        return copy, None

    def write(self, memory: NDArray[np.uint8], image: Image) -> None:
        """Put a picture, BGR, in place of the frame, which is not NV12."""
        self._pixels(memory)[...] = image if self.format == "BGR" else image[..., ::-1]

    def _pixels(self, memory: NDArray[np.uint8]) -> Image:
        rows = memory[: self.stride * self.height].reshape(self.height, self.stride)
        return rows[:, : 3 * self.width].reshape(self.height, self.width, 3)


def main(argv: list[str]) -> int:
    """Answer frames until standard input ends; 1 after an error."""
    memory, pipeline, engine, labels, draw = argv[1:]
    # These reach the whole group. GStreamer ends this by its input, so that sinks are closed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(take_stdout(), "wb", buffering=0)
    try:
        with ExitStack() as stack:
            config, files = _find(Path(pipeline), engine, labels, stack)
            for answer in _answers(config, files, int(memory), draw == "1", stack):
                answers.write(answer + b"\n")
    except TandemError as error:
        answers.write(json.dumps({"error": str(error)}).encode() + b"\n")
        return 1
    return 0


def _find(
    target: Path, engine: str, labels: str, stack: ExitStack
) -> tuple[PipelineConfig, dict[str, ModelFiles]]:
    """Read a bundle, its folder, or a pipeline.toml whose engine and labels may be replaced."""
    if target.suffix == ".toml":
        config = load_pipeline(target)
        engines = {config.first.name: Path(engine)} if engine else None
        return config, files_of(config, target.parent, engines, Path(labels) if labels else None)
    folder = target
    if not folder.is_dir():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bundle"
        extract_bundle(target, folder)
    config = load_pipeline(folder / PIPELINE)
    return config, bundle_files(config, folder)


def _answers(
    config: PipelineConfig, files: dict[str, ModelFiles], fd: int, draw: bool, stack: ExitStack
) -> Iterator[bytes]:
    """Yield a line once the engine is warm, and one for each frame."""
    models = open_models(
        config, files, stack, lambda engine, core, turn: Session(engine, dla_core=core, turn=turn)
    )
    check_engines(config, {name: one.facts for name, one in models.items()})
    cv2.setNumThreads(1)
    controls = Controls()
    runner = BatchRunner(config, models[config.first.name], controls, models)
    stack.callback(runner.close)
    runner.warm_up()
    camera = config.cameras[0].id
    context = replace(sink_context(config, models, controls), cameras=(camera,))
    sinks = stack.enter_context(
        OpenSinks([sink for sink in config.sinks if not isinstance(sink, MqttSink)], context)
    )
    stack.callback(Reporter(runner.metrics, [sinks, controls], sinks, discard).close)
    yield b'{"ready": true}'
    caps, memory, clock, seq = None, np.empty(0, np.uint8), CaptureClock(), 0
    for line in sys.stdin.buffer:
        arrival = Stamp.now()
        request: dict[str, Any] = json.loads(line)
        if "caps" in request:
            previous, caps = caps, msgspec.convert(request["caps"], Caps)
            if previous is None or previous.live != caps.live:
                clock = CaptureClock(live=caps.live)
            memory = np.memmap(f"/proc/self/fd/{fd}", np.uint8, "r+", shape=(caps.size,))
            continue
        assert caps is not None
        if not controls.admits(camera):
            yield b""
            sinks.tick()
            continue
        image, nv12 = caps.read(memory)
        taken = clock.stamp(request["pts"], arrival)
        frame = Frame(image, seq, taken, arrival, "gst", camera, nv12=nv12, fps=caps.fps)
        seq += 1
        for result in runner.run([frame], sinks.sinks):
            if draw:
                caps.write(memory, draw_result(result))
            yield result.payload
        sinks.tick()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
