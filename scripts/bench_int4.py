"""Time products with INT4 weights against FP16 and PyTorch, on the whole GPU and on a slice of it.

    python -m scripts.bench_int4 build FOLDER [--batches 1 64] [--size 4096] [--layers 3] [--jobs N]
    python -m scripts.bench_int4 time FOLDER OUT [--percent 12] [--places whole slice]

A network of products whose FP16 weights are larger than the L2 cache together. `build` needs no
GPU: it writes the engines into FOLDER, compressed, as their weights repeat every 96 columns. `time`
needs the runtime, PyTorch and a GPU, and measures each place in a process of its own, which times
the tactics first and runs the fastest. Of each subject: the error against FP32, the time of the
network as one CUDA graph, and that of one product by itself (see `device.runtime.cuda.timing` for
what is in the L2 cache then). OUT gets a JSON file for each place; the table has all that is there.
The slice: see `scripts/bench_slice.py`.
"""

import argparse
import lzma
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
from numpy.typing import NDArray

from device.engine.cuda_manifest import Cuda
from device.engine.file import open_engine
from device.profile import PROFILES
from device.runtime.executors.cuda import CudaExecutor
from device.runtime.session import Session
from scripts.bench_slice import PLACES, gpu_slice, slice_profile
from scripts.gpu_table import Ceilings, Run

SUBJECTS = ("int4", "fp16")
BLOCK = 128
REPEATED = 32  # columns; three times as many with the factors of their scales
WARM_UP = 30
RUNS = 200
LIMITS = Ceilings(0.0, 0.0, 1.0, 14)  # of the slice: for the order of tactics, before any is timed


class Network(msgspec.Struct, frozen=True):
    """`layers` products of `size` x `size` weights, at each of `batches`."""

    size: int
    layers: int
    batches: tuple[int, ...]


class Row(msgspec.Struct, frozen=True):
    """Figures of one subject; `product_us` and `kernels` of engines alone.

    `error`: the largest of all tactics of INT4, of the first one of others.
    """

    subject: str
    batch: int
    error: float
    network_us: float
    product_us: float | None = None
    kernels: tuple[str, ...] = ()


class Measured(msgspec.Struct, frozen=True):
    """The figures of a place, and the GPU that gave them."""

    gpu: str
    sms: int
    rows: tuple[Row, ...]


def layer_constants(layer: int, size: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the packed integers and the scales of a layer; they keep the size of activations."""
    rng = np.random.default_rng(layer)
    packed = rng.integers(0, 256, (REPEATED, size // BLOCK, BLOCK // 2), np.uint8)
    scales = rng.uniform(0.5, 1.5, (REPEATED, size // BLOCK)) / (3.2 * size**0.5)
    columns = np.arange(size)
    factors = 0.5 ** (columns // REPEATED % 3)
    scales = scales[columns % REPEATED] * factors[:, None]
    return packed[columns % REPEATED], scales.astype(np.float32)


def layer_weights(layer: int, size: int) -> NDArray[np.float32]:
    """Return the weights of a layer, (depth, columns)."""
    packed, scales = layer_constants(layer, size)
    integers = np.stack((packed & 15, packed >> 4), -1).reshape(size, -1, BLOCK)
    weights = (integers.astype(np.float32) - 8) * scales[..., None]
    return np.ascontiguousarray(weights.reshape(size, size).T)


def make_model(path: Path, network: Network, subject: str, batch: int) -> None:
    """Write the network with INT4 weights, or with the same ones in floating point."""
    import onnx  # none of it is needed to time
    from onnx import helper, numpy_helper

    size, nodes, constants = network.size, [], []
    for layer in range(network.layers):
        names, domain = [f"x{layer}", f"w{layer}"], ""
        attributes: dict[str, Any] = {}
        if subject == "int4":
            packed, scales = layer_constants(layer, size)
            constants.append(numpy_helper.from_array(packed, f"w{layer}"))
            constants.append(numpy_helper.from_array(scales.reshape(-1), f"s{layer}"))
            names, domain = [*names, f"s{layer}"], "com.microsoft"
            attributes = {"K": size, "N": size, "bits": 4, "block_size": BLOCK}
        else:
            constants.append(numpy_helper.from_array(layer_weights(layer, size), f"w{layer}"))
        kind, name = "MatMulNBits" if domain else "MatMul", f"product{layer}"
        nodes.append(
            helper.make_node(kind, names, [f"x{layer + 1}"], name, domain=domain, **attributes)
        )
    first, last = (
        helper.make_tensor_value_info(f"x{at}", onnx.TensorProto.FLOAT, [batch, size])
        for at in (0, network.layers)
    )
    graph = helper.make_graph(nodes, "products", [first], [last], constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def engine_name(place: str, subject: str, batch: int) -> str:
    """Return the name of an engine."""
    return f"{place}-{subject}-{batch}.engine"


def build(folder: Path, network: Network, place: str, subject: str, batch: int) -> str:
    """Build one engine, compress it; return its name and its notes."""
    from toolkit.engine.build import BuildOptions, build_engine  # as above

    name = engine_name(place, subject, batch)
    with tempfile.TemporaryDirectory() as scratch:
        model, out = Path(scratch) / "m.onnx", Path(scratch) / name
        make_model(model, network, subject, batch)
        profile = str(PROFILES / "h200.toml")
        if place == "slice":
            profile = str(slice_profile(Path(scratch) / "slice.toml", Run(LIMITS, ())))
        result = build_engine(model, profile, out, BuildOptions(precision="fp16"))
        with out.open("rb") as engine, lzma.open(folder / f"{name}.xz", "wb", preset=1) as packed:
            shutil.copyfileobj(engine, packed, 1 << 24)
    return f"{name}: {'; '.join(result.notes)}"


def build_all(folder: Path, network: Network, jobs: int) -> None:
    """Build the engines of all places, subjects and batches."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "network.json").write_bytes(msgspec.json.encode(network))
    engines = [
        (folder, network, place, subject, batch)
        for place in PLACES
        for subject in SUBJECTS
        for batch in network.batches
    ]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for line in pool.starmap(build, engines, chunksize=1):
            print(line, flush=True)


def unpack(packed: Path, out: Path) -> None:
    """Write the engine of a compressed one."""
    with lzma.open(packed) as source, out.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 24)


def largest_error(
    path: Path, x: NDArray[np.float32], truth: NDArray[np.float32], *, first: bool
) -> float:
    """Return the largest error of an engine, with every tactic that it carries or the `first`."""
    with open_engine(path) as engine:
        implementation = engine.manifest.segments[0].implementations[0]
        assert isinstance(implementation, Cuda)
        counts = [len(op.tactics) for op in implementation.works]
    errors = []
    for number in range(1 if first else max(counts)):
        chosen = tuple(min(number, count - 1) for count in counts)
        with (
            mock.patch.object(CudaExecutor, "_choose", return_value=chosen),
            open_engine(path) as engine,
            Session(engine) as session,
        ):
            (y,) = session.infer({"x0": x}).values()
            errors.append(error_of(y, truth))
            print(f"{path.name} tactic {number}: error {errors[-1]:.2e}", flush=True)
    return max(errors)


def time_engine(
    path: Path, x: NDArray[np.float32], truth: NDArray[np.float32], timings: Path
) -> tuple[float, float, float, tuple[str, ...]]:
    """Return error, time of the network, median time of one product, and the kernels."""
    error = largest_error(path, x, truth, first="int4" not in path.name)
    with open_engine(path) as engine, Session(engine, timing_cache=timings) as session:
        session.infer({"x0": x})
        (executor,), (report,) = session.executors, session.reports
        profiler = executor.profiler
        if profiler is None:
            raise SystemExit(f"{path.name} does not run on the GPU: {report.reason}")
        profiler.compute_us(WARM_UP)
        network_us = statistics.median(profiler.compute_us(RUNS))
        layers = profiler.layer_times(3)
        implementation = engine.manifest.segments[0].implementations[0]
        assert isinstance(implementation, Cuda)
    times, kernels = [], []
    for op, layer in zip(implementation.works, layers, strict=True):
        if layer.nodes:  # others are changes of type
            times.append(layer.time_us)
            launches = op.tactics[layer.tactic].launches
            functions = ((implementation.kernels[one.kernel], one.grid) for one in launches)
            kernels += [f"{kernel.function} {grid}" for kernel, grid in functions]
    return error, network_us, statistics.median(times), tuple(dict.fromkeys(kernels))


def error_of(y: NDArray[Any], truth: NDArray[Any]) -> float:
    """Return the relative error, by the norm."""
    return float(np.linalg.norm(y.astype(np.float64) - truth) / np.linalg.norm(truth))


def time_place(engines: Path, network: Network, place: str) -> Measured:
    """Time all subjects on what this process has of the GPU."""
    import torch  # where engines are built there may be none

    torch.backends.cuda.matmul.allow_tf32 = False
    weights = [
        torch.from_numpy(layer_weights(layer, network.size)).cuda()
        for layer in range(network.layers)
    ]
    halves = [weight.T.contiguous().half() for weight in weights]
    rows: list[Row] = []
    for batch in network.batches:
        x = np.random.default_rng(batch).normal(size=(batch, network.size)).astype(np.float32)
        y = torch.from_numpy(x).cuda()
        half = y.half()
        for weight in weights:
            y = y @ weight
        truth = y.cpu().numpy()
        for subject in SUBJECTS:
            path, timings = engines / engine_name(place, subject, batch), engines / "timings.json"
            rows.append(Row(subject, batch, *time_engine(path, x, truth, timings)))
        rows.append(time_torch(half, halves, truth))
        print(place, *rows[-3:], sep="\n  ", flush=True)
    properties = torch.cuda.get_device_properties(0)
    return Measured(properties.name, properties.multi_processor_count, tuple(rows))


def time_torch(x: Any, weights: Sequence[Any], truth: NDArray[np.float32]) -> Row:  # noqa: ANN401
    """Return the figures of PyTorch's products, in one CUDA graph."""
    import torch

    def run() -> Any:  # noqa: ANN401
        y = x
        for weight in weights:
            y = torch.nn.functional.linear(y, weight)
        return y

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            result = run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
    times = []
    for _ in range(WARM_UP + RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    error = error_of(result.float().cpu().numpy(), truth)
    return Row("torch", len(truth), error, statistics.median(times[WARM_UP:]))


def table(places: Mapping[str, Measured]) -> list[str]:
    """Return a row for each place and batch: times, and how many times faster INT4 is."""
    lines = [
        "| place | batch | INT4 us | FP16 us | PyTorch us | FP16 / INT4 | PyTorch / INT4 "
        "| product FP16 / INT4 |",
        "|---|" + "--:|" * 7,
    ]
    for place, measured in places.items():
        by_subject = {(row.subject, row.batch): row for row in measured.rows}
        for batch in sorted({row.batch for row in measured.rows}):
            int4, fp16, peer = (by_subject[s, batch] for s in (*SUBJECTS, "torch"))
            times = " | ".join(f"{row.network_us:.1f}" for row in (int4, fp16, peer))
            ratios = [row.network_us / int4.network_us for row in (fp16, peer)]
            if int4.product_us is not None and fp16.product_us is not None:
                ratios.append(fp16.product_us / int4.product_us)
            shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"| {place}, {measured.sms} SMs | {batch} | {times} | {shown} |")
    return lines


def time_all(folder: Path, out: Path, places: Sequence[str], percent: int) -> None:
    """Unpack the engines, and time each place in a process of its own."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        engines = Path(scratch)
        pairs = [(packed, engines / packed.stem) for packed in folder.glob("*.engine.xz")]
        with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
            pool.starmap(unpack, pairs, chunksize=1)
        shutil.copy(folder / "network.json", engines)
        command = [sys.executable, "-m", "scripts.bench_int4", "place", scratch, str(out)]
        for place in places:
            if place == "whole":
                subprocess.run([*command, "--places", place], check=True)
                continue
            with gpu_slice(percent) as environment:
                subprocess.run([*command, "--places", place], env=environment, check=True)


def measured_in(out: Path) -> dict[str, Measured]:
    """Return the figures of all places that a folder has."""
    paths = {place: out / f"{place}.json" for place in ("whole", "slice")}
    return {
        place: msgspec.json.decode(path.read_bytes(), type=Measured)
        for place, path in paths.items()
        if path.exists()
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("build", "time", "place", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 64))
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--percent", type=int, default=12, help="of the SMs; 12 are 14 of 132")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=("whole", "slice"))
    return parser.parse_args(arguments)


def main() -> None:
    """Build, time or print the table."""
    options = parse(sys.argv[1:])
    if options.step == "build":
        network = Network(options.size, options.layers, tuple(options.batches))
        build_all(options.folder, network, options.jobs)
        return
    if options.step == "place":
        (place,) = options.places
        described = (options.folder / "network.json").read_bytes()
        network = msgspec.json.decode(described, type=Network)
        data = msgspec.json.encode(time_place(options.folder, network, place))
        (options.out / f"{place}.json").write_bytes(msgspec.json.format(data))
        return
    if options.step == "time":
        time_all(options.folder, options.out, options.places, options.percent)
    print("\n".join(table(measured_in(options.out or options.folder))))


if __name__ == "__main__":
    main()
