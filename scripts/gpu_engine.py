"""Engines that are on the GPU as a whole, for the GPU's tests and benchmarks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from device.engine.file import write_engine
from device.engine.manifest import DimRange, Precision, Provenance
from device.profile import load_profile
from toolkit.engine.assemble import assemble
from toolkit.gpu.segments import (
    NO_COMPILER,
    GpuSegments,
    compile_gpu_segments,
    find_backend,
    lower_gpu_segments,
)
from toolkit.graph.extract import extract_segments
from toolkit.graph.passes import run_passes
from toolkit.graph.segment import PlannedSegment
from toolkit.importers.onnx import import_model


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


def relative_error(found: np.ndarray, truth: np.ndarray) -> float:
    """Return ||found - truth|| / ||truth||."""
    difference = found.astype(np.float64) - truth.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(truth.astype(np.float64)))
