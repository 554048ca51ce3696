"""The rules for `tensorrt` and `tensorrt_gpu` implementations in a manifest."""

from collections.abc import Iterator, Mapping
from math import isfinite, prod

from device.engine.cuda_check import of_port
from device.engine.cuda_manifest import Cuda, Workspace
from device.engine.manifest import ITEM_BYTES, TensorInfo
from device.engine.manifest_facts import Facts
from device.engine.tensorrt_manifest import Form, Port, TensorRT, TensorRTGpu, Weight

MAX_WEIGHT_BYTES = 2**30
"""Of the weights of one form; a DLA loadable holds at most 512 MiB, in half the bytes."""

VECTOR_BYTES = 32
"""Of a vector of channels in the DLA's formats chw16 and chw32."""

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
            yield from _ranges(where, implementation.ranges)
            yield from _port_kernels(facts, where, implementation)
            for form in (implementation.ranged, implementation.typed):
                yield from _form(facts, where, form)


def tensorrt_gpu(facts: Facts) -> Iterator[str]:
    """A form or the reason why there is none; all sizes at its borders are known before a run."""
    for segment in facts.manifest.segments:
        for implementation in segment.implementations:
            if not isinstance(implementation, TensorRTGpu):
                continue
            where = f"segment {segment.name!r}, tensorrt_gpu"
            for name, form, problem in (
                ("ranged", implementation.ranged, implementation.ranged_problem),
                ("typed", implementation.typed, implementation.typed_problem),
            ):
                if (form is None) != bool(problem):
                    yield f"{where}: {name} needs a form, or the reason why there is none"
            if not implementation.forms:
                yield f"{where}: it has no form; at least one is needed"
            for tensor in (*segment.inputs, *segment.outputs):
                if tensor in facts.tensors and None in facts.tensors[tensor].shape:
                    yield f"{where}: the size of tensor {tensor!r} is known only when run"
            yield from _ranges(where, implementation.ranges)
            for form in implementation.forms:
                yield from _form(facts, where, form)


def _ranges(where: str, ranges: Mapping[str, float]) -> Iterator[str]:
    for tensor, amax in ranges.items():
        if not (isfinite(amax) and amax > 0):
            yield f"{where}: tensor {tensor!r} has the range {amax}; it must be above 0"


def _port(where: str, port: Port) -> Iterator[str]:
    if (port.dtype == "int8") != (port.scale is not None):
        yield f"{where}: port {port.tensor!r} is {port.dtype}; int8 has a scale, float16 none"
    if port.scale is not None and not (isfinite(port.scale) and port.scale > 0):
        yield f"{where}: port {port.tensor!r} has the scale {port.scale}; it must be above 0"


def _port_kernels(facts: Facts, where: str, implementation: TensorRT) -> Iterator[str]:
    """Kernels of a port read and write its tensor alone, as it is in C order and in its format."""
    for ports, programs, direction in (
        (implementation.inputs, implementation.enter, "enter"),
        (implementation.outputs, implementation.leave, "leave"),
    ):
        if programs and len(programs) != len(ports):
            yield f"{where}: {len(ports)} ports {direction}, {len(programs)} of them have kernels"
            return
        for port, program in zip(ports, programs, strict=False):
            place = f"{where}: port {port.tensor!r}"
            yield from of_port(program, facts, place)
            tensor = facts.tensors.get(port.tensor)
            if tensor is None or not all(isinstance(dim, int) for dim in tensor.shape):
                yield f"{place}: its sizes are not fixed"
                continue
            sizes = (_plain_bytes(tensor), _packed_bytes(port, tensor))
            expected = sizes if direction == "enter" else sizes[::-1]
            places = (*program.inputs, *program.outputs)
            sizes_of_kernels = [stored.bytes for stored in places]
            if sizes_of_kernels != list(expected):
                yield f"{place} has {list(expected)} bytes, its kernels {sizes_of_kernels}"
                continue
            yield from _inside(place, program)


def _inside(where: str, program: Cuda) -> Iterator[str]:
    """Addresses lie in one of the two tensors, whose places the board chooses."""
    spans = [(p.offset, p.offset + p.bytes) for p in (*program.inputs, *program.outputs)]
    offsets = (
        argument.offset
        for op in program.works
        for tactic in op.tactics
        for launch in tactic.launches
        for argument in launch.arguments
        if isinstance(argument, Workspace)
    )
    for offset in offsets:
        if not any(isinstance(offset, int) and start <= offset < stop for start, stop in spans):
            yield f"{where}: its kernels take the address {offset}, which is in none of its tensors"


def _plain_bytes(tensor: TensorInfo) -> int:
    return prod(dim for dim in tensor.shape if isinstance(dim, int)) * ITEM_BYTES[tensor.dtype]


def _packed_bytes(port: Port, tensor: TensorInfo) -> int:
    n, c, h, w = (*(dim for dim in tensor.shape if isinstance(dim, int)), 1, 1, 1, 1)[:4]
    vector = VECTOR_BYTES // ITEM_BYTES[port.dtype]
    return n * -(-c // vector) * h * w * VECTOR_BYTES


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
