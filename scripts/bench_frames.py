"""Frames as inputs on a GPU: compare with the CPU's input, and time both ways.

    python -m scripts.bench_frames build robot.engine --profile h200 --precision fp16
    python -m scripts.bench_frames run robot.engine [--runs 200] [--json]

`build` needs no GPU: it makes an engine of the shipped detector, with the kernels. `run` needs the
GPU: it compares images bit by bit, and times a frame from its bytes to the outputs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

import configs
from device.engine.file import open_engine
from device.runtime.frames import FrameInput, FramePixels, FramePlace, why_no_frames
from device.runtime.session import Session
from pipelines.config import PipelineConfig, PreprocessConfig, SourceConfig, load_model
from pipelines.decode_config import Detr
from pipelines.frame import Frame, Nv12, Stamp
from pipelines.runtime.feed import DeviceFeed
from pipelines.stages.preprocess import Preprocessor, fit, inner_size, preprocess
from pipelines.stages.scene import Scene
from pipelines.vision import cv2

MODEL = configs.ROOT / "models" / "robot-objects.toml"
SIZES = ((1080, 1920), (720, 1280), (480, 640), (240, 320), (641, 427))
TIMED = (1080, 1920)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an image made on the GPU differs from the CPU's, in levels of the frame's bytes."""

    pixels: str
    height: int
    width: int
    largest: float
    equal_share: float


@dataclass(frozen=True, slots=True)
class Times:
    """Medians in ms of one frame, from bytes in the CPU's memory to outputs there."""

    pixels: str
    on_cpu_ms: float
    on_cpu_made_ms: float
    on_gpu_ms: float
    in_pipeline_ms: float


def random_frame(rng: np.random.Generator, pixels: str, height: int, width: int) -> FramePixels:
    """Return noise: its pixels differ from their neighbours as much as any can."""
    if pixels == "bgr":
        return FramePixels(rng.integers(0, 256, (height, width, 3), np.uint8), "bgr", width, height)
    even = height // 2 * 2, width // 2 * 2
    rows = rng.integers(0, 256, (even[0] * 3 // 2, even[1]), np.uint8)
    return FramePixels(rows, "nv12", even[1], even[0])


def as_bgr(frame: FramePixels) -> np.ndarray:
    """Return the frame as the CPU's preprocessing takes it."""
    if frame.pixels == "bgr":
        return frame.rows
    image = np.asarray(cv2.cvtColor(frame.rows, cv2.COLOR_YUV2BGR_NV12), np.uint8)
    return image[: frame.height, : frame.width]


def place_of(frame: FramePixels, config: PreprocessConfig) -> FramePlace:
    """Return where the frame lies in the input."""
    geometry = fit(frame.height, frame.width, config)
    inner = inner_size(frame.height, frame.width, config)
    return FramePlace(*inner, geometry.pad_x, geometry.pad_y)


def compare(
    target: FrameInput, config: PreprocessConfig, rng: np.random.Generator
) -> list[Agreement]:
    """Return how the images of random frames agree."""
    rows = []
    step = config.scale / min(config.std)
    for pixels in ("bgr", "nv12"):
        for height, width in SIZES:
            frame = random_frame(rng, pixels, height, width)
            target.put(0, frame, place_of(frame, config))
            expected = preprocess(as_bgr(frame), config)[0][0].astype(np.float64)
            steps = np.abs(target.image(0).astype(np.float64) - expected) / step
            equal = float(np.mean(steps < 1e-3))
            largest = round(float(steps.max()), 4)
            rows.append(Agreement(pixels, frame.height, frame.width, largest, equal))
    return rows


def time_ways(
    session: Session, target: FrameInput, config: PreprocessConfig, runs: int
) -> list[Times]:
    """Return the times of both ways, taking turns."""
    rng = np.random.default_rng(1)
    name = session.inputs[0].name
    on_cpu = Preprocessor(config)
    feed = DeviceFeed(config, target)
    scene = Scene(
        PipelineConfig(
            name="bench", source=SourceConfig(uri="test://"), preprocess=config, decode=Detr()
        ),
        (),
    )
    rows = []
    for pixels in ("bgr", "nv12"):
        frame = random_frame(rng, pixels, *TIMED)
        place = place_of(frame, config)

        def cpu(frame: FramePixels = frame) -> None:
            session.infer({name: on_cpu.run(as_bgr(frame))[0]})

        def gpu(frame: FramePixels = frame, place: FramePlace = place) -> None:
            target.put(0, frame, place)
            target.infer(1)

        def make(frame: FramePixels = frame) -> None:
            on_cpu.run(as_bgr(frame))

        now = Stamp.now()
        nv12 = Nv12(frame.rows, frame.width, frame.height) if pixels == "nv12" else None
        taken = Frame(partial(as_bgr, frame), 0, now, now, "bench", nv12=nv12)

        def pipeline(taken: Frame = taken) -> None:
            feed.put(0, taken, scene)
            feed.infer(1)

        times = _medians_ms((cpu, make, gpu, pipeline), runs)
        rows.append(Times(pixels, *times))
    return rows


def _medians_ms(ways: tuple[Callable[[], None], ...], runs: int) -> list[float]:
    spent: list[list[float]] = [[] for _ in ways]
    for number in range(runs + 10):
        for way, times in zip(ways, spent, strict=True):
            begin_s = time.perf_counter()
            way()
            if number >= 10:
                times.append(time.perf_counter() - begin_s)
    return [round(median(times) * 1e3, 3) for times in spent]


def build(path: Path, profile: str, precision: str) -> None:
    """Write the engine."""
    from toolkit.engine.build import BuildOptions, build_engine
    from toolkit.quantize.ranges.measure import RangeOptions

    model = load_model(MODEL)
    options = BuildOptions(
        precision=precision,  # type: ignore[arg-type]
        ranges=RangeOptions(preprocess=model.preprocess),
        dummy_ranges=precision == "int8",
        preprocess_on="gpu",
    )
    build_engine(MODEL.parent / model.file, profile, path, options)


def run(path: Path, runs: int, *, as_json: bool) -> int:
    """Compare and time; return the exit status."""
    config = load_model(MODEL).preprocess
    cv2.setNumThreads(1)
    with open_engine(path) as engine, Session(engine) as session:
        reason = why_no_frames(engine, session)
        if reason is not None:
            print(f"frames do not become inputs on the GPU: {reason}", file=sys.stderr)
            return 1
        target = FrameInput(engine, session, 1, {})
        agreements = compare(target, config, np.random.default_rng(0))
        times = time_ways(session, target, config, runs)
        target.close()
    if as_json:
        result = {"agreement": [asdict(a) for a in agreements], "times": [asdict(t) for t in times]}
        print(json.dumps(result))
    else:
        for row in agreements:
            print(
                f"{row.pixels:5} {row.width}x{row.height}: at most {row.largest} levels,"
                f" {row.equal_share:.2%} equal"
            )
        for timed in times:
            print(
                f"{timed.pixels:5} {TIMED[1]}x{TIMED[0]} to outputs: {timed.on_cpu_ms} ms with the"
                f" input made on the CPU ({timed.on_cpu_made_ms} ms of it), {timed.on_gpu_ms} ms"
                f" with the kernel, {timed.in_pipeline_ms} ms as a pipeline does it"
            )
    return 0 if max(row.largest for row in agreements) <= 1.01 else 1


def main() -> int:
    """Build or run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("build", "run"):
        one = verbs.add_parser(verb)
        one.add_argument("engine", type=Path)
        if verb == "build":
            one.add_argument("--profile", default="h200")
            one.add_argument("--precision", choices=["fp32", "fp16", "int8"], default="fp16")
        else:
            one.add_argument("--runs", type=int, default=200)
            one.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.verb == "build":
        build(arguments.engine, arguments.profile, arguments.precision)
        return 0
    return run(arguments.engine, arguments.runs, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
