"""Time engines on this machine's CPU against onnxruntime alone, in one run.

    python scripts/bench_session.py [--threads 1] [--runs 60]

The subjects take turns run by run, so that a machine that slows down slows all of them; the table
gives medians and their ratio to the plain FP32 model in onnxruntime.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)

import configs
from device.runtime.session import open_session
from pipelines.config import load_model
from pipelines.stages.preprocess import preprocess
from pipelines.vision import cv2
from toolkit.engine.build import BuildOptions, build_engine

MODEL = configs.ROOT / "models" / "robot-objects.toml"
Run = Callable[[np.ndarray], object]


class _Pictures(CalibrationDataReader):  # type: ignore[misc]
    """The shipped calibration scenes, for onnxruntime's own quantizer."""

    def __init__(self, inputs: list[np.ndarray]) -> None:
        self._inputs = iter(inputs)

    def get_next(self) -> dict[str, np.ndarray] | None:
        value = next(self._inputs, None)
        return None if value is None else {"images": value}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=60)
    arguments = parser.parse_args()
    inputs = _inputs()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subjects = _subjects(folder, inputs, arguments.threads, stack)
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for number in range(arguments.runs + 3):
            x = inputs[number % len(inputs)]
            for name, run in subjects.items():
                start = time.perf_counter()
                run(x)
                if number >= 3:
                    times[name].append(1e3 * (time.perf_counter() - start))
    base = float(np.median(next(iter(times.values()))))
    print(f"{'subject':44} {'median ms':>9} {'p90 ms':>7} {'ratio':>6}")
    for name, values in times.items():
        median = float(np.median(values))
        print(f"{name:44} {median:9.2f} {np.percentile(values, 90):7.2f} {median / base:6.2f}")


def _inputs() -> list[np.ndarray]:
    model = load_model(MODEL)
    files = sorted((MODEL.parent / model.calibration).glob("*.jpg"))
    return [preprocess(cv2.imread(str(file)), model.preprocess)[0].copy() for file in files]


def _subjects(
    folder: Path, inputs: list[np.ndarray], threads: int, stack: ExitStack
) -> dict[str, Run]:
    model = load_model(MODEL)
    source = MODEL.parent / model.file
    samples = [{"images": x} for x in inputs]
    quantized = folder / "ort.onnx"
    quantize_static(
        str(source),
        str(quantized),
        _Pictures(inputs),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    subjects: dict[str, Run] = {
        "onnxruntime FP32": _plain(source, threads),
        "onnxruntime static INT8 (U8S8, per channel)": _plain(quantized, threads),
    }
    for name, profile, options in (
        ("engine FP32, laptop", "laptop", BuildOptions(precision="fp32")),
        ("engine INT8, laptop (one segment)", "laptop", BuildOptions(data=samples)),
        ("engine INT8, agx-orin-64gb (GPU + DLA)", "agx-orin-64gb", BuildOptions(data=samples)),
    ):
        path = folder / f"{len(subjects)}.engine"
        build_engine(source, profile, path, options)
        session = stack.enter_context(open_session(path, threads=threads))
        subjects[name] = lambda x, session=session: session.infer({"images": x})
    return subjects


def _plain(path: Path, threads: int) -> Run:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"images": x})


if __name__ == "__main__":
    main()
