"""What the bytes of an engine are for, and an engine without those that its board does not need."""

from collections.abc import Iterator, Mapping

import msgspec

from device.engine.container import Entry
from device.engine.cuda_manifest import Cuda
from device.engine.manifest import Implementation, Manifest, Portable, Processor, Segment
from device.engine.tensorrt_manifest import Form, TensorRT, TensorRTGpu

KERNELS = "GPU kernels"
KERNEL_WEIGHTS = "weights of GPU kernels"
FALLBACK_KERNELS = "GPU kernels in place of the DLA"
FALLBACK_WEIGHTS = "weights of GPU kernels in place of the DLA"
TENSORRT_MODELS = "models for TensorRT"
PORTABLE_MODELS = "portable models"
PORTABLE_WEIGHTS = "portable weights"
SHARED_WEIGHTS = "weights of TensorRT and portable"


def bytes_by_purpose(manifest: Manifest, entries: Mapping[str, Entry]) -> dict[str, int]:
    """Return the bytes of an engine's entries by what they are for, in the order of the file.

    An entry that several implementations read counts once, where it is read first.
    """
    purpose_of: dict[str, str] = {}
    for segment in manifest.segments:
        for implementation in segment.implementations:
            for name, role in _entries(implementation, segment.processor):
                purpose_of.setdefault(name, role)
    totals: dict[str, int] = {}
    for name, entry in entries.items():
        if name in purpose_of:
            purpose = purpose_of[name]
            totals[purpose] = totals.get(purpose, 0) + entry.stop - entry.start
    return totals


def without_portable(manifest: Manifest) -> Manifest:
    """Return a manifest whose segments have no portable implementation beside GPU kernels.

    What TensorRT makes of a DLA segment stays.
    """
    return msgspec.structs.replace(
        manifest, segments=tuple(_without_portable(segment) for segment in manifest.segments)
    )


def entries_read(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the entries that implementations read, each once."""
    names = (
        name
        for segment in manifest.segments
        for implementation in segment.implementations
        for name, _ in _entries(implementation, segment.processor)
    )
    return tuple(dict.fromkeys(names))


def _without_portable(segment: Segment) -> Segment:
    if not any(isinstance(implementation, Cuda) for implementation in segment.implementations):
        return segment
    others = tuple(i for i in segment.implementations if not isinstance(i, Portable))
    return msgspec.structs.replace(segment, implementations=others)


def _entries(implementation: Implementation, processor: Processor) -> Iterator[tuple[str, str]]:
    """Yield the entries of an implementation with their purposes."""
    if isinstance(implementation, Cuda):
        on_gpu = processor == "gpu"
        for kernel in implementation.kernels:
            yield kernel.cubin, KERNELS if on_gpu else FALLBACK_KERNELS
        yield implementation.weights, KERNEL_WEIGHTS if on_gpu else FALLBACK_WEIGHTS
    elif isinstance(implementation, TensorRT):
        for form in (implementation.ranged, implementation.typed):
            yield from _form_entries(form)
        for port in (*implementation.enter, *implementation.leave):
            yield from _entries(port, "gpu")
    elif isinstance(implementation, TensorRTGpu):
        for form in implementation.forms:
            yield from _form_entries(form)
    else:
        yield implementation.model, PORTABLE_MODELS
        for name in implementation.weights:
            yield name, PORTABLE_WEIGHTS


def _form_entries(form: Form) -> Iterator[tuple[str, str]]:
    yield form.model, TENSORRT_MODELS
    for weight in form.weights:
        yield weight.entry, SHARED_WEIGHTS
        if weight.scales is not None:
            yield weight.scales, TENSORRT_MODELS
