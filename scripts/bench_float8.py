"""Time networks with products of FP8 against FP16 on this machine's GPU.

    python -m scripts.bench_float8 FOLDER [--subjects product vit_base convnext_tiny] [--batch 32]
        [--jobs 8]

`product` is one of 4096 x 4096 x 4096. Weights are random. The FP8 model is the FP16 one with Q/DQ
of FP8 around the products whose weights are constant, its ranges those of two random inputs. FOLDER
gets models, engines and measured tactics. Each network runs as one CUDA graph of the fastest
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

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from device.runtime.session import open_session
from scripts.networks import transformers
from scripts.networks.convnext import convnext_tiny
from scripts.networks.graph import Net, channels, dims
from toolkit.engine.build import BuildOptions, build_engine

PROFILE = "h200"
FORMS = ("fp16", "fp8")
SIZE = 4096
OPSET = 19  # the first with FP8; no operator of the networks differs from OPSET of `graph`
LARGEST = 448.0
MIN_CHANNELS = 16  # of a convolution of FP8
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


def quantized_products(model: ir.Model) -> list[ir.Node]:
    """Return the nodes whose operands become FP8: products with constant weights."""
    return [
        node
        for node in model.graph
        if node.op_type in ("Conv", "Gemm", "MatMul")
        and node.inputs[1] is not None
        and node.inputs[1].is_initializer()
        and (node.op_type != "Conv" or channels(node.inputs[1]) >= MIN_CHANNELS)
    ]


def with_float8(model: ir.Model, amax: Mapping[str, float]) -> ir.Model:
    """Add Q/DQ of FP8 in place: one scale for an activation, one for each column of weights."""
    graph, pairs = model.graph, {}
    graph.opset_imports[""] = OPSET
    for node in quantized_products(model):
        x, weight = node.inputs[:2]
        assert x is not None
        assert weight is not None
        if x not in pairs:
            scale = _constant(graph, f"{x.name}_scale", np.float32(amax[str(x.name)] / LARGEST))
            zero = _constant(graph, f"{x.name}_zero", np.zeros((), ml_dtypes.float8_e4m3fn))
            rounded = ir.node("QuantizeLinear", [x, scale, zero], name=f"{x.name}_q")
            real = ir.node("DequantizeLinear", [rounded.outputs[0], scale, zero])
            real.name = f"{x.name}_dq"
            graph.insert_before(node, [rounded, real])
            pairs[x] = real.outputs[0]
        node.replace_input_with(0, pairs[x])
        axis = 1 if node.op_type == "MatMul" else 0
        read = _float8_weight(graph, weight, axis)
        graph.insert_before(node, read)
        node.replace_input_with(1, read.outputs[0])
    return model


def _float8_weight(graph: ir.Graph, weight: ir.Value, axis: int) -> ir.Node:
    """Return the DequantizeLinear of a weight, with a scale for each index of `axis`."""
    assert weight.const_value is not None
    values = weight.const_value.numpy()
    others = tuple(at for at in range(values.ndim) if at != axis)
    scales = np.abs(values).max(others, keepdims=True) / np.float32(LARGEST)
    operands = {
        "fp8": (values / scales).astype(ml_dtypes.float8_e4m3fn),
        "scales": scales.reshape(-1),
        "zeros": np.zeros(scales.size, ml_dtypes.float8_e4m3fn),
    }
    inputs = [_constant(graph, f"{weight.name}_{n}", array) for n, array in operands.items()]
    return ir.node("DequantizeLinear", inputs, {"axis": axis}, name=f"{weight.name}_dq")


def _constant(graph: ir.Graph, name: str, array: NDArray[Any] | np.generic) -> ir.Value:
    tensor = ir.tensor(np.asarray(array), name=name)
    value = ir.Value(
        name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype)
    )
    value.const_value = tensor
    graph.register_initializer(value)
    return value


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
    """Write the model in floating point and the one with Q/DQ of FP8."""
    model = SUBJECTS[subject](batch)
    ir.save(model, folder / f"{subject}-fp16.onnx")
    small = SUBJECTS[subject](1)
    names = [str(node.inputs[0].name) for node in quantized_products(small) if node.inputs[0]]
    ranges = [run_cpu(small, sample(small, seed), names) for seed in (1, 2)]
    amax = {name: max(float(np.abs(run[name]).max()) for run in ranges) for name in names}
    ir.save(with_float8(model, amax), folder / f"{subject}-fp8.onnx")


def build(folder: Path, subject: str, precision: str) -> str:
    """Build one engine; return what the build says."""
    path = folder / f"{subject}-{precision}"
    options = BuildOptions(precision="fp16")
    result = build_engine(f"{path}.onnx", PROFILE, f"{path}.engine", options)
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


def compare(folder: Path, subject: str, batch: int) -> str:
    """Time the engines of a subject; return its row of the table."""
    model = SUBJECTS[subject](batch)
    feeds, (output,) = sample(model, 0), [str(value.name) for value in model.graph.outputs]
    truth = run_cpu(model, feeds, [output])[output]
    half, float8 = (time_engine(folder, f"{subject}-{one}", feeds, truth) for one in FORMS)
    times = f"{half[0]:.1f} | {float8[0]:.1f} | {half[0] / float8[0]:.2f}"
    return f"| {subject} | {times} | {half[1]:.1e} | {float8[1]:.1e} |"


def main() -> None:
    """Build and time what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=8)
    options = parser.parse_args(sys.argv[1:])
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        pool.starmap(make_models, [(folder, one, options.batch) for one in options.subjects])
        engines = [(folder, one, form) for one in options.subjects for form in FORMS]
        for line in pool.starmap(build, engines, chunksize=1):
            print(line, flush=True)
    print(
        "| network | FP16 us | FP8 us | FP16 / FP8 | error FP16 | error FP8 |\n|---|" + "--:|" * 5
    )
    for subject in options.subjects:
        print(compare(folder, subject, options.batch), flush=True)


if __name__ == "__main__":
    main()
