"""Engines that are on the GPU as a whole, for the GPU's tests and benchmarks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from device.engine.file import write_engine
from device.engine.manifest import DimRange, Precision, Provenance
from device.profile import load_profile
from scripts.gpu_table import Ceilings
from toolkit.engine.assemble import assemble
from toolkit.gpu.segments import (
    NO_COMPILER,
    GpuSegments,
    compile_gpu_segments,
    find_backend,
    lower_gpu_segments,
)
from toolkit.graph.extract import extract_segments
from toolkit.graph.node_view import views
from toolkit.graph.passes import run_passes
from toolkit.graph.segment import PlannedSegment
from toolkit.importers.onnx import import_model

PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})  # what matrix units compute


def build_on_gpu(
    model: Path,
    out: Path,
    *,
    profile: str,
    precision: Precision,
    dims: Sequence[DimRange] = (),
) -> GpuSegments:
    """Write an engine whose only segment is on the GPU, whatever a plan would say."""
    imported = import_model(model, dims=dims)
    graph, _ = run_passes(imported.model)
    names = tuple(str(node.name) for node in graph.graph)
    planned = [PlannedSegment("gpu0", "gpu", names)]
    extracted = extract_segments(graph, dict.fromkeys(names, "gpu0"), ["gpu0"])
    backend = find_backend(load_profile(profile), precision, dims=dims)
    gpu = GpuSegments(notes=(NO_COMPILER,))
    if backend is not None:
        programs = lower_gpu_segments(backend, planned, extracted)
        gpu = compile_gpu_segments(backend, planned, programs)
        gpu = replace(gpu, refused={**programs.refused, **gpu.refused})
    manifest, entries = assemble(
        graph,
        planned,
        extracted,
        scales={},
        dims=gpu.dims or imported.dims,
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


def relative_error(values: np.ndarray, truth: np.ndarray) -> float:
    """Return ||values - truth|| / ||truth||."""
    difference = values.astype(np.float64) - truth.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(truth.astype(np.float64)))


def finite_error(values: np.ndarray, truth: np.ndarray) -> float | None:
    """Return `relative_error`, or None where `values` is not finite."""
    error = relative_error(values, truth)
    return error if math.isfinite(error) else None


def operation_floors(
    model: Path, precision: str, limits: Ceilings
) -> Callable[[Sequence[str]], float]:
    """Return the roofline time, in microseconds, of nodes that run as one operation.

    It is max(products at the matrix rate, tensors that enter and leave once at memory speed), all
    in the precision of the engine. Nodes that a rewrite made are not known, and count nothing.
    """
    nodes = {view.name: view for view in views(run_passes(import_model(model).model)[0].graph)}
    item_bytes, peak = (1, limits.int8_tops) if precision == "int8" else (2, limits.fp16_tflops)
    readers: dict[str, set[str]] = {}
    for view in nodes.values():
        for tensor in view.reads:
            readers.setdefault(tensor, set()).add(view.name)

    def floor_us(names: Sequence[str]) -> float:
        group = {name: nodes[name] for name in names if name in nodes}
        results = {tensor.name for view in group.values() for tensor in view.outputs}
        sizes = {
            tensor.name: tensor.elements or 0
            for view in group.values()
            for tensor in (*view.activations, *view.outputs)
            if tensor.name not in results or readers.get(tensor.name, {""}) - group.keys()
        }
        weights = sum(view.weight_bytes for view in group.values()) / 4  # in FP32
        moved = (sum(sizes.values()) + weights) * item_bytes
        products = sum(view.macs or 0 for view in group.values() if view.op in PRODUCTS)
        return max(2 * products / peak, moved / limits.memory_tbps) * 1e-6

    return floor_us
