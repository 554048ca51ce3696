"""Time whole networks on this machine's NVIDIA GPU against PyTorch, in one run.

    python scripts/bench_gpu.py [--networks resnet50] [--batches 1 8 32] [--precision fp16]
        [--subjects ours eager compiled] [--layers]

Networks are torchvision's, with random weights. Every subject runs as one CUDA graph on inputs that
are on the GPU already; times are of the GPU, between two events around the graph. The engine's
outputs are compared with PyTorch's in FP32 before anything is timed.
"""

import argparse
import copy
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from device.engine import open_engine, write_engine
from device.executors.cuda import CudaExecutor
from device.manifest import Precision, Provenance
from device.profile import load_profile
from device.session import Session
from toolkit.assemble import assemble
from toolkit.gpu.segments import GpuSegments, lower_gpu_segments
from toolkit.importer import import_model
from toolkit.lower import lower_segments
from toolkit.passes import run_passes
from toolkit.planning.segments import PlannedSegment

PROFILE = "h200"
SUBJECTS = ("ours", "eager", "compiled")
WARM_UP = 30
RUNS = 200


def build_on_gpu(model: Path, out: Path, *, profile: str, precision: Precision) -> GpuSegments:
    """Write an engine whose only segment is on the GPU, whatever a plan would say."""
    imported = import_model(model)
    graph, _ = run_passes(imported.model)
    names = tuple(str(node.name) for node in graph.graph)
    planned = [PlannedSegment("gpu0", "gpu", names)]
    lowered = lower_segments(graph, dict.fromkeys(names, "gpu0"), ["gpu0"])
    gpu = lower_gpu_segments(planned, lowered, load_profile(profile), precision)
    manifest, entries = assemble(
        graph,
        planned,
        lowered,
        scales={},
        dims=imported.dims,
        placements=(),
        profile=profile,
        provenance=Provenance(
            model=imported.name,
            model_sha256=imported.sha256,
            precision=precision,
            passes=(),
            versions={},
        ),
        cuda=gpu.segments,
    )
    write_engine(out, manifest, entries)
    return gpu


def relative_error(found: np.ndarray, truth: np.ndarray) -> float:
    """Return ||found - truth|| / ||truth||."""
    difference = found.astype(np.float64) - truth.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(truth.astype(np.float64)))


def make_network(name: str) -> Any:  # noqa: ANN401  (torch is not a dependency)
    """Return a network of torchvision, random but with activations in range."""
    import torch
    import torchvision

    torch.manual_seed(0)
    network = getattr(torchvision.models, name)(weights=None).eval()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    network = network.cuda()
    with torch.no_grad():  # statistics of its own activations keep 50 layers in range
        network.train()
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None
        network(torch.randn(16, 3, 224, 224, device="cuda"))
    return network.eval()


def export(network: Any, batch: int, path: Path) -> None:  # noqa: ANN401
    """Write a network as ONNX with a fixed batch."""
    import torch

    example = torch.randn(batch, 3, 224, 224, device="cuda")
    torch.onnx.export(
        network, (example,), str(path), input_names=["x"], output_names=["y"], dynamo=False
    )


def torch_time_us(network: Any, x: Any) -> float:  # noqa: ANN401
    """Return the median GPU time of a network's CUDA graph in microseconds."""
    import torch

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
    import torch

    with torch.no_grad():
        return relative_error(run(half_input(x)).float().cpu().numpy(), truth)


def half_input(x: np.ndarray) -> Any:  # noqa: ANN401
    """Return the input on the GPU, FP16, channels last."""
    import torch

    return torch.from_numpy(x).cuda().half().to(memory_format=torch.channels_last)


def half_network(network: Any) -> Any:  # noqa: ANN401
    """Return a copy of the network in FP16, channels last."""
    import torch

    return copy.deepcopy(network).half().to(memory_format=torch.channels_last)


def time_peer(
    peer: str,
    network: Any,  # noqa: ANN401
    x: np.ndarray,
    truth: np.ndarray,
) -> tuple[float, float]:
    """Return PyTorch's error and GPU time in microseconds; `peer`: eager or compiled."""
    import torch
    import torch._inductor.config as inductor

    inductor.freezing = True
    torch._dynamo.reset()
    half = half_network(network)
    run = torch.compile(half) if peer == "compiled" else half
    return half_error(run, x, truth), torch_time_us(run, half_input(x))


def time_engine(path: Path, x: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """Return the engine's error and its GPU time in microseconds."""
    with open_engine(path) as engine:
        (segment,) = engine.manifest.segments
        with Session(engine) as session:
            (report,) = session.reports
            if report.implementation != "cuda":
                raise SystemExit(f"the engine does not run on the GPU: {report.reason}")
            error = relative_error(session.infer({"x": x})["y"], truth)
        executor = CudaExecutor(engine, segment, segment.implementations[0], {}, None)
        executor.time_us(WARM_UP)
        return error, statistics.median(executor.time_us(RUNS))


def layer_table(path: Path) -> list[str]:
    """Return a line for each launch: the time of its work by itself, kernel, grid and nodes."""
    with open_engine(path) as engine:
        (segment,) = engine.manifest.segments
        implementation = segment.implementations[0]
        executor = CudaExecutor(engine, segment, implementation, {}, None)
        executor.time_us(WARM_UP)
        rows = executor.time_works_us(20)
    kernels = implementation.kernels
    return [
        f"{time:8.1f} {kernels[one.kernel].function:14} {one.grid!s:18} "
        f"{kernels[one.kernel].registers} {kernels[one.kernel].spill_bytes} {' '.join(work.nodes)}"
        for work, time in rows
        for one in work.tactics[0].launches
    ]


def time_ours(
    network: Any,  # noqa: ANN401
    x: np.ndarray,
    truth: np.ndarray,
    precision: Precision,
    layers: bool,
) -> tuple[float, float]:
    """Build the network for this GPU; return its error and GPU time in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        model, path = Path(folder) / "m.onnx", Path(folder) / "m.engine"
        export(network, len(x), model)
        gpu = build_on_gpu(model, path, profile=PROFILE, precision=precision)
        for note in gpu.notes:
            print(note)
        found = time_engine(path, x, truth)
        if layers:
            print("\n".join(layer_table(path)))
    return found


def main() -> None:
    """Print a line for each network, batch and subject."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["resnet50"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp16", help="of ours")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument("--layers", action="store_true", help="time every launch by itself")
    asked = parser.parse_args()
    import torch

    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for name in asked.networks:
        network = make_network(name)
        for batch in asked.batches:
            x = np.random.default_rng().normal(size=(batch, 3, 224, 224)).astype(np.float32)
            with torch.no_grad():
                truth = network(torch.from_numpy(x).cuda()).cpu().numpy()
            for subject in asked.subjects:
                error, time_us = (
                    time_ours(network, x, truth, asked.precision, asked.layers)
                    if subject == "ours"
                    else time_peer(subject, network, x, truth)
                )
                print(
                    f"{name:14} {batch:4} {subject:9} error {error:.1e} {time_us:8.0f} us",
                    flush=True,
                )


if __name__ == "__main__":
    main()
