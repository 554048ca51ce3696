"""What `tandem inspect` prints. It loads neither onnx nor the compiler."""

from collections.abc import Mapping

from device.engine.arithmetic import arithmetic_of
from device.engine.cuda_manifest import Cuda
from device.engine.manifest import IMPORTED, UNCALIBRATED, DimRange, Manifest
from device.engine.preprocessing import preprocessing_line


def manifest_text(manifest: Manifest) -> str:
    """Return the content of an engine's manifest as text."""
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    source = manifest.provenance
    lines = [
        f"engine for {manifest.profile}, {arithmetic_of(manifest)}, from {source.model} "
        f"(sha256 {source.model_sha256[:12]})",
        "made with " + ", ".join(f"{name} {v}" for name, v in source.versions.items()),
    ]
    if manifest.uncalibrated:
        lines.append(UNCALIBRATED)
    elif source.calibration is not None and source.calibration.method == IMPORTED:
        lines.append("INT8 ranges were imported, not measured here")
    elif source.calibration is not None:
        lines.append(
            f"calibrated by {source.calibration.method} on {source.calibration.samples} samples"
        )
    if source.licence:
        lines.append(f"licence of the model: {source.licence}")
    lines += [f"measured {row.name} {row.value:g}: {row.how}" for row in source.measured or ()]
    lines.append(preprocessing_line(manifest.preprocessing))
    for title, names in (("input", manifest.inputs), ("output", manifest.outputs)):
        for name in names:
            tensor = tensors[name]
            shape = "x".join("?" if dim is None else str(dim) for dim in tensor.shape)
            lines.append(f"{title} {name}: {tensor.dtype} {shape}")
    lines += [_dimension(dim) for dim in manifest.dims]
    for segment in manifest.segments:
        kinds = ", ".join(str(i.__struct_config__.tag) for i in segment.implementations)
        us = sum(row.predicted_us for row in manifest.plan if row.segment == segment.name)
        lines.append(
            f"segment {segment.name} on {segment.processor}: {len(segment.nodes)} nodes, "
            f"predicted {us:.0f} us, carries {kinds}"
        )
        lines += [
            _kernels(item) + ("" if segment.processor == "gpu" else ", if TensorRT refuses it")
            for item in segment.implementations
            if isinstance(item, Cuda)
        ]
    for crossing in manifest.crossings:
        size = "size known only when run" if crossing.bytes is None else f"{crossing.bytes} bytes"
        lines.append(
            f"crossing {crossing.tensor} ({tensors[crossing.tensor].dtype}): "
            f"{crossing.source} -> {', '.join(crossing.targets)}, {size}"
        )
    lines.append(f"arena: {manifest.memory.arena_bytes} bytes")
    return "\n".join(lines)


def bytes_text(purposes: Mapping[str, int]) -> str:
    """Return the bytes of an engine by what they are for, as one line."""
    sizes = ", ".join(f"{purpose} {count / 1e6:.2f} MB" for purpose, count in purposes.items())
    return f"{sum(purposes.values()) / 1e6:.2f} MB: {sizes}"


def _kernels(cuda: Cuda) -> str:
    tactics = sum(len(op.tactics) for op in cuda.works)
    return (
        f"  kernels for sm_{cuda.sm}: {len(cuda.works)} operations, {tactics} tactics, "
        f"{len(cuda.kernels)} kernels; workspace {cuda.workspace_bytes / 2**20:.2f} MiB"
    )


def _dimension(dim: DimRange) -> str:
    steps = f" in steps of {dim.step}" if dim.step > 1 else ""
    return f"dimension {dim.name}: {dim.min} .. {dim.opt} .. {dim.max}{steps}"
