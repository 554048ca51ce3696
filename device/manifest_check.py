"""The rules that a manifest keeps; nothing in an engine is used before all of them hold."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite

from device.container import MAX_RANK, Entry
from device.errors import EngineError
from device.manifest import (
    ARENA_ALIGNMENT,
    FORMAT_VERSION,
    ITEM_BYTES,
    DimRange,
    Manifest,
    Segment,
    TensorInfo,
    largest_bytes,
    largest_elements,
)

MAX_COUNT = 100_000  # of anything in a list
MAX_NAME = 4096  # characters
MAX_ELEMENTS = 2**31 - 1  # of one tensor: kernels and onnxruntime index with 32 bits
_ARENA_SLACK = 4096  # bytes that a memory plan may lose to alignment for each buffer


@dataclass(frozen=True, slots=True)
class _Facts:
    """A manifest with what the rules look up in it. `made_by` and `read_by` hold positions of
    segments, -1 for the caller who gives the inputs, and the number of segments for the outputs.
    """

    manifest: Manifest
    entries: Mapping[str, Entry]
    tensors: Mapping[str, TensorInfo]
    dims: Mapping[str, DimRange]
    segments: Mapping[str, Segment]
    made_by: Mapping[str, int]
    read_by: Mapping[str, tuple[int, ...]]


Rule = Callable[[_Facts], Iterator[str]]


def check_manifest(manifest: Manifest, entries: Mapping[str, Entry]) -> None:
    """Check a manifest against itself and against the entries of its file.

    Raises EngineError with the first rule that it breaks: the object, the limit and the value.
    """
    facts = _facts(manifest, entries)
    for rule in RULES:
        for problem in rule(facts):
            raise EngineError(problem)


def _facts(manifest: Manifest, entries: Mapping[str, Entry]) -> _Facts:
    made_by = dict.fromkeys(manifest.inputs, -1)
    read_by: dict[str, list[int]] = {}
    for place, segment in enumerate(manifest.segments):
        for name in segment.outputs:
            made_by.setdefault(name, place)
        for name in segment.inputs:
            read_by.setdefault(name, []).append(place)
    for name in manifest.outputs:
        read_by.setdefault(name, []).append(len(manifest.segments))
    return _Facts(
        manifest,
        entries,
        {tensor.name: tensor for tensor in manifest.tensors},
        {dim.name: dim for dim in manifest.dims},
        {segment.name: segment for segment in manifest.segments},
        made_by,
        {name: tuple(places) for name, places in read_by.items()},
    )


def _format(facts: _Facts) -> Iterator[str]:
    found = facts.manifest.format
    if found > FORMAT_VERSION:
        yield f"format version {found}, this Tandem reads {FORMAT_VERSION}; update Tandem"
    elif found < FORMAT_VERSION:
        yield f"format version {found}, this Tandem reads {FORMAT_VERSION}; build it again"


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
        kinds = (str(one.__struct_config__.tag) for one in segment.implementations)
        yield f"implementations of segment {segment.name!r}", kinds
        for one in segment.implementations:
            yield f"weights of segment {segment.name!r}", one.weights
    for crossing in manifest.crossings:
        yield f"targets of crossing {crossing.tensor!r}", crossing.targets


def _names(facts: _Facts) -> Iterator[str]:
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


def _present(facts: _Facts) -> Iterator[str]:
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


def _dims(facts: _Facts) -> Iterator[str]:
    for dim in facts.manifest.dims:
        if not 1 <= dim.min <= dim.opt <= dim.max <= MAX_ELEMENTS:
            yield (
                f"dimension {dim.name!r} has min {dim.min}, opt {dim.opt}, max {dim.max}; "
                f"needed is 1 <= min <= opt <= max <= {MAX_ELEMENTS}"
            )


def _tensors(facts: _Facts) -> Iterator[str]:
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


def _given_dims(facts: _Facts) -> Iterator[str]:
    given: set[object] = set()
    for name in facts.manifest.inputs:
        if name not in facts.tensors:
            yield f"inputs: {name!r} is not among the tensors"
            return
        if None in facts.tensors[name].shape:
            yield f"input {name!r} has a dimension of unknown size; give it a number or a name"
        given.update(facts.tensors[name].shape)
    for tensor in facts.manifest.tensors:
        for dim in tensor.shape:
            if isinstance(dim, str) and dim not in given:
                yield f"tensor {tensor.name!r} uses the dimension {dim!r}, which no input sets"


def _running_order(facts: _Facts) -> Iterator[str]:
    manifest = facts.manifest
    for place, segment in enumerate(manifest.segments):
        for name in (*segment.inputs, *segment.outputs):
            if name not in facts.tensors:
                yield f"segment {segment.name!r} uses {name!r}, which is not among the tensors"
        for name in segment.inputs:
            if facts.made_by.get(name, place) >= place:
                yield (
                    f"segment {segment.name!r} reads {name!r}, which is neither an input nor made "
                    "by an earlier segment"
                )
        for name in segment.outputs:
            if facts.made_by[name] != place:
                yield f"segment {segment.name!r} makes {name!r}, which is made or given before"
    for name in manifest.outputs:
        if facts.made_by.get(name, -1) < 0:
            yield f"output {name!r} is not made by any segment"


def _entry_references(facts: _Facts) -> Iterator[str]:
    for segment in facts.manifest.segments:
        for one in segment.implementations:
            model = facts.entries.get(one.model)
            if model is None:
                yield f"segment {segment.name!r} names the entry {one.model!r}, which is missing"
            elif (model.dtype, len(model.shape)) != ("uint8", 1):
                yield (
                    f"segment {segment.name!r} has its model in the entry {one.model!r} of dtype "
                    f"{model.dtype} and shape {list(model.shape)}; it must be a row of uint8"
                )
            for name in one.weights:
                if name not in facts.entries:
                    yield f"segment {segment.name!r} names the entry {name!r}, which is missing"


def _crossings(facts: _Facts) -> Iterator[str]:
    due = _due_crossings(facts)
    for crossing in facts.manifest.crossings:
        name = crossing.tensor
        source, targets = due.pop(name, ("", frozenset[str]()))
        if (crossing.source, frozenset(crossing.targets)) != (source, targets):
            found = f"from {crossing.source!r} to {sorted(crossing.targets)}"
            truth = f"from {source!r} to {sorted(targets)}" if targets else "not at all"
            yield f"crossing {name!r} goes {found}, by the segments {truth}"
            return
        size = largest_bytes(facts.tensors[name], facts.dims)
        if crossing.bytes != size:
            yield f"crossing {name!r} has {crossing.bytes} bytes, its largest shape has {size}"
    for name, (source, _) in due.items():
        yield f"tensor {name!r} of segment {source!r} changes processor but is not a crossing"


def _due_crossings(facts: _Facts) -> dict[str, tuple[str, frozenset[str]]]:
    """Each tensor that passes to another processor, with the names of its source and targets."""
    segments = facts.manifest.segments
    due: dict[str, tuple[str, frozenset[str]]] = {}
    for name, made in facts.made_by.items():
        if made < 0:
            continue
        readers = (segments[at] for at in facts.read_by.get(name, ()) if at < len(segments))
        source = segments[made]
        targets = frozenset(one.name for one in readers if one.processor != source.processor)
        if targets:
            due[name] = (source.name, targets)
    return due


def _buffers(facts: _Facts) -> Iterator[str]:
    memory = facts.manifest.memory
    most = 0
    for buffer in memory.buffers:
        name = buffer.tensor
        if name not in facts.tensors or name not in facts.made_by:
            yield f"memory has a buffer for {name!r}, which is not a tensor that anything makes"
            return
        size = largest_bytes(facts.tensors[name], facts.dims)
        if buffer.bytes != size:
            yield f"the buffer of {name!r} has {buffer.bytes} bytes, its largest shape has {size}"
        if buffer.offset < 0 or buffer.offset % ARENA_ALIGNMENT:
            yield (
                f"the buffer of {name!r} starts at {buffer.offset}; "
                f"it must be a multiple of {ARENA_ALIGNMENT}"
            )
        if buffer.offset + buffer.bytes > memory.arena_bytes:
            yield (
                f"the buffer of {name!r} ends at {buffer.offset + buffer.bytes}, "
                f"the arena at {memory.arena_bytes}"
            )
        most += buffer.bytes + _ARENA_SLACK
    if not 0 <= memory.arena_bytes <= most:
        yield f"the arena has {memory.arena_bytes} bytes, its buffers need no more than {most}"


def _overlaps(facts: _Facts) -> Iterator[str]:
    """Walk through the segments with the buffers alive, in order of place: those never overlap,
    so a new one needs to be compared with its two neighbours only."""
    births: dict[int, list[tuple[int, int, str]]] = {}
    deaths: dict[int, list[tuple[int, int, str]]] = {}
    for buffer in facts.manifest.memory.buffers:
        item = (buffer.offset, buffer.offset + buffer.bytes, buffer.tensor)
        made = facts.made_by[buffer.tensor]
        births.setdefault(made, []).append(item)
        deaths.setdefault(max((made, *facts.read_by.get(buffer.tensor, ()))), []).append(item)
    alive: list[tuple[int, int, str]] = []
    for place in range(-1, len(facts.manifest.segments) + 1):
        for item in births.get(place, ()):
            at = bisect_left(alive, item)
            for other in alive[max(at - 1, 0) : at + 1]:
                if item[0] < other[1] and other[0] < item[1]:
                    yield (
                        f"the buffers of {item[2]!r} ({item[0]} to {item[1]}) and {other[2]!r} "
                        f"({other[0]} to {other[1]}) overlap while both are in use"
                    )
            insort(alive, item)
        for item in deaths.get(place, ()) if place < len(facts.manifest.segments) else ():
            del alive[bisect_left(alive, item)]


def _plan(facts: _Facts) -> Iterator[str]:
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
    _crossings,
    _buffers,
    _overlaps,
    _plan,
)
