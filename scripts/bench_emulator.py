"""CPU time of the DLA emulation and of onnxruntime's INT8, in one run, on one thread by default.

    python -m scripts.bench_emulator [--threads 1] [--runs 20] [--networks robot-objects ...]

The demo detector, robot-objects, is built for agx-orin-64gb with its calibration scenes, other
networks (scripts/networks) with random weights and inputs: times hardly depend on either. Only
DLA segments are timed, each separately. The subjects alternate run by run; the table gives
the sum of the medians, its ratio to onnxruntime's, and the signal-to-noise ratio of the engine's
outputs against those with onnxruntime throughout.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

import configs
from device.dla_emulator.options import Emulation
from device.engine.file import Engine, open_engine
from device.engine.manifest import Portable, Segment
from device.runtime.executors.emulated import EmulatedExecutor
from device.runtime.executors.portable import PortableExecutor
from device.runtime.executors.protocol import Executor
from device.runtime.session import Dla, Scales, open_session
from pipelines.config import load_model
from pipelines.stages.preprocess import preprocess
from pipelines.vision import cv2
from scripts.networks import NETWORKS
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.partition.planning.forced import Forced
from toolkit.partition.planning.plan import PlanOptions
from toolkit.quantize.ranges.measure import RangeOptions

MODEL = configs.ROOT / "models" / "robot-objects.toml"
DETECTOR = "robot-objects"
PROFILE = "agx-orin-64gb"
PORTABLE = "onnxruntime INT8"
EMULATIONS = {
    "fast": Emulation("fast", "hardware"),
    "exact": Emulation("exact", "hardware"),
    "fast, ideal scales": Emulation("fast", "ideal"),
}
Arrays = Mapping[str, np.ndarray]
Run = Callable[[Arrays], object]


def main() -> None:
    """Print a table for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16, help="to calibrate with")
    parser.add_argument(
        "--networks", nargs="+", choices=[DETECTOR, *sorted(NETWORKS)],
        default=[DETECTOR, "resnet50"],
    )  # fmt: skip
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.networks:
            make = _detector if name == DETECTOR else _network
            _bench(name, *make(name, Path(folder), arguments.samples), arguments)


def _detector(name: str, folder: Path, count: int) -> tuple[Path, list[Arrays]]:
    model, samples = load_model(MODEL), _scenes(count)
    path = folder / f"{name}.engine"
    _build(MODEL.parent / model.file, path, samples)
    return path, samples


def _build(source: Path, path: Path, samples: list[Arrays]) -> None:
    plan = PlanOptions(forced=Forced(dla=("all",)))  # whether or not it pays
    options = BuildOptions(data=samples, ranges=RangeOptions("minmax"), plan=plan, kernels=False)
    build_engine(source, PROFILE, path, options)


def _scenes(count: int) -> list[Arrays]:
    model = load_model(MODEL)
    files = sorted((MODEL.parent / model.calibration).glob("*.jpg"))[:count]
    pictures = (preprocess(cv2.imread(str(file)), model.preprocess)[0] for file in files)
    return [{"images": picture.copy()} for picture in pictures]


def _network(name: str, folder: Path, count: int) -> tuple[Path, list[Arrays]]:
    model = NETWORKS[name].model(1, None)
    source = folder / f"{name}.onnx"
    ir.save(model, source)
    shape = [int(dim) for dim in model.graph.inputs[0].shape or ()]
    rng = np.random.default_rng(0)
    draws = [rng.standard_normal(shape).astype(np.float32) for _ in range(count)]
    samples: list[Arrays] = [{str(model.graph.inputs[0].name): draw} for draw in draws]
    path = folder / f"{name}.engine"
    _build(source, path, samples)
    return path, samples


def _bench(name: str, path: Path, samples: list[Arrays], arguments: argparse.Namespace) -> None:
    """Time every DLA segment of an engine and compare the engine's outputs."""
    times: dict[str, float] = dict.fromkeys((PORTABLE, *EMULATIONS), 0.0)
    with open_engine(path) as engine:
        segments = [
            segment for segment in engine.manifest.segments if segment.processor.startswith("dla")
        ]
        if not segments:
            raise SystemExit(f"{name}: no node is on the DLA of {PROFILE}; time another network")
        for segment in segments:
            feeds = _feeds(engine, segment, samples[0])
            subjects = _subjects(engine, segment, arguments.threads)
            for subject, median_s in _medians(subjects, feeds, arguments.runs).items():
                times[subject] += median_s
        nodes = sum(len(segment.nodes) for segment in segments)
        print(f"{name}: {nodes} of {len(engine.manifest.plan)} nodes on the DLA")
    noises = _noises(path, samples[:4], arguments.threads)
    print(f"{'subject':24} {'ms':>8} {'images/s':>9} {'ratio':>6} {'SQNR dB':>8}")
    for subject, median_s in times.items():
        ratio = median_s / times[PORTABLE]
        shown = f"{1e3 * median_s:8.1f} {1 / median_s:9.1f} {ratio:6.1f}"
        print(f"{subject:24} {shown} {noises[subject]:8.1f}")


def _feeds(engine: Engine, segment: Segment, sample: Arrays) -> dict[str, np.ndarray]:
    """Return the sample for inputs of the model, random numbers for other tensors."""
    rng = np.random.default_rng(1)
    tensors = {tensor.name: tensor for tensor in engine.manifest.tensors}
    feeds = {}
    for name in segment.inputs:
        shape = [int(dim) for dim in tensors[name].shape if dim is not None]
        drawn = np.clip(rng.standard_normal(shape) * 30, -128, 127).astype(tensors[name].dtype)
        feeds[name] = sample.get(name, drawn)
    return feeds


def _subjects(engine: Engine, segment: Segment, threads: int) -> dict[str, Run]:
    tensors = {tensor.name: tensor for tensor in engine.manifest.tensors}
    graph = next(
        implementation
        for implementation in segment.implementations
        if isinstance(implementation, Portable)
    )
    executors: dict[str, Executor] = {
        PORTABLE: PortableExecutor(engine, segment, graph, tensors, threads)
    }
    for name, emulation in EMULATIONS.items():
        executors[name] = EmulatedExecutor(engine, segment, graph, emulation, threads)
    outputs = dict.fromkeys(segment.outputs)
    return {
        name: partial(executor.run, outputs=outputs, sizes={})
        for name, executor in executors.items()
    }


def _medians(subjects: Mapping[str, Run], feeds: Arrays, runs: int) -> dict[str, float]:
    """Return each subject's median CPU time in seconds; runs alternate between subjects."""
    times: dict[str, list[float]] = {subject: [] for subject in subjects}
    for number in range(runs + 2):
        for subject, run in subjects.items():
            start = time.process_time()
            run(feeds)
            if number >= 2:
                times[subject].append(time.process_time() - start)
    return {subject: float(np.median(values)) for subject, values in times.items()}


def _noises(path: Path, samples: list[Arrays], threads: int) -> dict[str, float]:
    """Return each subject's SQNR at the engine's outputs against the portable engine's, in dB."""
    outputs: dict[str, list[np.ndarray]] = {}
    for subject in (PORTABLE, *EMULATIONS):
        emulation = EMULATIONS.get(subject)
        dla: Dla = "portable" if emulation is None else emulation.mode
        scales: Scales = "hardware" if emulation is None else emulation.arithmetic
        with open_session(path, threads=threads, dla=dla, scales=scales) as session:
            outputs[subject] = [output for x in samples for output in session.infer(x).values()]
    return {
        subject: _sqnr(outputs[PORTABLE], subject_outputs)
        for subject, subject_outputs in outputs.items()
    }


def _sqnr(reference: list[np.ndarray], outputs: list[np.ndarray]) -> float:
    signal = noise = 0.0
    for expected, actual in zip(reference, outputs, strict=True):
        real = expected.astype(np.float64)
        signal += float((real**2).sum())
        noise += float(((real - actual) ** 2).sum())
    return float("inf") if noise == 0.0 else 10 * float(np.log10(signal / noise))


if __name__ == "__main__":
    main()
