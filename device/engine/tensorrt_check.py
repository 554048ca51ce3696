"""The rules for `tensorrt` implementations in a manifest."""

from collections.abc import Iterator
from math import isfinite, prod

from device.engine.manifest_facts import Facts
from device.engine.tensorrt_manifest import Form, Port, TensorRT, Weight

MAX_WEIGHT_BYTES = 2**30
"""Of the weights of one form; a DLA loadable holds at most 512 MiB, in half the bytes."""

_BYTES = {"float32": 4, "float16": 2}


def tensorrt(facts: Facts) -> Iterator[str]:
    """Ports are the segment's tensors, forms name entries that are there and fit."""
    for segment in facts.manifest.segments:
        for implementation in segment.implementations:
            if not isinstance(implementation, TensorRT):
                continue
            where = f"segment {segment.name!r}, tensorrt"
            for ports, names in (
                (implementation.inputs, segment.inputs),
                (implementation.outputs, segment.outputs),
            ):
                if tuple(port.tensor for port in ports) != names:
                    yield f"{where}: its ports are not the segment's inputs and outputs, in order"
                for port in ports:
                    yield from _port(where, port)
            for tensor, amax in implementation.ranges.items():
                if not (isfinite(amax) and amax > 0):
                    yield f"{where}: tensor {tensor!r} has the range {amax}; it must be above 0"
            for form in (implementation.ranged, implementation.typed):
                yield from _form(facts, where, form)


def _port(where: str, port: Port) -> Iterator[str]:
    if (port.dtype == "int8") != (port.scale is not None):
        yield f"{where}: port {port.tensor!r} is {port.dtype}; int8 has a scale, float16 none"
    if port.scale is not None and not (isfinite(port.scale) and port.scale > 0):
        yield f"{where}: port {port.tensor!r} has the scale {port.scale}; it must be above 0"


def _form(facts: Facts, where: str, form: Form) -> Iterator[str]:
    model = facts.entries.get(form.model)
    if model is None or (model.dtype, len(model.shape)) != ("uint8", 1):
        yield f"{where}: the entry {form.model!r} is missing or no row of uint8"
    end = 0
    for weight in form.weights:
        for problem in _weight(facts, weight):
            yield f"{where}: {problem}"
            return
        if weight.offset < end:
            yield f"{where}: weight {weight.entry!r} begins at {weight.offset}, before {end}"
        entry = facts.entries[weight.entry]
        end = weight.offset + prod(entry.shape) * _BYTES[weight.dtype]
        if end > MAX_WEIGHT_BYTES:
            yield f"{where}: its weights end at {end} bytes, the limit is {MAX_WEIGHT_BYTES}"


def _weight(facts: Facts, weight: Weight) -> Iterator[str]:
    entry = facts.entries.get(weight.entry)
    if entry is None:
        yield f"the entry {weight.entry!r} is missing"
        return
    if weight.scales is None:
        return
    scales = facts.entries.get(weight.scales)
    if scales is None or scales.dtype != "float32":
        yield f"the entry {weight.scales!r} is missing or not float32"
    elif weight.axis is None:
        if scales.shape not in ((), (1,)):
            yield f"the entry {weight.scales!r} has the shape {list(scales.shape)}, not one scale"
    elif not (0 <= weight.axis < len(entry.shape) and scales.shape == (entry.shape[weight.axis],)):
        yield (
            f"the entry {weight.scales!r} has the shape {list(scales.shape)}, which does not fit "
            f"axis {weight.axis} of {weight.entry!r}, {list(entry.shape)}"
        )
