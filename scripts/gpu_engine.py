"""Engines that are on the GPU as a whole, for the GPU's tests and benchmarks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from device.engine.file import write_engine
from device.engine.manifest import DimRange, Precision, Provenance
from device.profile import load_profile
from toolkit.engine.assemble import assemble
from toolkit.gpu.segments import GpuSegments, compile_gpu_segments
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
    lowered = extract_segments(graph, dict.fromkeys(names, "gpu0"), ["gpu0"])
    gpu = compile_gpu_segments(planned, lowered, load_profile(profile), precision, dims=dims)
    manifest, entries = assemble(
        graph,
        planned,
        lowered,
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
