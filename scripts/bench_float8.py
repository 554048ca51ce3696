"""Time networks with products of FP8, or in BF16, against FP16 on this machine's GPU.

    python -m scripts.bench_float8 FOLDER [--form fp8|bf16]
        [--subjects product vit_base convnext_tiny] [--batch 32] [--jobs 8]

`product` is one of 4096 x 4096 x 4096. Weights are random. FP8 is that of `tandem build --precision
fp8` with a table, whose ranges are those of two random inputs. FOLDER gets models, tables, engines
and measured tactics. Each network runs as one CUDA graph of the fastest
tactics; the errors are those of the outputs against onnxruntime in FP32, by the norm.
"""

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from calibration.table import MIN_AMAX, CalibrationTable, read_table, write_table
from device.runtime.session import open_session
from scripts.networks import transformers
from scripts.networks.convnext import convnext_tiny
from scripts.networks.graph import Net, dims
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.observe import ActivationRunner
from toolkit.quantize.quantize import calibrated_tensors

PROFILE = "h200"
SIZE = 4096
WARM_UP = 30
RUNS = 200
Arrays = Mapping[str, NDArray[Any]]


def product(batch: int) -> ir.Model:
    """Return one product of SIZE rows, whatever the batch."""
    net = Net("product", (SIZE, SIZE))
    return net.model(net.matmul(net.image, net.weight(SIZE, SIZE)))


SUBJECTS: Mapping[str, Callable[[int], ir.Model]] = {
    "product": product,
    "vit_base": partial(transformers.vit_base, 224),
    "convnext_tiny": convnext_tiny,
}


def run_cpu(model: ir.Model, feeds: Arrays, names: Sequence[str]) -> Arrays:
    """Return tensors of a float model, computed by onnxruntime."""
    proto = ir.to_proto(model)
    known = {output.name for output in proto.graph.output}
    proto.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        for name in dict.fromkeys(names)
        if name not in known and name not in feeds
    )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(proto.SerializeToString(), options)
    present = [output.name for output in session.get_outputs()]
    return {**feeds, **dict(zip(present, session.run(present, dict(feeds)), strict=True))}


def sample(model: ir.Model, seed: int) -> Arrays:
    """Return a random input."""
    (image,) = model.graph.inputs
    values = np.random.default_rng(seed).normal(size=dims(image)).astype(np.float32)
    return {str(image.name): values}


def make_models(folder: Path, subject: str, batch: int) -> None:
    """Write the model and its calibration table."""
    ir.save(SUBJECTS[subject](batch), folder / f"{subject}.onnx")
    small = folder / f"{subject}-small.onnx"
    ir.save(SUBJECTS[subject](1), small)
    imported = import_model(small)
    graph = run_passes(imported.model)[0]
    run = ActivationRunner(graph, calibrated_tensors(graph))
    amax: dict[str, float] = {}
    for seed in (1, 2):
        for name, array in run(sample(graph, seed)).items():
            amax[name] = max(amax.get(name, MIN_AMAX), float(np.abs(array).max()))
    sha256 = imported.sha256
    table = CalibrationTable(
        method="minmax", samples=2, data_sha256=sha256, model_sha256=sha256, tensors=amax
    )
    write_table(folder / f"{subject}.json", table)
    small.unlink()


def build(folder: Path, subject: str, precision: str) -> str:
    """Build one engine; return what the build says."""
    options = BuildOptions(precision="bf16" if precision == "bf16" else "fp16")
    if precision == "fp8":
        table = read_table(folder / f"{subject}.json")
        options = BuildOptions(precision="fp8", table=table)
    path = folder / f"{subject}-{precision}"
    result = build_engine(folder / f"{subject}.onnx", PROFILE, f"{path}.engine", options)
    return f"{path.name}: {'; '.join(result.notes)}"


def time_engine(folder: Path, name: str, feeds: Arrays, truth: NDArray[Any]) -> tuple[float, float]:
    """Return the median time of one run in us, and the error."""
    with open_session(folder / f"{name}.engine", timing_cache=folder / "timings.json") as session:
        (y,) = session.infer(feeds).values()
        profiler = session.executors[0].profiler
        if len(session.executors) != 1 or profiler is None:
            raise SystemExit(f"{name} does not run on the GPU alone: {session.reports}")
        profiler.compute_us(WARM_UP)
        time_us = statistics.median(profiler.compute_us(RUNS))
        for layer in sorted(profiler.layer_times(3), key=lambda one: -one.time_us)[:6]:
            print(f"  {name}: {layer.time_us:.1f} us {layer.nodes[-1:]}", flush=True)
    error = np.linalg.norm(y.astype(np.float64) - truth) / np.linalg.norm(truth)
    return time_us, float(error)


def compare(folder: Path, subject: str, batch: int, form: str = "fp8") -> str:
    """Time the engines of a subject in FP16 and in `form`; return its row of the table."""
    model = SUBJECTS[subject](batch)
    feeds, (output,) = sample(model, 0), [str(value.name) for value in model.graph.outputs]
    truth = run_cpu(model, feeds, [output])[output]
    half, narrow = (time_engine(folder, f"{subject}-{one}", feeds, truth) for one in ("fp16", form))
    times = f"{half[0]:.1f} | {narrow[0]:.1f} | {half[0] / narrow[0]:.2f}"
    return f"| {subject} | {times} | {half[1]:.1e} | {narrow[1]:.1e} |"


def main() -> None:
    """Build and time what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=8)
    options = parser.parse_args(sys.argv[1:])
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        pool.starmap(make_models, [(folder, one, options.batch) for one in options.subjects])
        forms = ("fp16", options.form)
        engines = [(folder, one, form) for one in options.subjects for form in forms]
        for line in pool.starmap(build, engines, chunksize=1):
            print(line, flush=True)
    form = options.form.upper()
    columns = f"| network | FP16 us | {form} us | FP16 / {form} | error FP16 | error {form} |"
    print(f"{columns}\n|---|{'--:|' * 5}")
    for subject in options.subjects:
        print(compare(folder, subject, options.batch, options.form), flush=True)


if __name__ == "__main__":
    main()
