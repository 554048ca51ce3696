"""Time whole networks on this machine's NVIDIA GPU against PyTorch.

    python scripts/bench_gpu.py [--networks resnet50] [--batches 1 8 32 128]
        [--precisions fp16 int8] [--peers eager compiled] [--engines FOLDER] [--json FILE]
        [--timing-cache FILE] [--layers]

Networks and pictures are those of `scripts/gpu_networks.py`; engines come from
`scripts/gpu_builds.py`. Every subject runs as one CUDA graph on inputs that are on the GPU already;
times are of the GPU, between two events around the graph. Outputs are compared with PyTorch's in
FP32 before anything is timed. "Floor": see `gpu_networks.floors_us`; its ceilings are measured at
the start. PyTorch: see `scripts/gpu_peers.py`. `--engines`: where engines are looked for, and
kept. A run may be made in parts, each with some networks or subjects and a `--json` of its own;
`scripts/gpu_table.py` merges them into the tables of docs/performance.md.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import torch

from device.engine.cuda_manifest import Cuda
from device.engine.file import open_engine
from device.runtime.executors.protocol import Profiler
from device.runtime.session import Session
from scripts.gpu_builds import BATCHES, NETWORKS, PRECISIONS, build_missing, engine_path, model_path
from scripts.gpu_engine import finite_error, operation_floors
from scripts.gpu_networks import floors_us, make_network, picture_size, pictures
from scripts.gpu_peers import PEERS, median_us, time_peers
from scripts.gpu_table import Ceilings, Cell, Layer, Run, merged, tables

WARM_UP = 30
RUNS = 200
JOBS = "builds at once; with 0 cells without an engine are left out"


def time_engine(
    path: Path, x: np.ndarray, truth: np.ndarray, timing_cache: Path | None
) -> tuple[float | None, float]:
    """Return the engine's error and its GPU time in microseconds, on the input's numbers."""
    with open_engine(path) as engine, Session(engine, timing_cache=timing_cache) as session:
        error = finite_error(session.infer({"x": x})["y"], truth)
        profiler = gpu_profiler(session)
        profiler.compute_us(WARM_UP)
        return error, statistics.median(profiler.compute_us(RUNS))


def gpu_profiler(session: Session) -> Profiler:
    """Return the profiler of a session's only segment; SystemExit where it is not on the GPU."""
    (executor,), (report,) = session.executors, session.reports
    if executor.profiler is None:
        raise SystemExit(f"the engine does not run on the GPU: {report.reason}")
    return executor.profiler


def layer_rows(folder: Path, cell: Cell, limits: Ceilings, cache: Path | None) -> list[Layer]:
    """Time each operation of an engine by itself, and print it with what its kernel takes.

    A kernel's line has time, share of the roofline, function, grid, threads, registers, spilled and
    shared bytes, tactic and nodes. What is in the L2 cache: see `device.runtime.cuda.timing`.
    """
    name, batch, precision = cell.network, cell.batch, cell.subject
    floors = operation_floors(model_path(folder, name, batch), precision, limits)
    rows = []
    path = engine_path(folder, name, batch, precision)
    with open_engine(path) as engine, Session(engine, timing_cache=cache) as session:
        session.infer({"x": pictures(batch, picture_size(name), np.random.default_rng())})
        layers = gpu_profiler(session).layer_times(3)
        implementation = engine.manifest.segments[0].implementations[0]
        assert isinstance(implementation, Cuda)
    for op, layer in zip(implementation.works, layers, strict=True):
        launches = op.tactics[layer.tactic].launches
        kernel = implementation.kernels[launches[0].kernel]
        floor_us = floors(layer.nodes)
        rows.append(
            Layer(name, batch, precision, kernel.function, layer.nodes, layer.time_us, floor_us)
        )
        print(
            f"{layer.time_us:8.1f} {floor_us / layer.time_us:4.0%} {kernel.function:14} "
            f"{launches[0].grid!s:18} {kernel.threads:3} {kernel.registers} {kernel.spill_bytes} "
            f"{kernel.shared_bytes:6} {layer.tactic} {' '.join(layer.nodes)}"
        )
    return rows


def ceilings() -> Ceilings:
    """Measure products of 8192 x 8192 matrices and a copy of 4 GB.

    Tensor cores multiply INT8 twice as fast as FP16 (peak rates in NVIDIA's data sheet of the
    H200); PyTorch's own product of INT8 stays below that, and is no ceiling then.
    """
    halves = [torch.randn(8192, 8192, device="cuda", dtype=torch.float16) for _ in range(2)]
    bytes_ = [torch.randint(-99, 99, (8192, 8192), device="cuda", dtype=torch.int8) for _ in "ab"]
    left, right = torch.empty(2, 2**32, device="cuda", dtype=torch.uint8)
    operations = 2 * 8192**3
    time_us = partial(median_us, warm_up=10, runs=10)
    fp16_tflops = operations / time_us(lambda: torch.mm(*halves)) * 1e-6
    int8_tops = operations / time_us(lambda: torch._int_mm(bytes_[0], bytes_[1].T)) * 1e-6
    return Ceilings(
        fp16_tflops,
        max(int8_tops, 2 * fp16_tflops),
        2 * left.numel() / time_us(lambda: left.copy_(right)) * 1e-6,
        torch.cuda.get_device_properties(0).multi_processor_count,
    )


def measure(
    options: argparse.Namespace, name: str, limits: Ceilings, folder: Path
) -> Iterator[Cell]:
    """Measure the engines of one network at all batches, one cell after the other."""
    network, size = make_network(name), picture_size(name)
    for batch in options.batches:
        x = pictures(batch, size, np.random.default_rng())
        on_gpu = torch.from_numpy(x).cuda()
        with torch.no_grad():
            truth = network(on_gpu).cpu().numpy()
        halves = floors_us(network, on_gpu, 2, limits.fp16_tflops, limits.memory_tbps)
        for precision in options.precisions:
            path = engine_path(folder, name, batch, precision)
            if not options.jobs and not path.exists():
                continue
            error, time_us = time_engine(path, x, truth, options.timing_cache)
            floor = halves
            if precision == "int8":
                floor = floors_us(network, on_gpu, 1, limits.int8_tops, limits.memory_tbps)
            yield Cell(name, batch, precision, error, time_us, floor)
        torch.cuda.empty_cache()  # PyTorch's processes want memory after this one


def write(path: Path | None, run: Run) -> None:
    """Write a run as JSON, if there is a path."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(run)))


def main() -> None:
    """Print a line for each network, batch and subject, then the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="*", default=NETWORKS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=["fp16", "int8"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--engines", type=Path, help="folder of engines; missing ones are built")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help=JOBS)
    parser.add_argument("--timing-cache", type=Path, help="run the fastest tactics, timed here")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--layers", action="store_true", help="time every launch by itself")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # what others are compared with is FP32
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.engines or Path(scratch)
        if options.precisions and options.jobs:
            build_missing(
                folder, options.networks, options.batches, options.precisions, options.jobs
            )
        limits = ceilings()
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {limits}")
        engines = (measure(options, name, limits, folder) for name in options.networks)
        peers = time_peers(options.networks, options.batches, options.peers, limits)
        cells: list[Cell] = []
        layers: list[Layer] = []
        write(options.json, Run(limits, ()))
        for cell in chain(
            chain.from_iterable(engines) if options.precisions else (),
            peers if options.peers else (),
        ):
            cells.append(cell)
            print(
                f"{cell.network:16} {cell.batch:4} {cell.subject:9} error {cell.error_text} "
                f"{cell.time_us:8.0f} us, floor {cell.floor_us:6.0f} us, "
                f"{cell.batch / cell.time_us * 1e6:8.0f} pictures/s",
                flush=True,
            )
            if options.layers and cell.subject in PRECISIONS:
                layers += layer_rows(folder, cell, limits, options.timing_cache)
            # As far as it is: a run that is stopped has said something.
            write(options.json, Run(limits, tuple(cells), tuple(layers)))
    print("\n".join(tables(merged([Run(limits, tuple(cells))]))))


if __name__ == "__main__":
    main()
