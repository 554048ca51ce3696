"""The rules for a manifest; nothing in an engine is used before all of them hold."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite

from device.engine import cuda_check, frame_check, memory_check, tensorrt_check
from device.engine.container import MAX_RANK, Entry
from device.engine.manifest import FORMAT_VERSION, ITEM_BYTES, Manifest, Portable, largest_elements
from device.engine.manifest_facts import Facts, check_bytes_entry, gather_facts
from device.errors import EngineError

MAX_COUNT = 100_000  # of anything in a list
MAX_NAME = 4096  # characters
MAX_ELEMENTS = 2**31 - 1  # of one tensor: kernels and onnxruntime index with 32 bits


Rule = Callable[[Facts], Iterator[str]]


def check_manifest(manifest: Manifest, entries: Mapping[str, Entry]) -> None:
    """Check a manifest against itself and against the entries of its file.

    Raises EngineError with the first rule that it breaks: the object, the limit and the value.
    """
    facts = gather_facts(manifest, entries)
    for rule in RULES:
        for problem in rule(facts):
            raise EngineError(problem)


def _format(facts: Facts) -> Iterator[str]:
    version = facts.manifest.format
    if version > FORMAT_VERSION:
        yield f"format version {version}, this Tandem reads {FORMAT_VERSION}; update Tandem"
    elif version < FORMAT_VERSION:
        yield f"format version {version}, this Tandem reads {FORMAT_VERSION}; build it again"


def _name_lists(manifest: Manifest) -> Iterator[tuple[str, Iterable[str]]]:
    """Every list of names in which each may stand once, with what to call it."""
    yield "inputs", manifest.inputs
    yield "outputs", manifest.outputs
    yield "tensors", (tensor.name for tensor in manifest.tensors)
    yield "dims", (dim.name for dim in manifest.dims)
    yield "segments", (segment.name for segment in manifest.segments)
    yield "crossings", (crossing.tensor for crossing in manifest.crossings)
    yield "memory", (buffer.tensor for buffer in manifest.memory.buffers)
    yield "plan", (row.node for row in manifest.plan)
    for segment in manifest.segments:
        yield f"inputs of segment {segment.name!r}", segment.inputs
        yield f"outputs of segment {segment.name!r}", segment.outputs
        yield f"nodes of segment {segment.name!r}", segment.nodes
        tags = (str(i.__struct_config__.tag) for i in segment.implementations)
        yield f"implementations of segment {segment.name!r}", tags
        for implementation in segment.implementations:
            if isinstance(implementation, Portable):
                yield f"weights of segment {segment.name!r}", implementation.weights
    for crossing in manifest.crossings:
        yield f"targets of crossing {crossing.tensor!r}", crossing.targets


def _names(facts: Facts) -> Iterator[str]:
    for title, names in _name_lists(facts.manifest):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                yield f"{title}: {name!r} stands there twice; names are unique"
            if not 0 < len(name) <= MAX_NAME:
                yield f"{title}: a name has {len(name)} characters, the limits are 1 and {MAX_NAME}"
            seen.add(name)
        if len(seen) > MAX_COUNT:
            yield f"{title}: {len(seen)} of them, the limit is {MAX_COUNT}"


def _present(facts: Facts) -> Iterator[str]:
    manifest = facts.manifest
    required = (
        ("profile", manifest.profile),
        ("inputs", manifest.inputs),
        ("outputs", manifest.outputs),
        ("segments", manifest.segments),
    )
    for title, value in required:
        if not value:
            yield f"{title}: there is none, at least one is needed"
    for segment in manifest.segments:
        if not segment.outputs or not segment.implementations:
            yield f"segment {segment.name!r} has no outputs or no implementations; it needs both"


def _dims(facts: Facts) -> Iterator[str]:
    for dim in facts.manifest.dims:
        if not 1 <= dim.min <= dim.opt <= dim.max <= MAX_ELEMENTS:
            yield (
                f"dimension {dim.name!r} has min {dim.min}, opt {dim.opt}, max {dim.max}; "
                f"needed is 1 <= min <= opt <= max <= {MAX_ELEMENTS}"
            )
        if dim.step < 1 or any(size % dim.step for size in (dim.min, dim.opt, dim.max)):
            yield (
                f"dimension {dim.name!r} goes in steps of {dim.step}; its min {dim.min}, opt "
                f"{dim.opt} and max {dim.max} must be multiples of it"
            )


def _tensors(facts: Facts) -> Iterator[str]:
    for tensor in facts.manifest.tensors:
        name = tensor.name
        if tensor.dtype not in ITEM_BYTES:
            yield f"tensor {name!r} has dtype {tensor.dtype!r}; known are {', '.join(ITEM_BYTES)}"
        if len(tensor.shape) > MAX_RANK:
            yield f"tensor {name!r} has {len(tensor.shape)} dimensions, the limit is {MAX_RANK}"
        for dim in tensor.shape:
            if isinstance(dim, int) and not 0 <= dim <= MAX_ELEMENTS:
                yield f"tensor {name!r} has a size of {dim}, the limits are 0 and {MAX_ELEMENTS}"
            if isinstance(dim, str) and dim not in facts.dims:
                yield f"tensor {name!r} uses the dimension {dim!r}, which is not declared"
        elements = largest_elements(tensor.shape, facts.dims)
        if elements is not None and elements > MAX_ELEMENTS:
            yield f"tensor {name!r} has up to {elements} elements, the limit is {MAX_ELEMENTS}"
        scale = tensor.scale
        if scale is not None and tensor.dtype != "int8":
            yield f"tensor {name!r} has a scale but dtype {tensor.dtype}; only int8 takes one"
        if scale is not None and not (isfinite(scale) and scale > 0):
            yield f"tensor {name!r} has the scale {scale}; it must be finite and above 0"


def _given_dims(facts: Facts) -> Iterator[str]:
    input_dims: set[object] = set()
    for name in facts.manifest.inputs:
        if name not in facts.tensors:
            yield f"inputs: {name!r} is not among the tensors"
            return
        if None in facts.tensors[name].shape:
            yield f"input {name!r} has a dimension of unknown size; give it a number or a name"
        input_dims.update(facts.tensors[name].shape)
    for tensor in facts.manifest.tensors:
        for dim in tensor.shape:
            if isinstance(dim, str) and dim not in input_dims:
                yield f"tensor {tensor.name!r} uses the dimension {dim!r}, which no input sets"


def _running_order(facts: Facts) -> Iterator[str]:
    manifest = facts.manifest
    for index, segment in enumerate(manifest.segments):
        for name in (*segment.inputs, *segment.outputs):
            if name not in facts.tensors:
                yield f"segment {segment.name!r} uses {name!r}, which is not among the tensors"
        for name in segment.inputs:
            if facts.made_by.get(name, index) >= index:
                yield (
                    f"segment {segment.name!r} reads {name!r}, which is neither an input nor made "
                    "by an earlier segment"
                )
        for name in segment.outputs:
            if facts.made_by[name] != index:
                yield f"segment {segment.name!r} makes {name!r}, which is made or given before"
    for name in manifest.outputs:
        if facts.made_by.get(name, -1) < 0:
            yield f"output {name!r} is not made by any segment"


def _entry_references(facts: Facts) -> Iterator[str]:
    for segment in facts.manifest.segments:
        for portable in segment.implementations:
            if not isinstance(portable, Portable):
                continue
            yield from check_bytes_entry(facts, portable.model, f"segment {segment.name!r}")
            for name in portable.weights:
                if name not in facts.entries:
                    yield f"segment {segment.name!r} names the entry {name!r}, which is missing"


def _plan(facts: Facts) -> Iterator[str]:
    for row in facts.manifest.plan:
        segment = facts.segments.get(row.segment)
        if segment is None:
            yield f"plan: node {row.node!r} is in the segment {row.segment!r}, which is not there"
        elif segment.processor != row.processor:
            yield (
                f"plan: node {row.node!r} is on {row.processor}, "
                f"its segment {segment.name!r} on {segment.processor}"
            )
        if not (isfinite(row.predicted_us) and row.predicted_us >= 0):
            yield f"plan: node {row.node!r} takes {row.predicted_us} us; it must be 0 or more"


# Read in this order: a rule may rely on all rules before it.
RULES: tuple[Rule, ...] = (
    _format,
    _names,
    _present,
    _dims,
    _tensors,
    _given_dims,
    _running_order,
    _entry_references,
    cuda_check.cuda,
    tensorrt_check.tensorrt,
    tensorrt_check.tensorrt_gpu,
    frame_check.frames,
    memory_check.crossings,
    memory_check.buffers,
    memory_check.overlaps,
    _plan,
)
