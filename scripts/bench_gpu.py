"""Time whole networks on this machine's NVIDIA GPU against PyTorch, in one run.

    python scripts/bench_gpu.py [--networks resnet50] [--batches 1 8 32 128]
        [--precisions fp16 int8] [--peers eager compiled] [--engines FOLDER] [--json FILE]
        [--timing-cache FILE] [--layers]

Networks are those of `scripts/gpu_networks.py`, with random weights. Every subject runs as one CUDA
graph on inputs that are on the GPU already; times are of the GPU, between two events around the
graph. Outputs are compared with PyTorch's in FP32 before anything is timed; INT8 has its ranges
from random pictures, so its error says little. "Floor": see `gpu_networks.floors_us`; its two
ceilings are measured at the start. `--engines`: where engines are looked for, and kept.
"""

import argparse
import copy
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from calibration.table import CalibrationTable
from device.cuda_manifest import Cuda
from device.engine import open_engine
from device.executors.cuda import CudaExecutor
from device.session import Session
from scripts.gpu_engine import relative_error
from scripts.gpu_networks import export, floors_us, make_network, picture_size
from toolkit.build import BuildOptions, build_engine
from toolkit.int8.ranges import RangeOptions

PROFILE = "h200"
NETWORKS = ("resnet50", "mobilenet_v2", "efficientnet_b0", "yolo8n", "vit_small")
PRECISIONS = ("fp32", "fp16", "int8")
PEERS = ("eager", "compiled")
WARM_UP = 30
RUNS = 200
CALIBRATION_PICTURES = 4


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU does at most: products in TFLOP/s (INT8: TOP/s), memory in TB/s."""

    fp16_tflops: float
    int8_tops: float
    memory_tbps: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One subject on one network: its error against FP32, its time, and the floor of both."""

    network: str
    batch: int
    subject: str
    error: float
    time_us: float
    floor_us: float


def torch_time_us(network: Any, x: Any) -> float:  # noqa: ANN401
    """Return the median GPU time of a network's CUDA graph in microseconds."""
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(5):
            network(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            network(x)
        times = []
        for _ in range(WARM_UP + RUNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times[WARM_UP:])


def half_error(run: Any, x: np.ndarray, truth: np.ndarray) -> float:  # noqa: ANN401
    """Return the error of a network of PyTorch that computes in FP16, channels last."""
    with torch.no_grad():
        return relative_error(run(half_input(x)).float().cpu().numpy(), truth)


def half_input(x: np.ndarray) -> Any:  # noqa: ANN401
    """Return the input on the GPU, FP16, channels last."""
    return torch.from_numpy(x).cuda().half().to(memory_format=torch.channels_last)


def half_network(network: Any) -> Any:  # noqa: ANN401
    """Return a copy of the network in FP16, channels last."""
    return copy.deepcopy(network).half().to(memory_format=torch.channels_last)


def time_peer(
    peer: str,
    network: Any,  # noqa: ANN401
    x: np.ndarray,
    truth: np.ndarray,
) -> tuple[float, float]:
    """Return PyTorch's error and GPU time in microseconds; `peer`: eager or compiled."""
    import torch._inductor.config as inductor

    inductor.freezing = True
    torch._dynamo.reset()
    half = half_network(network)
    run = torch.compile(half) if peer == "compiled" else half
    return half_error(run, x, truth), torch_time_us(run, half_input(x))


def time_engine(
    path: Path, x: np.ndarray, truth: np.ndarray, timing_cache: Path | None
) -> tuple[float, float]:
    """Return the engine's error and its GPU time in microseconds, on the input's numbers."""
    with open_engine(path) as engine, Session(engine, timing_cache=timing_cache) as session:
        (report,) = session.reports
        if report.implementation != "cuda":
            raise SystemExit(f"the engine does not run on the GPU: {report.reason}")
        error = relative_error(session.infer({"x": x})["y"], truth)
        (executor,) = session.executors
        assert isinstance(executor, CudaExecutor)
        executor.time_us(WARM_UP)
        return error, statistics.median(executor.time_us(RUNS))


def layer_table(path: Path, x: np.ndarray, timing_cache: Path | None) -> list[str]:
    """Return a line for each piece of work: its time by itself, kernel, grid and nodes."""
    with open_engine(path) as engine, Session(engine, timing_cache=timing_cache) as session:
        session.infer({"x": x})
        (executor,) = session.executors
        assert isinstance(executor, CudaExecutor)
        implementation = engine.manifest.segments[0].implementations[0]
        assert isinstance(implementation, Cuda)
        rows = executor.time_works_us(3)
        chosen = executor.tactics
    lines = []
    for (work, time), at in zip(rows, chosen, strict=True):
        launches = work.tactics[at].launches
        kernel = implementation.kernels[launches[0].kernel]
        lines.append(
            f"{time:8.1f} {kernel.function:14} {launches[0].grid!s:18} {kernel.threads:3} "
            f"{kernel.registers} {kernel.spill_bytes} {kernel.shared_bytes:6} {at} "
            f"{' '.join(work.nodes)}"
        )
    return lines


def ceilings() -> Ceilings:
    """Measure products of 8192 x 8192 matrices and a copy of 4 GB."""
    halves = [torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2)]
    bytes_ = [torch.randint(-99, 99, (8192, 8192), device="cuda", dtype=torch.int8) for _ in "ab"]
    left, right = torch.empty(2, 2**32, device="cuda", dtype=torch.uint8)
    operations = 2 * 8192**3
    return Ceilings(
        operations / _time_us(lambda: torch.mm(*halves)) * 1e-6,
        operations / _time_us(lambda: torch._int_mm(bytes_[0], bytes_[1].T)) * 1e-6,
        2 * left.numel() / _time_us(lambda: left.copy_(right)) * 1e-6,
    )


def _time_us(run: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times[10:])


def calibrated(network: Any, size: int) -> CalibrationTable:  # noqa: ANN401
    """Return ranges from random pictures; tensors have the same names at every batch."""
    random = np.random.default_rng(1)
    pictures = [
        {"x": random.normal(size=(1, 3, size, size)).astype(np.float32)}
        for _ in range(CALIBRATION_PICTURES)
    ]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "m.onnx"
        export(network, 1, model, size)
        ranges = RangeOptions(method="minmax")
        options = BuildOptions(precision="int8", data=pictures, ranges=ranges)
        built = build_engine(model, PROFILE, Path(folder) / "m.engine", options)
    assert built.calibration is not None
    return built.calibration.table


def build(
    network: Any,  # noqa: ANN401
    shape: tuple[int, ...],
    options: BuildOptions,
    path: Path,
) -> None:
    """Write the engine of a network for an input of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "m.onnx"
        export(network, shape[0], model, shape[-1])
        for note in build_engine(model, PROFILE, path, options).notes:
            print(note)


def geometric_means(cells: Sequence[Cell], subject: str, peer: str) -> list[str]:
    """Say how often and by what factor a subject is faster than a peer."""
    of_peer = {(one.network, one.batch): one.time_us for one in cells if one.subject == peer}
    ratios = {
        (one.network, one.batch): of_peer[one.network, one.batch] / one.time_us
        for one in cells
        if one.subject == subject and (one.network, one.batch) in of_peer
    }
    lines = []
    for only in (None, *sorted({batch for _, batch in ratios})):
        chosen = [ratio for (_, batch), ratio in ratios.items() if only in (None, batch)]
        where = "all batches" if only is None else f"batch {only}"
        mean = math.exp(statistics.fmean(map(math.log, chosen)))
        lines.append(
            f"{subject} against {peer}, {where}: "
            f"geometric mean {mean:.2f}x, least {min(chosen):.2f}x, {len(chosen)} cells"
        )
    return lines


def measure(asked: argparse.Namespace, name: str, limits: Ceilings, folder: Path) -> list[Cell]:
    """Measure all subjects of one network at all batches."""
    network, size = make_network(name), picture_size(name)
    tables: dict[str, CalibrationTable] = {}
    cells = []
    for batch in asked.batches:
        x = np.random.default_rng().normal(size=(batch, 3, size, size)).astype(np.float32)
        on_gpu = torch.from_numpy(x).cuda()
        with torch.no_grad():
            truth = network(on_gpu).cpu().numpy()
        halves = floors_us(network, on_gpu, 2, limits.fp16_tflops, limits.memory_tbps)
        for subject in (*asked.precisions, *asked.peers):
            floor = halves
            if subject in PRECISIONS:
                path = folder / f"{name}-{batch}-{subject}.engine"
                if not path.exists():
                    if subject == "int8" and name not in tables:
                        tables[name] = calibrated(network, size)
                    table = tables[name] if subject == "int8" else None
                    build(network, x.shape, BuildOptions(precision=subject, table=table), path)
                error, time_us = time_engine(path, x, truth, asked.timing_cache)
                if asked.layers:
                    print("\n".join(layer_table(path, x, asked.timing_cache)))
                if subject == "int8":
                    floor = floors_us(network, on_gpu, 1, limits.int8_tops, limits.memory_tbps)
            else:
                error, time_us = time_peer(subject, network, x, truth)
            cells.append(Cell(name, batch, subject, error, time_us, floor))
            print(
                f"{name:16} {batch:4} {subject:9} error {error:.1e} {time_us:8.0f} us, "
                f"floor {floor:6.0f} us, {batch / time_us * 1e6:8.0f} pictures/s",
                flush=True,
            )
    return cells


def main() -> None:
    """Print a line for each network, batch and subject, and how the subjects compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=["fp16", "int8"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--engines", type=Path, help="folder of engines; missing ones are built")
    parser.add_argument("--timing-cache", type=Path, help="run the fastest tactics, timed here")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--layers", action="store_true", help="time every launch by itself")
    asked = parser.parse_args()
    limits = ceilings()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {limits}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.engines or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        cells = [cell for name in asked.networks for cell in measure(asked, name, limits, folder)]
    for subject in asked.precisions:
        for peer in asked.peers:
            print("\n".join(geometric_means(cells, subject, peer)))
    if asked.json:
        found = {"ceilings": asdict(limits), "cells": [asdict(one) for one in cells]}
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
