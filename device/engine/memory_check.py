"""The rules for the crossings and the memory plan of a manifest."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from device.engine.manifest import ARENA_ALIGNMENT, largest_bytes
from device.engine.manifest_facts import Facts

_ARENA_SLACK = 4096  # bytes that a memory plan may lose to alignment for each buffer


def crossings(facts: Facts) -> Iterator[str]:
    """Exactly the tensors that change processor are crossings, with their segments and bytes."""
    due = _due_crossings(facts)
    for crossing in facts.manifest.crossings:
        name = crossing.tensor
        source, targets = due.pop(name, ("", frozenset[str]()))
        if (crossing.source, frozenset(crossing.targets)) != (source, targets):
            stated = f"from {crossing.source!r} to {sorted(crossing.targets)}"
            actual = f"from {source!r} to {sorted(targets)}" if targets else "not at all"
            yield f"crossing {name!r} goes {stated}, by the segments {actual}"
            return
        size = largest_bytes(facts.tensors[name], facts.dims)
        if crossing.bytes != size:
            yield f"crossing {name!r} has {crossing.bytes} bytes, its largest shape has {size}"
    for name, (source, _) in due.items():
        yield f"tensor {name!r} of segment {source!r} changes processor but is not a crossing"


def _due_crossings(facts: Facts) -> dict[str, tuple[str, frozenset[str]]]:
    """Each tensor that passes to another processor, with the names of its source and targets."""
    segments = facts.manifest.segments
    due: dict[str, tuple[str, frozenset[str]]] = {}
    for name, producer in facts.made_by.items():
        if producer < 0:
            continue
        reader_numbers = facts.read_by.get(name, ())
        readers = (segments[number] for number in reader_numbers if number < len(segments))
        source = segments[producer]
        targets = frozenset(
            reader.name for reader in readers if reader.processor != source.processor
        )
        if targets:
            due[name] = (source.name, targets)
    return due


def buffers(facts: Facts) -> Iterator[str]:
    """Each buffer holds a tensor at its largest shape, aligned, inside an arena of fair size."""
    memory = facts.manifest.memory
    max_bytes = 0
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
        max_bytes += buffer.bytes + _ARENA_SLACK
    if not 0 <= memory.arena_bytes <= max_bytes:
        yield f"the arena has {memory.arena_bytes} bytes, its buffers need no more than {max_bytes}"


def overlaps(facts: Facts) -> Iterator[str]:
    """Buffers of tensors that are in use at the same time share no byte."""
    # `alive` holds the live buffers by offset. They never overlap, so a new one is compared with
    # its two neighbours only.
    births: dict[int, list[tuple[int, int, str]]] = {}
    deaths: dict[int, list[tuple[int, int, str]]] = {}
    for buffer in facts.manifest.memory.buffers:
        item = (buffer.offset, buffer.offset + buffer.bytes, buffer.tensor)
        birth = facts.made_by[buffer.tensor]
        births.setdefault(birth, []).append(item)
        deaths.setdefault(max((birth, *facts.read_by.get(buffer.tensor, ()))), []).append(item)
    alive: list[tuple[int, int, str]] = []
    for position in range(-1, len(facts.manifest.segments) + 1):
        for item in births.get(position, ()):
            at = bisect_left(alive, item)
            for neighbor in alive[max(at - 1, 0) : at + 1]:
                if item[0] < neighbor[1] and neighbor[0] < item[1]:
                    yield (
                        f"the buffers of {item[2]!r} ({item[0]} to {item[1]}) and {neighbor[2]!r} "
                        f"({neighbor[0]} to {neighbor[1]}) overlap while both are in use"
                    )
            insort(alive, item)
        for item in deaths.get(position, ()) if position < len(facts.manifest.segments) else ():
            del alive[bisect_left(alive, item)]
